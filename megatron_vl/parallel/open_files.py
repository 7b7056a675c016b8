"""The limit on open files of this process, which also applies to sockets to the ranks of a large run."""

from __future__ import annotations

import resource

OPEN_FILES = 65_536
"""Enough for a process of the largest runs: one or two connections to each of some ten thousand ranks."""


def raise_open_files() -> int:
    """Raises this process's limit on open files to :data:`OPEN_FILES`, or as far as the system permits.

    A process can raise its usual limit of 1,024 itself. More is needed because the server of a store holds
    two connections to each rank, and a gloo group one to each member. Returns the limit.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now == resource.RLIM_INFINITY:
        return OPEN_FILES

    possible = OPEN_FILES if most == resource.RLIM_INFINITY else min(most, OPEN_FILES)
    if now < possible:
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, most))
    return max(now, possible)
