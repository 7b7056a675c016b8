"""Splits fp32 master weights into the model's bf16 weights and 16 more bits, and joins them again.

A bf16 weight is the master weight rounded to the nearest bf16, ties to even. The difference of the two, in
units in the last place of fp32, lies between -0x8000 and 0x8000. ``low`` stores it in 16 bits, where these
two limits are the same number. Only ties reach them, about one weight in 65,536. For a tie that was rounded
down, the sign bit of Adam's second moment, which is never negative, is set. So the master weight and the
second moment are restored bit for bit, and 2 of the master weight's 4 bytes need not be kept or moved.

A Triton kernel runs on a GPU and in Triton's interpreter, torch code elsewhere.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_vl.kernels.where_kernels_run import runs_on_kernels

_BLOCK_ELEMENTS = 1 << 16
TIE_DIFFERENCE = 0x8000
"""The difference of a master weight that lies halfway between two bf16 numbers."""


def split_master(master_weight: Tensor, weight: Tensor, low_bits: Tensor, exp_avg_sq: Tensor) -> None:
    """Writes ``weight``, ``low_bits``, and the direction of ties in the sign of ``exp_avg_sq``.

    Args:
        master_weight: fp32 [N], finite.
        weight: bf16 [N], the rounded master weight.
        low_bits: int16 [N].
        exp_avg_sq: fp32 [N], not negative.
    """
    if runs_on_kernels(master_weight):
        from megatron_vl.kernels.optimizer import adam_triton

        adam_triton.split_master(master_weight, weight, low_bits, exp_avg_sq)
        return

    for master, upper, low, moment in _in_blocks(master_weight, weight, low_bits, exp_avg_sq):
        upper.copy_(master)
        # Those of bf16 numbers are the upper bits of fp32 numbers.
        difference = master.view(torch.int32) - (upper.view(torch.int16).to(torch.int32) << 16)
        low.copy_(difference)
        moment.copy_(torch.where(difference == TIE_DIFFERENCE, -moment, moment))


def join_master(weight: Tensor, low_bits: Tensor, exp_avg_sq: Tensor, master_weight: Tensor) -> None:
    """Writes ``master_weight`` and makes ``exp_avg_sq`` positive again: the inverse of :func:`split_master`.

    Shapes and types are those of :func:`split_master`.
    """
    if runs_on_kernels(master_weight):
        from megatron_vl.kernels.optimizer import adam_triton

        adam_triton.join_master(weight, low_bits, exp_avg_sq, master_weight)
        return

    for upper, low, moment, master in _in_blocks(weight, low_bits, exp_avg_sq, master_weight):
        master.copy_(upper)
        bits = master.view(torch.int32)
        bits += low
        bits.add_((low == -TIE_DIFFERENCE) & moment.signbit(), alpha=2 * TIE_DIFFERENCE)  # rounded down
        moment.abs_()


def _in_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors' parts, one after another: what is computed of them stays in a core's cache."""
    return zip(*(tensor.split(_BLOCK_ELEMENTS) for tensor in tensors), strict=True)
