"""Tests of the data tool: formats, splits, refusals, and what Energon finds afterwards."""

import base64
import errno
import json
import os
import random
import re
import shutil
import struct
import tarfile
import threading
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from data_tools import convert as tool
from data_tools.convert import ConversionOptions, RecordIds, convert_dataset
from data_tools.records import ConvertError, read_records
from megatron_vl.system import durable_files
from tests.data.datasets import converted, mixed_records
from tests.data.media import encoded, reader_without_memory, video, write
from toolkit.cli import main

HUMAN, GPT = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}
TEXT = {"conversations": [HUMAN, GPT]}


def shards(path: Path) -> dict[str, bytes]:
    out: dict[str, bytes] = {}
    for tar_path in sorted(path.glob("*.tar")):
        with tarfile.open(tar_path) as tar:
            for member in tar:
                assert member.name not in out
                out[member.name] = tar.extractfile(member).read()
    return out


def refused(path: Path) -> dict[int, str]:
    lines = [json.loads(line) for line in (path / "quarantine.jsonl").read_text().splitlines()]
    return {line["record"]: line["reason"] for line in lines}


def asks(value, **media):
    return {**media, "conversations": [{"from": "human", "value": value}, GPT]}


@pytest.mark.parametrize("chunk", [7, 64, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_arrays_are_read_in_any_chunks(tmp_path, monkeypatch, chunk, indent):
    monkeypatch.setattr("data_tools.records.CHUNK_BYTES", chunk)
    records: list = [{"a": "x" * n, "b": [1.5, None, {"é": ']},{ \\" 漢'}]} for n in range(0, 90, 13)]
    records += [12, "s", True]
    path = tmp_path / "a.json"
    path.write_text("\ufeff" + json.dumps(records, indent=indent, ensure_ascii=False))
    assert [record for _, record in read_records(path)] == records


def test_broken_lines_are_quarantined_and_reading_continues(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"a": 1}\n\n{broken\n\xff\xfe\n{"a": 2}')
    (_, first), (third, broken), (fourth, binary), (_, last) = read_records(path)
    assert (first, last, third, fourth) == ({"a": 1}, {"a": 2}, 3, 4)
    assert (broken.reason, binary.reason) == ("not JSON", "not UTF-8")


def with_field(value: str) -> str:
    return json.dumps(TEXT)[:-1] + f', "x": {value}}}'


@pytest.mark.parametrize("array", [True, False], ids=["array", "lines"])
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (with_field('1, "image": "a.png", "y": {"x": 1}, "image": "b.png"'), "duplicate key"),
        (with_field("[" * 200 + "]" * 200), "nested too deeply"),  # its queue to a worker process would fail
        (with_field("[" * 900 + "]" * 900), "nested too deeply"),
        (with_field("[" * 199 + "]" * 199), ""),
        (with_field("[" + "[], " * 500 + "0]"), ""),
        (with_field("[" + "7" * 5000 + ', "]"]'), "integer too long"),
        ("-" + "7" * 5000, "integer too long"),
    ],
)
def test_records_that_python_would_misread_are_quarantined(tmp_path, monkeypatch, array, text, reason):
    texts = [json.dumps(TEXT), text, json.dumps(TEXT)]
    path = write(tmp_path / "in.json", (f"[{', '.join(texts)}]" if array else "\n".join(texts)).encode())
    monkeypatch.setattr("data_tools.records.CHUNK_BYTES", 16)
    records = [record for _, record in read_records(path)]
    assert records[0] == records[2] == TEXT
    assert records[1].reason == reason if reason else records[1] == json.loads(text)


def test_file_that_ends_within_a_line_is_refused(tmp_path, capsys):
    """A download that broke off must not count as one bad record of many."""
    text = "".join(json.dumps(TEXT) + "\n" for _ in range(3))
    path = write(tmp_path / "in.jsonl", text[:-9].encode())
    with pytest.raises(ConvertError, match="in.jsonl ends within line 3"):
        list(read_records(path))
    assert main(["data", "convert", "--input", str(path), "--out", str(tmp_path / "out")]) == 1
    assert "fetch the whole file" in capsys.readouterr().err and not (tmp_path / "out/.nv-meta").exists()
    path.write_text(text[:-1])
    assert len(list(read_records(path))) == 3


def test_input_that_grows_meanwhile_is_refused(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "in.jsonl", (json.dumps(TEXT) + "\n").encode())

    def growing(*arguments):
        with path.open("a") as file:
            file.write(json.dumps(TEXT) + "\n")
        return read_records(*arguments)

    words = ["data", "convert", "--input", str(path), "--out", str(tmp_path / "out"), "--workers", "1"]
    with monkeypatch.context() as patched:
        patched.setattr("data_tools.convert.read_records", growing)
        assert main(words) == 1
    assert "something writes to it" in capsys.readouterr().err and not (tmp_path / "out/.nv-meta").exists()
    assert main(words) == 0 and "2 of 2 records" in capsys.readouterr().out


def test_line_without_end_is_one_bad_line(tmp_path, monkeypatch):
    monkeypatch.setattr("data_tools.records.MAX_RECORD_BYTES", 100)
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' + "x" * 350 + '\n{"a": 2}\n' + "y" * 120)
    found = list(read_records(tmp_path / "a.jsonl"))
    assert [n for n, _ in found] == [1, 2, 3, 4] and found[2][1] == {"a": 2}
    assert found[1][1].reason == found[3][1].reason == "line too long"


@pytest.mark.parametrize(
    "text",
    [
        *(b'[{"a": 1}, {"a": ', b'[{"a": 1}, {a: 2}, {"a": 3}]', b'[{"a": 1}', b'[{"a": 1} {"a": 2}]'),
        *(b"", b"[{}] [{}]", b'[{"a": "\xe9"}]'),
    ],
)
def test_broken_arrays_name_the_record(tmp_path, text):
    path = write(tmp_path / "a.json", text)
    with pytest.raises(ConvertError, match="a.json"):
        list(read_records(path))


def test_shards_hold_the_original_bytes_and_the_sizes(tmp_path):
    records = mixed_records(tmp_path / "media", 10)
    out, report = converted(tmp_path, records, val_fraction=0.2)
    assert (report.samples, report.images, report.videos, report.refused) == (10, 8, 4, {})
    members = shards(out)
    first = json.loads(members["000000000.json"])

    assert members["000000000.0.jpg"] == (tmp_path / "media/images/0.img").read_bytes()
    crc = zlib.crc32(members["000000000.0.jpg"])
    facts = {"key": "0.jpg", "kind": "image", "height": 40, "width": 60, "crc32": crc}
    assert first["media"] == [facts]
    assert first["messages"][0]["content"] == [
        {"type": "image", "image": "0.jpg"},
        {"type": "text", "text": "\nWhat is this?"},
    ]
    assert first["source"] == {"file": "in.json", "record": 1}

    clip = json.loads(members["000000003.json"])["media"][0]
    assert clip.pop("crc32") == zlib.crc32(members["000000003.0.mp4"])
    assert clip == {"key": "0.mp4", "kind": "video", "height": 56, "width": 84, "frames": 12, "fps": 10.0}
    assert all(name.count(".") in (1, 2) and name.split(".")[0].isdigit() for name in members)


@pytest.mark.parametrize("count,fraction,val", [(2, 0.01, 1), (7, 0.9, 6), (40, 0.05, 2), (5, 0.0, 0)])
def test_splits_are_never_empty(tmp_path, count, fraction, val):
    out, report = converted(tmp_path, [TEXT] * count, val_fraction=fraction, samples_per_shard=1)
    assert (report.train, report.val) == (count - val, val) and report.train >= 1
    splits = yaml.safe_load((out / ".nv-meta/split.yaml").read_text())["split_parts"]
    assert bool(splits["val"]) == bool(val) and splits["train"]


def test_bad_media_are_refused_one_by_one(tmp_path):
    media = tmp_path / "media"
    secret = write(tmp_path / "secret.png", encoded(30, 30))
    for name in ("good.png", "folder/x.png"):
        write(media / name, encoded(30, 30))
    write(media / "cut.jpg", encoded(90, 90, "jpeg")[:600])
    write(media / "thin.png", encoded(1, 300))
    write(media / "page.png", b"<html></html>")
    write(media / "cut.mp4", video(10)[:500])
    (media / "link.png").symlink_to(secret)
    (media / "inner.png").symlink_to(media / "good.png")
    (media / "loop.png").symlink_to(media / "loop.png")
    os.mkfifo(media / "pipe.png")
    uri, many = "data:image/png;base64,", "A" * 100_000  # base64 that no format is known from
    good = uri + base64.b64encode(encoded(30, 30)).decode()
    references = {
        "": ["good.png", "inner.png", "folder/../good.png", f"file://{media / 'good.png'}", good],
        "outside the media root": ["link.png", "../secret.png", str(secret)],
        "medium missing": ["none.png"],
        "not a file": ["folder", "pipe.png"],
        "remote medium": ["https://example.com/a.png"],
        "image does not decode": ["cut.jpg", "page.png"],
        "image too narrow": ["thin.png"],
        "bad media reference": [
            *("loop.png", "file://good.png", "a\0b.png", f"{uri}@@@", "data:image/png,raw"),
            *(many, f"file://{many}", f"{uri}@{many}"),
        ],
    }
    cases = [(reason, name) for reason, names in references.items() for name in names]
    records = [asks("<image>", image=name) for _, name in cases] + [asks("<video>", video="cut.mp4")]
    out, report = converted(tmp_path, records)
    expected = {i: reason for i, (reason, _) in enumerate(cases, 1) if reason}
    found = refused(out)
    loop = cases.index(("bad media reference", "loop.png")) + 1
    assert found[loop] in ("medium missing", "bad media reference")
    assert found | {loop: expected[loop]} == expected | {len(records): "video does not decode"}
    listed = (out / "quarantine.jsonl").read_text()
    assert max(map(len, re.findall("A+", listed))) == 200
    lines = [json.loads(line) for line in listed.splitlines()]
    assert {(line["file"], line["field"]) for line in lines} == {("in.json", "image"), ("in.json", "video")}
    assert f"link.png leads to {secret}" in lines[0]["detail"]
    assert not any(noise in line["detail"] for line in lines for noise in ("object at 0x", "<none>"))
    assert report.samples + len(found) == report.records == len(records)
    assert sum(sum(r.values()) for r in report.refused.values()) == len(found)
    assert encoded(30, 30) in shards(out).values()


@pytest.mark.parametrize(
    ("fault", "method"), [(errno.EIO, "read_bytes"), (errno.ENOMEM, "read_bytes"), (errno.ESTALE, "stat")]
)
def test_machine_faults_are_not_blamed_on_a_record(tmp_path, monkeypatch, capsys, fault, method):
    """One that passes is not noticed; one that stays stops the command, and the next one loses nothing."""
    image = write(tmp_path / "m/a.png", encoded(30, 30))
    (tmp_path / "m/b.png").symlink_to("b.png")
    records = [asks("<image>", image="a.png"), TEXT, asks("<image>", image="b.png")]
    real_method = getattr(Path, method)
    failures_left = 1

    def fails(path: Path, **arguments):
        nonlocal failures_left
        if path == image and failures_left:
            failures_left -= 1
            raise OSError(fault, os.strerror(fault))
        return real_method(path, **arguments)

    monkeypatch.setattr(Path, method, fails)
    monkeypatch.setattr("megatron_vl.system.errors.RETRY_WAITS_S", (0.0, 0.0, 0.0))
    assert run(tmp_path, records, "--max-quarantined", "0.4") == 0
    assert list(refused(tmp_path / "out")) == [3], "only a loop of links is the record's"

    shutil.rmtree(tmp_path / "out")
    failures_left, _ = 1 << 30, capsys.readouterr()
    assert run(tmp_path, records, "--max-quarantined", "0.4") == 1
    message = capsys.readouterr().err
    assert f"{os.strerror(fault)}: '{image}'. Fix this" in message and "Traceback" not in message
    failures_left = 0
    assert run(tmp_path, records, "--max-quarantined", "0.4") == 0
    assert list(refused(tmp_path / "out")) == [3]


@pytest.mark.parametrize(
    ("fault", "step", "remedy"),
    [(errno.EROFS, "make_dirs", "give a folder"), (errno.ENOSPC, "fsync_tree", "make room")],
)
def test_disk_that_takes_nothing_is_named_with_what_to_do(tmp_path, monkeypatch, capsys, fault, step, remedy):
    def fails(path: Path) -> None:
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(durable_files, step, fails)
    assert run(tmp_path, [TEXT]) == 1
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith(f"megatron-vl data convert: {tmp_path}/out: {os.strerror(fault)}; {remedy}")


@pytest.mark.parametrize(
    ("media", "num_reads"),
    [
        ({"image": "a.png"}, 0),
        ({"video": "a.mp4"}, 2),  # within the decoder
        ({"videos": [["a.png"]]}, 0),  # where the archive is opened
        ({"videos": [["a.png"]]}, 8),  # where an image of it is read
    ],
)
def test_too_little_memory_stops_the_conversion(tmp_path, monkeypatch, capsys, media, num_reads):
    write(tmp_path / "m/a.png", encoded(30, 30))
    write(tmp_path / "m/a.mp4", video(8, 320, 320))
    records = [TEXT, asks("<image>" if "image" in media else "<video>", **media)]
    with monkeypatch.context() as patched:
        patched.setattr("io.BytesIO", reader_without_memory(num_reads))
        assert run(tmp_path, records, "--workers", "2") == 1
    message = capsys.readouterr().err
    assert "in.json: record 2: MemoryError" in message and "lower --workers" in message
    assert run(tmp_path, records, "--workers", "2") == 0 and not refused(tmp_path / "out")


def test_damaged_video_of_any_size_is_the_records_fault(tmp_path):
    size_of_table = video(8).index(b"stts") + 8
    damaged = video(8)[:size_of_table] + b"\x7f\xff\xff\xff" + video(8)[size_of_table + 4 :]
    write(tmp_path / "media/a.mp4", damaged)
    out, _ = converted(tmp_path, [TEXT, asks("<video>", video="a.mp4")])
    assert refused(out) == {2: "video does not decode"}
    assert "Cannot allocate memory" in (out / "quarantine.jsonl").read_text()


def bomb(height: int, width: int) -> bytes:
    """A PNG of a few bytes that claims to have this size."""
    data = bytearray(encoded(8, 8, "grey"))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def test_limit_of_pixels_applies_to_the_header(tmp_path):
    """The second image has no pixels at all."""
    write(tmp_path / "media/a.png", encoded(100, 100))
    write(tmp_path / "media/b.png", bomb(10_000, 20_000))
    write(tmp_path / "media/c.mp4", video(3, 128, 128))
    records = [asks("<image>", image=name) for name in ("a.png", "b.png")] + [asks("<video>", video="c.mp4")]
    too_large = {1: "image too large", 2: "image too large", 3: "video too large"}
    for limit, reasons in ((9_999, too_large), (400_000_000, {2: "image does not decode"})):
        out, _ = converted(tmp_path, records, max_pixels=limit)
        assert refused(out) == reasons
        shutil.rmtree(out)


def test_duplicate_ids_are_refused_or_kept(tmp_path):
    """JSON can spell single surrogates: ids that differ only there are different, and a refusal shows one."""
    ids = ["x\ud800", "x\ud801", "x?", "x\ud800", 1, "1", True]
    records = [{"id": value, **TEXT} for value in ids] + [{"id": "b"}, {"id": "b", **TEXT}]
    records += [{"id": value} for value in ("y" * 101, 7, False, ["a"])]
    out, report = converted(tmp_path, records)
    lines = [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]
    found = [(line["record"], line["reason"]) for line in lines[:2]]
    assert found == [(4, "duplicate id"), (8, "no conversation")]
    assert lines[0]["field"] == "id" and report.samples == 7
    assert lines[0]["detail"].startswith("str: x\\ud800 is also the id of record 1 of in.json")
    # Text and whole numbers are shown.
    assert [line["id"] for line in lines] == ["x\\ud800", "b", f"{'y' * 97}...", "7", "", ""]
    shutil.rmtree(out)
    out, report = converted(tmp_path, records, duplicate_ids="keep")
    assert report.samples == 8 and 4 not in refused(out)


def test_inputs_follow_each_other_and_keep_their_names(tmp_path):
    lines = write(tmp_path / "x/in.jsonl", (json.dumps(TEXT) + "\n{\n" + json.dumps(TEXT) + "\n").encode())
    array = write(tmp_path / "y/in.jsonl", json.dumps([TEXT, {}]).encode())
    report = convert_dataset([lines, array], ConversionOptions(None, tmp_path / "out"))
    assert report.samples == 3
    assert report.refused == {"x/in.jsonl": {"not JSON": 1}, "y/in.jsonl": {"no conversation": 1}}
    sources = [json.loads(v)["source"] for v in shards(tmp_path / "out").values()]
    assert sources[-1] == {"file": "y/in.jsonl", "record": 1}


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("used exists; remove it", {"out": "used"}),
        ("val-fraction 1.0", {"val_fraction": 1.0}),
        ("too few for a validation split", {"val_fraction": 0.5}),
        ("--format csv is unknown; valid: .*sharegpt", {"format": "csv"}),
        ("media-root", {"media_root": "nowhere"}),
        ("^--workers must be positive$", {"workers": 0}),
    ],
)
def test_used_folder_and_impossible_options_are_refused(tmp_path, monkeypatch, message, changes):
    monkeypatch.chdir(tmp_path)
    source = write(tmp_path / "in.json", json.dumps([TEXT]).encode())
    write(tmp_path / "used/file", b"mine")
    options = {"media_root": tmp_path, "out": "out"} | changes
    paths = {name: Path(options.pop(name)) for name in ("media_root", "out")}
    with pytest.raises(ConvertError, match=message):
        convert_dataset([source], ConversionOptions(**paths, **options))


