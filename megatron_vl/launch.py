"""Starts the ranks of a training run on this node, with torchrun's options. It differs in four ways.

    python -m megatron_vl.launch --standalone --nproc-per-node 8 -m megatron_vl.train --config RUN.yaml

* When a rank stops with a message, only that message is shown. torchrun would print a traceback of its own
  after it.
* SIGTERM, SIGUSR1, SIGHUP (a closed terminal) and Ctrl-C ask the ranks to save and end, and the exit code is
  then 0. Before the first step they end without saving, with 128 + the signal's number. A second Ctrl-C ends
  them at once. torchrun would kill the ranks after 30 seconds.
* A rank that stays stopped (SIGSTOP) is killed. Other ranks of its node do that too, but it may be alone.
* On CPU the ranks of a single node are forks of this process, which has imported what they need. Importing
  takes seconds of processor time, and there are more ranks than cores. With GPUs each rank is a program of
  its own. ``--fork`` before torchrun's options forks any module, for commands that know that they run on CPU.
"""

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

from megatron_vl.config import parse_config
from megatron_vl.parallel import joining
from megatron_vl.parallel.joining import JoinError, JoinWait, join, join_limit_s, raise_open_file_limit
from megatron_vl.system import host_memory
from megatron_vl.system.processes import kill_process_tree, list_children
from megatron_vl.system.signals import (
    STOP_SIGNALS,
    handle_stop_signals,
    hide_native_warnings,
    note_stop_request,
    set_signal_handler,
    survive_closed_outputs,
)

RANK_PROGRAM = "megatron_vl.train"
STOPPED_GRACE_S = 30.0
"""Seconds after ``failures.timeout_s`` in which the other ranks of the node may kill a stopped rank."""

_launcher_pid = 0
received_signals: list[int] = []
"""Those that have asked this process to end its ranks."""
_ranks_seen = threading.Event()
"""Set when this process has ranks, or had them."""


def main(argv: list[str] | None = None) -> int:
    """Runs the ranks and waits for them.

    Returns:
        0 when all ranks ended well, otherwise the exit code of the first that failed (128 + N if signal N
        ended it, or came before the first step).
    """
    global _launcher_pid
    _launcher_pid = os.getpid()
    argv = list(sys.argv[1:] if argv is None else argv)
    should_fork = argv[:1] == ["--fork"]
    hide_native_warnings()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import parse_args, run

    survive_closed_outputs()
    raise_open_file_limit()  # this process serves the store of all ranks
    torchrun_args = parse_args(argv[1:] if should_fork else argv)
    program, run_args = torchrun_args.training_script, torchrun_args.training_script_args
    config = None
    with contextlib.suppress(Exception):  # the ranks will say what is wrong with it
        config = parse_config(list(run_args)) if program == RANK_PROGRAM else None
    should_fork = should_fork or (
        torchrun_args.standalone and config is not None and config.platform == "cpu"
    )
    if should_fork:
        import_training_stack(program)

    if program == RANK_PROGRAM:
        torchrun_args.signals_to_handle = "SIGQUIT"  # on which torchrun may still kill the ranks
        set_signal_handler(STOP_SIGNALS, _ask_ranks_to_stop)
        threading.Thread(target=_wait_for_ranks, daemon=True).start()
    timeout_s = config.failures.timeout_s if config is not None else 0
    if timeout_s:
        threading.Thread(target=kill_stopped_ranks, args=(timeout_s + STOPPED_GRACE_S,), daemon=True).start()

    # torchrun logs each failure and each signal that it sends, but the ranks have printed the cause already.
    for logger_name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(logger_name).setLevel(logging.CRITICAL)

    try:
        _nodes_store = _meet_nodes(torchrun_args, join_limit_s(timeout_s))  # kept while the ranks run
        run_forked_ranks(torchrun_args) if should_fork else run(torchrun_args)
        return 0
    except (JoinError, RendezvousError) as error:
        problem = str(error) or f"not all {torchrun_args.nnodes} nodes came in time"
        _print_message(f"{problem} ({torchrun_args.rdzv_endpoint})")
        return 1
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _exit_code_of_rank(rank, failure.exitcode, is_only_rank=torchrun_args.nproc_per_node == "1")
    except SignalException as error:
        return 128 + error.sigval.value


