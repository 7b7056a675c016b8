"""Four ranks train on a data set that is damaged before the start and while they train."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from data_tools.convert import ConversionOptions, convert_dataset
from data_tools.sample_sizes import index_datasets
from megatron_vl.config import DataConfig
from megatron_vl.data.source import tolerant_reader
from megatron_vl.spec.families import read_spec
from megatron_vl.train import main as train_main
from tests.support.ranks import run_function
from tests.support.tiny_run import metrics, options_of, prepare

pytestmark = [pytest.mark.ranks, pytest.mark.full]

STEPS = 40


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint) -> dict[str, Path]:
    """96 samples in 24 shards."""
    folder = tmp_path_factory.mktemp("damaged") / "prepared"
    found = prepare(folder, tiny_checkpoint("qwen2_5_vl", tied=True, dtype=torch.float32), samples=96)
    shutil.rmtree(folder / "data")
    options = ConversionOptions(folder / "media", folder / "data", samples_per_shard=4)
    assert convert_dataset([folder / "data.json"], options).shards == 24
    index_datasets(DataConfig(path=str(folder / "data")), read_spec(found["hf"]), found["hf"])
    return found


def _shard(data: Path, number: int) -> Path:
    return data / f"train-{number:06d}.tar"


def _damage_first(data: Path) -> None:
    """Before the start: a pipe that does not answer, a tar cut short, and flipped bytes of images."""
    _shard(data, 0).unlink()
    os.mkfifo(_shard(data, 0))
    whole = _shard(data, 1).read_bytes()
    _shard(data, 1).write_bytes(whole[: len(whole) // 2])
    broken = bytearray(_shard(data, 2).read_bytes())
    for at in range(0, len(broken), 700):
        broken[at] ^= 0xFF
    _shard(data, 2).write_bytes(broken)


def _damage_while_training(data: Path, run: Path) -> None:
    """After two steps: shards and an index vanish, and a file is replaced by a folder."""
    while len(metrics(run)) < 2:
        time.sleep(0.2)
    for number in (3, 4, 5):
        _shard(data, number).unlink()
    _shard(data, 6).with_suffix(".tar.idx").unlink()
    _shard(data, 7).unlink()
    _shard(data, 7).mkdir()


def train_impatiently(*run_args: str) -> None:
    """Trains, and waits one second for a sample."""
    tolerant_reader.SAMPLE_TIMEOUT_S = 1.0
    sys.exit(train_main(list(run_args)))


def test_training_goes_on_and_each_sample_is_counted_by_reason(prepared: dict[str, Path]) -> None:
    data, run = prepared["data"], prepared["folder"] / "run"
    _damage_first(data)
    damaging = threading.Thread(target=_damage_while_training, args=(data, run), daemon=True)
    damaging.start()
    options = ["--data.max_bad_share", "1", "--data.num_workers", "1", "--checkpoint.interval", "20"]
    done = run_function(train_impatiently, options_of(prepared, run, *options, steps=STEPS), 4)
    assert done.returncode == 0, done.stderr[-4000:]
    assert not damaging.is_alive()

    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(line["updated"] and line["samples"] > 0 for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]

    counted: Counter[str] = Counter()
    for line in lines:
        counted += Counter(
            {k.removeprefix("dropped/"): n for k, n in line.items() if k.startswith("dropped/")}
        )
    saved = json.loads((run / f"step_{STEPS:08d}" / "run.json").read_text())["bad_samples"]
    assert saved["reasons"] == dict(counted) and saved["used"] == sum(line["samples"] for line in lines)

    listed = metrics(run, "quarantine.jsonl")
    assert {line["reason"] for line in listed} == counted.keys()
    assert all(line["key"] and line["shard"] for line in listed)
    by_shard = {line["shard"]: line["reason"] for line in listed}
    assert by_shard["train-000000.tar"] == "reading takes too long"
    assert by_shard["train-000001.tar"] == "shard damaged"
    # A worker that holds a deleted file open still reads it.
    later = {by_shard.get(f"train-{number:06d}.tar") for number in range(3, 8)} - {None}
    assert later and later <= {"shard missing", "shard unreadable"}
    assert {f"train-{number:06d}.tar" for number in range(8, 24)}.isdisjoint(by_shard)
