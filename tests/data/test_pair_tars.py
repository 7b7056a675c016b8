"""Image-text pairs in tars that exist: indexed where they lie, and trained on as if they were converted."""

import io
import json
import multiprocessing
import os
import random
import re
import signal
import tarfile
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.energon.epathlib import EPath
from megatron.energon.errors import FatalSampleError
from PIL import Image
from werkzeug.serving import WSGIRequestHandler

from data_tools import tar_index
from data_tools.sample_sizes import index_datasets
from data_tools.sample_sources import SampleReader, read_sources
from data_tools.tar_index import TarIndex, find_tars
from megatron_vl.config import DataConfig
from megatron_vl.data.loader import build_loader
from megatron_vl.data.row_encoder import RowEncoder
from megatron_vl.data.source import pair_reader, store_reading
from megatron_vl.data.source.dataset_description import read_dataset, read_description
from megatron_vl.data.source.location import LoaderError
from megatron_vl.data.source.store_reading import read_tar_shards
from megatron_vl.data.source.tar_list import parse_fields
from megatron_vl.spec.families import read_spec
from tests.tiny import tiny_checkpoint
from toolkit.cli import main

from .datasets import converted, turns
from .media import encoded, write
from .pair_tars import index, pair_members, write_pair_tars, write_tar
from .test_object_store import BUCKET, store, upload  # noqa: F401

type Members = list[tuple[str, bytes]]


@pytest.fixture(scope="module")
def hf() -> Path:
    return tiny_checkpoint("qwen2_5_vl")


@pytest.fixture(scope="module")
def tars(tmp_path_factory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("pairs") / "tars"
    return folder, write_pair_tars(folder, tars=2, pairs=6)


def trained_texts(out: Path | str, hf: Path, pattern: str, workers: int = 0) -> Counter[str]:
    """How often each text that a pattern finds is trained on in one pass. Nothing is left out."""
    data = DataConfig(path=str(out), seq_len=512, num_workers=workers)
    with closing(build_loader(data, read_spec(hf), hf, epochs=1)) as loader:
        rows = list(loader)
        tokenizer = loader._planning_context.row_encoder.chat_encoder.tokenizer
    assert not any(row.dropped_counts for row in rows)
    return Counter(re.findall(pattern, "\n".join(tokenizer.decode(row.tokens) for row in rows)))


def quarantined(out: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]


def samples_of(out: Path, hf: Path):
    (source,) = read_sources(str(out), "train")
    encoder = RowEncoder(DataConfig(path=str(out)), read_spec(hf), hf)
    with closing(SampleReader(source)) as reader:
        raw = [reader.read_sample(i, with_media=True) for i in range(len(source))]
    return [encoder.postencode_sample(encoder.preencode_sample(one)) for one in raw]


def test_tars_give_the_samples_of_converted_pairs(tars, tmp_path, hf):
    folder, captions = tars
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    report = index(tmp_path / "tar-set", hf, folder)
    assert (report.pairs, report.broken) == (12, Counter())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before, "nothing is written there"

    records = []
    for number, caption in enumerate(captions):
        name, content = pair_members(f"{number}", number, caption)[0]
        write(tmp_path / "media" / name, content)
        records.append({"image": name, "caption": caption})
    expected_dir, _ = converted(tmp_path, records)

    found, expected = samples_of(tmp_path / "tar-set", hf), samples_of(expected_dir, hf)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.token_ids, other.token_ids) and torch.equal(one.loss_mask, other.loss_mask)
        (medium,), (other_medium,) = one.media_items, other.media_items
        assert medium.grid_thw == other_medium.grid_thw and torch.equal(medium.planes, other_medium.planes)

    numbers = trained_texts(tmp_path / "tar-set", hf, r"the number (\d+)", workers=2)
    assert numbers == Counter(map(str, range(12)))