def _print_message(text: str) -> None:
    print(f"megatron_vl.launch: {text}", file=sys.stderr, flush=True)


def _meet_nodes(torchrun_args: argparse.Namespace, limit_s: float) -> object:
    """Waits for the other nodes: torch would do so in native code, silent and deaf to signals.

    With ``--node-rank``, it waits for all of them, and returns the store of the meeting, which torch then
    finds by its port. With a rendezvous, it waits for the launcher that serves as the meeting point, and
    watches torch's wait for the others.

    Raises JoinError if they do not come within ``limit_s`` seconds.
    """
    from torch.distributed.elastic.rendezvous.utils import (
        _matches_machine_hostname,
        parse_rendezvous_endpoint,
    )
    from torch.distributed.run import parse_min_max_nnodes

    _, num_nodes = parse_min_max_nnodes(torchrun_args.nnodes)
    endpoint = torchrun_args.rdzv_endpoint
    if torchrun_args.rdzv_backend == "static" and num_nodes > 1:
        endpoint = endpoint or f"{torchrun_args.master_addr}:{torchrun_args.master_port}"
        torchrun_args.rdzv_endpoint = endpoint
        host, port = parse_rendezvous_endpoint(endpoint, default_port=29500)
        node = torchrun_args.node_rank
        return join(host, port, node == 0, "megatron_vl/nodes", "node", node, num_nodes, limit_s)
    if torchrun_args.rdzv_backend != "c10d" or not endpoint:
        return None

    host, port = parse_rendezvous_endpoint(endpoint, default_port=29400)
    JoinWait(limit_s).reach_address(host, port, is_server=_matches_machine_hostname(host))
    torchrun_args.rdzv_conf = f"join_timeout={limit_s:.0f},{torchrun_args.rdzv_conf}".rstrip(",")

    def note_missing_nodes() -> None:
        if not _ranks_seen.wait(joining.NOTE_AFTER_S):
            print(
                f"NOTE: not all {torchrun_args.nnodes} nodes have come to {endpoint}; start the others",
                file=sys.stderr,
                flush=True,
            )

    threading.Thread(target=note_missing_nodes, daemon=True).start()
    return None


def _exit_code_of_rank(rank: int, exit_code: int, is_only_rank: bool) -> int:
    """The exit code of a run one of whose ranks has failed. It prints the reason if the rank could not."""
    if exit_code in (-signal.SIGUSR1, 128 + signal.SIGUSR1):
        if exit_code < 0:  # the rank did not handle the signal yet
            _print_message("the run had not begun; nothing was saved")
        return 128 + (received_signals[0] if received_signals else signal.SIGUSR1)
    if exit_code >= 0:
        return exit_code
    signal_name = signal.Signals(-exit_code).name
    kill_text = f". {host_memory.KILL_ADVICE}" if is_only_rank and signal_name == "SIGKILL" else ""
    _print_message(f"rank {rank} was ended by {signal_name}{kill_text}")
    return 128 - exit_code


def import_training_stack(module_name: str) -> None:
    """Imports the modules that ranks on CPU need.

    This process chooses no platform and has no process group, so a fork of it is as fresh as a new program.
    """
    # Core's imports would initialise a GPU, which forks cannot share. The ranks use none.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import transformers.models.auto.tokenization_auto  # noqa: F401

    import megatron_vl.training.trainer  # noqa: F401

    importlib.import_module(module_name)
    gc.collect()
    gc.freeze()  # pages that the ranks share stay shared


def run_forked_ranks(torchrun_args: argparse.Namespace) -> None:
    """Runs a module on a single node as torchrun's ``run`` does, with ranks that are forks."""
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args

    torchrun_args.start_method = "fork"
    torchrun_args.rdzv_backend = "c10d"
    torchrun_args.rdzv_endpoint = "localhost:0"
    torchrun_args.rdzv_id = str(uuid.uuid4())
    config, _, _ = config_from_args(torchrun_args)
    elastic_launch(config=config, entrypoint=_run_as_rank)(
        torchrun_args.training_script, torchrun_args.training_script_args
    )


