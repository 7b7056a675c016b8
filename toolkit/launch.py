"""Starts groups of Python processes, one per rank, as torchrun does for a training run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent


def run_group(
    module: str,
    arguments: Sequence[str | Path],
    ranks: int,
    *,
    show: Literal["nothing", "all", "errors"] = "nothing",
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
    on_cpu: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m module arguments`` in ``ranks`` processes on this machine and waits for them to end.

    Args:
        show: where the output of the processes goes. ``nothing``: into the result; ``all``: to the output of
            this process; ``errors``: all of it to standard error, because this process needs standard output.
        environment: variables of the processes. Variables that the user has set take precedence.
        on_cpu: whether the processes use no GPU, so that they may be forks of a process that has imported the
            stack.
        timeout: seconds after which the group is killed.

    Raises:
        subprocess.TimeoutExpired: the group was killed because of ``timeout``.
    """
    launch: list[str] = []
    if ranks > 1:
        launcher = ["megatron_vl.launch", "--fork"] if on_cpu else ["torch.distributed.run"]
        launch = ["-m", *launcher, "--standalone", "--nproc-per-node", str(ranks)]
    variables = {
        "OMP_NUM_THREADS": "1",
        **(environment or {}),
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
    }

    variables["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part
    )
    if ranks == 1:  # the variables that torchrun would set, without its start-up time
        alone = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
        }
        variables |= alone | {"MASTER_PORT": str(free_port())}

    kept = subprocess.PIPE if show == "nothing" else None
    command = [sys.executable, *launch, "-m", module, *map(str, arguments)]
    stdout = sys.stderr if show == "errors" else kept
    return subprocess.run(
        command, env=variables, stdout=stdout, stderr=kept, text=True, timeout=timeout, check=False
    )


def free_port() -> int:
    """Finds an unused TCP port of this machine."""
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def end_of(done: subprocess.CompletedProcess[str], lines: int = 25) -> str:
    """The last lines of a group's output, without torchrun's report."""
    said = (done.stderr or "") + (done.stdout or "")
    own = said.split("torch.distributed.elastic.multiprocessing.errors.ChildFailedError", 1)[0]
    return "\n".join(own.splitlines()[-lines:])