def run(tmp_path, records, *options: str) -> int:
    text = records if isinstance(records, str) else json.dumps(records)
    source = write(tmp_path / "in.json", text.encode())
    (tmp_path / "m").mkdir(exist_ok=True)
    words = ["--input", source, "--media-root", tmp_path / "m", "--out", tmp_path / "out", "--workers", 1]
    return main(["data", "convert", *map(str, words), *options])


def test_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    source = write(tmp_path / "in.json", json.dumps([TEXT]).encode())
    assert main(["data", "convert", "--input", str(source), "--out", str(source / "out")]) == 1
    said = capsys.readouterr().err
    assert f"'{source}'" in said and "start again" in said and "Traceback" not in said


def test_command_names_what_has_no_effect(tmp_path, capsys):
    """Only samples are counted."""
    write(tmp_path / "m/a.png", encoded(30, 30))
    image = {"type": "image", "image": "a.png", "fps": None}
    answer = {"role": "assistant", "content": [image, {"type": "text", "text": "That one."}], "mood": 0.5}
    record = {"messages": [{"role": "user", "content": [image, {"type": "text", "text": "Which?"}]}, answer]}
    record["max_pixels"] = 784  # of the record, and not of a medium
    bad = {"messages": [{"role": "user", "content": [{**image, "image": "none.png"}]}, answer]}
    many = {f"k{i:03d}" + "x" * 100: 1 for i in range(120)}

    assert run(tmp_path, [TEXT, record, record, bad, {**TEXT, **many}], "--max-quarantined", "1") == 0
    out = capsys.readouterr().out
    assert "max_pixels in 2 records" in out and "nothing in them is trained on): mood in 2 turns\n" in out
    assert "and 91 more keys (see report.json)\n" in out
    assert "  2 images or videos in the assistant's turns: the model sees them but is not trained on" in out
    report = json.loads((tmp_path / "out/report.json").read_text())
    records = report["ignored"].pop("records")
    assert report["ignored"] == {"turns": {"mood": 2}} and report["answer_media"] == 2
    assert len(records) == 101 and records["other keys"] == 21 and max(map(len, records)) == 60