def _run_as_rank(module_name: str, run_args: list[str]) -> None:
    """Runs ``python -m module_name run_args`` in a fork. It returns only if the program succeeded."""
    import torch

    if module_name == RANK_PROGRAM:
        handle_stop_signals()
    else:
        set_signal_handler((signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP), signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    os.setsid()  # Ctrl-C is for the launcher, which asks the ranks
    if thread_count := os.environ.get("OMP_NUM_THREADS"):  # torch read another value when it was imported
        torch.set_num_threads(int(thread_count.split(",")[0]))

    sys.argv = [module_name, *run_args]
    sys.modules.pop(module_name, None)  # it runs as __main__ and must not be known under its own name as well
    try:
        runpy.run_module(module_name, run_name="__main__", alter_sys=True)
    except SystemExit as exit_request:
        if exit_request.code:
            raise
    except KeyboardInterrupt:  # the launcher would wait for the result of a rank that ends without a code
        sys.exit(128 + signal.SIGINT)
    except Exception:
        traceback.print_exc()
        sys.exit(1)

    # This process waits until the launcher has read its result. The handlers of the program do not end it.
    # The launcher's SIGUSR1 is for ranks that still run, and must not turn a success into a failure.
    for signal_number in STOP_SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN if signal_number == signal.SIGUSR1 else signal.SIG_DFL)


def kill_stopped_ranks(stopped_limit_s: float, poll_interval_s: float = 5.0) -> None:
    """Kills children that stay stopped for longer than ``stopped_limit_s``. Does not return."""
    stopped_since: dict[int, float] = {}
    last_poll = time.monotonic()
    while True:
        time.sleep(poll_interval_s)
        now = time.monotonic()
        if now - last_poll > 4 * poll_interval_s:
            stopped_since.clear()  # this process was stopped too
        last_poll = now
        stopped_since = {
            pid: stopped_since.get(pid, now) for pid in list_children(os.getpid()) if _is_stopped_process(pid)
        }
        for pid, began in stopped_since.items():
            if now - began > stopped_limit_s:
                _print_message(f"process {pid} was stopped for {stopped_limit_s:.0f} s and is killed")
                kill_process_tree(pid)


def _is_stopped_process(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def _ask_ranks_to_stop(signal_number: int, frame: FrameType | None) -> None:
    """Passes the request to stop on to the ranks. The main program keeps waiting for them.

    Raises SignalException if there are no ranks yet, or a second Ctrl-C has ended them.
    """
    if os.getpid() != _launcher_pid:  # a fork that does not run its program yet
        note_stop_request(signal_number)
        return
    from torch.distributed.elastic.multiprocessing.api import SignalException

    signal_name, is_ctrl_c = signal.Signals(signal_number).name, signal_number == signal.SIGINT
    is_repeated = is_ctrl_c and signal_number in received_signals
    received_signals.append(signal_number)
    rank_pids = _find_rank_pids()
    ends_at_once = is_repeated or not (rank_pids or _ranks_seen.is_set())
    if rank_pids and not ends_at_once:
        ctrl_c_hint = "; Ctrl-C again ends them at once, without saving" if is_ctrl_c else ""
        _print_message(f"{signal_name}: the ranks save and end{ctrl_c_hint}")
    for pid in rank_pids:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.kill(pid, signal.SIGKILL if ends_at_once else signal.SIGUSR1)
    if ends_at_once:
        raise SignalException(f"{signal_name} ends the launcher", signal.Signals(signal_number))


def _wait_for_ranks(poll_interval_s: float = 1.0) -> None:
    while not _find_rank_pids():
        time.sleep(poll_interval_s)
    _ranks_seen.set()


def _find_rank_pids() -> list[int]:
    """The ranks among this process's children: programs of their own, or forks of it. None without /proc."""
    try:
        forked_command = tuple(psutil.Process().cmdline())
        commands_by_pid = list_children(os.getpid())
    except (psutil.Error, OSError):
        return []
    return [
        pid
        for pid, command in commands_by_pid.items()
        if RANK_PROGRAM in command or command == forked_command
    ]


if __name__ == "__main__":
    sys.exit(main())
