"""Untrusted data sets: descriptions that name code, names that lead away, pickles, sizes that fill memory."""

import io
import json
import resource
import shutil
import tarfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_tools.shards import IndexWriter, WrittenShard
from megatron_vl.config import DataConfig
from megatron_vl.data.source.dataset_description import METADATA_DIR, SIZES_DIR
from megatron_vl.data.source.location import LoaderError
from megatron_vl.data.source.tolerant_reader import CRC_FIELD, append_crc32
from tests.data.datasets import converted, mixed_records, open_loader
from tests.data_tools.test_convert import bomb
from tests.security.payload import edit
from tests.tiny import tiny_checkpoint

COUNT = 10
PLAIN = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
Member = tuple[tarfile.TarInfo, bytes]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pristine")
    return converted(folder, mixed_records(folder / "media", COUNT), workers=1)[0]


@pytest.fixture
def dataset(pristine, tmp_path) -> Path:
    return shutil.copytree(pristine, tmp_path / "data")


def read(path: Path) -> tuple[set[str], dict[str, str]]:
    """Keys of the samples of one pass (or a little more), and the reason for each dropped key."""
    settings = {"seq_len": 320, "num_workers": 0, "shuffle": False, "max_pixels": 28 * 28 * 24}
    rows = open_loader(DataConfig(path=str(path), **settings), tiny_checkpoint("qwen2_5_vl"))
    used, dropped = set(), {}
    for row in islice(rows, COUNT + 6):
        used |= set(row.sample_keys)
        dropped |= {sample.key: sample.reason for sample in row.dropped_samples}
    rows.close()
    return used, dropped


def describe(file: Path, content: dict[str, Any] | str) -> None:
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))


def touching(mark) -> dict[str, object]:
    """What Energon 7.4.1 calls where it expects any value."""
    return {"__module__": "os", "__function__": "system", "command": f"touch {mark.path}"}


def alias(_) -> str:
    return "__module__: &a megatron.energon\n__class__: CrudeWebdataset\nsubflavors: {x: *a}\n"


def tag(mark) -> str:
    return f"!!python/object/apply:os.system ['touch {mark.path}']\n"


LOADERS = {"sample_loader": "sample_loader.py:sample_loader", "part_filter": "sample_loader.py:part_filter"}
DESCRIPTIONS: dict[str, Callable[..., Any]] = {
    "flavor": lambda mark: {**PLAIN, "subflavors": {"x": touching(mark)}},
    "module": lambda _: {"__module__": "evil", "__class__": "Evil"},
    "class": lambda mark: {
        "__module__": "subprocess",
        "__class__": "Popen",
        "args": ["touch", str(mark.path)],
    },
    "loader file": lambda _: {**PLAIN, "__class__": "VQAWebdataset", **LOADERS},
    "config folder": lambda _: {**PLAIN, "split_config": "../../elsewhere.yaml"},
    "function": touching,
    "tag": tag,
    "alias": alias,
}


@pytest.mark.parametrize("kind", DESCRIPTIONS)
def test_description_that_could_run_code_is_refused(dataset, mark, monkeypatch, kind):
    for name in ("evil.py", "sample_loader.py"):
        (dataset / ".nv-meta" / name).write_text(mark.python)
    monkeypatch.syspath_prepend(dataset / ".nv-meta")
    describe(dataset / ".nv-meta" / "dataset.yaml", DESCRIPTIONS[kind](mark))
    with pytest.raises(LoaderError, match="dataset.yaml"):
        read(dataset)


def test_python_files_in_the_folder_are_left_alone(dataset, mark):
    meta_files = ".nv-meta/sample_loader.py .nv-meta/part_filter.py"
    for name in f"sample_loader.py {meta_files} conftest.py sitecustomize.py".split():
        (dataset / name).write_text(mark.python)
    (dataset / ".nv-meta" / "state.pkl").write_bytes(mark.pickle())
    assert len(read(dataset)[0]) == COUNT


@pytest.mark.parametrize(
    "name", ["../other.tar", "/etc/passwd", "link.tar", "file:///etc/passwd", "{0..99999999}.tar", "a\0.tar"]
)
def test_shards_stay_in_the_folder(dataset, tmp_path, name):
    (tmp_path / "other.tar").write_bytes((dataset / "train-000000.tar").read_bytes())
    (dataset / "link.tar").symlink_to(tmp_path / "other.tar")
    meta = dataset / ".nv-meta"
    counts = json.loads((meta / ".info.json").read_text())["shard_counts"]
    edit(meta / ".info.json", shard_counts=counts | {name: COUNT})
    describe(meta / "split.yaml", {"split_parts": {"train": [name], "val": []}, "exclude": []})
    with pytest.raises(LoaderError, match="is not inside|more than 4000000 shards|cannot be read"):
        read(dataset)


