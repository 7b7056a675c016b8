"""Starts the ranks of a training run on this node, with torchrun's options. Four things differ from it.

    python -m megatron_vl.launch --standalone --nproc-per-node 8 -m megatron_vl.train --config RUN.yaml

* When a rank stops with a message, only that message is shown.
  torchrun would print a traceback of its own after it.
* SIGTERM, SIGUSR1, SIGHUP (a closed terminal) and Ctrl-C ask the ranks to save and end, and the exit code is
  then 0. Before the first step they end without saving, with 128 + the signal's number. A second Ctrl-C ends
  them at once. torchrun would kill the ranks after 30 seconds.
* A rank that stays stopped (SIGSTOP) is killed. Other ranks of its node do that too, but it may be alone.
* On CPU the ranks of a single node are forks of this process, which has imported what they need. Importing
  takes seconds of processor time, and there are more ranks than cores. With GPUs each rank is a program of
  its own. ``--fork`` before torchrun's options forks any module, for commands that know that they run on CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import logging
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import uuid
from types import FrameType

import psutil

from megatron_vl import host_memory
from megatron_vl.config import TrainConfig, parse_config
from megatron_vl.parallel.open_files import raise_open_files
from megatron_vl.processes import children
from megatron_vl.signals import STOP_SIGNALS, handle, note_request, outlive_readers, take_stop_signals

RANK_PROGRAM = "megatron_vl.train"
STOPPED_S = 30.0
"""Seconds after ``failures.timeout_s`` in which the other ranks of the node may kill a stopped one."""


def main(argv: list[str] | None = None) -> int:
    """Runs the ranks and waits for them.

    Returns:
        0 when all ranks ended well, otherwise the exit code of the first that failed (128 + N if signal N
        ended it, or came before the first step).
    """
    global _launcher
    _launcher = os.getpid()
    words = list(sys.argv[1:] if argv is None else argv)
    fork = words[:1] == ["--fork"]
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    outlive_readers()
    raise_open_files()  # this process serves the store of all ranks

    args = parse_args(words[1:] if fork else words)
    config = _config(args.training_script, args.training_script_args)
    fork = fork or (args.standalone and config is not None and config.platform == "cpu")
    if fork:
        import_stack(args.training_script)

    if args.training_script == RANK_PROGRAM:
        args.signals_to_handle = "SIGQUIT"  # on which torchrun may still kill the ranks
        handle(STOP_SIGNALS, _ask_ranks)
        threading.Thread(target=_see_ranks, daemon=True).start()

    if config is not None and config.failures.timeout_s:
        limit_s = config.failures.timeout_s + STOPPED_S
        threading.Thread(target=kill_stopped, args=(limit_s,), daemon=True).start()

    # torchrun logs each failure and each signal that it sends,
    # but the ranks have already said what was wrong.
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)

    try:
        run_forks(args) if fork else run(args)
        return 0
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _code_of(rank, failure.exitcode, alone=args.nproc_per_node == "1")
    except SignalException as error:
        return 128 + error.sigval.value


def _code_of(rank: int, code: int, alone: bool) -> int:
    """The exit code of a run whose rank has failed. Says why if the rank could not.

    Args:
        alone: whether this node has no other ranks, which would say more.
    """
    if code in (-signal.SIGUSR1, 128 + signal.SIGUSR1):
        if code < 0:  # the rank did not handle the signal yet
            said = "megatron_vl.launch: the run had not begun; nothing was saved"
            print(said, file=sys.stderr, flush=True)
        return 128 + (_received[0] if _received else signal.SIGUSR1)

    if code < 0:
        name = signal.Signals(-code).name
        why = f". {host_memory.about_kill()}" if alone and name == "SIGKILL" else ""
        print(f"megatron_vl.launch: rank {rank} was ended by {name}{why}", file=sys.stderr, flush=True)
        return 128 - code
    return code


def _config(program: str, words: list[str]) -> TrainConfig | None:
    """The run's configuration; None if this starts something else."""
    if program != RANK_PROGRAM:
        return None
    with contextlib.suppress(Exception):  # the ranks say what is wrong with it
        return parse_config(list(words))
    return None


