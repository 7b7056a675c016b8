"""Raises this process's limit on open files, which also applies to the sockets of a large run."""

from __future__ import annotations

import resource

OPEN_FILES = 65_536
"""Enough for a process of the largest runs: one or two connections to each of some ten thousand ranks."""


def raise_open_files() -> int:
    """Raises this process's limit on open files to :data:`OPEN_FILES`, or as far as the system permits.

    The usual limit is 1,024, which a process can raise itself. The server of a store needs more, because it
    holds two connections to each rank. So does a gloo group, which has a connection to each member.

    Returns:
        The new limit.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now == resource.RLIM_INFINITY:
        return OPEN_FILES

    possible = OPEN_FILES if most == resource.RLIM_INFINITY else min(most, OPEN_FILES)
    if now < possible:
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, most))
    return max(now, possible)
