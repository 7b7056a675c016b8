"""Kills conversions with SIGKILL at chosen and random moments and starts them again.

    python -m tests.converters.kills HF DIR [CHOSEN RANDOM SEED [COMMAND ...]]

Each attempt runs in its own process, forked from one that has imported everything. The program prints a JSON
line for each kill.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from converters.convert import convert_weights, export_weights, reshard_weights
from megatron_vl.weights import tensor_files

from .helpers import assert_same_folder

OPERATIONS = ("pwrite", "replace", "rename", "unlink", "rmdir", "mkdir", "ftruncate", "fsync")
"""Calls of :mod:`os` before which a process may be killed."""


Work = Callable[..., Any]
"""A conversion, which takes ``out`` and ``force``."""


def conversions(hf: Path, folder: Path) -> dict[str, Work]:
    full, shards = folder / "whole_convert", folder / "whole_split"
    return {
        "convert": partial(convert_weights, hf),
        "split": partial(reshard_weights, full, layout={"tp": 2, "pp": 2, "vpp": 2}),
        "merge": partial(reshard_weights, shards),
        "export": partial(export_weights, shards, hf),
    }


def attempt(
    work: Work, out: Path, log: Path, force: bool, kill_before: int = 0, kill_after: float | None = None
) -> int | None:
    """Runs a conversion in a child. Returns its exit code, or None if it was killed.

    Args:
        kill_before: the child kills itself before its n-th writing operation; 0: never.
        kill_after: the parent kills the child after this many seconds.
    """
    sys.stdout.flush()
    child = os.fork()
    if not child:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        count_operations(kill_before, log.with_suffix(".count"))
        code = 0
        try:
            work(out, workers=2, force=force)
        except Exception as error:
            code = 1
            print(error, flush=True)
        os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)


def count_operations(kill_before: int, report: Path) -> None:
    """Makes this process die before its n-th operation, or (0) write the number of operations to a file."""
    tensor_files.CHUNK_BYTES = 1 << 16
    calls = [0]

    def counted(operation: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == kill_before:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)  # the other threads go on until the signal arrives
            if not kill_before:
                report.write_text(str(calls[0]))
            return operation(*args, **options)

        return call

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))


def check(
    command: str,
    hf: Path,
    folder: Path,
    draw: random.Random,
    at_chosen: int,
    at_random: int,
    earlier: Path | None = None,
) -> None:
    """Kills one conversion at several moments.

    Args:
        earlier: weights that are in the output folder before and are replaced (``--force``), with a file of
            the user beside them.
    """
    work, force = conversions(hf, folder)[command], earlier is not None
    whole = folder / f"whole_{command}"
    log, out = folder / "log", folder / "out"

    def put_earlier() -> None:
        if earlier:
            shutil.copytree(earlier, out)
            (out / "notes.txt").write_text("mine")

    def check_folder(expected: Path) -> None:
        if earlier:
            assert (out / "notes.txt").read_text() == "mine"
            (out / "notes.txt").rename(folder / "notes.txt")
        assert_same_folder(expected, out)
        if earlier:
            (folder / "notes.txt").rename(out / "notes.txt")

    if not whole.exists() and attempt(work, whole, log, False):
        raise AssertionError(log.read_text())
    put_earlier()
    begin = time.monotonic()
    if attempt(work, out, log, force):
        raise AssertionError(log.read_text())
    seconds = time.monotonic() - begin
    last = int(log.with_suffix(".count").read_text())
    check_folder(whole)
    shutil.rmtree(out)

    # The first and the last operations make and rename folders; in between are tensors.
    ends = [1, 2, 3, 4, last // 2, *range(last - (25 if earlier else 10), last + 1)]
    moments: list[dict[str, Any]] = [
        {"kill_before": n} for n in [*ends, *draw.sample(range(5, last - 25), at_chosen)]
    ]
    moments += [{"kill_after": draw.uniform(0, seconds)} for _ in range(at_random)]

    for moment in moments:
        put_earlier()
        killed = [attempt(work, out, log, force, **moment)]
        state = "absent"
        if out.exists():  # only whole folders have the name; the user's file comes last
            state = "complete"
            if earlier and len(list(out.glob("tp*"))) == len(list(earlier.glob("tp*"))):
                state = "earlier"
                check_folder(earlier)
            elif not earlier:
                check_folder(whole)
        if killed == [None] and draw.random() < 0.3:  # killed a second time
            killed.append(attempt(work, out, log, force, draw.randrange(1, last)))
        if killed[-1] is None:
            code = attempt(work, out, log, force)
            # Killed between its last operation and its end: the output is there and complete.
            assert not code or "is not empty" in log.read_text() and not earlier, log.read_text()

        check_folder(whole)
        assert not out.with_name("out.partial").exists()
        report = {"command": command, "force": bool(earlier), **moment, "of": last}
        print(json.dumps({**report, "killed": killed.count(None), "after_kill": state}))
        shutil.rmtree(out)


if __name__ == "__main__":
    origin, place = Path(sys.argv[1]), Path(sys.argv[2])
    chosen, at_random, seed = (int(word) for word in (*sys.argv[3:6], *("3", "2", "0")[len(sys.argv) - 3 :]))
    for name, work in conversions(origin, place).items():
        if name in sys.argv[6:] or not sys.argv[6:]:
            check(name, origin, place, random.Random(seed), chosen, at_random)
        else:
            attempt(work, place / f"whole_{name}", place / "log", False)
    check("merge", origin, place, random.Random(seed), chosen, at_random, place / "whole_split")
