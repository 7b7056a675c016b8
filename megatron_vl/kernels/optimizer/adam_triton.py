"""The Triton kernels of :mod:`megatron_vl.kernels.optimizer.adam` and ``master_halves``.

One launch updates all stretches of a chunk: a program takes a block of elements, and a table says whose they
are. Products and sums are not fused, and divisions and roots are rounded to the nearest number, so that the
bits are those of the torch code. Halves of master weights are split and joined by their bits only, so that
modes for rounding and denormal numbers do not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vl.kernels.sizes import cdiv

BLOCK_ELEMENTS = 2048
# The factors of the hash in :mod:`megatron_vl.kernels.optimizer.adam`.
_SECOND = tl.constexpr(0x9E3779B1 - (1 << 32))
_MIX_0, _MIX_1 = tl.constexpr(0x85EBCA6B - (1 << 32)), tl.constexpr(0xC2B2AE35 - (1 << 32))
HALVES_BLOCK = 1024
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
        _split_kernel[(cdiv(count, HALVES_BLOCK),)](
            master_weight.view(torch.int32), weight.view(torch.int16), low_bits,
            exp_avg_sq.view(torch.int32), count,
            BLOCK=HALVES_BLOCK,
        )  # fmt: skip


def join_master(weight: Tensor, low_bits: Tensor, exp_avg_sq: Tensor, master_weight: Tensor) -> None:
    """weight bf16 [N], low int16 [N], master and exp_avg_sq fp32 [N]; N below 2^31."""
    if count := master_weight.numel():
        _join_kernel[(cdiv(count, HALVES_BLOCK),)](
            weight.view(torch.int16), low_bits, exp_avg_sq.view(torch.int32),
            master_weight.view(torch.int32), count,
            BLOCK=HALVES_BLOCK,
        )  # fmt: skip


@triton.jit
def _random_bits(first_bits, second_bits, step_hash):
    hashed_bits = first_bits + (second_bits & 0x7FFFFFFF) * _SECOND + step_hash
    hashed_bits = (hashed_bits ^ (hashed_bits >> 16 & 0xFFFF)) * _MIX_0
    hashed_bits = (hashed_bits ^ (hashed_bits >> 13 & 0x7FFFF)) * _MIX_1
    return hashed_bits ^ (hashed_bits >> 16 & 0xFFFF)


@triton.jit
def _adam_step_kernel(
    slice_table,
    slice_of_block,
    coefficient_table,
    exp_avg,
    exp_avg_sq,
    low_bits,
    HALVES: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block_index = tl.program_id(0)
    slice_record = slice_table + tl.load(slice_of_block + block_index) * 6
    weight_pointer = tl.load(slice_record).to(tl.pointer_type(tl.int16 if HALVES else tl.int32))
    gradient_pointer = tl.load(slice_record + 1).to(tl.pointer_type(tl.float32))
    state_offset = tl.multiple_of(tl.load(slice_record + 2).to(tl.int32), 64)
    num_elements = tl.load(slice_record + 3).to(tl.int32)
    if ALIGNED:  # 16 bytes are loaded at once, which the mask must allow, too.
        weight_pointer = tl.multiple_of(weight_pointer, 16)
        gradient_pointer = tl.multiple_of(gradient_pointer, 16)
        num_elements = tl.multiple_of(num_elements, 8)
    coefficients = coefficient_table + tl.load(slice_record + 5) * 11

    element_index = (block_index - tl.load(slice_record + 4).to(tl.int32)) * BLOCK + tl.arange(0, BLOCK)
    mask = element_index < num_elements
    gradient = tl.load(coefficients + 9) * tl.load(gradient_pointer + element_index, mask=mask, other=0)
    first_moment = tl.load(exp_avg + state_offset + element_index, mask=mask, other=0).to(tl.int32) << 16
    second_bits = tl.load(exp_avg_sq + state_offset + element_index, mask=mask, other=0).to(tl.int32) << 16
    master_bits = tl.load(weight_pointer + element_index, mask=mask, other=0).to(tl.int32)
    if HALVES:
        master_bits = join_bits(
            master_bits,
            tl.load(low_bits + state_offset + element_index, mask=mask, other=0).to(tl.int32),
            second_bits,
        )
        second_bits = second_bits & 0x7FFFFFFF

    first_moment = (
        tl.load(coefficients) * first_moment.to(tl.float32, bitcast=True)
        + tl.load(coefficients + 1) * gradient
    )
    second_moment = tl.load(coefficients + 2) * second_bits.to(tl.float32, bitcast=True)
    second_moment = second_moment + tl.load(coefficients + 3) * (gradient * gradient)

    learning_rate = tl.load(coefficients + 7)
    master_weight = master_bits.to(tl.float32, bitcast=True)
    corrected_root = tl.sqrt_rn(second_moment * tl.load(coefficients + 5))
    weight_update = tl.div_rn(
        first_moment * tl.load(coefficients + 4), corrected_root + tl.load(coefficients + 6)
    )
    weight_update = weight_update + tl.load(coefficients + 8) * master_weight
    master_weight = tl.where(learning_rate == 0, master_weight, master_weight - learning_rate * weight_update)

    master_bits = master_weight.to(tl.int32, bitcast=True)
    second_bits = second_moment.to(tl.int32, bitcast=True)
    if HALVES:
        master_bits, low_difference = split_bits(master_bits)
        tl.store(weight_pointer + element_index, master_bits.to(tl.int16), mask=mask)
        tl.store(low_bits + state_offset + element_index, low_difference.to(tl.int16), mask=mask)
        second_bits = tl.where(low_difference == 0x8000, second_bits | _SIGN_BIT, second_bits)
    else:
        tl.store(weight_pointer + element_index, master_bits, mask=mask)

    first_moment = first_moment.to(tl.int32, bitcast=True)
    rounding_noise = _random_bits(
        first_moment, second_bits, tl.load(coefficients + 10).to(tl.int32, bitcast=True)
    )
    tl.store(
        exp_avg + state_offset + element_index,
        ((first_moment + (rounding_noise & 0xFFFF)) >> 16).to(tl.int16),
        mask=mask,
    )
    tl.store(
        exp_avg_sq + state_offset + element_index,
        ((second_bits + (rounding_noise >> 16 & 0xFFFF)) >> 16).to(tl.int16),
        mask=mask,
    )


def adam_step(
    slice_table: Tensor,
    slice_of_block: Tensor,
    coefficient_table: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    low_bits: Tensor,
    *,
    has_split_master: bool,
    is_aligned: bool,
) -> None:
    """Updates some stretches of a chunk of less than 2^31 elements.

    Args:
        slice_table: int64 [N, 6], as :class:`megatron_vl.kernels.optimizer.adam.LaunchTables` says.
        slice_of_block: int32 [blocks].
        coefficient_table: fp32 [rates, 11], as :class:`megatron_vl.kernels.optimizer.adam.StepCoefficients`
        says. has_split_master: whether weights are bf16. is_aligned: whether addresses are multiples of 16
        bytes and sizes of 8 elements, which is faster.
    """
    _adam_step_kernel[(len(slice_of_block),)](
        slice_table, slice_of_block, coefficient_table, exp_avg.view(torch.int16),
        exp_avg_sq.view(torch.int16), low_bits,
        HALVES=has_split_master, ALIGNED=is_aligned, BLOCK=BLOCK_ELEMENTS, num_warps=8,
        enable_fp_fusion=False,
    )  # fmt: skip
