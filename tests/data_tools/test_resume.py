"""A killed conversion continues and ends with the bytes of an undisturbed one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from data_tools.convert import ConversionOptions, ConvertError, _WorkerPool, convert_dataset
from data_tools.resume import make_plan
from data_tools.shards import ShardError
from tests.data.datasets import mixed_records
from tests.data.media import encoded, write

FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Input and media: 60 records in two files, some of them bad."""
    folder = tmp_path_factory.mktemp("source")
    records: list[Any] = [record | {"extra": 1} for record in mixed_records(folder / "media", 50)]
    for i in range(0, 50, 5):
        turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "y"}]
        records.insert(i, {"image": "none.png", "conversations": turns} if i % 2 else {"bad": i})
    (folder / "a.json").write_text(json.dumps(records[:35]))
    (folder / "b.jsonl").write_text("\n".join(map(json.dumps, records[35:])) + "\n{broken\n")
    return folder


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """Keeps the journal close to the shards."""
    monkeypatch.setattr("data_tools.convert.RECORDS_PER_BATCH", 2)


def options(source: Path, out: Path, **changes: Any) -> ConversionOptions:
    return ConversionOptions(
        source / "media", out, **{"val_fraction": 0.2, "samples_per_shard": 7, **changes}
    )


def inputs(source: Path) -> list[Path]:
    return [source / "a.json", source / "b.jsonl"]


