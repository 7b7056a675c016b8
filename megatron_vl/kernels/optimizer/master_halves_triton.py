"""The Triton kernels of :mod:`megatron_vl.kernels.optimizer.master_halves`.

They work on bits only, so that modes for rounding and denormal numbers do not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_ELEMENTS = 1024
_SIGN_BIT = tl.constexpr(-0x80000000)


@triton.jit
def split_bits(master_bits):
    """The upper half of a master weight's bits, rounded to the nearest, and what is left. All are int32."""
    # A NaN stays a NaN: rounding could carry into its sign.
    upper_bits = (master_bits + 0x7FFF + ((master_bits >> 16) & 1)) >> 16
    upper_bits = tl.where((master_bits & 0x7FFFFFFF) > 0x7F800000, (master_bits >> 16) | 0x40, upper_bits)
    return upper_bits, master_bits - (upper_bits << 16)


@triton.jit
def join_bits(upper_bits, low_bits, exp_avg_sq):
    """The master weight's bits from its halves. A tie that was rounded down has a negative ``exp_avg_sq``."""
    rounded_down = (low_bits == -0x8000) & (exp_avg_sq < 0)
    return (upper_bits << 16) + tl.where(rounded_down, 0x8000, low_bits)


@triton.jit(do_not_specialize=["total"])
def _split_kernel(master_pointer, weight_pointer, low_pointer, exp_avg_sq, total, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < total
    master_bits = tl.load(master_pointer + index, mask=mask, other=0)
    upper_bits, difference = split_bits(master_bits)
    tl.store(weight_pointer + index, upper_bits.to(tl.int16), mask=mask)
    tl.store(low_pointer + index, difference.to(tl.int16), mask=mask)

    second_moment = tl.load(exp_avg_sq + index, mask=mask, other=0)
    tl.store(exp_avg_sq + index, second_moment | _SIGN_BIT, mask=mask & (difference == 0x8000))


@triton.jit(do_not_specialize=["total"])
def _join_kernel(weight_pointer, low_pointer, exp_avg_sq, master_pointer, total, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < total
    upper_bits = tl.load(weight_pointer + index, mask=mask, other=0).to(tl.int32)
    difference = tl.load(low_pointer + index, mask=mask, other=0).to(tl.int32)
    second_moment = tl.load(exp_avg_sq + index, mask=mask, other=0)

    tl.store(master_pointer + index, join_bits(upper_bits, difference, second_moment), mask=mask)
    tl.store(exp_avg_sq + index, second_moment & 0x7FFFFFFF, mask=mask & (second_moment < 0))


def split_master(master_weight: Tensor, weight: Tensor, low_bits: Tensor, exp_avg_sq: Tensor) -> None:
    """master and exp_avg_sq fp32 [N], weight bf16 [N], low int16 [N]; N below 2^31."""
    if count := master_weight.numel():
        _split_kernel[(triton.cdiv(count, _BLOCK_ELEMENTS),)](
            master_weight.view(torch.int32),
            weight.view(torch.int16),
            low_bits,
            exp_avg_sq.view(torch.int32),
            count,
            BLOCK=_BLOCK_ELEMENTS,
        )


def join_master(weight: Tensor, low_bits: Tensor, exp_avg_sq: Tensor, master_weight: Tensor) -> None:
    """weight bf16 [N], low int16 [N], master and exp_avg_sq fp32 [N]; N below 2^31."""
    if count := master_weight.numel():
        _join_kernel[(triton.cdiv(count, _BLOCK_ELEMENTS),)](
            weight.view(torch.int16),
            low_bits,
            exp_avg_sq.view(torch.int32),
            master_weight.view(torch.int32),
            count,
            BLOCK=_BLOCK_ELEMENTS,
        )
