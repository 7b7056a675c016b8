"""The Triton kernels of :mod:`megatron_vl.kernels.master_halves`.

They work on bits only, so that modes for rounding and denormal numbers do not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_SIGN = tl.constexpr(-0x80000000)


@triton.jit
def halves_of(bits):
    """The upper half of a master weight's bits, rounded to the nearest, and what is left. All are int32."""
    # A NaN stays a NaN: rounding could carry into its sign.
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    upper = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, upper)
    return upper, bits - (upper << 16)


@triton.jit
def joined(upper, low, exp_avg_sq):
    """The master weight's bits from its halves. A tie that was rounded down has a negative ``exp_avg_sq``."""
    down = (low == -0x8000) & (exp_avg_sq < 0)
    return (upper << 16) + tl.where(down, 0x8000, low)


@triton.jit(do_not_specialize=["total"])
def _split(master, weight, low, exp_avg_sq, total, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < total
    bits = tl.load(master + index, mask=mask, other=0)
    upper, difference = halves_of(bits)
    tl.store(weight + index, upper.to(tl.int16), mask=mask)
    tl.store(low + index, difference.to(tl.int16), mask=mask)

    second = tl.load(exp_avg_sq + index, mask=mask, other=0)
    tl.store(exp_avg_sq + index, second | _SIGN, mask=mask & (difference == 0x8000))


@triton.jit(do_not_specialize=["total"])
def _join(weight, low, exp_avg_sq, master, total, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < total
    upper = tl.load(weight + index, mask=mask, other=0).to(tl.int32)
    difference = tl.load(low + index, mask=mask, other=0).to(tl.int32)
    second = tl.load(exp_avg_sq + index, mask=mask, other=0)

    tl.store(master + index, joined(upper, difference, second), mask=mask)
    tl.store(exp_avg_sq + index, second & 0x7FFFFFFF, mask=mask & (second < 0))


def split_master(master: Tensor, weight: Tensor, low: Tensor, exp_avg_sq: Tensor) -> None:
    """master and exp_avg_sq fp32 [N], weight bf16 [N], low int16 [N]; N below 2^31."""
    if count := master.numel():
        _split[(triton.cdiv(count, _BLOCK),)](
            master.view(torch.int32),
            weight.view(torch.int16),
            low,
            exp_avg_sq.view(torch.int32),
            count,
            BLOCK=_BLOCK,
        )


def join_master(weight: Tensor, low: Tensor, exp_avg_sq: Tensor, master: Tensor) -> None:
    """weight bf16 [N], low int16 [N], master and exp_avg_sq fp32 [N]; N below 2^31."""
    if count := master.numel():
        _join[(triton.cdiv(count, _BLOCK),)](
            weight.view(torch.int16),
            low,
            exp_avg_sq.view(torch.int32),
            master.view(torch.int32),
            count,
            BLOCK=_BLOCK,
        )
