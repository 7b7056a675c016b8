"""A killed conversion starts again and gives the same bytes; only complete folders have the name."""

import itertools
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from converters.convert import convert_weights, export_weights, reshard_weights
from megatron_vl.weights import tensor_files
from megatron_vl.weights.tensor_files import TensorWriter
from tests.disk import Disk

from .helpers import assert_same_folder, released_folder

SIZE = "Qwen2.5-VL-3B-Instruct"
LAYOUT = {"tp": 2, "pp": 2}
OPERATIONS = ("pwrite", "replace", "rename", "unlink", "rmdir", "mkdir", "ftruncate")
"""Calls of :mod:`os` before which a process may be killed. An fsync changes nothing that others see."""


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return released_folder(tmp_path_factory.mktemp("restart") / "hf", SIZE)


@pytest.fixture(scope="module")
def works(origin: Path) -> dict[str, Callable[..., Any]]:
    works: dict[str, Callable[..., Any]] = {
        "convert": partial(convert_weights, origin),
        "split": partial(reshard_weights, origin.with_name("convert"), layout=LAYOUT | {"vpp": 2}),
        "merge": partial(reshard_weights, origin.with_name("split")),
        "export": partial(export_weights, origin.with_name("split"), origin),
    }
    for name, work in works.items():
        work(origin.with_name(name))
    return works


def attempt(work: Callable[..., Any], log: Path, kill_before: int = 0, kill_after: float = 0) -> int | None:
    """Runs a conversion in a child, which kills itself before its n-th writing operation (0: it counts them),
    or is killed after some seconds. Returns its exit code, or None if it was killed."""
    child = os.fork()
    if not child:
        operations = itertools.count(1)

        def counting_calls(operation: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                if (number := next(operations)) == kill_before:
                    os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(60)  # the other threads go on until the signal arrives
                elif not kill_before:
                    log.with_suffix(".count").write_text(str(number))
                return operation(*args, **options)

            return call

        tensor_files.CHUNK_BYTES = 1 << 16
        for name in OPERATIONS:
            setattr(os, name, counting_calls(getattr(os, name)))
        try:
            work(workers=2)
        except BaseException as error:
            log.write_text(str(error))
            os._exit(1)
        os._exit(0)
    if kill_after:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)


KILLED = [("convert", False), ("export", False), ("merge", True)]
KILLED += [pytest.param(command, False, marks=pytest.mark.full) for command in ("split", "merge")]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "replaces"), KILLED)
def test_killed_conversion_gives_the_same_bytes(
    tmp_path, origin, works, command: str, replaces: bool
) -> None:
    out, log, whole, earlier = (tmp_path / name for name in ("out", "log", "whole", "earlier"))
    shutil.copytree(origin.with_name(command), whole)
    shutil.copytree(origin.with_name("split"), earlier)
    if replaces:
        (whole / "notes.txt").write_text("mine")
        (earlier / "notes.txt").write_text("mine")
    work, draw = partial(works[command], out, force=replaces), random.Random(0)

    def begin(**kill: Any) -> int | None:
        shutil.rmtree(out, ignore_errors=True)
        if replaces:
            shutil.copytree(earlier, out)
        return attempt(work, log, **kill)

    start = time.monotonic()
    assert begin() == 0, log.read_text()
    seconds = time.monotonic() - start
    last = int(log.with_suffix(".count").read_text())
    assert_same_folder(whole, out)

    # The first and the last operations make and rename folders; in between are tensors.
    ends = [1, 2, 3, 4, last // 2, *range(last - (14 if replaces else 6), last + 1)]
    moments = [{"kill_before": n} for n in [*ends, *draw.sample(range(5, last - 14), 2)]]
    states = set()
    for moment in [*moments, {"kill_after": draw.uniform(0, seconds)}]:
        code = begin(**moment)
        assert code is None or "kill_after" in moment
        # Only whole folders have the name; the user's file comes last.
        state = "earlier" if replaces and any(out.glob("tp*")) else "complete" if out.exists() else "absent"
        states.add(state)
        if state == "earlier" or state == "complete" and not replaces:
            assert_same_folder(earlier if state == "earlier" else whole, out)
        if code is None and draw.random() < 0.3:
            code = attempt(work, log, draw.randrange(1, last))
        if code is None:
            code = attempt(work, log)
            # Killed between its last operation and its end: the output is there and complete.
            assert not code or "is not empty" in log.read_text() and not replaces, log.read_text()
        assert_same_folder(whole, out)
        assert not out.with_name("out.partial").exists()
    # An earlier checkpoint is replaced by two renames, and missing for the moment between them.
    assert states == {"absent", "complete"} | ({"earlier"} if replaces else set())


def test_folders_of_others_are_not_removed(tmp_path: Path, origin: Path, monkeypatch) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="out.partial is needed .* holds something else; rename it"):
        convert_weights(origin, tmp_path / "out")
    assert (tmp_path / "out.partial" / "notes.txt").read_text() == "mine"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in (Path("."), Path("/")):
        with pytest.raises(FileExistsError, match="is the current folder or a mount point"):
            convert_weights(origin, out)


def test_link_to_another_disk_stays_a_link(tmp_path: Path, origin: Path) -> None:
    """``OUT.partial`` is beside the folder that the link leads to, so that it can be renamed."""
    (tmp_path / "disk" / "weights").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "weights")
    convert_weights(origin, tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["weights"]
    convert_weights(origin, tmp_path / "whole")
    assert_same_folder(tmp_path / "whole", tmp_path / "disk" / "weights")


@pytest.mark.parametrize("fault", ["new and disk full", "disk full", "first rename", "second rename"])
def test_failed_conversion_leaves_what_was_there(tmp_path, origin, monkeypatch, fault: str) -> None:
    out, before, calls = tmp_path / "out", tmp_path / "before", itertools.count(1)
    if "new" not in fault:
        convert_weights(origin, out, LAYOUT)
        (out / "mine").mkdir()
        shutil.copytree(out, before)
    there = sorted(tmp_path.rglob("*"))

    def write(self, data, offset, write=TensorWriter._write_at):
        if "disk full" in fault and next(calls) > 40:
            raise OSError(28, "No space left on device")
        write(self, data, offset)

    def rename(old, new, replace=os.replace):
        if (
            "rename" in fault
            and ".partial" in f"{old} {new}"
            and not re.search("safetensors|manifest", str(old))
        ):
            if next(calls) == 1 + ("second" in fault):
                raise OSError(5, "Input/output error")
        replace(old, new)

    monkeypatch.setattr(TensorWriter, "_write_at", write)
    monkeypatch.setattr(os, "replace", rename)
    with pytest.raises(OSError, match="No space left|Input/output"):
        convert_weights(origin, out, force=True)
    assert sorted(tmp_path.rglob("*")) == there
    if before.exists():
        assert_same_folder(before, out)


def test_export_is_on_the_disk_when_it_returns(tiny_checkpoint, tmp_path: Path, monkeypatch) -> None:
    hf = tiny_checkpoint("qwen2_5_vl")
    convert_weights(hf, tmp_path / "full")
    disk = Disk(monkeypatch)
    (tmp_path / "there").mkdir()
    export_weights(tmp_path / "full", hf, tmp_path / "there" / "out")
    assert disk.lost(tmp_path / "there") == [] and len(list((tmp_path / "there" / "out").iterdir())) > 4
