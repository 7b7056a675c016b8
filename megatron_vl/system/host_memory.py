"""The host memory that this process may use, and whether the kernel has killed processes for lack of it."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

import psutil

GIB = 1 << 30
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def count_oom_kills() -> tuple[int, str] | None:
    """(number of processes that the kernel has killed for lack of memory, scope of this counter in words).

    The counter is that of the job's control group (version 2 or else 1), or else that of the whole host. None
    if the kernel shows no counter here.
    """
    cgroup_v1_file = "memory/memory.oom_control"
    for path in (
        *_own_cgroup_files("memory.events"),
        _CGROUP_ROOT / "memory.events",
        _CGROUP_ROOT / cgroup_v1_file,
    ):
        count = _read_oom_kills(path)
        if count is not None:
            return count, "in the job's control group"
    count = _read_oom_kills(Path("/proc/vmstat"))
    return None if count is None else (count, "on this host, which may be another job's")


LOWER_HOST_MEMORY_ADVICE = "lower data.num_workers, or give the job more memory"


def explain_kill(was_local: bool = True) -> str:
    """A sentence on whether a process that SIGKILL ended was killed for lack of memory, and what to do.

    Args:
        was_local: whether the process ran on this machine.
    """
    kills_at_start, kills_so_far = _OOM_KILLS_AT_START, count_oom_kills()
    if kills_at_start is None or kills_so_far is None or not was_local:
        return (
            f"If `dmesg` there shows that the kernel killed it for lack of memory, {LOWER_HOST_MEMORY_ADVICE}"
        )
    if kills_so_far[0] > kills_at_start[0]:
        new_kills = kills_so_far[0] - kills_at_start[0]
        return (
            f"Since the start, the kernel has killed {new_kills} processes for lack of memory"
            f" {kills_so_far[1]} ({memory_limits_text()}): {LOWER_HOST_MEMORY_ADVICE}"
        )
    return "The kernel has killed no process for lack of memory here, so look for who ended it"


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
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        for limit_path in (*_own_cgroup_files(name), _CGROUP_ROOT / name):
            with contextlib.suppress(OSError, ValueError):  # there is no such file, or it says "max"
                byte_limits.append(int(limit_path.read_text()))
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


def _own_cgroup_files(file_name: str) -> list[Path]:
    """The file of this process' control group (version 2)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    return [
        _CGROUP_ROOT / line.partition("::")[2].lstrip("/") / file_name
        for line in lines
        if line.startswith("0::")
    ]


def _read_oom_kills(file_path: Path) -> int | None:
    """The number after ``oom_kill`` in a file of names and numbers."""
    try:
        entries = dict(line.split()[:2] for line in file_path.read_text().splitlines())
        return int(entries["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


_OOM_KILLS_AT_START = count_oom_kills()
"""The result of :func:`count_oom_kills` when this process began, or the launcher that it is a fork of."""
