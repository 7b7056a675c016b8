"""Moments are rounded right on average, and master weights come back bit for bit from two halves."""

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_vl.kernels.optimizer.adam import random_bits, round_moments
from megatron_vl.kernels.optimizer.master_halves import join_master, split_master

HALF_AND_QUARTERS = (0x4000, 0x8000, 0xC000)
"""Low halves of numbers a quarter, half and three quarters of the way to the next bf16 number."""


def rounded(avg: Tensor, square: Tensor, step: int = 1) -> tuple[Tensor, Tensor]:
    first, second = (torch.empty(len(avg), dtype=torch.bfloat16) for _ in range(2))
    round_moments(avg, square, step, first, second)
    return first, second


def test_hash_worked_by_hand() -> None:
    """Of moments whose bits are 3 and 5 in step 2, in unsigned arithmetic modulo 2^32."""
    mixed = (3 + 5 * 0x9E3779B1 + 2 * 0x27D4EB2F) % 2**32
    assert mixed == 0x66BF36D6
    mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B % 2**32
    mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 % 2**32
    mixed ^= mixed >> 16

    avg, square = (torch.tensor([bits], dtype=torch.int32) for bits in (3, 5))
    assert random_bits(avg, square, 2).item() % 2**32 == mixed

    first, second = rounded(avg.view(torch.float32), square.view(torch.float32), 2)
    assert first.view(torch.int16).item() == (3 + (mixed & 0xFFFF)) >> 16
    assert second.view(torch.int16).item() == (5 + (mixed >> 16)) >> 16


def test_rounding_keeps_what_bf16_holds_and_takes_a_neighbour_otherwise() -> None:
    torch.manual_seed(0)
    avg = torch.randn(50_000) * torch.logspace(-40, 30, 50_000)
    square = avg.square().clamp(max=1e38) * torch.where(torch.rand(50_000) < 0.5, -1.0, 1.0)
    for wide, narrow in zip((avg, square), rounded(avg, square), strict=True):
        down = (wide.view(torch.int32) >> 16).to(torch.int16)
        steps = narrow.view(torch.int16) - down
        assert ((steps == 0) | (steps == 1)).all() and set(steps.unique().tolist()) == {0, 1}
        assert torch.equal(narrow.signbit(), wide.signbit())

    kept = avg.bfloat16(), square.bfloat16()
    again = rounded(*(tensor.float() for tensor in kept))
    assert all(
        torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(kept, again, strict=True)
    )


@pytest.mark.parametrize("low", HALF_AND_QUARTERS)
def test_rounding_has_the_right_mean_over_elements_and_steps(low: int) -> None:
    """Also of numbers that are all the same, which only steps or their partner tell apart."""
    count = 40_000
    number = torch.tensor([0x3F800000 + low], dtype=torch.int32).view(torch.float32)
    partner = torch.linspace(-1.0, 1.0, count)
    wanted, error = low / 0x10000, 4 * 0.5 / count**0.5  # four standard deviations

    def share(tensor: Tensor) -> float:
        return float((tensor > 1).float().mean())

    first, _ = rounded(number.expand(count).contiguous(), partner.square())
    _, second = rounded(partner, number.expand(count).contiguous())
    assert share(first) == pytest.approx(wanted, abs=error)
    assert share(second) == pytest.approx(wanted, abs=error)

    one = torch.tensor([0.25])
    steps = [rounded(one, number, step)[1] for step in range(1000)]
    assert share(torch.cat(steps)) == pytest.approx(wanted, abs=4 * 0.5 / 1000**0.5)


def test_every_low_half_of_a_master_weight_comes_back() -> None:
    """All 65,536 low halves: of an even and an odd number of both signs, zero, denormal numbers, and the
    largest numbers, whose upper half rounds to infinity."""
    low = np.arange(1 << 16, dtype=np.uint32)
    for upper in (0x3F80, 0x3F81, 0xBF80, 0xBF81, 0x0000, 0x8000, 0x0001, 0x8001, 0x7F7F, 0xFF7F, 0x7F7E):
        master = torch.from_numpy((low | np.uint32(upper << 16)).view(np.float32))
        for second in (torch.zeros(len(low)), torch.rand(len(low))):
            weight, half = (torch.empty(len(low), dtype=kind) for kind in (torch.bfloat16, torch.int16))
            kept, again = second.clone(), torch.full_like(master, torch.nan)
            split_master(master, weight, half, kept)
            assert torch.equal(weight.view(torch.int16), master.bfloat16().view(torch.int16))
            moment = kept.clone()
            join_master(weight, half, moment, again)
            for found, given in ((again, master), (moment, second)):
                assert torch.equal(found.view(torch.int32), given.view(torch.int32)), hex(upper)
