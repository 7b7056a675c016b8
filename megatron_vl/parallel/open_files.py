"""How many files this process may have open: sockets to the other ranks of a large run are files too."""

from __future__ import annotations

import resource

OPEN_FILES = 65_536
"""What a process of the largest runs needs: one or two connections to each of some ten thousand ranks."""


def raise_open_files() -> int:
    """Lets this process open up to :data:`OPEN_FILES` files, as far as the system permits it. Returns how
    many it may.

    The usual limit of 1,024 can be raised by the process itself: the server of a store holds two connections
    to each rank, a gloo group one to each member.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now == resource.RLIM_INFINITY:
        return OPEN_FILES

    possible = OPEN_FILES if most == resource.RLIM_INFINITY else min(most, OPEN_FILES)
    if now < possible:
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, most))
    return max(now, possible)
