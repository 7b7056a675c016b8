"""Tensor-parallel collectives that run beside the matrix products of the same layer (Transformer Engine's userbuffers).

Without it the all-gather before and the reduce-scatter behind every block of a sequence-parallel layer stand in its way. The
decoder layers take part alone: their collectives always carry ``[seq_len, hidden_size]``, while the tower has another number of
patches in every row.
"""

from __future__ import annotations

import os

import torch

_started = False


def start(seq_len: int, hidden_size: int, tp: int, dtype: torch.dtype, fp8: bool) -> None:
    """Allocates the buffers that the tensor-parallel ranks of a node share; before the first forward pass. Collective.

    Args:
        seq_len: tokens of a row.
        fp8: the layers' products run in FP8, and so do what they gather.

    Raises:
        RuntimeError: the GPUs of a tensor-parallel group cannot map each other's memory (CUDA IPC).
    """
    global _started
    from transformer_engine.pytorch.module.base import UserBufferQuantizationMode, initialize_ub

    stop()
    # Transformer Engine would use NVLink multicast where the device has it, which many containers and virtual machines do
    # not allow; without it the copies go over CUDA IPC. UB_SKIPMC=0 in the environment brings it back.
    os.environ.setdefault("UB_SKIPMC", "1")
    mode = UserBufferQuantizationMode.FP8 if fp8 else UserBufferQuantizationMode.NONE
    initialize_ub([seq_len, hidden_size], tp, quantization_modes=[mode], dtype=dtype, bootstrap_backend="gloo")
    _started = True


def stop() -> None:
    """Frees the buffers, when there are any; layers built for them cannot run afterwards."""
    global _started
    if _started:
        from transformer_engine.pytorch.module.base import destroy_ub

        destroy_ub()
        _started = False