def test_exit_code_tells_whether_too_much_was_quarantined(tmp_path, capsys):
    """The default limit is one record in a hundred, and the data set is complete either way."""
    gone = asks("<image>", image="none.jpg")
    assert run(tmp_path, [TEXT] * 99 + [gone]) == 0
    out = capsys.readouterr().out
    assert f"99 of 100 records written to {tmp_path / 'out'}, " in out
    listed = f"listed in {tmp_path / 'out/quarantine.jsonl'}\n"
    assert f", 1 quarantined (medium missing: 1), {listed}" in out
    shutil.rmtree(tmp_path / "out")
    assert run(tmp_path, [TEXT] * 99 + [{}], "--max-quarantined", "0") == 3
    shown = capsys.readouterr()
    assert "1 of 100 records (1.00%) were quarantined, more than --max-quarantined 0 allows" in shown.err
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert (report["samples"], report["records"]) == (99, 100)
    assert report["refused"] == {"in.json": {"no conversation": 1}}
    for wrong in ("2", "-0.1", "nan", "few"):
        assert run(tmp_path, [TEXT], "--max-quarantined", wrong) == 2
        assert "--max-quarantined" in capsys.readouterr().err


def test_command_fails_when_nothing_could_be_written(tmp_path, capsys):
    """The first record's reason is in the message itself, so that a wrong media root is seen at once."""
    assert run(tmp_path, [asks("<image>\nWhat is this?", image="photos/none.jpg"), {}]) == 1
    error = capsys.readouterr().err
    assert "none of 2 records can be used (record 1, medium missing: " in error
    assert "photos/none.jpg does not exist in the media root" in error
    assert "quarantine.jsonl, correct them and convert again" in error
    # A data set without a sample gives way, one with samples does not.
    assert run(tmp_path, [{"query": "a", "response": "b"}]) == 0
    assert run(tmp_path, [{}]) == 1
    assert f"--out {tmp_path / 'out'} exists; remove it" in capsys.readouterr().err


