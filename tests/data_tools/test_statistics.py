"""What is counted from stored sizes is compared with the rows of the loader and with the records."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data_tools import statistics as module
from data_tools.sample_sizes import index_datasets
from data_tools.sample_sources import (
    SampleReader,
    SampleSource,
    _sources_of_parts,
    open_encoder,
    read_sources,
)
from data_tools.statistics import DatasetStatistics, count_statistics, describe_values
from megatron_vl.config import DataConfig
from megatron_vl.data.loader import build_loader
from megatron_vl.data.source.dataset_description import DatasetDescription, _join_parts
from megatron_vl.data.source.location import LoaderError
from megatron_vl.spec.families import read_spec
from tests.data.datasets import converted, mixed_records
from tests.data.mixtures import write
from tests.tiny import tiny_checkpoint

LONG = {"conversations": [{"from": "human", "value": "Tell"}, {"from": "gpt", "value": "on and " * 2000}]}


def _data(path: Path, **fields) -> DataConfig:
    fields = {"seq_len": 512, "num_workers": 0} | fields
    return DataConfig(path=str(path), min_pixels=56 * 56, max_pixels=28 * 28 * 24, **fields)


def _statistics(path: Path, split: str = "train", **fields) -> DatasetStatistics:
    folder = tiny_checkpoint("qwen2_5_vl")
    return count_statistics(open_encoder(_data(path, **fields), read_spec(folder), folder), folder, split)


def _indexed(path: Path) -> Path:
    folder = tiny_checkpoint("qwen2_5_vl")
    index_datasets(_data(path), read_spec(folder), folder)
    return path


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """Two shards of 20 and 11 samples; one sample is too long for a row."""
    folder = tmp_path_factory.mktemp("mixed")
    records = [*mixed_records(folder / "media", 30), LONG]
    return _indexed(converted(folder, records, samples_per_shard=20)[0])


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Sixteen texts of one to three turns, of which the small checkpoint's template cannot write four."""
    folder = tmp_path_factory.mktemp("texts")
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    turn = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    refused = [turn[0], call, {"role": "tool", "content": "1"}, turn[1]]
    records = [{"messages": refused if i % 4 == 3 else turn * (i % 3 + 1)} for i in range(16)]
    return _indexed(converted(folder, records, samples_per_shard=4, val_fraction=0.4)[0])


def test_samples_count_as_in_the_rows_of_the_loader(out):
    found = _statistics(out, pack=False)
    (one,) = found.sources
    folder = tiny_checkpoint("qwen2_5_vl")
    loader = build_loader(_data(out, pack=False), read_spec(folder), folder)
    rows = {}
    dropped: Counter[str] = Counter()
    while len(rows) < 30 or not dropped:
        row = next(loader)
        rows[row.sample_keys[0]] = row
        dropped |= Counter(row.dropped_counts)
    loader.close()

    for number in np.flatnonzero(one.usable_mask).tolist():
        row = rows.pop(f"{number:09d}")
        counted = [int(one.sizes[name][number]) for name in module.SAMPLE_QUANTITIES]
        assert counted[:2] == [int(row.cu_seqlens[1]), row.num_patches]
        assert sum(counted[2:]) == row.num_images
    # The loader reads the set more than once before the first row.
    assert not rows
    assert found.left_out_reasons() == {"longer than seq_len": 1}
    assert dropped.keys() == {"longer than seq_len"}
    # Of five records, three have images, one of them two; two have a video; one has two turns.
    assert one.sizes["images"][:5].tolist() == [1, 0, 2, 0, 1] and one.sizes["images"].sum() == 24
    assert one.sizes["videos"][:5].tolist() == [0, 0, 0, 1, 1] and one.sizes["videos"].sum() == 12
    assert one.assistant_turns == 24 + 2 * 6 + 1


def test_splits_have_numbers_of_their_own(texts):
    """Every fourth of the texts cannot be written; the others have one, two or three answers in turn."""
    train, val = (_statistics(texts, split) for split in ("train", "val"))
    reason = "not written by the chat template"
    left_out = [found.left_out_reasons()[reason] for found in (train, val)]
    assert train.num_samples + val.num_samples == 16 and sum(left_out) == 4 and all(left_out)
    for found, count in zip((train, val), left_out, strict=True):
        assert found.num_usable + count == found.num_samples
    usable = [i % 3 + 1 for i in range(16) if i % 4 != 3]
    assert sum(found.sources[0].assistant_turns for found in (train, val)) == sum(usable)


def test_limits_are_those_of_the_run(out):
    """The largest samples have 108 patches: those with two images or with a video and a large image."""
    (one,) = _statistics(out).sources
    patches, tokens = one.sizes["patches"], one.sizes["tokens"]
    found = _statistics(out, max_patches=100)
    left_out = {"longer than seq_len": 1, "more than max_patches": (patches > 100).sum()}
    assert found.sources[0].left_out == left_out
    assert found.num_usable == found.num_samples - sum(left_out.values())
    none = _statistics(out, seq_len=int(tokens.min()) - 1, too_long="drop")
    said = rf"no sample of .* can be used \(31 longer than seq_len\). Raise data.seq_len to {tokens.max()} "
    with pytest.raises(LoaderError, match=said):
        none.pass_facts(1)


def test_mixture_counts_as_training_draws_from_it(out, texts, tmp_path):
    parts = [{"path": str(out), "weight": 3}, {"path": str(texts), "weight": 1}]
    found = _statistics(write(tmp_path, train={"blend": parts}))
    first, second = (one.sizes["tokens"][one.usable_mask] for one in found.sources)
    # Of each draw from a source, a part is usable.
    shares = 0.75 * len(first) / 31, 0.25 * len(second) / len(found.sources[1].source)
    mean = (shares[0] * first.mean() + shares[1] * second.mean()) / sum(shares)
    assert describe_values(*found.sample_quantity("tokens"))["mean"] == pytest.approx(mean)
    assert found.num_samples == 31 + len(found.sources[1].source)
    assert found.pass_facts(1)["rows"] == math.ceil(found.num_samples * mean * sum(shares) / 512)


def test_pass_is_as_many_rows_as_its_samples_fill(out):
    assert _statistics(out, pack=False).pass_facts(4) == {"rows": 30, "global_batch_size": 4}
    for limits in ({}, {"max_patches": 200}):
        found = _statistics(out, **limits)
        (one,) = found.sources
        tokens, patches = (int(one.sizes[name][one.usable_mask].sum()) for name in ("tokens", "patches"))
        assert found.pass_facts(1)["rows"] == -(-patches // 200 if limits else -tokens // 512)


def test_quantiles_equal_those_by_hand():
    values = np.array([5, 1, 2, 4, 3] * 20)
    expected = {"mean": 3, "p5": 1, "p50": 3, "p95": 5, "p99": 5, "smallest": 1, "largest": 5}
    assert describe_values(values, np.full(100, 0.01)) == expected
    # Nine of ten draws give the 7.
    weighted = describe_values(np.array([7, 100, 3]), np.array([0.9, 0.04, 0.06]))
    assert [weighted[name] for name in ("p5", "p50", "p95", "p99")] == [3, 7, 7, 100]
    assert weighted["mean"] == pytest.approx(0.9 * 7 + 4 + 0.18)


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
