"""What a conversion has written is on the disk before anything refers to it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from data_tools.convert import ConversionOptions, convert_dataset
from tests.data.datasets import mixed_records
from tests.disk import Disk


@pytest.fixture
def source(tmp_path: Path) -> Path:
    records = mixed_records(tmp_path / "media", 20)
    (tmp_path / "in.json").write_text(json.dumps([*records, {"bad": 1}]))
    return tmp_path


def in_a_child(target: Callable[[], None]) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    process.join(60)
    return process.exitcode


def run(source: Path, force: bool = False) -> Path:
    """Writes a data set of five shards into a folder within a new folder."""
    out = source / "new" / "out"
    report = convert_dataset(
        [source / "in.json"],
        ConversionOptions(source / "media", out, val_fraction=0.2, samples_per_shard=5, force=force),
    )
    assert (report.samples, report.shards) == (20, 5)
    return out


def test_nothing_is_referred_to_before_it_is_on_the_disk(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = []

    def before_rename(old: Path, new: Path) -> None:
        out = source / "new" / "out"

        # A file is given its name when its bytes are on the disk.
        if old.is_file():
            assert f"the content of {old.name}" not in disk.lost(old.parent), f"{old} becomes {new}"

        # The manifest of a shard says that the shard needs not be written again.
        if new.name.endswith(".tar.json"):
            tar = new.name.removesuffix(".json")
            lost = disk.lost(out, but=(".convert",))
            assert not [line for line in lost if tar in line or f"{tar}.idx" in line]
            manifests.append(tar)

        # The description makes a data set of the rest.
        if new.name == ".nv-meta":
            assert disk.lost(out, but=(".convert",)) == []
            assert disk.lost(old) == []
            assert {"report.json", "quarantine.jsonl"} < {path.name for path in out.iterdir()}

    disk = Disk(monkeypatch, before_rename)
    run(source)
    assert len(manifests) == 5
    # `source` has files that the test wrote.
    assert disk.lost(source, but=("in.json", "media")) == []


def test_the_index_of_a_shard_that_was_kept_is_on_the_disk(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run rewrites it in place, beside a shard that it finds intact."""

    def killed() -> None:
        replace = os.replace
        count = 0

        def counted(old: Path, new: Path) -> None:
            nonlocal count
            count += Path(new).suffix == ".tar"
            if count == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(old, new)

        os.replace = counted
        run(source)

    assert in_a_child(killed) == -signal.SIGKILL
    out = source / "new" / "out"
    kept = {path.name: path.stat().st_ino for path in out.glob("*.tar")}
    assert len(kept) == 3

    disk = Disk(monkeypatch)
    run(source)
    assert {name: (out / name).stat().st_ino for name in kept} == kept
    lost = disk.lost(out)
    # The shards that were kept are on the disk since the first run, which this process did not see.
    assert lost == [f"the content of {name}" for name in sorted(kept)]


@pytest.mark.parametrize("step", range(1, 12, 2))
def test_a_removal_that_is_interrupted_leaves_no_complete_data_set(source: Path, step: int) -> None:
    """With --force, the files of an earlier conversion are removed one by one."""
    out = run(source)

    def killed() -> None:
        unlink = os.unlink
        count = 0

        def counted(*arguments: object, **more: object) -> None:
            nonlocal count
            count += 1
            if count > step:
                os.kill(os.getpid(), signal.SIGKILL)
            unlink(*arguments, **more)

        os.unlink = counted
        run(source, force=True)

    assert in_a_child(killed) == -signal.SIGKILL
    assert not (out / ".nv-meta" / "convert.json").exists()
