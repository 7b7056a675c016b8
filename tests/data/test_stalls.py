"""Storage that does not answer: a shard that is a pipe to which nobody writes, so that opening it waits."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest

from data_tools.sample_sizes import index_datasets
from data_tools.sample_sources import SampleReader, open_encoder, read_sources
from megatron_vl.config import DataConfig
from megatron_vl.data.sample import deadline
from megatron_vl.data.source import tolerant_reader
from megatron_vl.spec.families import read_spec
from tests.tiny import tiny_checkpoint

from .datasets import converted, mixed_records, open_loader

PIXELS = {"min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * 24}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    out = converted(folder, mixed_records(folder / "media", 24), samples_per_shard=6)[0]
    hf = tiny_checkpoint("qwen2_5_vl")
    index_datasets(_config(out), read_spec(hf), hf)
    return out


@pytest.fixture
def stalled(pristine, tmp_path):
    """The data set with a shard that cannot be opened; after the test it can."""
    data = shutil.copytree(pristine, tmp_path / "data")
    shard = data / "train-000001.tar"
    shard.unlink()
    os.mkfifo(shard)
    yield data
    # Whoever waits gets an empty file.
    os.close(os.open(shard, os.O_RDWR))


def _config(path: Path, **fields) -> DataConfig:
    fields = {"seq_len": 320, "num_workers": 0, "shuffle": False} | fields
    return DataConfig(path=str(path), **PIXELS, **fields)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_shard_that_does_not_answer_is_skipped_and_counted(stalled, workers, monkeypatch):
    monkeypatch.setattr(tolerant_reader, "SAMPLE_TIMEOUT_S", 4.0)
    folder = tiny_checkpoint("qwen2_5_vl")
    data = _config(stalled, num_workers=workers)
    loader = open_loader(data, folder)
    used: set[str] = set()
    dropped: dict[str, str] = {}
    for row in islice(loader, 24):
        used |= set(row.sample_keys)
        dropped |= {sample.key: sample.reason for sample in row.dropped_samples}
    loader.close()

    assert used == {f"{i:09d}" for i in range(24) if not 6 <= i < 12}
    # Each worker waits once; the rest of the shard is refused while that read has not returned.
    assert dropped == {f"train-000001.tar[{i}]": "reading takes too long" for i in range(6)}


def test_sample_that_takes_too_long_is_not_trained_on(pristine, monkeypatch):
    """Its text or its pixels; the record has a video alone."""
    folder = tiny_checkpoint("qwen2_5_vl")
    encoder = open_encoder(_config(pristine), read_spec(folder), folder)
    (source,) = read_sources(pristine, "train")
    with closing(SampleReader(source)) as reader:
        sample = reader.read_sample(3, with_media=True)
    encoded = encoder.preencode_sample(sample)
    monkeypatch.setattr(deadline, "SAMPLE_TIMEOUT_S", 1e-9)
    ready = encoder.postencode_sample(encoded)
    assert encoder.dropped_counts == {"decoding takes too long": 1}
    assert encoder.dropped_samples[0].source.endswith(".json record 4"), encoder.dropped_samples
    assert not ready.loss_mask.any() and (ready.media_items[0].planes == 128).all()
    assert len(ready.token_ids) == len(encoded.token_ids)
    refused = encoder.preencode_sample(sample).refused
    assert refused == ("encoding takes too long", "it took longer than 1e-09 s")
