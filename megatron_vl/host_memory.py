"""The host memory that this process may use, and whether the kernel has killed processes for lack of it."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import psutil

GIB = 1 << 30
_GROUPS = Path("/sys/fs/cgroup")


def oom_kills() -> tuple[int, str] | None:
    """How many processes the kernel has killed for lack of memory so far, and among which it counts.

    The job's own control group is looked at first (version 2, then 1), then the whole host. None: the kernel
    shows no counter here.
    """
    v1 = "memory/memory.oom_control"
    for path in (*_own_groups("memory.events"), _GROUPS / "memory.events", _GROUPS / v1):
        count = _value(path, "oom_kill")
        if count is not None:
            return count, "in the job's control group"
    count = _value(Path("/proc/vmstat"), "oom_kill")
    return None if count is None else (count, "on this host, which may be another job's")


LESS_HOST_MEMORY = "lower data.num_workers, or give the job more memory"


def about_kill(here: bool = True) -> str:
    """A sentence on whether a process that SIGKILL ended was killed for lack of memory, and what to do.

    Args:
        here: whether the process ran on this machine.
    """
    before, now = _KILLS_AT_START, oom_kills()
    if before is None or now is None or not here:
        return f"If `dmesg` there shows that the kernel killed it for lack of memory, {LESS_HOST_MEMORY}"
    if now[0] > before[0]:
        count = now[0] - before[0]
        return (
            f"Since the start, the kernel has killed {count} processes for lack of memory {now[1]}"
            f" ({limits()}): {LESS_HOST_MEMORY}"
        )
    return "The kernel has killed no process for lack of memory here, so look for who ended it"


def available() -> int:
    """Bytes that this node has left, or fewer if the job's control group may use fewer."""
    bounds = [psutil.virtual_memory().available]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        found = (_number(path) for path in (*_own_groups(name), _GROUPS / name))
        bounds += [limit for limit in found if limit is not None]
    return min(bounds)


def ranks_of_node() -> int:
    """Number of ranks that share this node's memory, as torchrun sets it; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def gib_per_rank() -> float:
    """Host memory in GiB that each rank of this node may still use."""
    return available() / ranks_of_node() / GIB


def limits() -> str:
    """What this process uses and may use, in a sentence's part."""
    own = psutil.Process().memory_info()
    parts = [f"this process holds {own.rss / GIB:.1f} GiB"]

    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        parts.append(f"its address space {own.vms / GIB:.1f} of {address_space / GIB:.1f} GiB (ulimit -v)")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        for path in (*_own_groups(name), _GROUPS / name):
            limit = _number(path)
            if limit is not None and limit < psutil.virtual_memory().total:
                parts.append(f"the job's control group may use {limit / GIB:.1f} GiB")
                break

    host = psutil.virtual_memory()
    parts.append(f"the host has {host.available / GIB:.1f} of {host.total / GIB:.1f} GiB left")
    return ", ".join(dict.fromkeys(parts))


def _own_groups(name: str) -> list[Path]:
    """The file of this process' control group (version 2)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    return [_GROUPS / line.partition("::")[2].lstrip("/") / name for line in lines if line.startswith("0::")]


def _value(path: Path, name: str) -> int | None:
    """The number after ``name`` in a file of names and numbers."""
    try:
        entries = dict(line.split()[:2] for line in path.read_text().splitlines())
        return int(entries[name])
    except (OSError, ValueError, KeyError):
        return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


_KILLS_AT_START = oom_kills()
"""What :func:`oom_kills` said when this process, or the launcher that it is a fork of, began."""