def test_first_of_equal_ids_is_found_among_many(monkeypatch, capsys) -> None:
    """Compared with a dictionary of all ids; every fifth id occurred before, in the same file or another."""
    monkeypatch.setattr(tool, "MAX_LATEST", 1000)
    monkeypatch.setattr(tool, "WARNED_COUNT", 20_000)
    choose = random.Random(5)
    first: dict[str, tuple[str, int]] = {}
    ids = RecordIds()
    repeated = 0
    for record in range(60_000):
        file = f"{record // 20_000}.jsonl"
        identity = f"str: {choose.randrange(120_000)}"
        expected = first.setdefault(identity, (file, record))
        repeated += expected != (file, record)
        assert ids.first_occurrence(identity, file, record) == expected
    assert 10_000 < repeated < 20_000
    said = capsys.readouterr().err
    assert said == (
        "20,000 ids so far take 0.0 GB of memory; --duplicate-ids keep needs none, and --part divides them\n"
    )


def test_hashes_that_end_in_zero_bytes_are_found(monkeypatch) -> None:
    """numpy cuts them off."""
    monkeypatch.setattr(tool, "MAX_LATEST", 500)
    ids = RecordIds()
    for turn in range(2):
        for number in range(2000):  # about eight hashes end in a zero byte
            assert ids.first_occurrence(f"int: {number}", "a", number + turn) == ("a", number)