def test_sizes_for_another_tokenizer_are_those_of_the_index(tars, tmp_path, hf):
    index(tmp_path / "out", hf, tars[0])
    (sizes_dir,) = (tmp_path / "out/.nv-meta/sizes").iterdir()
    names = ("samples.npy", "media.npy", "shards.json")
    written = {name: (sizes_dir / name).read_bytes() for name in names}
    for path in sizes_dir.iterdir():
        path.unlink()
    (result,) = index_datasets(DataConfig(path=str(tmp_path / "out")), read_spec(hf), hf)
    assert (result.samples, result.media, result.unusable) == (12, 12, 0)
    assert {name: (sizes_dir / name).read_bytes() for name in names} == written


# --- Damage -------------------------------------------------------------------------------------------------

KEYS = 5


def changed_pair(key: str, image: tuple[str, bytes], text: tuple[str, bytes]) -> list[tuple[Members, str]]:
    """What may stand in the place of a pair, and why the pair is lost; empty: it is not."""

    def caption(content: bytes) -> Members:
        return [image, (text[0], content)]

    others = [("__meta__/a.jpg", b""), ("noextension", b"x"), ("._00.jpg", b"x"), (f"{key}.npy", b"x")]
    return [
        ([image], "text missing"),
        ([text], "image missing"),
        ([(f"{key}.webp", b"RIFF"), image, text], "several images"),
        ([text, image, text], "several texts"),
        (caption(b" \n"), "text missing"),
        (caption(b"caf\xe9"), "text unreadable"),
        (caption(b"An end<|im_end|> within."), "control token in text"),
        (caption(b"An image <|image_pad|> within."), "placeholder token in text"),
        ([(image[0], b"<html>404</html>"), text], "image does not decode"),
        ([(f"{key}.jpg", encoded(30, 44, "jpeg")[:90]), text], "image does not decode"),
        # A PNG that is named as a JPEG, members of other kinds, and names that lead away change nothing.
        ([(f"{key}.jpg", encoded(30, 44, "png")), text], ""),
        ([*others, image, text], ""),
        ([(f"../../{name}", content) for name, content in (image, text)], ""),
    ]


def key_again(path: Path, at: int) -> tuple[set[int], str]:
    with tarfile.open(path) as tar_file:
        again = [(member.name, tar_file.extractfile(member).read()) for member in tar_file.getmembers()[:2]]
    write_tar(path, again, mode="a")
    return set(), "key occurs again"


