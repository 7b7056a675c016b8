"""Runs programs and functions in processes that a server forks (:mod:`.rank_server`).

Tests of the start itself (signals, kills, the launcher, the demo) start new processes instead.
"""

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from itertools import count
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import pytest

from .rank_server import Job, Outcome

REPOSITORY = Path(__file__).resolve().parents[2]

allowed = True
"""Whether the running test is marked ``ranks``; set by the tests' fixtures."""

FIRST_PORT, LAST_PORT, PORTS = 15_000, 31_000, 400
"""The ports of all test processes together, and the number of those that one process uses."""

_jobs = count()


def python_path() -> str:
    """``PYTHONPATH``: the checkout, then the tests' own, which may name another Megatron-core."""
    return os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])


def in_ranks(ranks: int | Callable[[dict[str, Any]], int] = 1) -> Callable[..., Any]:
    """Marks a test whose body runs in each of ``ranks`` processes (perhaps a function of its fixtures and
    parameters, which must be picklable), where its assertions are checked."""

    def decorate(body: Callable[..., None]) -> Any:
        @wraps(body)
        def test(**variables: Any) -> None:
            if "RANK" in os.environ:
                body(**variables)
            else:
                number = ranks(variables) if callable(ranks) else ranks
                call(body, number, **variables)

        return pytest.mark.ranks(test)

    return decorate


def run_module(
    module: str, arguments: Sequence[str | Path] = (), ranks: int = 1, *, timeout_s: float = 600, **job: Any
) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m module arguments`` in ``ranks`` processes, with further fields of :class:`Job`."""
    words = [module, *map(str, arguments)]
    outcome, folder = _run(ranks, timeout_s, module=module, arguments=words[1:], **job)
    if outcome.timed_out:
        raise subprocess.TimeoutExpired(words, timeout_s, folder["stdout"], folder["stderr"])
    return subprocess.CompletedProcess(words, _first_failure(outcome), folder["stdout"], folder["stderr"])


def run_function(
    function: Callable[..., Any], arguments: Sequence[object], ranks: int
) -> subprocess.CompletedProcess[str]:
    """Calls a function in ``ranks`` processes, which may fail or exit."""
    named = (function.__module__, function.__name__)
    outcome, folder = _run(ranks, function=named, arguments=list(arguments))
    assert not outcome.timed_out, f"{function.__name__} has not ended:\n{folder['stderr']}"
    return subprocess.CompletedProcess(named, _first_failure(outcome), folder["stdout"], folder["stderr"])


def run_group(
    module: str,
    arguments: Sequence[str | Path],
    ranks: int,
    *,
    show: str = "nothing",
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
    on_cpu: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Replaces :func:`toolkit.common.launch.run_group`, whose launcher would import the stack again."""
    done = run_module(
        module, arguments, ranks, environment=environment, cwd=Path.cwd(), timeout_s=timeout or 600
    )
    if show != "nothing":
        sys.stderr.write(done.stdout + done.stderr)
    return done


@dataclass(frozen=True)
class Ended:
    code: int
    """Exit code; -N for signal N."""
    stderr: str
    at: float
    """Time of the end, in seconds of :func:`time.monotonic`."""
    stdout: str
    """The output of all ranks together."""


def run_apart(
    program: str | Callable[..., None],
    arguments: Sequence[object],
    ranks: int,
    *,
    folders: Mapping[int, Path] | None = None,
    file_bytes: Mapping[int, int] | None = None,
    one_node: bool = False,
    timeout_s: float = 300,
) -> list[Ended]:
    """Runs a module or a function as ranks on different nodes: if one fails, the others go on."""
    work: dict[str, Any] = {"folders": {rank: str(path) for rank, path in (folders or {}).items()}}
    if isinstance(program, str):
        work |= {"module": program, "arguments": list(map(str, arguments))}
    else:
        work |= {"function": (program.__module__, program.__name__), "arguments": list(arguments)}
    work |= {"apart": True, "one_node": one_node, "file_bytes": dict(file_bytes or {})}
    outcome, folder = _run(ranks, timeout_s, **work)
    stderr = [folder[f"stderr_{rank}"] for rank in range(ranks)]
    assert not outcome.timed_out, f"ranks have not ended by themselves: {outcome}\n{stderr}"
    ended = zip(outcome.exit_codes, stderr, outcome.ended_at, strict=True)
    return [Ended(*each, folder["stdout"]) for each in ended]


def call(
    function: Callable[..., Any],
    ranks: int = 1,
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 600,
    **variables: Any,
) -> Any:
    """Calls ``function(**variables)`` in ``ranks`` processes. Returns rank 0's result, as JSON has it."""
    named = (function.__module__, function.__name__)
    outcome, folder = _run(ranks, timeout_s, environment, function=named, variables=variables)
    ends = f"{folder['stdout'][-2000:]}\n{folder['stderr'][-6000:]}"
    assert not any(outcome.exit_codes), f"exit codes {outcome.exit_codes}:\n{ends}"
    return json.loads(folder["result.json"])


def _run(
    ranks: int,
    timeout_s: float = 600,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    **work: Any,
) -> tuple[Outcome, dict[str, str]]:
    assert allowed, "a test that starts ranks needs the mark `ranks`"
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(), **(environment or {})}
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        place = {"environment": variables, "folder": folder, "cwd": str(cwd or REPOSITORY)}
        server = _server(variables.get("TRITON_INTERPRET", "0"))
        server.send(Job(ranks=ranks, **place, timeout_s=timeout_s, port=_free_port(), **work))
        outcome = server.recv()
        files = (path for path in Path(folder).iterdir() if path.is_file())
        found = {path.name: path.read_text(errors="replace") for path in files}
    return outcome, {"stdout": "", "stderr": ""} | found


@cache
def _server(triton_interpret: str) -> Connection:
    """A connection to the session's server of ranks. Triton reads the variable at its import."""
    session = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", uuid.uuid4().hex)  # containers repeat process numbers
    name = f"\0megatron_vl_tests_ranks_{run}_{triton_interpret}"
    if _reserve(f"{name}_start"):
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(), "TRITON_INTERPRET": triton_interpret}
        words = [sys.executable, "-m", "tests.support.rank_server", name[1:], str(session)]
        os.spawnve(os.P_NOWAIT, sys.executable, words, {**os.environ, **own})
    for _ in range(1200):
        with contextlib.suppress(ConnectionRefusedError):
            return Client(name, "AF_UNIX")
        time.sleep(0.05)
    raise AssertionError("the server of ranks does not start")


def _reserve(name: str) -> bool:
    """Binds an abstract Unix socket, until this process ends, unless another one holds it."""
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(name)
    except OSError:
        mark.close()
        return False
    atexit.register(mark.close)
    return True


def _free_port() -> int:
    while True:
        port = _block_of_ports() + next(_jobs) % PORTS
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


@cache
def _block_of_ports() -> int:
    """Reserves ``PORTS`` ports; returns the first.

    They lie below those that the kernel assigns, so a free one stays free until a rank binds it.
    """
    for first in range(FIRST_PORT, LAST_PORT, PORTS):
        if _reserve(f"\0megatron_vl_tests_ports_{first}"):
            return first
    raise AssertionError("other processes have reserved all ports")


def _first_failure(outcome: Outcome) -> int:
    """A group's exit code: that of a single process; of several, 1 if any failed, like torchrun."""
    codes = outcome.exit_codes
    return codes[0] if len(codes) == 1 else int(any(codes))
