"""Overlaps tensor-parallel collectives with the matrix products of the same layer.

It uses Transformer Engine's userbuffers. Without them, every block of a sequence-parallel layer waits for the
all-gather before it and the reduce-scatter after it. Only decoder layers use them: their collectives always
transfer ``[seq_len, hidden_size]``, whereas the tower's number of patches differs from row to row.
"""

from __future__ import annotations

import os

import torch

_buffers_allocated = False


def start_overlap(seq_len: int, hidden_size: int, tp: int, dtype: torch.dtype, fp8: bool) -> None:
    """Allocates the buffers that the tensor-parallel ranks of a node share. Collective.

    Args:
        seq_len: number of tokens of a row.
        fp8: whether the layers' products, and so the tensors that they gather, are in FP8.

    Raises:
        RuntimeError: the GPUs of a tensor-parallel group cannot map each other's memory (CUDA IPC).
    """
    global _buffers_allocated
    from transformer_engine.pytorch.module.base import UserBufferQuantizationMode, initialize_ub

    stop_overlap()
    # Transformer Engine would use NVLink multicast if the device has it, but many containers and virtual
    # machines do not allow it. Without it, the copies use CUDA IPC. UB_SKIPMC=0 in the environment enables
    # multicast again.
    os.environ.setdefault("UB_SKIPMC", "1")
    quantization_mode = UserBufferQuantizationMode.FP8 if fp8 else UserBufferQuantizationMode.NONE
    initialize_ub(
        [seq_len, hidden_size],
        tp,
        quantization_modes=[quantization_mode],
        dtype=dtype,
        bootstrap_backend="gloo",
    )
    _buffers_allocated = True


def stop_overlap() -> None:
    """Frees the buffers, if there are any. Layers that were built for them cannot run afterwards."""
    global _buffers_allocated
    if _buffers_allocated:
        from transformer_engine.pytorch.module.base import destroy_ub

        destroy_ub()
        _buffers_allocated = False
