"""The key-value store of the default process group, which torch 2.11.0 keeps to itself.

It carries what must reach other ranks without a collective: the failure of one rank, the beginning of a
layout, letters to rank 0. A store of our own would be one more server with a connection to every rank.
"""

from __future__ import annotations

from typing import Any


def default_store() -> Any:
    """The ``torch.distributed.Store`` that ``init_process_group`` was given or made.

    Raises:
        ValueError: there is no default process group.
    """
    # Not at the top: ranks that fail early ask for this module before torch is imported.
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