def import_stack(module: str) -> None:
    """Imports what ranks on CPU need. No platform is chosen and no process group exists in this process, so a
    fork of it is as fresh as a new program."""
    # Core's imports would initialise a GPU, which forks cannot share. The ranks use none.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import transformers.models.auto.tokenization_auto  # noqa: F401

    import megatron_vl.training.loop  # noqa: F401

    importlib.import_module(module)
    gc.collect()
    gc.freeze()  # pages that the ranks share stay shared


def run_forks(args: argparse.Namespace) -> None:
    """Does what torchrun's ``run`` does, for a module on a single node. The ranks are forks."""
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args

    args.start_method = "fork"
    args.rdzv_backend = "c10d"
    args.rdzv_endpoint = "localhost:0"
    args.rdzv_id = str(uuid.uuid4())
    config, _, _ = config_from_args(args)
    elastic_launch(config=config, entrypoint=_be_rank)(args.training_script, args.training_script_args)


def _be_rank(module: str, words: list[str]) -> None:
    """Runs ``python -m module words`` in a fork. Exits unless all went well."""
    import torch

    if module == RANK_PROGRAM:
        take_stop_signals()
    else:
        handle((signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP), signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    os.setsid()  # Ctrl-C is for the launcher, which asks the ranks
    if threads := os.environ.get("OMP_NUM_THREADS"):  # torch read another value when it was imported
        torch.set_num_threads(int(threads.split(",")[0]))

    sys.argv = [module, *words]
    sys.modules.pop(module, None)  # it runs as __main__ and must not be known under its own name as well
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise
    except KeyboardInterrupt:  # the launcher would wait for the result of a rank that ends without a code
        sys.exit(128 + signal.SIGINT)
    except Exception:
        traceback.print_exc()
        sys.exit(1)

    # This process waits until the launcher has read its result. The handlers of the program do not end it.
    # The launcher's SIGUSR1 is for ranks that still run, and must not turn a success into a failure.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGUSR1 else signal.SIG_DFL)


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
    """Passes the request to stop on to the ranks. The main program keeps waiting for them.

    Raises:
        SignalException: there are no ranks yet, or a second Ctrl-C has ended them.
    """
    if os.getpid() != _launcher:  # a fork that does not run its program yet
        note_request(number)
        return
    from torch.distributed.elastic.multiprocessing.api import SignalException

    name = signal.Signals(number).name
    again = number == signal.SIGINT and number in _received
    _received.append(number)
    ranks = _ranks()
    if again or not (ranks or _seen.is_set()):
        _tell_ranks(ranks, signal.SIGKILL)
        raise SignalException(f"{name} ends the launcher", signal.Signals(number))

    if not ranks:  # they have ended, and their result is the exit code
        return
    hint = "; Ctrl-C again ends them at once, without saving" if number == signal.SIGINT else ""
    print(f"megatron_vl.launch: {name}: the ranks save and end{hint}", file=sys.stderr, flush=True)
    _tell_ranks(ranks, signal.SIGUSR1)


_launcher = 0
"""Id of the process that has started the ranks."""
_received: list[int] = []
"""Signals that this process has received, in their order."""
_seen = threading.Event()
"""Set when this process has ranks, or had them."""


def _see_ranks(every_s: float = 1.0) -> None:
    """Returns when there are ranks."""
    while not _ranks():
        time.sleep(every_s)
    _seen.set()


def _ranks() -> list[int]:
    """The ranks among this process's children: programs of their own, or forks of it."""
    forked = tuple(psutil.Process().cmdline())
    everyone = children(os.getpid())
    return [pid for pid, command in everyone.items() if RANK_PROGRAM in command or command == forked]


def _tell_ranks(ranks: list[int], number: signal.Signals) -> None:
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main())
