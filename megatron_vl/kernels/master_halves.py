"""Splits fp32 master weights into the model's bf16 weights and 16 more bits, and joins them again.

A bf16 weight is the master weight rounded to the nearest bf16, ties to even. The difference of the two, in
units in the last place of fp32, lies between -0x8000 and 0x8000. ``low`` stores it in 16 bits, where these
two limits are the same number. Only ties reach them, about one weight in 65,536. For a tie that was rounded
down, the sign bit of Adam's second moment, which is never negative, is set. So the master weight and the
second moment are restored bit for bit, and 2 of the master weight's 4 bytes need not be kept or moved.

A Triton kernel runs on a GPU and in Triton's interpreter, torch code elsewhere.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

TIE = 0x8000
"""The difference of a master weight that lies halfway between two bf16 numbers."""


def split_master(master: Tensor, weight: Tensor, low: Tensor, exp_avg_sq: Tensor) -> None:
    """Writes ``weight``, ``low``, and the direction of ties in the sign of ``exp_avg_sq``.

    Args:
        master: fp32 [N], finite.
        weight: bf16 [N], the rounded master weight.
        low: int16 [N].
        exp_avg_sq: fp32 [N], not negative.
    """
    if on_kernels(master):
        from megatron_vl.kernels import master_halves_triton

        master_halves_triton.split_master(master, weight, low, exp_avg_sq)
        return

    weight.copy_(master)
    difference = master.view(torch.int32) - _upper(weight)
    low.copy_(difference)
    exp_avg_sq.copy_(torch.where(difference == TIE, -exp_avg_sq, exp_avg_sq))


def join_master(weight: Tensor, low: Tensor, exp_avg_sq: Tensor, master: Tensor) -> None:
    """Writes ``master`` and makes ``exp_avg_sq`` positive again: the inverse of :func:`split_master`.

    Shapes and types are those of :func:`split_master`.
    """
    if on_kernels(master):
        from megatron_vl.kernels import master_halves_triton

        master_halves_triton.join_master(weight, low, exp_avg_sq, master)
        return

    difference = low.to(torch.int32)
    down = (difference == -TIE) & exp_avg_sq.signbit()
    master.view(torch.int32).copy_(_upper(weight) + torch.where(down, TIE, difference))
    exp_avg_sq.abs_()


def _upper(weight: Tensor) -> Tensor:
    """The bits of bf16 numbers as int32 bits of fp32 numbers."""
    return weight.view(torch.int16).to(torch.int32) << 16


def on_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
