"""A real run moves between 4, 2 and 3 data-parallel ranks, and a rank is killed each time."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.support import ranks
from tests.support.tiny_run import metrics, options_of, prepare, trained

pytestmark = [pytest.mark.ranks, pytest.mark.full]
"""Rows of a moved loader, and a run on another number of ranks, are tests of their own in `make test`."""

STEPS = 6
OPTIONS = ["--global_batch_size", "12", "--checkpoint.interval", "1", "--log.samples", "true"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("elastic") / "prepared"
    return prepare(folder, tiny_checkpoint("qwen2_5_vl", tied=True, dtype=torch.float32), samples=60)


def samples(run: Path) -> list[tuple[int, list[str]]]:
    """Each step with its samples, sorted: ranks take other rows of a step, but all take the same together."""
    return [(line["step"], sorted(sum(line["rows"], []))) for line in metrics(run, "samples.jsonl")]


def test_run_that_is_killed_and_moves_reads_the_samples_of_one_that_stays(prepared, tmp_path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    trained(prepared, whole, *OPTIONS, "--data.num_workers", "1", ranks=4, steps=STEPS)
    wanted = dict(samples(whole))
    assert len(wanted) == STEPS

    run.mkdir()
    said = []
    for size, workers, killed in ((4, 1, 1), (2, 2, 0)):
        words = options_of(prepared, run, *OPTIONS, "--data.num_workers", str(workers), steps=STEPS)
        job = ranks.run_apart(
            "tests.support.faulty_rank", ["kill", killed, 2, "step", *words], size, one_node=True
        )
        assert job[killed].code == -signal.SIGKILL, job[killed].stderr[-3000:]
        said.append(job[0].stdout)
    printed = trained(prepared, run, *OPTIONS, "--data.num_workers", "0", ranks=3, steps=STEPS)
    said.append(printed)

    # Steps that were lost with a kill were taken again, with the same samples.
    taken = samples(run)
    assert {step for step, _ in taken} == set(wanted)
    assert all(each == wanted[step] for step, each in taken)

    assert all("resumed at step" in text for text in said[1:])

    losses = {line["step"]: line["loss"] for line in metrics(whole)}
    for line in metrics(run):  # sums of other parts
        assert line["loss"] == pytest.approx(losses[line["step"]], rel=1e-4)
