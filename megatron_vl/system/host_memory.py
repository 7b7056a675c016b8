"""The host memory that this process may use, and what to say if it was too little."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

import psutil

GIB = 1 << 30
_CGROUP_ROOT = Path("/sys/fs/cgroup")


LOWER_HOST_MEMORY_ADVICE = "lower data.num_workers, or give the job more memory"
KILL_ADVICE = (
    f"If `dmesg` there shows that the kernel killed it for lack of memory, {LOWER_HOST_MEMORY_ADVICE}"
)


def available_bytes() -> int:
    """Bytes that this node has left, or fewer if the job's control group may use fewer."""
    try:
        free_bytes = psutil.virtual_memory().available
    except OSError:  # there is no /proc
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([free_bytes, *_cgroup_limits()])


def _cgroup_limits() -> list[int]:
    """The limits in bytes of this process's control groups (versions 2 and 1), as far as they are known."""
    byte_limits = []
    for path in (*_cgroup_files("memory.max"), _CGROUP_ROOT / "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # there is no such file, or it says "max"
            byte_limits.append(int(path.read_text()))
    return byte_limits


def num_ranks_on_node() -> int:
    """Number of ranks that share this node's memory, as torchrun sets it; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def available_gib_per_rank() -> float:
    """Host memory in GiB that each rank of this node may still use."""
    return available_bytes() / num_ranks_on_node() / GIB


def memory_limits_text() -> str:
    """The memory that this process uses and may use, as part of a sentence."""
    try:
        process_memory, virtual_memory = psutil.Process().memory_info(), psutil.virtual_memory()
    except (psutil.Error, OSError):
        return "without /proc, no more is known"
    limit_texts = [f"this process holds {process_memory.rss / GIB:.1f} GiB"]

    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        limit_texts.append(
            f"its address space {process_memory.vms / GIB:.1f} of {address_space / GIB:.1f} GiB (ulimit -v)"
        )
    cgroup_limit = min(_cgroup_limits(), default=virtual_memory.total)
    if cgroup_limit < virtual_memory.total:
        limit_texts.append(f"the job's control group may use {cgroup_limit / GIB:.1f} GiB")
    limit_texts.append(
        f"the host has {virtual_memory.available / GIB:.1f} of {virtual_memory.total / GIB:.1f} GiB left"
    )
    return ", ".join(limit_texts)


def _cgroup_files(file_name: str) -> list[Path]:
    """A file of this process's control groups (version 2): its own, and the outermost one that it sees."""
    lines = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    own_groups = [line.partition("::")[2].lstrip("/") for line in lines if line.startswith("0::")]
    return [*(_CGROUP_ROOT / group / file_name for group in own_groups), _CGROUP_ROOT / file_name]
