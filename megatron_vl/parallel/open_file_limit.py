"""Raises this process's limit on open files. Sockets count as open files, and a large run has many."""

from __future__ import annotations

import resource

MAX_OPEN_FILES = 65_536
"""Enough for a process of the largest runs: one or two connections to each of some ten thousand ranks."""


def raise_open_file_limit() -> None:
    """Raises this process's limit on open files to :data:`MAX_OPEN_FILES`, or as far as the system permits.

    The usual limit is 1,024, which a process can raise itself. The server of a store needs more, because it
    holds two connections to each rank. So does a gloo group, which has a connection to each member.
    """
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    target_limit = MAX_OPEN_FILES if hard_limit == resource.RLIM_INFINITY else min(hard_limit, MAX_OPEN_FILES)
    if soft_limit != resource.RLIM_INFINITY and soft_limit < target_limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target_limit, hard_limit))