METADATASETS: dict[str, Callable[..., Any]] = {
    "function": lambda mark: {"splits": {"train": {"path": "data", "subflavors": {"x": touching(mark)}}}},
    "joiner": lambda mark: {"splits": {"train": {"join": {"a": {"path": "data"}}, "joiner": touching(mark)}}},
    "description": lambda _: {"splits": {"train": {"path": "data", "dataset_config": "../../evil.yaml"}}},
    "root": lambda _: {"path": "/elsewhere/meta.yaml", "splits": {"train": {"path": "data"}}},
    "itself": lambda _: {"splits": {"train": {"path": "meta.yaml"}}},
    "remote": lambda _: {"splits": {"train": {"path": "msc://bucket/data"}}},
    "pickle": lambda _: {"splits": {"train": {"path": "data.jsonl"}}},
    "nested": lambda _: {"splits": {"train": {"blend": [{"weight": 1, "path": "data"}]}}},
    "tag": tag,
}


@pytest.mark.parametrize("kind", METADATASETS)
def test_metadatasets_name_data_sets_only(dataset, mark, tmp_path, kind):
    content = METADATASETS[kind](mark)
    if isinstance(content, dict):
        content = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", **content}
    describe(tmp_path / "meta.yaml", content)
    (tmp_path / "data.jsonl").write_bytes(mark.pickle())
    if kind == "nested":
        describe(dataset / ".nv-meta" / "dataset.yaml", {**PLAIN, "subflavors": {"x": touching(mark)}})
    with pytest.raises(LoaderError):
        read(tmp_path / "meta.yaml")


def rebuilt(dataset: Path, change: Callable[[list[Member]], list[Member]]) -> Path:
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.webdataset.prepare import IndexShardInfo, WebdatasetPreparator

    path = dataset / "train-000000.tar"
    with tarfile.open(path) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar]
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for member, data in change(members):
            tar.addfile(member, io.BytesIO(data))
    rows = list(WebdatasetPreparator._preprocess_tar(path.name, {path.name: 0}, EPath(dataset), max_parts=0))
    count = next(row.shard_info.count for row in rows if isinstance(row, IndexShardInfo))
    shutil.rmtree(dataset / ".nv-meta")
    writer = IndexWriter(dataset / ".nv-meta")
    kept = [row for row in rows if not isinstance(row, IndexShardInfo)]
    writer.add_shard(WrittenShard(path.name, count, path.stat().st_size, "0" * 64, kept))
    writer.finish()
    return dataset


def named(name: str, data: bytes) -> Member:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    return member, data


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_pickles_and_libraries_in_a_shard_are_bytes(dataset, mark):
    """Energon's own decoder would load these by their suffix."""
    suffixes = ("pkl", "pickle", "pyd", "pth", "pt", "npy", "npz", "cls", "ten", "mp", "cbor", "so", "py")

    def add(members: list[Member]) -> list[Member]:
        out = []
        for member, data in members:
            out.append((member, data))
            if member.name.endswith(".json"):
                out += [
                    named(member.name.replace(".json", f".x.{suffix}"), mark.pickle()) for suffix in suffixes
                ]
        return out

    used, dropped = read(rebuilt(dataset, add))
    assert len(used) == COUNT and not dropped


@pytest.mark.parametrize("prefix", ["../../escape/", "/escape/", "./.././"])
def test_member_names_that_lead_away_write_nothing(dataset, tmp_path, prefix):
    rebuilt(dataset, lambda members: [named(prefix + member.name, data) for member, data in members])
    before = tree(tmp_path)
    used, dropped = read(dataset)
    shutil.rmtree(dataset / METADATA_DIR / SIZES_DIR)
    assert len(used) + len(dropped) == COUNT
    assert tree(tmp_path) == before and not Path("/escape").exists()


def test_members_that_are_links_give_nothing_of_the_system(dataset, tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"secret")

    def link(members: list[Member]) -> list[Member]:
        for member, _ in members:
            if not member.name.endswith(".json"):
                member.type = tarfile.SYMTYPE
                member.linkname = str(secret)
                member.size = 0
        return [(member, b"" if member.issym() else data) for member, data in members]

    used, dropped = read(rebuilt(dataset, link))
    assert used and dropped
    assert set(dropped.values()) <= {"shard damaged", "medium missing", "image changed since conversion"}


def test_image_larger_than_said_is_not_decoded(dataset):
    """It has 3.6 gigapixels in a few bytes, and the size and checksum that the sample states."""
    big = bomb(60_000, 60_000)

    def swap(members: list[Member]) -> list[Member]:
        out = []
        for member, data in members:
            if member.name.endswith(".json"):
                record = json.loads(data.rpartition(CRC_FIELD)[0] + b"}")
                for item in record["media"]:
                    item.pop("crc32")
                data = append_crc32(json.dumps(record).encode())
            elif member.name.split(".")[-1] in ("jpg", "png"):
                data = big
            out.append(named(member.name, data))
        return out

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    used, dropped = read(rebuilt(dataset, swap))
    assert "image does not decode" in dropped.values() and used
    # KiB; decoded it would be 10 GB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000


def test_member_of_absurd_size_is_damage(dataset):
    path = dataset / "train-000000.tar"
    with tarfile.open(path) as tar:
        member = next(member for member in tar if not member.name.endswith(".json"))
    data = bytearray(path.read_bytes())
    header = data[member.offset : member.offset + 512]
    header[124:136] = b"\x80" + (1 << 60).to_bytes(11, "big")  # GNU's way of writing an exabyte
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    data[member.offset : member.offset + 512] = header
    path.write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    used, dropped = read(dataset)
    assert "shard damaged" in dropped.values() and len(used | dropped.keys()) >= COUNT
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000
