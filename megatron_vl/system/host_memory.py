"""The host memory that this process may use, and what to say if it was too little."""

import contextlib
import os
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
    """The limits in bytes of this process's control groups, as far as they are known.

    They are those of its own group and of the outermost one that it sees (version 2), and of version 1.
    """
    byte_limits: list[int] = []
    group_lines: list[str] = []
    with contextlib.suppress(OSError):
        group_lines = Path("/proc/self/cgroup").read_text().splitlines()
    groups = [line.partition("::")[2].lstrip("/") for line in group_lines if line.startswith("0::")]
    own_limits = [_CGROUP_ROOT / group / "memory.max" for group in groups]
    for path in (*own_limits, _CGROUP_ROOT / "memory.max", _CGROUP_ROOT / "memory/memory.limit_in_bytes"):
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
    """The memory that this process holds, and that its node has left, as part of a sentence."""
    try:
        held = psutil.Process().memory_info().rss
    except (psutil.Error, OSError):
        return "without /proc, no more is known"
    left = f"{available_bytes() / GIB:.1f} GiB left"
    return f"this process holds {held / GIB:.1f} GiB, and its node or job has {left}"
