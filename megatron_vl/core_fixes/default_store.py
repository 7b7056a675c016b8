"""The key-value store of the default process group, for which torch 2.11.0 has no public function.

It carries messages that must reach other ranks without a collective: the failure of a rank, the start of a
layout, lists for rank 0. A separate store would be one more server with a connection to every rank.
"""

from typing import Any


def default_store() -> Any:
    """The ``torch.distributed.Store`` of the default process group, which must exist."""
    # Ranks that fail early import this module before torch is imported.
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
