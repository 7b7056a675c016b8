"""What a survey counts of a data set is compared with the rows that the loader makes of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections import Counter
from pathlib import Path

import pytest
import yaml

from data_tools.survey import Reader, SurveyError, draw, open_encoder, sources, survey
from megatron_vl.config import DataConfig
from megatron_vl.spec.families import read_spec
from tests.data.datasets import converted, mixed_records, open_loader
from tests.tiny import tiny_checkpoint

LONG = {"conversations": [{"from": "human", "value": "Tell"}, {"from": "gpt", "value": "on and " * 2000}]}


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """Two shards of 20 and 11 samples; one sample is too long for a row."""
    folder = tmp_path_factory.mktemp("survey")
    return converted(folder, [*mixed_records(folder / "media", 30), LONG], samples_per_shard=20)[0]


def _data(path: Path, **fields) -> DataConfig:
    fields = {"seq_len": 512, "num_workers": 0, "shuffle": False} | fields
    return DataConfig(path=str(path), min_pixels=56 * 56, max_pixels=28 * 28 * 24, **fields)


def _survey(path: Path, data: DataConfig | None = None, **options):
    folder = tiny_checkpoint("qwen2_5_vl")
    return survey(open_encoder(data or _data(path), read_spec(folder), folder), **options)


def test_each_sample_counts_as_in_the_loaders_rows(out):
    data, folder = _data(out, pack=False), tiny_checkpoint("qwen2_5_vl")
    found = _survey(out, data, samples=0)
    assert found.exact and len(found.samples) == 31

    loader = open_loader(data, folder)
    rows = {}
    dropped = Counter()
    while len(rows) < 30 or not dropped:
        row = next(loader)
        rows[row.keys[0]] = row
        dropped += Counter(row.dropped)
    loader.close()

    for sample in found.usable:
        row = rows[sample.key]
        counted = (sample.tokens, sample.learnt, sample.patches, sample.pictures + sample.videos)
        tokens = int(row.cu_seqlens[1])
        assert counted == (tokens, int(row.loss_mask.sum()), row.num_patches, row.num_images), sample
    assert {sample.key for sample in found.usable} == rows.keys()
    assert list(found.skipped()) == list(dropped) == ["longer than seq_len"]
    assert found.skipped()["longer than seq_len"].value == pytest.approx(1 / 31)
    # One in five records has two turns; videos are in two of five.
    assert Counter(sample.turns for sample in found.usable) == {1: 24, 2: 6}
    assert sum(sample.videos for sample in found.usable) == 12


@pytest.mark.slow
def test_rows_are_packed_as_the_loader_packs_them(out):
    """The order differs, so the means of many rows are compared: samples and patches of a row."""
    data, folder = _data(out, packing_buffer=16, shuffle=True), tiny_checkpoint("qwen2_5_vl")
    found = _survey(out, data, samples=0)
    for row in found.rows:
        assert row.total(lambda sample: sample.tokens) <= data.seq_len

    loader = open_loader(data, folder)
    rows = list(itertools.islice(loader, 64))
    loader.close()
    samples = sum(row.num_samples for row in rows) / len(rows)
    patches = sum(row.num_patches for row in rows) / len(rows)
    assert sum(len(row.samples) for row in found.rows) / len(found.rows) == pytest.approx(samples, rel=0.05)
    ours = sum(row.total(lambda sample: sample.patches) for row in found.rows) / len(found.rows)
    assert ours == pytest.approx(patches, rel=0.05)


def test_max_patches_bounds_the_rows_of_a_survey_too(out):
    found = _survey(out, _data(out, max_patches=200), samples=0)
    assert max(row.total(lambda sample: sample.patches) for row in found.rows) <= 200


def test_many_shards_are_drawn_from_at_random_without_reading_the_rest(out, tmp_path):
    """The 20 samples of one shard under 500 names make a data set of 10,000."""
    big = _many_shards(out, tmp_path / "big", 500)
    found = _survey(big, samples=150, seed=5)
    assert found.population == 10_000 and len(found.samples) == 150 and not found.exact
    (source,) = found.sources
    drawn = [source.place(sample.index) for sample in found.samples]
    assert len({shard for shard, _ in drawn}) > 100 and len(set(drawn)) == 150
    assert [sample.index for sample in _survey(big, samples=150, seed=5).samples] == [
        sample.index for sample in found.samples
    ]
    assert [s.index for s in _survey(big, samples=150, seed=6).samples] != [s.index for s in found.samples]

    stopped = _survey(big, samples=1000, seconds=0.0)
    assert stopped.stopped and len(stopped.samples) == 64


def _many_shards(out: Path, folder: Path, number: int) -> Path:
    meta = folder / ".nv-meta"
    meta.mkdir(parents=True)
    names = [f"train-{i:06d}.tar" for i in range(number)]
    for name in names:
        os.link(out / "train-000000.tar", folder / name)
        os.link(out / "train-000000.tar.idx", folder / f"{name}.idx")
    (meta / "dataset.yaml").write_text((out / ".nv-meta/dataset.yaml").read_text())
    (meta / "split.yaml").write_text(yaml.safe_dump({"split_parts": {"train": names}, "exclude": []}))
    (meta / ".info.json").write_text(json.dumps({"shard_counts": dict.fromkeys(names, 20)}))
    return folder


def test_a_mixture_is_drawn_from_as_training_draws_from_it(out, tmp_path):
    big = _many_shards(out, tmp_path / "big", 10)
    mixture = tmp_path / "mix.yaml"
    described = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    described["splits"] = {
        "train": {"blend": [{"path": str(out), "weight": 3}, {"path": str(big), "weight": 1}]}
    }
    mixture.write_text(yaml.safe_dump(described))
    assert [round(source.share, 3) for source in sources(mixture, "train")] == [0.75, 0.25]

    found = _survey(mixture, samples=100)
    drawn = Counter(sample.source for sample in found.samples)
    assert drawn == {0: 31, 1: 25}  # the first has no more
    # Rows hold three samples of the first source to each one of the second.
    origins = Counter(sample.source for row in found.rows for sample in row.samples)
    assert origins[0] / origins.total() == pytest.approx(0.75, abs=0.06)

    repeated = [{"path": str(out), "repetitions": 2}, {"path": str(big), "repetitions": 0.5}]
    described["splits"] = {"train": {"blend_epochized": repeated}}
    mixture.write_text(yaml.safe_dump(described))
    assert [source.share for source in sources(mixture, "train")] == pytest.approx([62 / 162, 100 / 162])


def test_a_subset_is_drawn_from_alone(out, tmp_path):
    """31 samples, of which the last 40 % are read twice: from the 18th (int(31 x 0.6)) to the last."""
    mixture = tmp_path / "mix.yaml"
    part = {"path": str(out), "repetitions": 2, "subset": {"range": ["60%", "100%"]}}
    whole = {"path": str(out), "repetitions": 1}
    described = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    described["splits"] = {"train": {"blend_epochized": [part, whole]}}
    mixture.write_text(yaml.safe_dump(described))

    first, second = sources(mixture, "train")
    assert (len(first), len(second)) == (13, 31) and first.indices == range(18, 31)
    assert [first.share, second.share] == pytest.approx([26 / 57, 31 / 57])
    assert first.find("000000003") is None and second.find("000000003") == 3
    assert first.find("000000020") == second.find("000000020") == 20

    found = _survey(mixture, samples=0)
    assert found.exact and found.population == 44
    assert sorted(sample.index for sample in found.samples if sample.source == 0) == list(range(18, 31))


def test_samples_are_found_by_key_and_by_place(out):
    (source,) = sources(out, "train")
    assert len(source) == 31 and source.place(20) == ("train-000001.tar", 0)
    assert source.find("000000020") == source.find("train-000001.tar[0]") == 20
    assert source.find("000000099") is None and source.find("train-000001.tar[11]") is None
    reader = Reader(source)
    sample = reader.read(20, whole=True)
    assert sample.__key__ == "000000020" and all(sample.members.values())
    assert list(reader.read(20, whole=False).members) == list(sample.members)
    reader.close()


def test_what_cannot_be_read_is_counted_by_reason(out, tmp_path):
    broken = _many_shards(out, tmp_path / "broken", 4)
    (broken / "train-000001.tar").unlink()
    found = _survey(broken, samples=0)
    assert Counter(sample.refused[0] for sample in found.samples if sample.refused) == {"shard missing": 20}

    split = {"split_parts": {"train": ["train-000000.tar"]}, "exclude": ["train-000000.tar/000000003"]}
    (broken / ".nv-meta/split.yaml").write_text(yaml.safe_dump(split))
    found = _survey(broken, samples=0)
    assert found.excluded == 1 and len(found.samples) == 19 and found.exact

    (broken / "train-000000.tar").unlink()
    with pytest.raises(SurveyError, match="none of 20 drawn samples can be used.*shard missing"):
        _survey(broken, samples=0)


def test_each_source_of_a_draw_gives_at_least_two_samples(out):
    (source,) = sources(out, "train")
    held = [dataclasses.replace(source, share=0.9999), dataclasses.replace(source, share=0.0001)]
    assert Counter(number for number, _ in draw(held, 20, seed=0)) == {0: 20, 1: 2}