COUNT = 150


@pytest.fixture
def every_kind(tmp_path, monkeypatch) -> list[Path]:
    monkeypatch.setattr(tool, "RECORDS_PER_BLOCK", 16)
    write(tmp_path / "media/a.png", encoded(40, 60))

    def record(i: int) -> dict:
        if i % 29 == 5:
            return {"id": i}
        turns = [{**HUMAN, "value": "<image>" if i % 3 else "Hi"}, {**GPT, "value": f"{i}"}]
        return {"id": i, "conversations": turns, "image": "a.png" if i % 3 else None}

    records = [record(i) for i in range(COUNT)]
    lines = [json.dumps(r) for r in records[:50]]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines[:20], "{broken", "", *lines[20:]]))
    (tmp_path / "b.json").write_text(json.dumps(records[50:100]))
    table = [
        {**r, "image": {"bytes": encoded(30, 30), "path": None} if r.get("image") else None}
        for r in records[100:]
    ]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "c.parquet", row_group_size=9)
    return [tmp_path / name for name in ("a.jsonl", "b.json", "c.parquet")]


def options_of(tmp_path: Path, name: str, **more) -> ConversionOptions:
    more |= {"val_fraction": 0.1, "samples_per_shard": 11}
    return ConversionOptions(tmp_path / "media", tmp_path / name, **more)


