"""Tensor-parallel collectives that run beside the matrix products of the same layer (Transformer Engine's
userbuffers).

Without it the all-gather before and the reduce-scatter behind every block of a sequence-parallel layer stand
in its way. The decoder layers take part alone: their collectives always carry ``[seq_len, hidden_size]``,
while the tower has another number of patches in every row.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

_started = False


def start(seq_len: int, hidden_size: int, tp: int, dtype: torch.dtype, fp8: bool) -> None:
    """Allocates the buffers that the tensor-parallel ranks of a node share; before the first forward pass.
    Collective.

    Args:
        seq_len: tokens of a row.
        fp8: the layers' products run in FP8, and so do what they gather.

    Raises:
        RuntimeError: the GPUs of a tensor-parallel group cannot map each other's memory (CUDA IPC).
    """
    global _started
    from transformer_engine.pytorch.module.base import UserBufferQuantizationMode, initialize_ub

    stop()
    # Transformer Engine would use NVLink multicast where the device has it, which many containers and virtual
    # machines do not allow; without it the copies go over CUDA IPC. UB_SKIPMC=0 in the environment brings it
    # back.
    os.environ.setdefault("UB_SKIPMC", "1")
    mode = UserBufferQuantizationMode.FP8 if fp8 else UserBufferQuantizationMode.NONE
    initialize_ub(
        [seq_len, hidden_size], tp, quantization_modes=[mode], dtype=dtype, bootstrap_backend="gloo"
    )
    _started = True


def stop() -> None:
    """Frees the buffers, when there are any; layers built for them cannot run afterwards."""
    global _started
    if _started:
        from transformer_engine.pytorch.module.base import destroy_ub

        destroy_ub()
        _started = False


@contextmanager
def paused(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Forward passes of ``chunks`` with ordinary collectives meanwhile, for rows of another length than
    ``seq_len``.

    Userbuffers move what the buffer holds, whatever the row does: with a shorter one they read and write past
    its tensors.
    """
    names = ("ub_overlap_ag_fprop", "ub_overlap_rs_fprop")
    using = [
        (m, name) for chunk in chunks for m in chunk.modules() for name in names if getattr(m, name, False)
    ]
    for module, name in using:
        setattr(module, name, False)
    try:
        yield
    finally:
        for module, name in using:
            setattr(module, name, True)
