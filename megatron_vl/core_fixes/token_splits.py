"""Expert-parallel ``alltoall`` on a machine without a GPU (Megatron-core 0.19.2).

The dispatcher turns the numbers of tokens that ranks exchange into NumPy arrays while it copies them off the GPU
(``maybe_move_tensor_to_cpu(..., as_numpy=True)``); what is on the host already stays a tensor, which
``torch.distributed.all_to_all_single`` does not take as split sizes. Can go when that function heeds ``as_numpy`` for
tensors of the host, see ``tests/models/test_moe.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe import token_dispatcher

_move = token_dispatcher.maybe_move_tensor_to_cpu


def _move_as_asked(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    moved = _move(tensor, as_numpy, record_stream)
    return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved


def splits_as_numbers() -> None:
    """Makes the dispatcher's split sizes numbers on every device. Calling it twice does nothing more."""
    token_dispatcher.maybe_move_tensor_to_cpu = _move_as_asked
