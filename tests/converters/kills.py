"""Kills conversions with SIGKILL at chosen and random moments and starts them again.

    python -m tests.converters.kills HF DIR

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
from pathlib import Path
from typing import Any

from megatron_vl.weights import tensor_files
from toolkit.cli import main
from toolkit.weights import command as weights_command

from .helpers import assert_same_folder

SPLIT = "--parallel.tp 2 --parallel.pp 2 --parallel.vpp 2"
OPERATIONS = ("pwrite", "replace", "unlink", "ftruncate", "fsync")
"""Calls of :mod:`os` before which a process may be killed."""


def commands(hf: Path, folder: Path) -> dict[str, list[str]]:
    """The four commands, without --out."""
    full, shards = str(folder / "whole_convert"), str(folder / "whole_split")
    return {
        "convert": ["convert", "--hf", str(hf)],
        "split": ["split", "--checkpoint", full, *SPLIT.split()],
        "merge": ["merge", "--checkpoint", shards],
        "export": ["export", "--checkpoint", shards, "--hf", str(hf)],
    }


def attempt(
    words: list[str], out: Path, log: Path, kill_before: int = 0, kill_after: float | None = None
) -> int | None:
    """Runs a command in a child. Returns its exit code, or None if it was killed.

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
        weights_command._print_report = print_counts
        code = main([*words, "--out", str(out)])
        sys.stdout.flush()
        os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)


def print_counts(report: Any, _: Path | None) -> None:
    names = ("kept_files", "kept_tensors", "files", "tensors")
    print(json.dumps({name: getattr(report, name) for name in names}))


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


def check(command: str, hf: Path, folder: Path, draw: random.Random, at_chosen: int, at_random: int) -> None:
    words = commands(hf, folder)[command]
    whole = folder / f"whole_{command}"
    log = folder / "log"
    if attempt(words, whole, log):
        raise AssertionError(log.read_text())

    last = int(log.with_suffix(".count").read_text())
    begin = time.monotonic()
    attempt(words, folder / "again", log, last + 1)
    seconds = time.monotonic() - begin
    # The first and the last operations are renames, the manifest and the journal; in between are tensors.
    ends = [1, 2, 3, last // 2, *range(last - 4, last + 1)]
    moments: list[dict[str, Any]] = [
        {"kill_before": n} for n in [*ends, *draw.sample(range(4, last - 4), at_chosen)]
    ]
    moments += [{"kill_after": draw.uniform(0, seconds)} for _ in range(at_random)]

    for moment in moments:
        out = folder / "out"
        killed = [attempt(words, out, log, **moment)]
        if killed == [None] and draw.random() < 0.3:  # killed a second time, while it goes on
            killed.append(attempt(words, out, log, draw.randrange(1, last)))
        code = killed[-1]
        if code is None:
            unfinished = (out / "unfinished.jsonl").exists()
            code = attempt(words, out, log)
            if code:
                # Killed between its last operation and its end: the output is there, and is not taken for a
                # partial one.
                assert not unfinished and "is not empty" in log.read_text(), log.read_text()

        assert_same_folder(whole, out)
        text = log.read_text()
        report = json.loads(text[text.index("{") :]) if code == 0 else {}
        kept = {key: report.get(key) for key in ("kept_files", "kept_tensors", "files", "tensors")}
        print(
            json.dumps(
                {"command": command, **moment, "of": last, "killed": killed.count(None), "told": text, **kept}
            )
        )

        shutil.rmtree(out)

    shutil.rmtree(folder / "again", ignore_errors=True)


if __name__ == "__main__":
    origin, place = Path(sys.argv[1]), Path(sys.argv[2])
    chosen, at_random, seed = (int(word) for word in (*sys.argv[3:], *("3", "2", "0")[len(sys.argv) - 3 :]))
    for name in ("convert", "split", "merge", "export"):
        check(name, origin, place, random.Random(seed), chosen, at_random)
