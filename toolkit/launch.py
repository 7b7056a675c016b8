"""Starts groups of processes of this very Python: one a rank, as torchrun does for a training."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_group(
    module: str, arguments: Sequence[str | Path], ranks: int, *, quiet: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m module arguments`` in ``ranks`` processes on this machine, to its end.

    Args:
        quiet: what the processes print is kept in the result; False: it goes where this process prints.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment["PYTHONPATH"] = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    if ranks == 1:
        environment["MASTER_PORT"] = str(free_port())
    return subprocess.run(
        [sys.executable, *launch, "-m", module, *map(str, arguments)], env=environment, capture_output=quiet, text=True
    )


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def end_of(done: subprocess.CompletedProcess[str], lines: int = 25) -> str:
    """The last lines that a group printed, without torchrun's own report."""
    said = (done.stderr or "") + (done.stdout or "")
    own = said.split("torch.distributed.elastic.multiprocessing.errors.ChildFailedError", 1)[0]
    return "\n".join(own.splitlines()[-lines:])
