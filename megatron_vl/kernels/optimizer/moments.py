"""Rounds Adam's moments from fp32 to bf16 so that their mean is exact.

Each step changes the second moment by up to a share of 1 - beta2. If that is less than half the distance of
two bf16 numbers (0.2 to 0.4 %, so for beta2 above 0.996), rounding to the nearest never lets the moment fall.
Stochastic rounding rounds up with the probability that makes the mean exact.

The random bits are a hash of both unrounded moments and of the step. So they need no generator, no state and
no index of the element. A step gives the same bits in every layout, after every resume, and for every
division of the state into chunks.

This is the code for a CPU. On a GPU, :mod:`megatron_vl.kernels.optimizer.adam_triton` does the same within
the update.
"""

from __future__ import annotations

import torch
from torch import Tensor

SECOND_MOMENT_FACTOR, STEP_FACTOR = 0x9E3779B1 - (1 << 32), 0x27D4EB2F
"""Odd factors of the second moment's bits and of the step in the hash."""
MIX_FACTORS = (0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32))
"""Odd factors that spread each bit over all others. All factors are the int32 of their bits."""


def round_moments(
    exp_avg: Tensor, exp_avg_sq: Tensor, step_count: int, first_moment: Tensor, second_moment: Tensor
) -> None:
    """Writes the moments of a step to ``first_moment`` and ``second_moment``.

    Values that bf16 can represent do not change.

    Args:
        exp_avg: fp32 [N], finite.
        exp_avg_sq: fp32 [N], finite. Its signs, which may mark ties of master weights, are kept.
        step_count: Adam's step count after this step.
        first_moment: bf16 [N].
        second_moment: bf16 [N].
    """
    first_bits, second_bits = exp_avg.view(torch.int32), exp_avg_sq.view(torch.int32)
    noise_bits = random_bits(first_bits, second_bits, step_count)
    first_moment.view(torch.int16).copy_((first_bits + (noise_bits & 0xFFFF)) >> 16)
    second_moment.view(torch.int16).copy_((second_bits + ((noise_bits >> 16) & 0xFFFF)) >> 16)


def random_bits(first_bits: Tensor, second_bits: Tensor, step_count: int) -> Tensor:
    """int32 [N] from the bits of both moments, int32 [N], and the step."""
    mixed_bits = first_bits + (second_bits & 0x7FFFFFFF) * SECOND_MOMENT_FACTOR + step_hash(step_count)
    mixed_bits = (mixed_bits ^ (mixed_bits >> 16 & 0xFFFF)) * MIX_FACTORS[0]
    mixed_bits = (mixed_bits ^ (mixed_bits >> 13 & 0x7FFFF)) * MIX_FACTORS[1]
    return mixed_bits ^ (mixed_bits >> 16 & 0xFFFF)


def step_hash(step_count: int) -> int:
    """The number that a step adds to the hash, as an int32."""
    return (step_count * STEP_FACTOR + (1 << 31)) % (1 << 32) - (1 << 31)