def digests(out: Path) -> dict[str, str]:
    return {
        str(p.relative_to(out)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(out.rglob("*"))
        if p.is_file()
    }


@pytest.fixture(scope="module")
def undisturbed(source, tmp_path_factory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    report = convert_dataset(inputs(source), options(source, out))
    assert report.samples == 50 and report.records == 61 and report.shards > 6
    assert report.ignored == {"records": {"extra": 50}}
    return digests(out)


def killed_at(move: int, source: Path, out: Path, workers: int) -> bool:
    """Converts in a separate process, killed with SIGKILL just before its ``move``-th rename (each rename
    ends one atomic piece of work). Returns whether that moment came."""

    def target() -> None:
        count = 0
        rename = os.replace

        def counted(*arguments: Any, **more: Any) -> None:
            nonlocal count
            count += 1
            if count == move:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(*arguments, **more)

        os.replace = counted
        convert_dataset(inputs(source), options(source, out, workers=workers))

    process = FORK.Process(target=target)
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


@pytest.mark.slow
def test_killed_before_each_rename(source, tmp_path, undisturbed):
    """A conversion renames about 30 times; every other of these moments is tried."""
    for move in range(1, 100, 2):
        out = tmp_path / str(move)
        if not killed_at(move, source, out, workers=1):
            break
        assert not (out / ".nv-meta").exists()
        convert_dataset(inputs(source), options(source, out))
        assert digests(out) == undisturbed, f"killed before rename {move}"
    assert move > 20


@pytest.mark.slow
def test_killed_again_and_again(source, tmp_path, undisturbed):
    """Each run in the same folder gets one rename further than the one before."""
    out = tmp_path / "out"
    move = 1
    while killed_at(move, source, out, workers=1):
        move += 1
    assert move > 6
    assert digests(out) == undisturbed


@pytest.mark.parametrize("seconds", [0.02, 0.1, 0.25])
def test_killed_at_some_moment_with_workers(source, tmp_path, undisturbed, seconds):
    out = tmp_path / "out"
    process = FORK.Process(target=convert_dataset, args=(inputs(source), options(source, out, workers=2)))
    process.start()
    time.sleep(seconds)
    process.kill()
    process.join(10)
    convert_dataset(inputs(source), options(source, out, workers=3))
    assert digests(out) == undisturbed


def test_workers_end_with_their_parent():
    """A worker without a parent would wait for its next task indefinitely."""

    def target() -> None:
        with _WorkerPool(2) as pool:
            list(pool.results_in_order(time.sleep, iter([(60,)] * 4)))

    process = FORK.Process(target=target)
    process.start()
    children: list[psutil.Process] = []
    until = time.monotonic() + 20
    while len(children) < 2 and time.monotonic() < until:
        children = psutil.Process(process.pid).children()
    time.sleep(0.3)  # they have asked to go with their parent
    process.kill()
    process.join(10)
    while any(map(alive, children)) and time.monotonic() < until:
        time.sleep(0.02)
    assert len(children) == 2 and not any(map(alive, children))


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def half(source: Path, out: Path) -> None:
    """Leaves what remains of a conversion that was killed halfway."""
    assert killed_at(15, source, out, workers=1)


def test_finished_shards_are_kept_and_damaged_ones_written_again(source, tmp_path, undisturbed):
    out = tmp_path / "out"
    half(source, out)
    tars = sorted(out.glob("*.tar"))
    assert len(tars) >= 3
    data = bytearray(tars[0].read_bytes())
    data[700] ^= 1
    tars[0].write_bytes(data)
    tars[1].unlink()
    with (out / ".convert/journal.jsonl").open("ab") as journal:
        journal.write(b'[{"file": "a.js')
    kept = tars[2].stat().st_ino
    convert_dataset(inputs(source), options(source, out))
    assert tars[2].stat().st_ino == kept
    assert digests(out) == undisturbed


def test_media_that_were_verified_are_not_decoded_again(source, tmp_path, undisturbed, monkeypatch):
    out = tmp_path / "out"
    half(source, out)
    known = sum(len(json.loads(line)) for line in (out / ".convert/journal.jsonl").read_text().splitlines())
    seen: list[str] = []
    import data_tools.convert as module

    inspect = module.inspect_medium
    monkeypatch.setattr(
        module, "inspect_medium", lambda kind, ref, *rest: seen.append(ref) or inspect(kind, ref, *rest)
    )
    module._inspect_file.cache_clear()
    convert_dataset(inputs(source), options(source, out))
    assert 30 < known < 61 and seen and "images/0.img" in seen and "images/10.img" not in seen
    assert digests(out) == undisturbed


def test_equal_ids_before_and_after_a_kill(tmp_path, monkeypatch):
    """The first of them is named wherever the run before ended, even if the table has outgrown its memory."""
    monkeypatch.setattr("data_tools.record_ids.CACHE_SIZE_KB", 16)
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    numbers = [*range(1000), 3, 998, *range(1000, 1100), 1050, 4]
    lines = [json.dumps({"id": f"n{n}", "conversations": turns}) for n in numbers]
    (tmp_path / "media").mkdir()
    (tmp_path / "a.json").write_text("[" + ",".join(lines[:1001]) + "]")
    (tmp_path / "b.jsonl").write_text("\n".join(lines[1001:]))

    whole, out = tmp_path / "whole", tmp_path / "out"
    report = convert_dataset(inputs(tmp_path), options(tmp_path, whole, samples_per_shard=100))
    assert (report.samples, report.quarantined_records) == (1100, 4)
    refused = [json.loads(line) for line in (whole / "quarantine.jsonl").read_text().splitlines()]
    assert [(line["file"], line["record"]) for line in refused] == [
        ("a.json", 1001),
        ("b.jsonl", 1),
        ("b.jsonl", 102),
        ("b.jsonl", 103),
    ]
    firsts = ["record 4 of a.json", "record 999 of a.json", "record 52 of b.jsonl", "record 5 of a.json"]
    assert all(first in line["detail"] for first, line in zip(firsts, refused, strict=True))

    def killed() -> None:
        replace = os.replace
        count = 0

        def counted(old: Path, new: Path) -> None:
            nonlocal count
            count += Path(new).suffix == ".tar"
            if count == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(old, new)

        os.replace = counted
        convert_dataset(inputs(tmp_path), options(tmp_path, out, samples_per_shard=100))

    process = FORK.Process(target=killed)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert (out / ".convert/ids.sqlite").stat().st_size > 0

    convert_dataset(inputs(tmp_path), options(tmp_path, out, samples_per_shard=100))
    assert digests(out) == digests(whole)


def test_a_complete_data_set_is_left_as_it_is(source, tmp_path, undisturbed):
    out = tmp_path / "out"
    first = convert_dataset(inputs(source), options(source, out))
    times = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    again = convert_dataset(inputs(source), options(source, out, workers=2))
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()} == times
    assert (again.samples, again.refused) == (first.samples, first.refused)
    assert again.was_complete and not first.was_complete
    assert digests(out) == undisturbed


def test_other_arguments_or_input_are_refused_and_force_starts_anew(tmp_path):
    write(tmp_path / "media/a.png", encoded(30, 30))
    turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "y"}]
    records = [{"image": "a.png", "conversations": turns}] * 40
    (tmp_path / "a.json").write_text(json.dumps(records))
    (tmp_path / "b.jsonl").write_text("{}\n")
    for complete in (False, True):
        out = tmp_path / f"out{complete}"
        if complete:
            convert_dataset(inputs(tmp_path), options(tmp_path, out))
        else:
            half(tmp_path, out)

        state = digests(out)
        for change in (
            {"val_fraction": 0.3},
            {"samples_per_shard": 8},
            {"max_pixels": 1000},
            {"duplicate_ids": "keep"},
        ):
            with pytest.raises(ConvertError, match=f"{next(iter(change))} was .*--force"):
                convert_dataset(inputs(tmp_path), options(tmp_path, out, **change))

        with pytest.raises(ConvertError, match="inputs were a.json, b.jsonl, now a.json"):
            convert_dataset(inputs(tmp_path)[:1], options(tmp_path, out))
        (tmp_path / "b.jsonl").write_text("[]\n")
        with pytest.raises(ConvertError, match="input b.jsonl has changed"):
            convert_dataset(inputs(tmp_path), options(tmp_path, out))
        (tmp_path / "b.jsonl").write_text("{}\n")

        assert {name: d for name, d in digests(out).items() if "lock" not in name} == {
            name: d for name, d in state.items() if "lock" not in name
        }
        report = convert_dataset(inputs(tmp_path), options(tmp_path, out, val_fraction=0.5, force=True))
        assert report.val == 20 and not (out / ".convert").exists()