@pytest.mark.parametrize("count", [2, 9])
def test_parts_hold_the_samples_of_one_conversion(tmp_path, every_kind, count):
    whole = convert_dataset(every_kind, options_of(tmp_path, "whole"))
    samples: dict[str, bytes] = {}
    records = 0
    for i in reversed(range(count)):
        part_options = options_of(tmp_path, "parts", part=(i, count))
        records += convert_dataset(every_kind, part_options).records
        found = shards(part_options.dataset_dir)
        assert not samples.keys() & found.keys()
        samples |= found
    assert records == whole.records == COUNT + 1
    assert samples == shards(tmp_path / "whole")
    names = [f"part-{i:05d}-of-{count:05d}" for i in range(count)]
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == names


def test_parts_of_another_conversion_are_refused(tmp_path, every_kind):
    convert_dataset(every_kind, options_of(tmp_path, "out", part=(0, 2)))
    with pytest.raises(ConvertError, match="converted from other input or with other arguments"):
        convert_dataset(every_kind[:2], options_of(tmp_path, "out", part=(1, 2)))
    with pytest.raises(ConvertError, match="holds part-00000-of-00002, which is none of 3 parts"):
        convert_dataset(every_kind, options_of(tmp_path, "out", part=(1, 3)))
    with pytest.raises(ConvertError, match="out exists; remove it"):
        convert_dataset(every_kind, options_of(tmp_path, "out"))
    with pytest.raises(ConvertError, match="hold no record in part 10/20"):
        convert_dataset(every_kind, options_of(tmp_path, "other", part=(10, 20)))
    assert list((tmp_path / "other").iterdir()) == []


def test_parts_are_converted_by_commands(tmp_path, every_kind, capsys):
    out = tmp_path / "out"
    command = ["data", "convert", "--input", *map(str, every_kind), "--media-root", str(tmp_path / "media")]
    command += ["--out", str(out), "--workers", "2", "--max-quarantined", "1"]
    for part in ("0/2", "1/2"):
        assert main([*command, "--part", part]) == 0
    capsys.readouterr()
    assert all((out / f"part-0000{part}-of-00002/train-000000.tar").exists() for part in (0, 1))
    for wrong in ("2/2", "1", "a/b", "1/x"):
        assert main([*command, "--part", wrong]) == 2
        assert "must be I/N" in capsys.readouterr().err


def test_records_may_come_through_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for number, text in enumerate((json.dumps([TEXT] * 3), json.dumps({"messages": 1}))):
        writer = threading.Thread(target=pipe.write_text, args=(text + "\n",))
        writer.start()
        report = convert_dataset([pipe], ConversionOptions(None, tmp_path / str(number)))
        writer.join()
        assert report.records == (3, 1)[number]
