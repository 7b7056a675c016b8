"""The process that writes missing sizes ends with the rank that started it."""

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from data_tools import sample_sizes
from megatron_vl.config import DataConfig
from megatron_vl.data.source.dataset_description import METADATA_DIR, SIZES_DIR
from megatron_vl.spec.families import read_spec
from megatron_vl.training.missing_sizes import write_missing_sizes_alone
from tests.data.datasets import converted, mixed_records
from tests.test_processes import has_ended, wait_until
from tests.tiny import tiny_checkpoint


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Without sizes."""
    return converted(tmp_path, mixed_records(tmp_path / "media", 20), samples_per_shard=5)[0]


def start(target: Callable[..., Any], *arguments: Any) -> psutil.Process:
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    return psutil.Process(process.pid)


def test_indexing_ends_with_a_killed_rank(dataset: Path) -> None:
    """It is killed while it starts, which takes seconds, and not when it has done its work."""
    hf = tiny_checkpoint("qwen2_5_vl")
    rank = start(write_missing_sizes_alone, DataConfig(path=str(dataset)), hf)
    wait_until(lambda: any("index" in child.cmdline() for child in rank.children()))
    [indexing] = rank.children()
    rank.kill()
    wait_until(lambda: has_ended(indexing))
    assert not list((dataset / METADATA_DIR / SIZES_DIR).glob("*"))


def test_workers_of_indexing_end_with_it(dataset: Path, monkeypatch) -> None:
    """A worker would wait for its next shard."""
    monkeypatch.setattr(sample_sizes, "measure_samples", lambda *_: time.sleep(300))
    data, hf = DataConfig(path=str(dataset)), tiny_checkpoint("qwen2_5_vl")
    indexing = start(sample_sizes.index_datasets, data, read_spec(hf), hf, 2)
    wait_until(lambda: len(indexing.children()) == 2)
    workers = indexing.children()
    indexing.kill()
    wait_until(lambda: all(map(has_ended, workers)))
