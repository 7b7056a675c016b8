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


@triton.jit(do_not_specialize=["total"])
def _split(master, weight, low, exp_avg_sq, total, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < total
    bits = tl.load(master + index, mask=mask, other=0)

    # A NaN stays a NaN: rounding could carry into its sign.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded)
    difference = bits - (rounded << 16)
    tl.store(weight + index, rounded.to(tl.int16), mask=mask)
    tl.store(low + index, difference.to(tl.int16), mask=mask)

    second = tl.load(exp_avg_sq + index, mask=mask, other=0)
    tl.store(exp_avg_sq + index, second | _SIGN, mask=mask & (difference == 0x8000))


@triton.jit(do_not_specialize=["total"])
def _join(weight, low, exp_avg_sq, master, total, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < total
    upper = tl.load(weight + index, mask=mask, other=0).to(tl.int32) << 16
    difference = tl.load(low + index, mask=mask, other=0).to(tl.int32)
    second = tl.load(exp_avg_sq + index, mask=mask, other=0)

    down = (difference == -0x8000) & (second < 0)
    tl.store(master + index, upper + tl.where(down, 0x8000, difference), mask=mask)
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
