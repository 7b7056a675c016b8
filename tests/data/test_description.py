"""What identifies a data set, and what reading its description costs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_tools import shards
from data_tools.records import ConvertError
from data_tools.shards import IndexWriter, WrittenShard
from megatron_vl.data.source import dataset_description
from megatron_vl.data.source.blend import blend_change_lines, read_blend_sources, read_saved_sources
from megatron_vl.data.source.dataset_description import LoaderError, read_description

from .mixtures import identity, write


def reconvert(folder: Path) -> None:
    shutil.rmtree(folder / "birds")
    shutil.copytree(folder / "other", folder / "birds")


def edit_split(folder: Path) -> None:
    meta = folder / "birds" / ".nv-meta" / "split.yaml"
    split = yaml.safe_load(meta.read_text())
    split["split_parts"]["train"].append(split["split_parts"]["val"].pop())
    split["split_parts"]["val"] = split["split_parts"]["train"][:1]
    meta.write_text(yaml.safe_dump(split))


def exclude(folder: Path) -> None:
    meta = folder / "birds" / ".nv-meta" / "split.yaml"
    split = yaml.safe_load(meta.read_text())
    meta.write_text(yaml.safe_dump(split | {"exclude": ["train-000000.tar"]}))


CHANGES: dict[str, Any] = {
    "split": lambda f: write(f, birds={"split_part": "val"}),
    "content": reconvert,
    "shards of a split": edit_split,
    "left out": exclude,
}


def blend_change(before: Any, path: Path) -> list[str]:
    return blend_change_lines(read_saved_sources(before), read_blend_sources(identity(path)))


@pytest.mark.parametrize("change", CHANGES)
def test_mixture_identity_is_what_it_consists_of(folder, change):
    before = identity(folder / "meta.yaml")
    assert not blend_change(before, folder / "meta.yaml")
    CHANGES[change](folder)
    assert "birds is new: " in "\n".join(blend_change(before, folder / "meta.yaml"))


@pytest.mark.parametrize("weights", [(6, 2), (0.3, 0.1), (1.5, 0.5), (3e-3, 1e-3)])
def test_identity_compares_weights_by_ratio(folder, weights):
    """Energon divides them by their sum."""
    before = identity(folder / "meta.yaml")
    birds, ships = weights
    write(folder, "scaled.yaml", birds={"weight": birds}, ships={"weight": ships})
    assert not blend_change(before, folder / "scaled.yaml")


def test_identity_that_cannot_be_read_is_other_data(folder):
    for damaged in (None, {}, {"mixture": 3}, {"mixture": {"blend": [{}]}}):
        assert read_saved_sources(damaged) == ()


def test_metadataset_with_a_tab_is_refused_with_its_place(folder):
    path = folder / "meta.yaml"
    path.write_text("splits:\n  train:\n\tblend: []\n")
    with pytest.raises(LoaderError) as error:
        read_description(path)
    assert str(error.value).startswith(f"{path}, line 3, column 1: broken YAML: ")
    assert str(error.value).endswith("; indent with spaces instead of tabs") and "\n" not in str(error.value)


def test_missing_split_is_named(folder):
    with pytest.raises(
        LoaderError, match=r"meta.yaml has no split 'test'; splits that are there: train, val\."
    ):
        read_description(folder / "meta.yaml").split_facts("test")
    write(folder, birds={"split_part": "test"})
    with pytest.raises(LoaderError, match=r"birds: the split 'test' is empty"):
        read_description(folder / "meta.yaml").split_facts("train")


# --- Many shards --------------------------------------------------------------------------------------------


def empty_shards(folder: Path, count: int) -> Path:
    """A data set of empty tars, described as the converter does."""
    folder.mkdir()
    writer = IndexWriter(folder / ".nv-meta")
    for i in range(count):
        (folder / f"train-{i:06d}.tar").touch()
        writer.add_shard(WrittenShard(f"train-{i:06d}.tar", 10, 0, f"{i:064x}"))
    writer.finish()
    return folder


def test_shard_limit_is_the_same_for_loader_and_converter(tmp_path, monkeypatch):
    assert shards.MAX_SHARDS is dataset_description.MAX_SHARDS
    monkeypatch.setattr(shards, "MAX_SHARDS", 5)
    monkeypatch.setattr(dataset_description, "MAX_SHARDS", 5)
    facts = read_description(empty_shards(tmp_path / "five", 5)).split_facts("train")
    assert facts.dataset_identity["samples"] == 50
    with pytest.raises(ConvertError, match=r"train-000005.tar is one more than the 5 shards .*in parts"):
        empty_shards(tmp_path / "six", 6)
    longest = json.dumps({"shard_counts": {f"train-{10**7 - 1}.tar": 10**6}}, indent=2).splitlines()[2]
    assert len(longest) < 39 and dataset_description.MAX_DESCRIPTION_BYTES >= 48 * 4_000_000


def test_shard_names_must_stay_inside_the_folder(tmp_path):
    data = empty_shards(tmp_path / "data", 3)
    (data / "part").mkdir()
    (tmp_path / "outside").mkdir()
    split = data / ".nv-meta" / "split.yaml"

    def named(name: str) -> Any:
        split.write_text(yaml.safe_dump({"split_parts": {"train": [name]}, "exclude": []}))
        split.with_name(".info.json").write_text(json.dumps({"shard_counts": {name: 1}}))
        return read_description(data)

    (data / "part" / "a.tar").touch()
    named("part/a.tar")
    named("./train-000000.tar")
    named(f"{data}/train-000000.tar")
    (data / "near.tar").symlink_to("train-000001.tar")
    named("near.tar")

    (data / "part" / "far.tar").symlink_to(tmp_path / "outside" / "b.tar")
    (data / "away").symlink_to(tmp_path / "outside")
    for name in ("part/far.tar", "away/b.tar", "part/../../outside/b.tar", "part/..", "", "/"):
        with pytest.raises(LoaderError, match="is not inside"):
            named(name)
    split.write_text("split_parts: {train: [train-000000.tar]}\nexclude: [train-000000.tar/000000001]\n")
    with pytest.raises(LoaderError, match="excludes train-000000.tar/000000001; only whole shards"):
        read_description(data)
    split.write_text("split_parts: {train: [train-000000.tar]}\nexclude: ['{0..99999999}']\n")
    with pytest.raises(LoaderError, match="more than"):
        read_description(data)
