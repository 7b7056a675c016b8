"""``data.path`` as a list of data sets, and as a folder of the parts of one."""

import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from megatron_vl.config import DataConfig, RunConfigError
from megatron_vl.data.loader import validation_rows
from megatron_vl.data.source.dataset_description import read_description
from megatron_vl.data.source.location import check_data_path
from megatron_vl.spec.families import read_spec
from tests.tiny import tiny_checkpoint

from .datasets import converted, open_loader
from .mixtures import talk, write


def keys(path: Any, count: int, state: dict[str, Any] | None = None, **changes: Any) -> Any:
    """The keys of the samples of the next rows, and the state after them."""
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
    ("part", "told"),
    [
        ({"weight": 1}, "is not {path: FOLDER, weight: NUMBER}"),
        ({"path": "synthetic:text"}, "is not {path: FOLDER, weight: NUMBER}"),
        ({"path": "nowhere"}, "nowhere does not exist"),
    ],
)
def test_data_path_list_rejects_wrong_entries(part, told):
    with pytest.raises(RunConfigError, match=told):
        check_data_path([part])
    with pytest.raises(RunConfigError, match="data.path is empty"):
        check_data_path([])


@pytest.fixture(scope="module")
def joined(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("joined")
    for i, count in enumerate((14, 9)):
        (folder / f"in{i}").mkdir()
        records = talk(f"part {i}", count)
        made, _ = converted(folder / f"in{i}", records, val_fraction=0.2, samples_per_shard=4)
        shutil.copytree(made, folder / "out" / f"part-{i:05}-of-00002")
    return folder / "out"


def test_data_set_parts_are_read_as_one(joined):
    config = DataConfig(path=str(joined), seq_len=256, num_workers=0, shuffle=False, pack=False)
    each = []
    for part in sorted(joined.iterdir()):
        count = read_description(part).split_facts("train").dataset_identity["samples"]
        each += keys(str(part), count, shuffle=False, pack=False)[0]
    in_order, _, notes = keys(str(joined), len(each), shuffle=False, pack=False)
    assert in_order == each and notes == []

    shuffled, state, _ = keys(str(joined), 6)
    first, state, _ = keys(str(joined), 2)
    rest, _, _ = keys(str(joined), 4, state)
    assert first + rest == shuffled

    val = list(validation_rows(config, read_spec(tiny_checkpoint()), tiny_checkpoint()))
    assert (
        sum(row.num_samples for row in val)
        == read_description(config.path).split_facts("val").dataset_identity["samples"]
    )


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
