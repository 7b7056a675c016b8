"""Tars of images and captions that another program wrote, read in place."""

from __future__ import annotations

import io
import json
import random
import shutil
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from data_tools import tar_index
from data_tools.tar_index import TarIndexError, index_tars
from megatron_vl.config import DataConfig
from megatron_vl.data.source.dataset_description import read_description
from megatron_vl.data.source.pair_members import MembersError, PairMembers
from tests.data.datasets import open_loader
from tests.data.media import encoded
from tests.tiny import tiny_checkpoint

MEMBERS = PairMembers.parse("image=jpg|png caption=txt|json:alt")
PICTURE, OTHER = encoded(56, 84, "jpeg"), encoded(84, 56, "png")

type Member = tuple[str, bytes]


def write_tar(path: Path, members: list[Member]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def pair(key: str, caption: str) -> list[Member]:
    return [(f"{key}.jpg", PICTURE), (f"{key}.txt", caption.encode())]


def trained(folder: Path, **fields: Any) -> tuple[Counter[str], Counter[str]]:
    """The captions that a pass trains on, and why samples are left out."""
    hf = tiny_checkpoint()
    tokenizer = AutoTokenizer.from_pretrained(hf)
    found: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for row in open_loader(DataConfig(path=str(folder), seq_len=128, num_workers=0, **fields), hf, epochs=1):
        dropped.update(row.dropped_counts)
        bounds = row.cu_seqlens.tolist()
        for start, end in zip(bounds[: row.num_samples], bounds[1:], strict=False):
            wanted = row.labels[start:end][row.loss_mask[start:end] > 0]
            found[tokenizer.decode(wanted).removesuffix("<|endoftext|>")] += bool(len(wanted))
    return +found, dropped


def test_pairs_are_trained_on_in_place(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    write_tar(folder / "0.tar", [*pair("a", "One."), ("b.PNG", OTHER), ("b.json", b'{"alt": "Two."}')])
    write_tar(folder / "1.tar", pair("a", "Three."))
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert index_tars([str(folder / "{0..1}.tar")], MEMBERS) == (folder, [])
    assert trained(folder) == ({"One.": 1, "Two.": 1, "Three.": 1}, {})
    assert {path.name: path.read_bytes() for path in folder.glob("*.tar")} == contents
    assert {path.name for path in folder.iterdir()} == {*contents, "0.tar.idx", "1.tar.idx", ".nv-meta"}

    # Again, it is left alone; with other members it is refused; a copy is the same data set.
    index_file = folder / ".nv-meta" / "index.sqlite"
    before = index_file.stat().st_mtime_ns
    (tmp_path / "list.txt").write_text(f"{folder}/0.tar\n{folder}/1.tar\n")
    assert index_tars([str(tmp_path / "list.txt")], MEMBERS) == (folder, [])
    assert index_file.stat().st_mtime_ns == before
    other = PairMembers.parse("image=jpg caption=json:alt")
    with pytest.raises(TarIndexError, match="other tars or with other members"):
        index_tars([str(folder / "{0..1}.tar")], other)
    copied = shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(copied / ".nv-meta")
    index_tars([str(copied / "{0..1}.tar")], MEMBERS)
    ids = [read_description(str(path)).content_id for path in (folder, copied)]
    shutil.rmtree(copied / ".nv-meta")
    index_tars([str(copied / "{0..1}.tar")], other)
    assert ids[0] == ids[1] != read_description(str(copied)).content_id


def test_interrupted_index_of_tars_starts_again(tmp_path, monkeypatch):
    write_tar(tmp_path / "0.tar", pair("a", "One."))
    write_tar(tmp_path / "1.tar", pair("b", "Two."))
    real = tar_index._index_tar

    def fail(folder, name, *rest):
        if name == "1.tar":
            raise KeyboardInterrupt
        return real(folder, name, *rest)

    monkeypatch.setattr(tar_index, "_index_tar", fail)
    with pytest.raises(KeyboardInterrupt):
        index_tars([str(tmp_path / "{0..1}.tar")], MEMBERS)
    assert not (tmp_path / ".nv-meta").exists()
    monkeypatch.undo()
    index_tars([str(tmp_path / "{0..1}.tar")], MEMBERS)
    assert trained(tmp_path)[0] == {"One.": 1, "Two.": 1}


def test_prompt_of_tars_makes_conversations(tmp_path):
    write_tar(tmp_path / "0.tar", pair("a", "One."))
    index_tars([str(tmp_path / "0.tar")], PairMembers.parse("image=jpg caption=txt prompt=What is it?"))
    assert trained(tmp_path)[0] == {"One.<|im_end|>": 1}


def test_captions_alone_are_text(tmp_path):
    write_tar(tmp_path / "0.tar", [("a.txt", b"One."), ("b.txt", b"Two.")])
    index_tars([str(tmp_path / "0.tar")], PairMembers.parse("caption=txt"))
    # Nothing predicts the first token of a document.
    assert trained(tmp_path)[0] == {"ne.": 1, "wo.": 1}


def test_impossible_inputs_are_refused(tmp_path):
    for members in ("image=jpg", "caption=", "caption=txt audio=mp3", "nonsense"):
        with pytest.raises(MembersError, match="is not such as"):
            PairMembers.parse(members)
    (tmp_path / "a").mkdir()
    write_tar(tmp_path / "0.tar", pair("a", "One."))
    write_tar(tmp_path / "a/1.tar", [])
    for inputs, message in (
        (["{0..1}.tar"], "1.tar is not a local .tar file"),
        (["0.tar", "a/1.tar"], "in different folders"),
        (["0.tar", "0.tar"], "twice"),
        (["a/1.tar"], "have no sample"),
    ):
        with pytest.raises(TarIndexError, match=message):
            index_tars([str(tmp_path / one) for one in inputs], MEMBERS)


def test_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    write_tar(tmp_path / "0.tar", pair("a", "One."))

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tar_index, "IndexWriter", refuse)
    with pytest.raises(TarIndexError, match="cannot be read or written"):
        index_tars([str(tmp_path / "0.tar")], MEMBERS)


def mutated(path: Path, number: int, draw: random.Random) -> tuple[set[str], Counter[str], bool]:
    """Writes a tar of three pairs, one of them changed. Returns the usable captions, why others are not, and
    whether the tar is damaged."""
    captions = [f"Caption {number} {i}." for i in range(3)]
    pairs = [pair(f"{number}_{i}", caption) for i, caption in enumerate(captions)]
    place = draw.randrange(3)
    key, usable = f"{number}_{place}", set(captions)
    kinds = ["none", "no caption", "empty", "two", "extension", "renamed", "bytes", "cut", "key", "split"]
    kind = kinds[number % len(kinds)]
    reasons: Counter[str] = Counter()
    if kind == "no caption":
        pairs[place].pop()
    elif kind == "empty":
        pairs[place][1] = (f"{key}.txt", b" \n")
    elif kind == "two":
        pairs[place].append((f"{key}.png", OTHER))
    elif kind == "extension":
        pairs[place][0] = (f"{key}.bmp", PICTURE)
    elif kind == "renamed":  # a PNG that is called .jpg decodes as what it is
        pairs[place][0] = (f"{key}.jpg", OTHER)
    elif kind == "bytes":
        pairs[place][0] = (f"{key}.jpg", b"no image")
    elif kind == "key":  # two pairs of one name, one after the other
        pairs[place] = pair(f"{number}_{(place + 1) % 3}", captions[place])
    elif kind == "split":  # a caption that does not follow its image
        lost = pairs[place].pop()
        pairs.append([lost]) if place < 2 else pairs.insert(0, [lost])
        reasons["image missing"] += 1
    reason = {
        "no caption": "no caption",
        "empty": "no caption",
        "two": "two images",
        "extension": "image missing",
        "bytes": "image does not decode",
        "split": "no caption",
    }.get(kind)
    if reason:
        reasons[reason] += 1
        usable.discard(captions[place])
    write_tar(path, sum(pairs, []))
    if kind == "cut":  # within the image of the last pair
        path.write_bytes(path.read_bytes()[: path.read_bytes().index(f"{number}_2.jpg".encode()) + 600])
        usable.discard(captions[2])
    return usable, reasons, kind == "cut"


def test_mutated_tars_leave_every_usable_pair_trained_on_once(tmp_path):
    draw = random.Random(7)
    usable: set[str] = set()
    reasons: Counter[str] = Counter()
    damaged = []
    for number in range(50):
        name = f"{number:05d}.tar"
        captions, why, is_damaged = mutated(tmp_path / name, number, draw)
        usable |= captions
        reasons += why
        damaged += [name] * is_damaged
    _, problems = index_tars([str(tmp_path / "{00000..00049}.tar")], MEMBERS)
    assert [problem.partition(":")[0] for problem in problems] == damaged and len(damaged) == 5
    found, dropped = trained(tmp_path)
    assert found == dict.fromkeys(usable, 1)
    assert dropped == reasons and len(reasons) == 4
    sizes = json.loads(next((tmp_path / ".nv-meta/sizes").glob("*/shards.json")).read_text())["shards"]
    assert sum((Counter(shard["unusable"]) for shard in sizes.values()), Counter()) == reasons
