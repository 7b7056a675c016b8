"""Imports the training stack, which takes four seconds of processor time, once, and forks ranks.

The server itself never uses the platform, a process group or a data set, so a fork of it is like a new
process. All tests of a session share it. A fork serves each test process: it runs one pickled :class:`Job`
after another and answers with an :class:`Outcome`. Like torchrun, it ends the other ranks if one fails.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = """
megatron_vl.train megatron_vl.training.resolve megatron_vl.training.trainer megatron_vl.training.missing_sizes
megatron_vl.training.passes megatron.core.models.mimo megatron_vl.data.loader megatron_vl.data.row_loader
toolkit.parity.worker toolkit.cli data_tools.convert pytest tests.support.tiny_run
transformers.models.qwen2.tokenization_qwen2 transformers.models.qwen2_vl.modeling_qwen2_vl
transformers.models.qwen2_5_vl.modeling_qwen2_5_vl transformers.models.qwen3_vl.modeling_qwen3_vl
transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe
""".split()
"""Modules imported before the first fork. A rank imports any further module itself."""

STACKS_S = 3.0
"""Seconds before the end of a job's time at which its ranks print the stacks of all their threads."""
GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL for the peers of a rank that failed; torchrun waits 30."""


@dataclass(frozen=True)
class Job:
    """One group of ranks: a module to run as ``python -m`` does, or a function to call."""

    ranks: int
    environment: dict[str, str]
    """That of each rank, without the variables that say which rank it is."""
    folder: str  # for ``stdout``, ``stderr`` and ``result.json``
    cwd: str
    timeout_s: float
    port: int  # of the group's rendezvous
    module: str = ""
    arguments: list[Any] = field(default_factory=list)
    function: tuple[str, str] = ("", "")
    """(module, name); the JSON-able result of rank 0 goes to ``result.json``."""
    variables: dict[str, Any] = field(default_factory=dict)
    is_group: bool = True
    """If not, there is one process, which has a user's environment."""
    apart: bool = False
    """As on different nodes: if one fails, the others are not ended, and each writes to its ``stderr_N``."""
    one_node: bool = False
    """With ``apart``, whether the ranks know that they share a node, so that only one prints a message."""
    folders: dict[int, str] = field(default_factory=dict)
    """Maps ranks that do not start in ``cwd`` to their working folders."""
    file_bytes: dict[int, int] = field(default_factory=dict)
    """Maps ranks to the largest size of a file that they may write, in bytes."""


@dataclass(frozen=True)
class Outcome:
    exit_codes: list[int]
    """By rank; -N for signal N."""
    timed_out: bool
    ended_at: list[float]
    """By rank, in seconds of :func:`time.monotonic`."""


def main(name: str, session: int) -> None:
    """Serves whoever connects to the abstract Unix socket until the process ``session`` has ended."""
    gc.disable()  # a third of the time of these imports
    for module in PRELOADED:
        importlib.import_module(module)

    # What a rank would do once: the parser of a command line (0.1 s), and Pillow's formats (0.05 s).
    from PIL import Image

    from megatron_vl.config import parse_config

    parse_config(["--model.hf", "none", "--data.path", "none", "--checkpoint.dir", "none"])
    Image.init()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # the end of torch's libraries takes another 0.05 s
    assert threading.active_count() == 1, "a thread of the server would be missing in every rank"
    gc.collect()
    gc.freeze()  # pages that the ranks share stay shared
    gc.enable()
    gc.set_threshold(50_000)  # collections of a rank's own objects took 2 % of its time

    with contextlib.suppress(FileNotFoundError, ProcessLookupError), socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        server.settimeout(1.0)
        while ") Z" not in Path(f"/proc/{session}/stat").read_text():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
            with contextlib.suppress(TimeoutError), server.accept()[0] as accepted:
                if os.fork() == 0:
                    server.close()
                    accepted.setblocking(True)
                    _serve(Connection(accepted.detach()))


def _serve(connection: Connection) -> NoReturn:
    with contextlib.suppress(EOFError):
        while True:
            connection.send(_run(connection.recv(), connection))
    os._exit(0)


def _run(job: Job, connection: Connection) -> Outcome:
    running = {}
    for rank in range(job.ranks):
        pid = os.fork()
        if pid == 0:
            connection.close()
            _be_rank(job, rank)
        running[pid] = rank
    exit_codes, ended_at = [0] * job.ranks, [0.0] * job.ranks
    ends_at, failed_at, timed_out = time.monotonic() + job.timeout_s, None, False
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            rank, code = running.pop(pid), os.waitstatus_to_exitcode(status)
            exit_codes[rank], ended_at[rank] = code, time.monotonic()
            if code and failed_at is None and not job.apart:
                failed_at = time.monotonic()
                _signal_all(running, signal.SIGTERM)
            continue

        timed_out |= time.monotonic() > ends_at
        if timed_out or (failed_at is not None and time.monotonic() > failed_at + GRACE_S):
            _signal_all(running, signal.SIGKILL)
        time.sleep(0.005)

    return Outcome(exit_codes, timed_out, ended_at)


def _signal_all(running: dict[int, int], number: signal.Signals) -> None:
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _be_rank(job: Job, rank: int) -> NoReturn:
    """Runs the job as this rank and exits with the code that a separate Python program would have."""
    code = 1
    try:
        _prepare(job, rank)
        code = _execute(job, rank)
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException:
        traceback.print_exc()
    finally:
        # Do what the interpreter does at its end. os._exit then skips the server's own exit handlers.
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _prepare(job: Job, rank: int) -> None:
    identity = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.ranks),
        "LOCAL_WORLD_SIZE": str(job.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job.port),
    }
    if not job.apart or job.one_node:  # the ranks of a node say a message once
        error_file = Path(job.folder) / "attempt" / str(rank) / "error.json"
        identity["TORCHELASTIC_ERROR_FILE"] = str(error_file)

    os.environ.clear()
    os.environ.update(job.environment | (identity if job.is_group else {}))
    os.chdir(job.folders.get(rank, job.cwd))

    for name, descriptor in (("stdout", 1), (f"stderr_{rank}" if job.apart else "stderr", 2)):
        target = os.open(Path(job.folder) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, descriptor)
        os.close(target)

    (Path(job.folder) / "attempt" / str(rank)).mkdir(parents=True, exist_ok=True)
    faulthandler.enable()
    if job.timeout_s > STACKS_S:
        faulthandler.dump_traceback_later(job.timeout_s - STACKS_S)  # a rank that hangs then shows where
    sys.path.insert(0, job.cwd)

    if limit := job.file_bytes.get(rank):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def _execute(job: Job, rank: int) -> int:
    if job.module:
        sys.argv = [job.module, *job.arguments]
        # The module runs as __main__. It must not exist a second time under its own name.
        sys.modules.pop(job.module, None)
        runpy.run_module(job.module, run_name="__main__", alter_sys=True)
        return 0

    module, name = job.function
    function = getattr(importlib.import_module(module), name)
    result = function(*job.arguments, **job.variables)
    if rank == 0:
        (Path(job.folder) / "result.json").write_text(json.dumps(result))
    return 0


def _exit_code(error: SystemExit) -> int:
    """The exit code that the interpreter derives from ``sys.exit``."""
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    # Use the importable name, so that the classes are those that the test process pickles.
    from tests.support.rank_server import main as serve

    serve(sys.argv[1], int(sys.argv[2]))
