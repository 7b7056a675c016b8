"""Starts the ranks of a training run on this node, with torchrun's options. Three things differ from it.

    python -m megatron_vl.launch --standalone --nproc-per-node 8 -m megatron_vl.train --config RUN.yaml

* When a rank stops with a message, only that message is shown.
  torchrun would print a traceback of its own after it.
* SIGTERM and SIGUSR1 ask the ranks to save and end, and the exit code is then 0. torchrun would kill the
  ranks after 30 seconds.
* A rank that stays stopped (SIGSTOP) is killed. Other ranks of its node do that too, but it may be alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from types import FrameType

import psutil

from megatron_vl.config import parse_config
from megatron_vl.parallel.open_files import raise_open_files
from megatron_vl.processes import children

RANK_PROGRAM = "megatron_vl.train"
STOPPED_S = 30.0
"""Seconds after ``failures.timeout_s`` in which the other ranks of the node may kill a stopped one."""


def main(argv: list[str] | None = None) -> int:
    """Runs the ranks and waits for them.

    Returns:
        0 when all ranks ended well, otherwise the exit code of the first that failed (128 + N if signal N
        ended it).
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    raise_open_files()  # this process serves the store of all ranks

    args = parse_args(sys.argv[1:] if argv is None else argv)
    # The signals on which torchrun may still kill the ranks.
    args.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _ask_ranks)

    if limit := _hang_limit(args.training_script, args.training_script_args):
        threading.Thread(target=kill_stopped, args=(limit + STOPPED_S,), daemon=True).start()

    # torchrun logs each failure and each signal that it sends,
    # but the ranks have already said what was wrong.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)

    try:
        run(args)
        return 0
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            why = "; the system does that when memory runs out" if name == "SIGKILL" else ""
            print(f"megatron_vl.launch: rank {rank} was ended by {name}{why}", file=sys.stderr, flush=True)
            return 128 - failure.exitcode
        return failure.exitcode
    except SignalException as error:
        return 128 + error.sigval.value


def _hang_limit(program: str, words: list[str]) -> float:
    """``failures.timeout_s`` of the run; 0 if this starts something else."""
    if program != RANK_PROGRAM:
        return 0.0
    with contextlib.suppress(Exception):  # the ranks say what is wrong with it
        return parse_config(list(words)).failures.timeout_s
    return 0.0


def kill_stopped(limit_s: float, every_s: float = 5.0) -> None:
    """Kills children that stay stopped for longer than ``limit_s``. Does not return."""
    since: dict[int, float] = {}
    looked = time.monotonic()
    while True:
        time.sleep(every_s)
        now = time.monotonic()
        if now - looked > 4 * every_s:
            since.clear()  # this process was stopped too
        looked = now

        stopped = {pid for pid in children(os.getpid()) if _is_stopped(pid)}
        since = {pid: since.get(pid, now) for pid in stopped}
        for pid in [pid for pid, began in since.items() if now - began > limit_s]:
            print(
                f"megatron_vl.launch: process {pid} was stopped for {limit_s:.0f} s and is killed",
                file=sys.stderr,
                flush=True,
            )
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def _ask_ranks(number: int, frame: FrameType | None) -> None:
    """Passes the request to stop on to the ranks. The main program keeps waiting for them."""
    print(
        f"megatron_vl.launch: {signal.Signals(number).name}: the ranks save and end",
        file=sys.stderr,
        flush=True,
    )
    for pid, command in children(os.getpid()).items():
        if RANK_PROGRAM in command:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(pid, signal.SIGUSR1)


if __name__ == "__main__":
    sys.exit(main())
