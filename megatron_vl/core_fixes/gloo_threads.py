"""Gives each gloo group only one worker thread (torch 2.11.0).

A gloo group has two worker threads by default. At the end of each operation, a worker assigns the group's
``lastCompletedWorkName``, a ``std::string`` that both share, without a lock (``ProcessGroupGloo::runLoop``).
Names of up to 15 characters are stored inside the string. ``ALLGATHER_COALESCED``, which Megatron-core's
overlapped parameter gather issues, has 19 and is stored on the heap. If two such operations end at the same
time, they free one buffer twice, and the rank dies with ``malloc(): unaligned tcache chunk detected`` or a
segmentation fault. With one worker there is no race.

NCCL is not affected, because only one watchdog thread writes its name. This fix can go when torch assigns the
name under a lock or no longer keeps it. tests/parallel/test_groups.py checks the groups' numbers of threads.
"""

import os
from datetime import timedelta
from typing import Any


def use_one_gloo_worker() -> None:
    """Gives every gloo group that is made later only one worker thread. Idempotent.

    Megatron-core and torch make groups themselves, and torch accepts no options for gloo. The constructor is
    all that these groups have in common, so it is replaced.
    """
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    gloo_class: Any = ProcessGroupGloo
    original_init = gloo_class.__init__
    if getattr(original_init, "one_worker", False):
        return

    def __init__(
        self: Any, store: Any, rank: int, size: int, options: Any = None, *, timeout: timedelta | None = None
    ) -> None:
        if isinstance(options, timedelta):
            options, timeout = None, options
        original_init(self, store, rank, size, options or _gloo_options(timeout))

    __init__.one_worker = True  # type: ignore[attr-defined]
    gloo_class.__init__ = __init__


def _gloo_options(timeout: timedelta | None) -> Any:
    """The options that torch's own constructor uses, except for the number of threads.

    They have a device for each network interface in ``GLOO_SOCKET_IFNAME`` (names separated by commas), or
    one for the interface that the host's name resolves to.
    """
    from torch.distributed.distributed_c10d import ProcessGroupGloo, default_pg_timeout

    gloo_class: Any = ProcessGroupGloo
    interface_names = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    devices = [gloo_class.create_device(interface=name) for name in interface_names]
    options = gloo_class._Options()
    options._timeout = timeout or default_pg_timeout
    options._devices = devices or [gloo_class.create_default_device()]
    options._threads = 1
    return options
