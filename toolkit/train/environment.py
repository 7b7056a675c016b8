"""Reads from the environment whether this process is a rank of torchrun or Slurm, or one of several nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

DEFAULT_PORT = 29500
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class Surroundings:
    """Facts that the launcher (torchrun, Slurm or none) gives the command."""

    is_rank: bool = False
    """Whether another program has started one process per rank, and this is one of them."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The variables that torchrun would have set, if Slurm started the ranks."""
    nnodes: int = 1
    master_addr: str = ""
    master_port: int = DEFAULT_PORT
    job_id: str = "megatron-vl"


def read(environ: Mapping[str, str]) -> Surroundings:
    """Reads torchrun's variables, then those of a Slurm step (``srun``).

    A step with more tasks than nodes has one task per rank. A step with one task per node starts the ranks of
    its node. A batch script without ``srun`` is not in a step and counts as a shell on that node.
    """
    if all(name in environ for name in TORCHRUN):
        return Surroundings(is_rank=True)
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return Surroundings()

    tasks = int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or 1)
    nodes = int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
    job = environ.get("SLURM_JOB_ID", "0")
    host = first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "localhost")
    port = 20000 + int(job) % 10000  # two jobs on one node get different ports
    if tasks <= nodes:
        return Surroundings(nnodes=nodes, master_addr=host, master_port=port, job_id=job)

    variables = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(-(-tasks // nodes)),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or host,
        "MASTER_PORT": environ.get("MASTER_PORT") or str(port),
    }
    return Surroundings(is_rank=True, variables=variables)


def first_host(nodelist: str) -> str:
    """Returns the first host of a Slurm list, such as ``gpu003`` for ``gpu[003-006,010],login1``."""
    match = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodelist)
    assert match is not None  # all parts may be empty
    return (match[1] or "") + (match[2] or "") + (match[3] or "")
