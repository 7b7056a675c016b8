"""The Triton kernel of :mod:`megatron_vl.kernels.adam`.

One launch updates all stretches of a chunk: a program takes a block of elements, and a table says whose they
are. Products and sums are not fused, and divisions and roots are rounded to the nearest number, so that the
bits are those of the torch code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vl.kernels.adam import Launch, StepRates, Stretch

_BLOCK = 2048
_ADDRESS_BYTES = 16
"""Alignment with which 8 bf16 numbers are loaded at once."""
_SIGN = tl.constexpr(-0x80000000)
# The factors of the hash in :mod:`megatron_vl.kernels.moments`.
_SECOND = tl.constexpr(0x9E3779B1 - (1 << 32))
_MIX_0, _MIX_1 = tl.constexpr(0x85EBCA6B - (1 << 32)), tl.constexpr(0xC2B2AE35 - (1 << 32))


@triton.jit
def _joined(upper, low, square):
    """The master weight's bits from its halves; the sign of ``square`` marks a tie that was rounded down."""
    down = (low == -0x8000) & (square < 0)
    return (upper << 16) + tl.where(down, 0x8000, low)


@triton.jit
def _halves(bits):
    """The upper half of a master weight's bits, rounded to the nearest, and what is left."""
    # A NaN stays a NaN: rounding could carry into its sign.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded)
    return rounded, bits - (rounded << 16)


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
    if ALIGNED:
        weights = tl.multiple_of(weights, 16)
        gradients = tl.multiple_of(gradients, 16)
    offset = tl.multiple_of(tl.load(row + 2).to(tl.int32), 64)
    size = tl.load(row + 3).to(tl.int32)
    numbers = rates + tl.load(row + 5) * 10

    index = (block - tl.load(row + 4).to(tl.int32)) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    gradient = tl.load(gradients + index, mask=mask, other=0)
    avg = tl.load(exp_avg + offset + index, mask=mask, other=0).to(tl.int32) << 16
    square = tl.load(exp_avg_sq + offset + index, mask=mask, other=0).to(tl.int32) << 16
    bits = tl.load(weights + index, mask=mask, other=0).to(tl.int32)
    if HALVES:
        bits = _joined(bits, tl.load(low + offset + index, mask=mask, other=0).to(tl.int32), square)
        square = square & 0x7FFFFFFF

    avg = tl.load(numbers) * avg.to(tl.float32, bitcast=True) + tl.load(numbers + 1) * gradient
    second = tl.load(numbers + 2) * square.to(tl.float32, bitcast=True)
    second = second + tl.load(numbers + 3) * (gradient * gradient)

    lr = tl.load(numbers + 7)
    master = bits.to(tl.float32, bitcast=True)
    root = tl.sqrt_rn(tl.div_rn(second, tl.load(numbers + 5) + tl.zeros_like(second)))
    update = tl.div_rn(avg, tl.load(numbers + 4) + tl.zeros_like(avg))
    update = tl.div_rn(update, root + tl.load(numbers + 6)) + tl.load(numbers + 8) * master
    master = tl.where(lr == 0, master, master - lr * update)

    bits = master.to(tl.int32, bitcast=True)
    square = second.to(tl.int32, bitcast=True)
    if HALVES:
        bits, rest = _halves(bits)
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
    stretches: Sequence[Stretch],
    rates: StepRates,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    low: Tensor,
    launch: Launch,
) -> None:
    """Arguments as in :func:`megatron_vl.kernels.adam.adam_step`; the chunk is smaller than 2^31 elements."""
    _tell(launch, stretches, exp_avg.device)
    if not len(launch.owners):
        return
    _step[(len(launch.owners),)](
        launch.stretches,
        launch.owners,
        rates.table,
        exp_avg.view(torch.int16),
        exp_avg_sq.view(torch.int16),
        low,
        HALVES=stretches[0].weight.dtype == torch.bfloat16,
        ALIGNED=launch.aligned,
        BLOCK=_BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )


def _tell(launch: Launch, stretches: Sequence[Stretch], device: torch.device) -> None:
    """Brings ``launch`` up to date. It costs a copy to the device only when an address or a step differs."""
    known: list[tuple[int, ...]] = []
    first = 0
    for one in stretches:
        weight = one.weight.data_ptr() + one.weight.itemsize * one.start
        gradient = one.gradient.data_ptr() + one.gradient.itemsize * one.start
        known.append((weight, gradient, one.offset, one.size, first, one.rates))
        first += triton.cdiv(one.size, _BLOCK)
    if known == launch.known:
        return

    table = torch.tensor(known, dtype=torch.int64)
    blocks = (table[:, 3] + _BLOCK - 1) // _BLOCK
    owners = torch.repeat_interleave(torch.arange(len(known), dtype=torch.int32), blocks)
    launch.known = known
    launch.aligned = not bool((table[:, :2] % _ADDRESS_BYTES).any())
    launch.stretches = table.to(device)
    launch.owners = owners.to(device)
