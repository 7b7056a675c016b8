"""The data sets of a mixture, and single samples of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_tools.sample_sources import SampleReader, SampleSource, _sources_of_parts, read_sources
from megatron_vl.data.source.dataset_description import DatasetDescription, _join_parts
from tests.data.datasets import converted, mixed_records

LONG = {"conversations": [{"from": "human", "value": "Tell"}, {"from": "gpt", "value": "on and " * 2000}]}


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """Two shards of 20 and 11 samples; one sample is too long for a row."""
    folder = tmp_path_factory.mktemp("sources")
    return converted(folder, [*mixed_records(folder / "media", 30), LONG], samples_per_shard=20)[0]


def test_samples_are_found_by_key_and_by_place(out):
    (source,) = read_sources(out, "train")
    assert len(source) == 31 and source.shard_position(20) == ("train-000001.tar", 0)
    assert source.find_sample("000000020") == source.find_sample("train-000001.tar[0]") == 20
    assert source.find_sample("000000099") is None and source.find_sample("train-000001.tar[11]") is None
    reader = SampleReader(source)
    sample = reader.read_sample(20, with_media=True)
    assert sample.key == "000000020" and all(sample.media_bytes.values())
    assert list(reader.read_sample(20, with_media=False).media_bytes) == list(sample.media_bytes)
    reader.close()


def test_folder_of_parts_gives_a_source_for_each(tmp_path):
    """The third part has no shard of the split."""
    parts = []
    for number, counts in enumerate(([3, 4], [5], [])):
        shards = {f"train-{i:06d}.tar": count for i, count in enumerate(counts)}
        splits = {"train": list(shards)}
        parts.append(DatasetDescription(tmp_path / f"part-{number}", splits, [], shards, ""))
    found = _sources_of_parts(SampleSource("set", _join_parts(tmp_path, parts), "train", 0.5))
    assert [(each.name, len(each)) for each in found] == [("set/part-0", 7), ("set/part-1", 5)]
    assert [each.share for each in found] == [pytest.approx(0.5 * 7 / 12), pytest.approx(0.5 * 5 / 12)]
    (alone,) = _sources_of_parts(SampleSource("set", parts[0], "train", 1.0))
    assert alone.dataset is parts[0]
