"""Reads from the environment whether this process is a rank of torchrun or Slurm, or one of several nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

DEFAULT_PORT = 29500
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class LaunchEnvironment:
    """Facts that the launcher (torchrun, Slurm or none) gives the command."""

    is_rank: bool = False
    """Whether another program has started one process per rank, and this is one of them."""
    rank_variables: Mapping[str, str] = field(default_factory=dict)
    """The variables that torchrun would have set, if Slurm started the ranks."""
    nnodes: int = 1
    master_addr: str = ""
    master_port: int = DEFAULT_PORT
    job_id: str = "megatron-vl"


def read_launch_environment(environ: Mapping[str, str]) -> LaunchEnvironment:
    """Reads torchrun's variables, then those of a Slurm step (``srun``).

    A step with more tasks than nodes has one task per rank. A step with one task per node starts the ranks of
    its node. A batch script without ``srun`` is not in a step and counts as a shell on that node.
    """
    if all(name in environ for name in TORCHRUN_VARIABLES):
        return LaunchEnvironment(is_rank=True)
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return LaunchEnvironment()

    task_count = int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or 1)
    node_count = int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
    job_id = environ.get("SLURM_JOB_ID", "0")
    master_addr = first_host(
        environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "localhost"
    )
    master_port = 20000 + int(job_id) % 10000  # two jobs on one node get different ports
    if task_count <= node_count:
        return LaunchEnvironment(False, {}, node_count, master_addr, master_port, job_id)
    rank_variables = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(task_count),
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(-(-task_count // node_count)),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or master_addr,
        "MASTER_PORT": environ.get("MASTER_PORT") or str(master_port),
    }
    return LaunchEnvironment(is_rank=True, rank_variables=rank_variables)


def first_host(nodelist: str) -> str:
    """Returns the first host of a Slurm list, such as ``gpu003`` for ``gpu[003-006,010],login1``."""
    match = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodelist)
    assert match is not None  # all parts may be empty
    return "".join(match.groups(""))