def test_force_removes_nothing_that_is_not_ours(source, tmp_path):
    write(tmp_path / "out/train-000000.tar", b"ours, perhaps")
    write(tmp_path / "out/notes.txt", b"mine")
    with pytest.raises(ConvertError, match="not an empty folder .it holds notes.txt"):
        convert_dataset(inputs(source), options(source, tmp_path / "out", force=True))
    assert (tmp_path / "out/notes.txt").read_bytes() == b"mine"
    assert (tmp_path / "out/train-000000.tar").exists()


def test_two_conversions_into_one_folder(source, tmp_path):
    import fcntl

    (tmp_path / "out/.convert").mkdir(parents=True)

    def hold(ready: Any) -> None:
        with (tmp_path / "out/.convert/lock").open("ab") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            ready.set()
            time.sleep(30)

    ready = FORK.Event()
    other = FORK.Process(target=hold, args=(ready,))
    other.start()
    assert ready.wait(10)
    with pytest.raises(ConvertError, match="another conversion is writing there"):
        convert_dataset(inputs(source), options(source, tmp_path / "out"))
    other.kill()
    other.join(10)
    assert convert_dataset(inputs(source), options(source, tmp_path / "out")).samples == 50


def test_a_medium_that_changes_before_its_shard_is_written(tmp_path):
    write(tmp_path / "media/a.png", encoded(30, 30))
    turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "y"}]
    (tmp_path / "a.json").write_text(json.dumps([{"image": "a.png", "conversations": turns}] * 40))
    (tmp_path / "b.jsonl").write_text("{}\n")
    half(tmp_path, tmp_path / "out")
    write(tmp_path / "media/a.png", encoded(30, 30, seed=1))
    with pytest.raises(
        ShardError, match=r"a.json: record \d+: a.png changed after it was verified; start again with --force"
    ):
        convert_dataset(inputs(tmp_path), options(tmp_path, tmp_path / "out"))


@pytest.mark.parametrize("limit", [30_000, 100_000])
def test_a_full_disk_is_explained_and_the_run_goes_on(source, tmp_path, undisturbed, limit):
    """A limit on file size stands in for the disk; it causes the same error in the same place."""
    import resource

    out = tmp_path / "out"

    def target(result: Any) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            convert_dataset(inputs(source), options(source, out))
        except ConvertError as error:
            result.send(str(error))

    receive, send = FORK.Pipe(duplex=False)
    process = FORK.Process(target=target, args=(send,))
    process.start()
    assert receive.poll(30)
    message = receive.recv()
    process.join(10)
    assert "File too large" in message or "I/O error" in message
    assert "start again with the same arguments" in message
    assert not (out / ".nv-meta").exists()
    convert_dataset(inputs(source), options(source, out))
    assert digests(out) == undisturbed


@pytest.mark.parametrize("finished", [True, False])
def test_a_data_set_of_another_version_is_no_success(tmp_path, finished):
    """Its rules for records may be others; the same arguments do not report it as made."""
    out = tmp_path / "out"
    record = {"conversations": [{"from": "human", "value": "hi"}]}
    record["conversations"].append({"from": "gpt", "value": "ok"})
    (tmp_path / "in.jsonl").write_text(json.dumps(record) + "\n")
    options = ConversionOptions(tmp_path, out)
    convert_dataset([tmp_path / "in.jsonl"], options)

    file = out / ".nv-meta" / "convert.json"
    content = json.loads(file.read_text())
    content["plan"]["format"] = 2
    file.write_text(json.dumps(content))
    if not finished:
        shutil.rmtree(out)
        (out / ".convert").mkdir(parents=True)
        plan = make_plan_of(options, tmp_path / "in.jsonl") | {"format": 2}
        (out / ".convert" / "plan.json").write_text(json.dumps(plan))

    with pytest.raises(ConvertError) as error:
        convert_dataset([tmp_path / "in.jsonl"], options)
    said = str(error.value)
    assert "has version 2 of its format, and this program reads 1" in said
    assert "--force" in said and "another --out" in said and "Give the same again" not in said

    convert_dataset([tmp_path / "in.jsonl"], dataclasses.replace(options, force=True))
    assert json.loads(file.read_text())["plan"]["format"] == 1
    convert_dataset([tmp_path / "in.jsonl"], options)


def make_plan_of(options: ConversionOptions, path: Path) -> dict:
    names = ("val_fraction", "samples_per_shard", "bytes_per_shard", "max_pixels", "duplicate_ids", "format")
    return make_plan([path], options.media_root, **{name: getattr(options, name) for name in names})
