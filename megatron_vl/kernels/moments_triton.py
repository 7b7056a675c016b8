"""The Triton kernel of :mod:`megatron_vl.kernels.moments`. It works on bits alone, so that no mode of
rounding or of denormal numbers matters."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
# The factors of the hash in :mod:`megatron_vl.kernels.moments`.
_SECOND, _STEP = tl.constexpr(0x9E3779B1 - (1 << 32)), tl.constexpr(0x27D4EB2F)
_MIX_0, _MIX_1 = tl.constexpr(0x85EBCA6B - (1 << 32)), tl.constexpr(0xC2B2AE35 - (1 << 32))


@triton.jit(do_not_specialize=["step", "total"])
def _round(exp_avg, exp_avg_sq, first, second, step, total, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < total
    avg = tl.load(exp_avg + index, mask=mask, other=0)
    square = tl.load(exp_avg_sq + index, mask=mask, other=0)

    bits = avg + (square & 0x7FFFFFFF) * _SECOND + step * _STEP
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * _MIX_0
    bits = (bits ^ (bits >> 13 & 0x7FFFF)) * _MIX_1
    bits = bits ^ (bits >> 16 & 0xFFFF)

    tl.store(first + index, ((avg + (bits & 0xFFFF)) >> 16).to(tl.int16), mask=mask)
    tl.store(second + index, ((square + (bits >> 16 & 0xFFFF)) >> 16).to(tl.int16), mask=mask)


def round_moments(exp_avg: Tensor, exp_avg_sq: Tensor, step: int, first: Tensor, second: Tensor) -> None:
    """exp_avg and exp_avg_sq fp32 [N], first and second bf16 [N]; N below 2^31."""
    if count := exp_avg.numel():
        _round[(triton.cdiv(count, _BLOCK),)](
            exp_avg.view(torch.int32),
            exp_avg_sq.view(torch.int32),
            first.view(torch.int16),
            second.view(torch.int16),
            step,
            count,
            BLOCK=_BLOCK,
        )
