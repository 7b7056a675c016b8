"""A conversion that is killed, or ends with an error, leaves no data set; the next one is undisturbed."""

import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from data_tools.convert import ConversionOptions, convert_dataset
from data_tools.records import ConvertError
from data_tools.worker_pool import WorkerPool
from megatron_vl.system.errors import UserError
from megatron_vl.system.partial_folder import open_partial_folder
from tests.data.datasets import mixed_records
from tests.disk import Disk

FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Input and media: 60 records in two files, some of them bad, with equal ids."""
    folder = tmp_path_factory.mktemp("source")
    records: list[Any] = [record | {"extra": 1} for record in mixed_records(folder / "media", 50)]
    for i in range(0, 50, 5):
        turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "y"}]
        records.insert(i, {"image": "none.png", "conversations": turns} if i % 2 else {"bad": i})
    for i in (3, 58):
        records[i] |= {"id": "same"}
    (folder / "a.json").write_text(json.dumps(records[:35]))
    (folder / "b.jsonl").write_text("\n".join(map(json.dumps, records[35:])) + "\n{broken\n")
    return folder


def convert(source: Path, out: Path, **changes: Any) -> Any:
    settings = {"val_fraction": 0.2, "samples_per_shard": 7, **changes}
    options = ConversionOptions(source / "media", out, **settings)
    return convert_dataset([source / "a.json", source / "b.jsonl"], options)


def digests(out: Path) -> dict[str, str]:
    files = sorted(path for path in out.rglob("*") if path.is_file())
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def undisturbed(source, tmp_path_factory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    report = convert(source, out)
    assert report.samples == 49 and report.records == 61 and report.shards > 6
    assert report.refused["b.jsonl"]["duplicate id"] == 1
    return digests(out)


LATER_KILLS = [pytest.param(0.1 * number, 1 + number % 2, marks=pytest.mark.full) for number in range(18)]


@pytest.mark.parametrize("seconds,workers", [(0.05, 1), (0.4, 2), *LATER_KILLS])
def test_killed_conversion_starts_again_and_gives_the_same_bytes(
    source, tmp_path, undisturbed, seconds, workers
):
    out = tmp_path / "out"
    process = FORK.Process(target=convert, args=(source, out), kwargs={"workers": workers})
    process.start()
    process.join(seconds)
    process.kill()
    process.join(10)
    if process.exitcode == -signal.SIGKILL:  # it was found at work
        assert not out.exists()
        convert(source, out, workers=3)
    assert digests(out) == undisturbed
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_killed_conversion_leaves_are_removed(source, tmp_path, undisturbed):
    (tmp_path / "out.partial/new/spool").mkdir(parents=True)
    (tmp_path / "out.partial/new/train-000099.tar").write_bytes(b"old")
    (tmp_path / "out.partial/owner").write_text("a-host 4194304")
    (tmp_path / "out").mkdir()  # an empty folder is taken
    convert(source, tmp_path / "out", workers=3)
    assert digests(tmp_path / "out") == undisturbed
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_conversion_into_a_folder_that_another_has_is_refused(source, tmp_path, undisturbed):
    out = tmp_path / "out"

    def hold(ready: Any) -> None:
        with open_partial_folder(out):
            ready.set()
            time.sleep(30)

    ready = FORK.Event()
    other = FORK.Process(target=hold, args=(ready,))
    other.start()
    assert ready.wait(10)
    with pytest.raises(ConvertError, match="out.partial is being written by process .* give another --out"):
        convert(source, out)
    other.kill()
    other.join(10)
    convert(source, out)
    with pytest.raises(ConvertError, match="out exists; remove it, or give another --out"):
        convert(source, out)
    assert digests(out) == undisturbed


def test_killed_worker_is_named():
    def kill_one() -> None:
        while not (workers := pool.processes.keys() - others):
            time.sleep(0.01)
        pids.append(min(workers))
        os.kill(pids[0], signal.SIGKILL)

    pids: list[int] = []
    others = {child.pid for child in multiprocessing.active_children()}  # of other tests
    killer = threading.Thread(target=kill_one)
    with pytest.raises(UserError) as caught, WorkerPool(2) as pool:
        killer.start()
        list(pool.results_in_order(time.sleep, iter([(0.5,)] * 20)))
    killer.join()
    assert f"worker process {pids[0]} (SIGKILL) died" in str(caught.value)


def test_ctrl_c_leaves_nothing(source, tmp_path, monkeypatch):
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("data_tools.shards.IndexWriter.finish", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", workers=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", [30_000, 100_000])
def test_full_disk_is_explained_and_leaves_nothing(source, tmp_path, undisturbed, limit):
    """A limit on file size stands in for the disk; it causes the same error in the same place."""
    import resource

    def target() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            convert(source, tmp_path / "out")
        except ConvertError as error:
            is_explained = "File too large" in str(error) or "disk I/O error" in str(error)
            os._exit(3 if is_explained and "start again" in str(error) else 4)
        os._exit(0)

    process = FORK.Process(target=target)
    process.start()
    process.join(60)
    assert process.exitcode == 3 and list(tmp_path.iterdir()) == []
    convert(source, tmp_path / "out")
    assert digests(tmp_path / "out") == undisturbed


def test_data_set_is_on_the_disk_before_it_gets_its_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed = []

    def before_rename(old: Path, new: Path) -> None:
        if new.name == "out":
            renamed.append(disk.lost(old))

    disk = Disk(monkeypatch, before_rename)
    convert(source, tmp_path / "new/out")
    assert renamed == [[]] and disk.lost(tmp_path / "new") == []


def test_workers_end_with_their_parent():
    """A worker without a parent would wait for its next task indefinitely."""

    def target() -> None:
        with WorkerPool(2) as pool:
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
    while alive := [child for child in children if child.is_running() and child.status() != "zombie"]:
        assert time.monotonic() < until, alive
        time.sleep(0.02)
    assert len(children) == 2
