"""What identifies a data set; lists of data sets as ``data.path``, and folders of the parts of one."""

import json
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_tools import shards
from data_tools.records import ConvertError
from data_tools.shards import IndexWriter, WrittenShard
from megatron_vl.config import DataConfig, RunConfigError
from megatron_vl.data.loader import validation_rows
from megatron_vl.data.source import dataset_description
from megatron_vl.data.source.blend import blend_change_lines, read_blend_sources, read_saved_sources
from megatron_vl.data.source.dataset_description import LoaderError, read_description
from megatron_vl.data.source.location import check_data_path
from megatron_vl.spec.families import read_spec
from tests.tiny import tiny_checkpoint

from .datasets import converted, open_loader
from .media import write as write_file
from .mixtures import identity, talk, write


def reconvert(folder: Path) -> None:
    shutil.rmtree(folder / "birds")
    shutil.copytree(folder / "other", folder / "birds")


def edit_split(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        meta = folder / "birds" / ".nv-meta" / "split.yaml"
        split = yaml.safe_load(meta.read_text())
        change(split)
        meta.write_text(yaml.safe_dump(split))

    return edit


CHANGES: dict[str, Any] = {
    "split": lambda f: write(f, birds={"split_part": "val"}),
    "content": reconvert,
    "shards of a split": edit_split(lambda split: split["split_parts"]["train"].pop()),
    "left out": edit_split(lambda split: split.update(exclude=["train-000000.tar"])),
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
    with pytest.raises(LoaderError, match=r"meta.yaml has no split 'test'; .* there: train, val\."):
        read_description(folder / "meta.yaml").split_facts("test")
    write(folder, birds={"split_part": "test"})
    with pytest.raises(LoaderError, match=r"birds: the split 'test' is empty"):
        read_description(folder / "meta.yaml").split_facts("train")


def empty_shards(folder: Path, count: int) -> Path:
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


def test_shards_may_have_any_name_inside_the_folder(tmp_path):
    """tests/security has names that are refused."""
    data = empty_shards(tmp_path / "data", 3)
    split = data / ".nv-meta" / "split.yaml"
    write_file(data / "part" / "a.tar", b"")
    (data / "near.tar").symlink_to("train-000001.tar")
    for name in ("part/a.tar", "./train-000000.tar", f"{data}/train-000000.tar", "near.tar"):
        split.write_text(yaml.safe_dump({"split_parts": {"train": [name]}, "exclude": []}))
        split.with_name(".info.json").write_text(json.dumps({"shard_counts": {name: 1}}))
        read_description(data)
    split.write_text("split_parts: {train: [train-000000.tar]}\nexclude: [train-000000.tar/000000001]\n")
    with pytest.raises(LoaderError, match="excludes train-000000.tar/000000001; only whole shards"):
        read_description(data)


def keys(path: Any, count: int, state: dict[str, Any] | None = None, **changes: Any) -> Any:
    config = DataConfig(path=path, seq_len=256, num_workers=0, **changes)
    loader = open_loader(config, tiny_checkpoint(), rows_per_step=2)
    if state is not None:
        loader.load_state_dict(state)
    found = [row.sample_keys for row in islice(loader, count)]
    state, notes = loader.state_dict(), loader.start_notes
    loader.close()
    return found, state, notes


def blend(folder: Path, **weights: float) -> list[dict[str, Any]]:
    return [{"path": str(folder / name), "weight": weight} for name, weight in weights.items()]


def test_data_path_list_equals_a_metadataset(folder):
    write(folder, train={"blend": [{"path": "birds", "weight": 3}, {"path": "ships", "weight": 1}]})
    by_file, _, _ = keys(str(folder / "meta.yaml"), 8)
    by_list, _, notes = keys(blend(folder, birds=3, ships=1), 8)
    assert by_list == by_file
    assert notes[:2] == [
        "source birds: weight 3, 20 samples, 75.0% of the samples expected",
        "source ships: weight 1, 16 samples, 25.0% of the samples expected",
    ]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{"weight": 1}], "is not {path: FOLDER, weight: NUMBER}"),
        ([{"path": "synthetic:text"}], "is not {path: FOLDER, weight: NUMBER}"),
        ([{"path": "nowhere"}], "nowhere does not exist"),
        ([], "data.path is empty"),
    ],
)
def test_data_path_list_rejects_wrong_entries(parts, message):
    with pytest.raises(RunConfigError, match=message):
        check_data_path(parts)


@pytest.fixture(scope="module")
def joined(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("joined")
    for i, count in enumerate((14, 9)):
        records = talk(f"part {i}", count)
        made, _ = converted(folder / f"in{i}", records, val_fraction=0.2, samples_per_shard=4)
        shutil.copytree(made, folder / "out" / f"part-{i:05}-of-00002")
    return folder / "out"


def test_data_set_parts_are_read_as_one(joined):
    config = DataConfig(path=str(joined), seq_len=256, num_workers=0, shuffle=False, pack=False)
    each = []
    for part in sorted(joined.iterdir()):
        each += keys(str(part), identity(part)["samples"], shuffle=False, pack=False)[0]
    in_order, _, notes = keys(str(joined), len(each), shuffle=False, pack=False)
    assert in_order == each and notes == []

    shuffled, state, _ = keys(str(joined), 6)
    first, state, _ = keys(str(joined), 2)
    rest, _, _ = keys(str(joined), 4, state)
    assert first + rest == shuffled

    val = validation_rows(config, read_spec(tiny_checkpoint()), tiny_checkpoint())
    assert sum(row.num_samples for row in val) == identity(joined, "val")["samples"]


def test_data_set_parts_must_be_complete(joined, tmp_path):
    shutil.copytree(joined, tmp_path / "out")
    check_data_path(str(tmp_path / "out"))
    (tmp_path / "out" / "notes").mkdir()
    with pytest.raises(RunConfigError, match="notes is no part"):
        check_data_path(str(tmp_path / "out"))
    (tmp_path / "out" / "notes").rmdir()
    shutil.rmtree(tmp_path / "out" / "part-00001-of-00002")
    with pytest.raises(RunConfigError, match="part-00001-of-00002 is missing"):
        read_description(str(tmp_path / "out"))
