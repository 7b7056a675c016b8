"""The host memory that this process may use, and whether the kernel has killed processes for lack of it."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

import psutil

GIB = 1 << 30
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def _count_oom_kills() -> tuple[int, str] | None:
    """(number of processes that the kernel has killed for lack of memory, scope of this counter in words).

    The counter is that of the job's control group (version 2 or else 1), or else that of the whole host. None
    if the kernel shows no counter here.
    """
    group_scope, host_scope = "in the job's control group", "on this host, which may be another job's"
    files = [*_cgroup_files("memory.events"), _CGROUP_ROOT / "memory/memory.oom_control"]
    for path, scope in [*((path, group_scope) for path in files), (Path("/proc/vmstat"), host_scope)]:
        # There is no such file, or it has no such line.
        with contextlib.suppress(OSError, ValueError, KeyError):
            entries = dict(line.split()[:2] for line in path.read_text().splitlines())
            return int(entries["oom_kill"]), scope
    return None


LOWER_HOST_MEMORY_ADVICE = "lower data.num_workers, or give the job more memory"


def explain_kill(was_local: bool = True) -> str:
    """A sentence on whether a process that SIGKILL ended was killed for lack of memory, and what to do.

    Args:
        was_local: whether the process ran on this machine.
    """
    at_start, now = _OOM_KILLS_AT_START, _count_oom_kills()
    if at_start is None or now is None or not was_local:
        return (
            f"If `dmesg` there shows that the kernel killed it for lack of memory, {LOWER_HOST_MEMORY_ADVICE}"
        )
    if now[0] > at_start[0]:
        return (
            f"Since the start, the kernel has killed {now[0] - at_start[0]} processes for lack of memory"
            f" {now[1]} ({memory_limits_text()}): {LOWER_HOST_MEMORY_ADVICE}"
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


_OOM_KILLS_AT_START = _count_oom_kills()
"""The result of :func:`_count_oom_kills` when this process began, or the launcher that it is a fork of."""
