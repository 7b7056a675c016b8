"""The shuffle buffer is Energon's own for few bytes, bounded for many, and exact when resumed."""

from __future__ import annotations

import json
from itertools import islice

import pytest
from megatron.energon.wrappers import ShuffleBufferDataset as EnergonShuffleBuffer

from megatron_vl.config import DataConfig, RunConfigError, TrainConfig, validate
from megatron_vl.data import loader as loader_module
from megatron_vl.data.loader import build_loader, stored_bytes
from megatron_vl.data.shuffling import GIB, ShuffleBufferDataset, at_most
from megatron_vl.spec.families import read_spec
from tests.tiny import tiny_checkpoint

from .datasets import converted, mixed_records

COUNT = 30


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shuffling")
    return converted(folder, mixed_records(folder / "media", COUNT), samples_per_shard=7)[0]


def loader(path, **changes):
    folder = tiny_checkpoint("qwen2_5_vl")
    settings = {
        "seq_len": 320,
        "num_workers": 0,
        "pack": False,
        "shuffle_buffer": 12,
        "max_pixels": 28 * 28 * 24,
        **changes,
    }
    return build_loader(DataConfig(path=str(path), **settings), read_spec(folder), folder)


def keys(rows, count: int) -> list[list[str]]:
    return [row.keys for row in islice(rows, count)]


def energon_buffer(dataset, size, most_bytes, size_of, worker_config):
    return EnergonShuffleBuffer(dataset, size=size, worker_config=worker_config)


def buffer_of(rows) -> ShuffleBufferDataset:
    return rows._rows._local.streams[0].dataset._find_wrapped_dataset(ShuffleBufferDataset)


@pytest.mark.parametrize("gib", [0, pytest.param(2.0, marks=pytest.mark.slow)])
def test_small_samples_come_in_energons_own_order(dataset, monkeypatch, gib):
    ours = keys(loader(dataset, shuffle_buffer_gib=gib), 3 * COUNT)
    monkeypatch.setattr(loader_module, "ShuffleBufferDataset", energon_buffer)
    assert ours == keys(loader(dataset), 3 * COUNT)


def test_a_state_of_energons_own_buffer_goes_on(dataset, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(loader_module, "ShuffleBufferDataset", energon_buffer)
        first = loader(dataset)
        keys(first, 9)
        state = json.loads(json.dumps(first.state_dict()))
        wanted = keys(first, COUNT)
    second = loader(dataset)
    second.load_state_dict(state)
    assert keys(second, COUNT) == wanted


def test_bytes_bound_the_buffer_and_lose_nothing(dataset):
    rows = loader(dataset, shuffle_buffer=COUNT, shuffle_buffer_gib=20_000 / GIB)
    sizes = []
    held = []
    counts = []
    seen = set()
    for row in islice(rows, 4 * COUNT):
        now = [stored_bytes(sample) for sample in buffer_of(rows)._active_buffer]
        sizes += now
        held.append(sum(now))
        counts.append(len(now))
        seen |= set(row.keys)
    assert max(held) < 20_000 + max(sizes)
    assert 1 < max(counts) < COUNT, "the bound bites, and there is something to draw from"
    assert len(seen) == COUNT


def test_a_sample_above_the_bound_passes_straight_through(dataset):
    tight = keys(loader(dataset, shuffle_buffer_gib=1 / GIB), COUNT)
    assert tight == keys(loader(dataset, shuffle_buffer=1), COUNT), "without a buffer: as they are read"


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_bounded_buffer_resumes_exactly(dataset, workers):
    settings = {"num_workers": workers, "shuffle_buffer": COUNT, "shuffle_buffer_gib": 20_000 / GIB}
    first = loader(dataset, **settings)
    keys(first, 11)
    state = json.loads(json.dumps(first.state_dict()))
    wanted = keys(first, 2 * COUNT)
    first.close()
    second = loader(dataset, **settings)
    second.load_state_dict(state)
    assert keys(second, 2 * COUNT) == wanted
    second.close()
    unbounded = loader(dataset, **settings | {"shuffle_buffer_gib": 0})
    assert keys(unbounded, 2 * COUNT) != wanted
    unbounded.close()


def test_another_bound_is_refused_with_its_field(dataset):
    state = loader(dataset, shuffle_buffer_gib=1).state_dict()
    with pytest.raises(
        loader_module.StateError,
        match=r"shuffle_buffer_gib = 1, this loader has 2.0 .*set data.shuffle_buffer_gib",
    ):
        loader(dataset).load_state_dict(state)


def test_the_start_says_what_it_may_take(dataset):
    shards = list(dataset.glob("train-*.tar"))
    mean = sum(shard.stat().st_size for shard in shards) / COUNT
    (note,) = loader(dataset, num_workers=2, shuffle_buffer=1000).notes
    assert (
        f"about {1000 * mean / GIB:.2f} GiB (1000 samples of {mean / 1e6:.2f} MB) for each of 2 streams"
        in note
    )
    assert "at most 2 GiB a stream and 4 GiB a rank" in note
    (note,) = loader(dataset, shuffle_buffer_gib=0).notes
    assert "without a limit in bytes" in note
    assert not loader(dataset, shuffle_buffer=0).notes
    assert at_most(1000, 2.0, 20 << 20) == (103, 2.0) and at_most(1000, 2.0, 1 << 20) == (1000, 1000 / 1024)
    assert at_most(1000, 0, 20 << 20) == (1000, 1000 * 20 / 1024)


def test_the_field_takes_no_negative_number():
    config = TrainConfig(data=DataConfig(shuffle_buffer_gib=-1.0))
    with pytest.raises(RunConfigError, match="data.shuffle_buffer_gib -1.0 must be at least 0"):
        validate(config, 1)