def truncated(path: Path, at: int) -> tuple[set[int], str]:
    """The image of the last pair ends with the file; the caption before it is whole."""
    with tarfile.open(path) as tar_file:
        image = tar_file.getmembers()[-2]
    os.truncate(path, image.offset_data + image.size // 2)
    return {KEYS - 1}, "member truncated"


def damaged_header(path: Path, at: int) -> tuple[set[int], str]:
    with tarfile.open(path) as tar_file:
        member = tar_file.getmembers()[2 * at]
    with path.open("r+b") as file:
        file.seek(member.offset + 150)
        file.write(b"\xff" * 4)
    return set(range(at, KEYS)), "tar damaged"


def other_member(name: str, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/hostname" if kind == tarfile.SYMTYPE else ""
    return info


def link(path: Path, at: int) -> tuple[set[int], str]:
    """A link with the name of an image is not followed."""
    write_tar(path, [other_member("zz.jpg", tarfile.SYMTYPE), ("zz.txt", b"text")], mode="a")
    return set(), "image missing"


FILE_MUTATIONS = [key_again, truncated, damaged_header, link]


def test_mutated_tars_lose_only_broken_pairs(tmp_path, hf):
    """Of 51 tars, each usable pair is trained on exactly once a pass, and all else is counted and named."""
    draw = random.Random(5)
    usable, expected_reasons = set(), Counter()
    for number in range(51):
        at, path = draw.randrange(KEYS), tmp_path / "tars" / f"{number:05d}.tar"
        pairs: list[Members] = []
        for i in range(KEYS):
            kind, suffix = draw.choice([("jpeg", "jpg"), ("png", "png"), ("webp", "webp")])
            image = encoded(28 + draw.randrange(20), 30, kind, seed=i)
            pairs.append([(f"{i:02d}.{suffix}", image), (f"{i:02d}.txt", f"id{number}-{i}".encode())])
        changes = changed_pair(f"{at:02d}", *pairs[at])
        mutation = number % (len(changes) + len(FILE_MUTATIONS))
        if mutation < len(changes):
            pairs[at], reason = changes[mutation]
            lost = {at} if reason else set()
        write_tar(path, sum(pairs, []))
        if mutation >= len(changes):
            lost, reason = FILE_MUTATIONS[mutation - len(changes)](path, at)
        usable |= {f"id{number}-{i}" for i in range(KEYS) if i not in lost}
        expected_reasons += Counter([reason] if reason else [])

    report = index(tmp_path / "out", hf, tmp_path / "tars", workers=2)
    assert report.broken == expected_reasons and report.pairs == len(usable) > 150
    entries = quarantined(tmp_path / "out")
    assert Counter(entry["reason"] for entry in entries) == expected_reasons
    named = re.compile(r"\w\.(jpg|png|webp|txt)|at byte 0 of")
    assert all(entry["file"] and named.search(entry["detail"]) for entry in entries)
    found = trained_texts(tmp_path / "out", hf, r"id\d+-\d+")
    assert found == Counter(usable)


def test_files_that_are_no_tars_are_named(tars, tmp_path, hf):
    folder = tmp_path / "tars"
    for i, content in enumerate([b"", b"<html>" * 200, b"\x1f\x8b\x08" + bytes(600), bytes(10240)]):
        write(folder / f"0000{i}.tar", content)
    with pytest.raises(LoaderError, match="none of . samples"):
        index(tmp_path / "out", hf, folder)
    (folder / "00004.tar").symlink_to(tars[0] / "00001.tar")
    assert index(tmp_path / "out", hf, folder).pairs == 6
    named = [entry["file"] for entry in quarantined(tmp_path / "out")]
    assert named == ["00001.tar", "00002.tar"], "the first is empty, and zeros end a tar"
    assert trained_texts(tmp_path / "out", hf, r"the number (\d+)").total() == 6


def test_member_of_any_claimed_size_takes_no_memory(tmp_path, hf, monkeypatch):
    """A file and headers of a terabyte, and an image that could be a whole member: a hole takes no room."""
    monkeypatch.setattr(pair_reader, "MAX_MEMBER_BYTES", 100_000)
    kinds = [(tarfile.REGTYPE, 1 << 40), (tarfile.XHDTYPE, 1 << 40), (tarfile.GNUTYPE_LONGNAME, 1 << 40)]
    kinds.append((tarfile.REGTYPE, -512))  # it would be found again and again
    for number, (kind, size) in enumerate(kinds):
        path = write_tar(tmp_path / f"tars/{number}.tar", pair_members("a", number, "Good."))
        info = tarfile.TarInfo("big.jpg")
        info.type, info.size = kind, size
        with path.open("r+b") as file, tarfile.open(path) as tar_file:
            tar_file.getmembers()
            file.seek(tar_file.offset)
            file.write(info.tobuf(tarfile.GNU_FORMAT))
    good = pair_members("a", 4, "Good.")
    write_tar(tmp_path / "tars/4.tar", [*good, ("b.png", bytes(100_001)), ("b.txt", b"Big.")])
    report = index(tmp_path / "out", hf, tmp_path / "tars")
    expected = {"member truncated": 1, "tar damaged": 3, "member too large": 1}
    assert report.pairs == 5 and report.broken == expected
    assert quarantined(tmp_path / "out")[-1]["detail"] == "b.png of 100,001 bytes"


def test_other_files_among_those_of_a_pair_change_nothing(tmp_path, hf):
    others = [
        # macOS writes a hidden file before each other one.
        [other_member("f/._a.jpg"), other_member("f/._a.txt")],
        [other_member("x.y", tarfile.DIRTYPE), other_member("b.jpg", tarfile.SYMTYPE)],
        [other_member("f/a.png", tarfile.GNUTYPE_SPARSE), other_member("b.bin", tarfile.GNUTYPE_SPARSE)],
        [other_member("f/a.__key__"), other_member("f/a.bin")],
    ]
    for number, (first, second) in enumerate(others):
        image, caption = pair_members("f/a", 0, f"The number {number}.")
        more = pair_members("caf\udce9", 1, f"The number {number + 4}.")
        write_tar(tmp_path / f"tars/{number}.tar", [first, image, second, caption, *more])
    report = index(tmp_path / "out", hf, tmp_path / "tars")
    assert (report.pairs, report.broken) == (8, {})
    assert trained_texts(tmp_path / "out", hf, r"The number (\d)") == Counter("01234567")


def test_other_file_of_a_pair_may_be_truncated(tmp_path, hf, store):  # noqa: F811
    path = write_tar(tmp_path / "a.tar", [*pair_members("a", 0, "The number 1."), ("a.bin", bytes(1 << 20))])
    os.truncate(path, path.stat().st_size - (1 << 20))
    store.upload_file(str(path), BUCKET, "truncated/a.tar")
    for out, given in (("here", path), ("there", "msc://images/truncated/a.tar")):
        report = index(tmp_path / out, hf, given)
        assert (report.pairs, report.broken) == (1, {})
        assert trained_texts(tmp_path / out, hf, r"The number (\d)") == {"1": 1}


def test_incomplete_copy_of_an_index_is_refused(tars, tmp_path, hf):
    index(tmp_path / "out", hf, tars[0])
    spans = tmp_path / "out/.nv-meta/tars.idx"
    spans.write_bytes(spans.read_bytes()[:40])
    with pytest.raises(LoaderError, match=r"tars.idx does not fit tars.json"):
        read_tar_shards(read_dataset(tmp_path / "out"))
    (spans.parent / "tars.json").write_text("[" * 200_000)
    with pytest.raises(LoaderError, match="is damaged"):
        read_dataset(tmp_path / "out")


def test_image_with_a_long_head_is_measured(tmp_path, hf):
    """The size of a JPEG may follow more than 64 KiB of other data, and its EXIF turns it."""
    exif = Image.Exif()
    exif[0x0112] = 6
    image, content = Image.new("RGB", (80, 40), "red"), io.BytesIO()
    image.save(content, "JPEG", exif=exif, icc_profile=bytes(200_000))
    assert content.getvalue().find(b"\xff\xc0") > 1 << 16
    write_tar(tmp_path / "a.tar", [("a.jpg", content.getvalue()), ("a.txt", b"Red.")])
    assert index(tmp_path / "out", hf, tmp_path / "a.tar").pairs == 1
    (sizes_dir,) = (tmp_path / "out/.nv-meta/sizes").iterdir()
    assert np.load(sizes_dir / "media.npy")[["height", "width"]].tolist() == [(80, 40)]


# --- Fields -------------------------------------------------------------------------------------------------


def test_members_are_found_by_the_given_extensions_and_answer_a_question(tmp_path, hf):
    image = encoded(30, 40)
    inner = json.dumps({"meta": {"alt": " An alt text. "}}).encode()
    members = [("a.img.png", image), ("a.meta.json", inner), ("b.img.png", image), ("b.txt", b"B.")]
    members += [("c.IMG.PNG", image), ("c.txt", b" "), ("c.meta.json", inner), ("d.img.png", image)]
    members += [("d.meta.json", b'{"meta": {"alt": 5}}')]
    write_tar(tmp_path / "a.tar", members)
    words = ("image=img.png", "caption=txt|meta.json:meta.alt", "prompt=What is this?")
    report = index(tmp_path / "out", hf, tmp_path / "a.tar", members=words)
    assert (report.pairs, report.broken) == (3, Counter({"text unreadable": 1}))
    answers = r"<\|vision_end\|>What is this\?<\|im_end\|>\n<\|im_start\|>assistant\n(An alt text\.|B\.)<"
    assert trained_texts(tmp_path / "out", hf, answers) == {"An alt text.": 2, "B.": 1}


def test_tars_of_text_alone(tmp_path, hf):
    members = [("a.txt", b" One text. "), ("b.json", b'{"text": "Two texts."}'), ("c.json", b'{"t": 1}')]
    members += [("d.jpg", encoded(30, 40)), ("d.txt", b"Three texts."), ("e.txt", b""), ("f.txt", b"\xff")]
    write_tar(tmp_path / "a.tar", members)
    report = index(tmp_path / "out", hf, tmp_path / "a.tar", members=("text=txt|json:text",))
    assert (report.pairs, report.broken) == (3, Counter({"text missing": 2, "text unreadable": 1}))
    found = trained_texts(tmp_path / "out", hf, r"(One text|Two texts|Three texts)\.<\|endoftext\|>")
    assert found == {"One text": 1, "Two texts": 1, "Three texts": 1}


def test_members_that_cannot_be_read_are_refused():
    for words in (["photo=jpg"], ["image="], ["image"], ["text=txt", "image=jpg"], ["image=jpg", "text=txt"]):
        with pytest.raises(LoaderError, match="--members"):
            parse_fields(words)


def test_inputs_may_be_braces_folders_and_lists(tars, tmp_path):
    folder, _ = tars
    names = ["00000.tar", "00001.tar"]
    (tmp_path / "list.txt").write_text("\n".join(str(folder / name) for name in names))
    for given in (folder / "{00000..00001}.tar", folder, tmp_path / "list.txt"):
        assert find_tars([str(given)]) == (folder, names)
    assert find_tars([f"{folder}/00000.tar", f"{tmp_path}/x/b.tar"])[1][0].endswith("tars/00000.tar")
    for wrong in ([f"{folder}/00000.tar"] * 2, [str(tmp_path)], ["/a/0.tar", "msc://p/a/0.tar"]):
        with pytest.raises(LoaderError):
            find_tars(wrong)
    with pytest.raises(LoaderError, match="write msc://PROFILE.* or s3://BUCKET"):
        find_tars(["gs://bucket/{0..3}.tar"])


def test_killed_index_continues(tmp_path, hf, monkeypatch):
    write_pair_tars(tmp_path / "tars", tars=3, pairs=2)
    read_tar_once = tar_index._read_tar_once

    def killed(tar_index: TarIndex, number: int) -> object:
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return read_tar_once(tar_index, number)

    out, tars = tmp_path / "out", tmp_path / "tars"
    monkeypatch.setattr(tar_index, "_read_tar_once", killed)
    process = multiprocessing.get_context("fork").Process(target=index, args=(out, hf, tars))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL and not (out / ".nv-meta").exists()
    monkeypatch.undo()
    report = index(out, hf, tars)
    assert (report.read_tars, report.pairs) == (1, 6)
    assert {path.name for path in out.iterdir()} == {".nv-meta", "quarantine.jsonl", "tar-index"}


def test_changed_and_new_tars_are_named_and_read_alone(tmp_path, hf):
    folder, out = tmp_path / "tars", tmp_path / "out"
    write_pair_tars(folder, tars=2, pairs=3)
    index(out, hf, folder)
    before = read_description(str(out)).split_facts("train").dataset_identity
    split = out / ".nv-meta/split.yaml"
    split.write_text('{"split_parts": {"train": ["{00000..00000}.tar"], "val": ["0{0001..0001}.tar"]}}')

    write_tar(folder / "00001.tar", pair_members("z", 1, "Changed."))
    write_tar(folder / "00002.tar", pair_members("y", 2, "New."))
    with pytest.raises(LoaderError, match="1 of 2 tars .* went since they were indexed: 00001.tar. Run"):
        read_description(str(out))
    report = index(out, hf, folder)
    assert (report.read_tars, report.pairs) == (2, 5)
    description = read_description(str(out))
    assert description.shards_by_split == {"train": ["00000.tar", "00002.tar"], "val": ["00001.tar"]}
    assert description.split_facts("train").dataset_identity["content"] != before["content"]
    assert len(list((out / "tar-index").iterdir())) == 3, "no results of earlier tars are left"

    # A tar that was taken out of all splits stays out.
    split.write_text('{"split_parts": {"train": ["00000.tar"], "val": ["00001.tar"]}}')
    index(out, hf, folder)
    assert read_description(str(out)).shards_by_split == {"train": ["00000.tar"], "val": ["00001.tar"]}

    (folder / "00002.tar").unlink()
    with pytest.raises(LoaderError, match="00002.tar"):
        read_description(str(out))
    with pytest.raises(LoaderError, match="00002.tar does not exist"):
        index(out, hf, folder / "{00000..00002}.tar")


def test_folder_of_the_tars_may_be_that_of_the_data_set(tmp_path, hf):
    write_pair_tars(tmp_path / "a", tars=2, pairs=2)
    index(tmp_path / "a", hf, tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert trained_texts(tmp_path / "b", hf, r"the number (\d+)").total() == 4


def test_parts_are_read_as_one_data_set(tmp_path, hf):
    write_pair_tars(tmp_path / "tars", tars=3, pairs=3)
    index(tmp_path / "out/part-00000-of-00002", hf, tmp_path / "tars/{00000..00001}.tar")
    index(tmp_path / "out/part-00001-of-00002", hf, tmp_path / "tars/00002.tar")
    numbers = trained_texts(tmp_path / "out", hf, r"the number (\d+)")
    assert numbers == Counter(map(str, range(9)))


def test_converted_data_set_is_not_replaced(tars, tmp_path, hf):
    out, _ = converted(tmp_path, [{"conversations": turns(1)}])
    with pytest.raises(LoaderError, match="was converted"):
        index(out, hf, tars[0])


# --- Object stores ------------------------------------------------------------------------------------------


def test_tars_in_an_object_store_are_read_there(store, tars, tmp_path, hf, monkeypatch):  # noqa: F811
    """Also if the data set itself lies in the store."""
    folder, _ = tars
    upload(store, folder, "pairs")
    index(tmp_path / "here", hf, folder)
    index(tmp_path / "there", hf, "msc://images/pairs/{00000..00001}.tar", workers=2)
    with pytest.raises(LoaderError, match="pairs/00002.tar does not exist"):
        index(tmp_path / "missing", hf, "msc://images/pairs/{00000..00002}.tar")
    files = [".nv-meta/tars.idx", ".nv-meta/index.uuid", ".nv-meta/split.yaml"]
    assert all((tmp_path / "here" / f).read_bytes() == (tmp_path / "there" / f).read_bytes() for f in files)

    numbers = trained_texts(tmp_path / "there", hf, r"the number (\d+)", workers=2)
    assert numbers == Counter(map(str, range(12)))

    # A bucket without a profile, at the address that boto3 finds in the environment.
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.meta.endpoint_url)
    assert index(tmp_path / "s3", hf, f"s3://{BUCKET}/pairs/{{00000..00001}}.tar").pairs == 12
    assert trained_texts(tmp_path / "s3", hf, r"the number (\d+)") == numbers

    upload(store, tmp_path / "there", "set")
    assert trained_texts(f"s3://{BUCKET}/set", hf, r"the number (\d+)") == numbers
    store.put_object(Bucket=BUCKET, Key="pairs/00001.tar", Body=b"other")
    with pytest.raises(LoaderError, match="00001.tar"):
        read_description(str(tmp_path / "there"))


def test_index_in_a_store_reads_ranges_and_a_start_reads_no_tar(store, tmp_path, hf, monkeypatch):  # noqa: F811
    """Worked out by hand. In the first tar, each image takes 4 MiB: a header and 1 MiB after it have its
    head, and the next window the caption after it and the next image's head."""
    members = []
    for number in range(3):
        image, caption = pair_members(f"{number:04d}", 5 * number, f"An image with the number {number}")
        members += [(image[0], image[1] + bytes(4 << 20)), caption]
    large = write_tar(tmp_path / "00000.tar", members)
    small = write_tar(tmp_path / "00001.tar", pair_members("a", 3, "A small one."))
    for path in (large, small):
        store.upload_file(str(path), BUCKET, f"ranges/{path.name}")
    with tarfile.open(large) as tar_file:
        captions = [member.offset for member in tar_file if member.name.endswith("txt")]
    seen: list[tuple[str, str, str]] = []

    def note(request: WSGIRequestHandler, *_: object) -> None:
        if request.path.endswith(".tar"):
            seen.append((request.command, request.path[-9:], request.headers.get("Range", "")))

    monkeypatch.setattr(WSGIRequestHandler, "log_request", note)
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.meta.endpoint_url)
    out, end = tmp_path / "out", large.stat().st_size - 1
    index(out, hf, f"s3://{BUCKET}/ranges/{{00000..00001}}.tar")
    places = [(first, min(first + 511 + (1 << 20), end)) for first in (0, *captions)]
    assert [one for one in seen if one[0] != "HEAD"] == [
        *(("GET", large.name, f"bytes={first}-{last}") for first, last in places),
        ("GET", small.name, f"bytes=0-{small.stat().st_size - 1}"),
    ]

    seen.clear()
    data = DataConfig(path=str(out), seq_len=512, num_workers=0)
    with closing(build_loader(data, read_spec(hf), hf)) as loader:
        heads = [("HEAD", large.name, ""), ("HEAD", small.name, "")]
        assert sorted(seen) == heads, "the tars are as they were"
        assert next(loader).num_images and all(place for method, _, place in seen if method == "GET")


def test_refusal_of_a_store_is_no_damage_and_is_named(store, tmp_path, hf, monkeypatch, capsys):  # noqa: F811
    """Also if it is gone when the same bytes are asked for again."""
    image, caption = pair_members("a", 0, "Good.")
    path = write_tar(tmp_path / "0.tar", [(image[0], image[1] + bytes(4 << 20)), caption])
    store.upload_file(str(path), BUCKET, "refused/0.tar")
    read_bytes, refused = store_reading._read_bytes, []

    def refuses_once(path: EPath, start: int, end: int) -> bytes:
        if start and not refused:
            refused.append(start)
            raise FatalSampleError(f"{path} cannot be read: no")
        return read_bytes(path, start, end)

    monkeypatch.setattr(store_reading, "_read_bytes", refuses_once)
    given = ["--input", "msc://images/refused/0.tar", "--out", str(tmp_path / "out"), "--model.hf", str(hf)]
    assert main(["data", "index", *given, "--workers", "1"]) == 1
    shown = capsys.readouterr().err
    assert "0.tar cannot be read: no" in shown and "This is a bug" not in shown
    assert main(["data", "index", *given]) == 0


def test_commands_index_and_show_tars(tars, tmp_path, hf, capsys):
    out, given = str(tmp_path / "out"), f"{tars[0]}/{{00000..00001}}.tar"
    run = ["--model.hf", str(hf), "--data.seq_len", "512"]
    assert main(["data", "index", "--input", given, "--out", out, *run]) == 0
    assert "12 pairs in 2 tars, 2 of them read now\n" in capsys.readouterr().out
    assert main(["data", "show", "--data.path", out, "--json", *run]) == 0
    facts = json.loads(capsys.readouterr().out)["splits"]["train"]
    assert (facts["samples"], facts["usable"], facts["sources"]["out"]["images"]) == (12, 12, 12)
    assert main(["data", "show", "--data.path", out, "--sample", "00001.tar[3]", *run]) == 0
    shown = capsys.readouterr().out
    assert "the number 9" in shown and "(00001.tar record 000010003)" in shown
    assert main(["data", "show", "--data.path", out, "--sample", "000010003", *run]) == 1
    assert "give the sample as SHARD[N]" in capsys.readouterr().err
    for wrong in (["--input", given], ["--members", "image=jpg"], ["--input", given, "--out", "/proc/no"]):
        assert main(["data", "index", *wrong, *run]) != 0
    assert "/proc/no" in capsys.readouterr().err
