"""Runs on random rows: the same rows in every layout, and a resumed run continues in them."""

import json
import shutil
from itertools import islice
from pathlib import Path

import pytest
import torch

from megatron_vl.config import DataConfig, RunConfigError, TrainConfig, validate_config
from megatron_vl.data.state_json import LoaderStateError
from megatron_vl.data.synthetic import SyntheticRows
from megatron_vl.spec.families import ModelSpec, read_spec
from tests.support.ranks import run_module
from tests.support.tiny_run import metrics

SHAPE = "--data.seq_len 128 --global_batch_size 4 --dtype float32 --platform cpu --optimizer.lr 1e-3"


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return read_spec("tests/hf_configs/Qwen3-VL-2B-Instruct.json")


def rows_of(spec: ModelSpec, dp: int, rows_per_step: int, steps: int, state=None, **data) -> list:
    """The rows of the first steps of all ranks, in order, and the state after them."""
    config = DataConfig(**{"path": "synthetic:images", "seq_len": 96} | data)
    loaders = [SyntheticRows(config, spec, rank, dp, rows_per_step) for rank in range(dp)]
    rows = []
    for loader in loaders if state else ():
        loader.load_state_dict(json.loads(json.dumps(state)))
    for _ in range(steps):
        for loader in loaders:
            rows += islice(loader, rows_per_step // dp)
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    return [rows, states[0]]


def same(rows: list, others: list) -> bool:
    pairs = list(zip(rows, others, strict=True))
    assert all(row.sample_keys == other.sample_keys for row, other in pairs)
    return all(
        torch.equal(row.tokens, other.tokens) and torch.equal(row.vision.planes, other.vision.planes)
        for row, other in pairs
    )


def test_rows_do_not_depend_on_the_layout(spec: ModelSpec) -> None:
    rows, _ = rows_of(spec, 1, 12, 7)  # 84 rows, more than are different
    assert same(rows, rows_of(spec, 4, 12, 7)[0])
    assert same(rows, rows_of(spec, 6, 42, 2)[0])
    assert torch.equal(rows[0].tokens, rows[64].tokens) and not torch.equal(rows[0].tokens, rows[1].tokens)
    assert not same(rows, rows_of(spec, 1, 12, 7, seed=2)[0])


def test_state_continues_on_other_ranks_and_with_other_steps(spec: ModelSpec) -> None:
    rows, _ = rows_of(spec, 1, 42, 2)
    first, state = rows_of(spec, 2, 6, 3)
    assert same(rows, first + rows_of(spec, 3, 33, 2, state)[0])


def test_state_of_other_rows_is_refused(spec: ModelSpec) -> None:
    _, state = rows_of(spec, 1, 2, 1)
    for other in ({"path": "synthetic:text"}, {"seed": 5}):
        with pytest.raises(LoaderStateError, match="set data.path and data.seed back"):
            rows_of(spec, 1, 2, 1, state, **other)


@pytest.mark.parametrize("seq_len", [4, 5, 31, 2_500])
def test_rows_of_any_length(spec: ModelSpec, seq_len: int) -> None:
    for path in ("synthetic:images", "synthetic:text"):
        [row], _ = rows_of(spec, 1, 1, 1, path=path, seq_len=seq_len)
        assert row.seq_len == seq_len and row.loss_mask.any() and bool(row.num_images) == ("images" in path)


def test_other_random_rows_are_refused() -> None:
    with pytest.raises(RunConfigError, match="random rows are synthetic:images or synthetic:text"):
        validate_config(TrainConfig(steps=1, data=DataConfig(path="synthetic:movies")), 1)


@pytest.mark.ranks
def test_run_on_random_rows_resumes_bitwise(tiny_checkpoint, tmp_path: Path) -> None:
    """On two stages. Only the config is read of the model's folder."""
    config = shutil.copy(tiny_checkpoint("qwen2_5_vl") / "config.json", tmp_path)
    start = f"--model.hf {config} --model.checkpoint random --data.path synthetic:images"
    words = f"{start} --steps 4 {SHAPE} --parallel.pp 2".split()

    def train(run: str, *more: str) -> list[dict]:
        words_of_run = [*words, "--checkpoint.dir", tmp_path / run, "--log.samples", "true", *more]
        done = run_module("megatron_vl.train", words_of_run, ranks=2, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-4000:]
        assert "64 different rows of random tokens" in done.stdout
        return metrics(tmp_path / run)

    whole = train("whole")
    train("parts", "--stop_after", "2")
    parts = train("parts")
    assert [line["step"] for line in parts] == [1, 2, 3, 4] and len({line["loss"] for line in whole}) == 4
    for name in ("loss", "grad_norm", "samples", "images"):
        assert [line[name] for line in parts] == [line[name] for line in whole]
    keys = metrics(tmp_path / "parts", "samples.jsonl")
    assert keys == metrics(tmp_path / "whole", "samples.jsonl")
    assert [row[0] for line in keys for row in line["rows"]] == [f"{number}/0" for number in range(16)]
    manifests = [tmp_path / run / "step_00000004" / "weights" / "manifest.json" for run in ("whole", "parts")]
    assert manifests[0].read_bytes() == manifests[1].read_bytes()
