"""A real run moves between 4, 2, 3 and 4 data-parallel ranks, and a rank is killed each time."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from data_tools.sample_sizes import index
from megatron_vl.config import DataConfig
from megatron_vl.spec.families import read_spec
from tests.support import ranks
from tests.training.small_run import metrics, options_of, prepare, train

pytestmark = pytest.mark.ranks

STEPS = 8
OPTIONS = ["--global_batch_size", "12", "--checkpoint.interval", "1", "--log.samples", "true"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("elastic") / "prepared"
    return prepare(folder, tiny_checkpoint("qwen2_5_vl", tied=True, dtype=torch.float32), samples=60)


def rows(run: Path) -> list[tuple[int, list[list[str]]]]:
    return [(line["step"], line["rows"]) for line in metrics(run, "samples.jsonl")]


def test_a_run_that_is_killed_and_moves_reads_the_rows_of_one_that_stays(
    prepared: dict[str, Path], tmp_path: Path
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    done = train(prepared, whole, *OPTIONS, "--data.num_workers", "1", ranks=4, steps=STEPS)
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = dict(rows(whole))
    assert len(wanted) == STEPS and all(len(each) == 12 for each in wanted.values())

    run.mkdir()
    said = []
    for size, workers, killed in ((4, 1, 1), (2, 2, 0), (3, 0, 2)):
        words = options_of(prepared, run, *OPTIONS, "--data.num_workers", str(workers), steps=STEPS)
        job = ranks.run_apart(
            "tests.training.faulty_rank", ["kill", killed, 2, "step", *words], size, one_node=True
        )
        assert job[killed].code == -signal.SIGKILL, job[killed].stderr[-3000:]
        said.append(job[0].stdout)
    done = train(prepared, run, *OPTIONS, "--data.num_workers", "1", ranks=4, steps=STEPS)
    assert done.returncode == 0, done.stderr[-3000:]
    said.append(done.stdout)

    # Steps that were lost with a kill were taken again, with the same rows.
    taken = rows(run)
    assert {step for step, _ in taken} == set(wanted)
    assert all(each == wanted[step] for step, each in taken)

    for text, words in zip(
        said[1:], ("2 data-parallel ranks x 2", "3 data-parallel ranks x 0"), strict=False
    ):
        assert "resumed at step" in text and f"the data continue on {words} workers, after" in text
    assert "2 of 4 streams of the data are read by up to 2 data-parallel ranks" in said[2]

    losses = {line["step"]: line["loss"] for line in metrics(whole)}
    for line in metrics(run):  # sums of other parts
        assert line["loss"] == pytest.approx(losses[line["step"]], rel=1e-4)


def test_planned_batches_train_the_same_on_any_ranks(prepared: dict[str, Path], tmp_path: Path) -> None:
    """Two ranks with rows of equal patches, continued on one, have the losses of one that takes all rows."""
    index(DataConfig(path=str(prepared["data"])), read_spec(prepared["hf"]), prepared["hf"])
    planned = [*OPTIONS, "--data.balance", "true", "--data.num_workers", "1"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    done = train(prepared, whole, *planned, ranks=1, steps=5)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the 12 rows of each step are planned from the stored sizes" in done.stdout

    done = train(prepared, run, *planned, "--stop_after", "3", ranks=2, steps=5)
    assert done.returncode == 0, done.stderr[-3000:]
    done = train(prepared, run, *planned, ranks=1, steps=5)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed at step 3" in done.stdout
    assert "after 2 x 1: every step takes the same samples" in done.stdout

    wanted = {step: sorted(sum(each, [])) for step, each in rows(whole)}
    assert {step: sorted(sum(each, [])) for step, each in rows(run)} == wanted
    losses = {line["step"]: line["loss"] for line in metrics(whole)}
    assert len(losses) == 5
    for line in metrics(run):  # sums of other parts
        assert line["loss"] == pytest.approx(losses[line["step"]], rel=1e-4)

    refused = train(prepared, run, *OPTIONS, ranks=1, steps=6)
    assert refused.returncode == 1
    assert "planned from stored sizes, and cannot be now: data.balance is off" in refused.stderr
