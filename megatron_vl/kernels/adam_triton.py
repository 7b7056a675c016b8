"""The Triton kernel of :mod:`megatron_vl.kernels.adam`.

One launch updates all stretches of a chunk: a program takes a block of elements, and a table says whose they
are. Products and sums are not fused, and divisions and roots are rounded to the nearest number, so that the
bits are those of the torch code.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vl.kernels.master_halves_triton import halves_of, joined

BLOCK = 2048
"""Elements of a program."""
_SIGN = tl.constexpr(-0x80000000)
# The factors of the hash in :mod:`megatron_vl.kernels.moments`.
_SECOND = tl.constexpr(0x9E3779B1 - (1 << 32))
_MIX_0, _MIX_1 = tl.constexpr(0x85EBCA6B - (1 << 32)), tl.constexpr(0xC2B2AE35 - (1 << 32))


@triton.jit
def _random_bits(avg, square, step_hash):
    bits = avg + (square & 0x7FFFFFFF) * _SECOND + step_hash
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * _MIX_0
    bits = (bits ^ (bits >> 13 & 0x7FFFF)) * _MIX_1
    return bits ^ (bits >> 16 & 0xFFFF)


@triton.jit
def _step(
    stretches,
    owners,
    rates,
    exp_avg,
    exp_avg_sq,
    low,
    HALVES: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    row = stretches + tl.load(owners + block) * 6
    weights = tl.load(row).to(tl.pointer_type(tl.int16 if HALVES else tl.int32))
    gradients = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    offset = tl.multiple_of(tl.load(row + 2).to(tl.int32), 64)
    size = tl.load(row + 3).to(tl.int32)
    if ALIGNED:  # 16 bytes are loaded at once, which the mask must allow, too.
        weights = tl.multiple_of(weights, 16)
        gradients = tl.multiple_of(gradients, 16)
        size = tl.multiple_of(size, 8)
    numbers = rates + tl.load(row + 5) * 10

    index = (block - tl.load(row + 4).to(tl.int32)) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    gradient = tl.load(gradients + index, mask=mask, other=0)
    avg = tl.load(exp_avg + offset + index, mask=mask, other=0).to(tl.int32) << 16
    square = tl.load(exp_avg_sq + offset + index, mask=mask, other=0).to(tl.int32) << 16
    bits = tl.load(weights + index, mask=mask, other=0).to(tl.int32)
    if HALVES:
        bits = joined(bits, tl.load(low + offset + index, mask=mask, other=0).to(tl.int32), square)
        square = square & 0x7FFFFFFF

    avg = tl.load(numbers) * avg.to(tl.float32, bitcast=True) + tl.load(numbers + 1) * gradient
    second = tl.load(numbers + 2) * square.to(tl.float32, bitcast=True)
    second = second + tl.load(numbers + 3) * (gradient * gradient)

    lr = tl.load(numbers + 7)
    master = bits.to(tl.float32, bitcast=True)
    root = tl.sqrt_rn(second * tl.load(numbers + 5))
    update = tl.div_rn(avg * tl.load(numbers + 4), root + tl.load(numbers + 6))
    update = update + tl.load(numbers + 8) * master
    master = tl.where(lr == 0, master, master - lr * update)

    bits = master.to(tl.int32, bitcast=True)
    square = second.to(tl.int32, bitcast=True)
    if HALVES:
        bits, rest = halves_of(bits)
        tl.store(weights + index, bits.to(tl.int16), mask=mask)
        tl.store(low + offset + index, rest.to(tl.int16), mask=mask)
        square = tl.where(rest == 0x8000, square | _SIGN, square)
    else:
        tl.store(weights + index, bits, mask=mask)

    avg = avg.to(tl.int32, bitcast=True)
    noise = _random_bits(avg, square, tl.load(numbers + 9).to(tl.int32, bitcast=True))
    tl.store(exp_avg + offset + index, ((avg + (noise & 0xFFFF)) >> 16).to(tl.int16), mask=mask)
    tl.store(exp_avg_sq + offset + index, ((square + (noise >> 16 & 0xFFFF)) >> 16).to(tl.int16), mask=mask)


def adam_step(
    stretches: Tensor,
    owners: Tensor,
    rates: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    low: Tensor,
    *,
    halves: bool,
    aligned: bool,
) -> None:
    """Updates some stretches of a chunk of less than 2^31 elements.

    Args:
        stretches: int64 [N, 6], as :class:`megatron_vl.kernels.adam.Launch` says.
        owners: int32 [blocks].
        rates: fp32 [rates, 10], as :class:`megatron_vl.kernels.adam.StepRates` says.
        halves: whether weights are bf16.
        aligned: whether addresses are multiples of 16 bytes and sizes of 8 elements, which is faster.
    """
    _step[(len(owners),)](
        stretches,
        owners,
        rates,
        exp_avg.view(torch.int16),
        exp_avg_sq.view(torch.int16),
        low,
        HALVES=halves,
        ALIGNED=aligned,
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )
