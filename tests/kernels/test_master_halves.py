"""Master weights come back bit for bit from the model's weights and 16 more bits, ties included."""

import numpy as np
import torch
from torch import Tensor

from megatron_vl.kernels.optimizer.master_halves import join_master, split_master


def bits_of(tensor: Tensor) -> list[int]:
    return tensor.numpy().view(np.uint32).tolist()


def there_and_back(master: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Master weight and second moment as they come back."""
    weight, low = torch.empty(len(master), dtype=torch.bfloat16), torch.empty(len(master), dtype=torch.int16)
    kept = second.clone()
    split_master(master, weight, low, kept)
    assert torch.equal(weight.view(torch.int16), master.bfloat16().view(torch.int16))

    again, moment = torch.full_like(master, torch.nan), kept.clone()
    join_master(weight, low, moment, again)
    return again, moment


def test_every_low_half_under_even_odd_and_extreme_upper_halves() -> None:
    """All 65,536 low halves: of an even and an odd number of both signs, zero, denormal numbers, and the
    largest numbers, whose upper half rounds to infinity."""
    low = np.arange(1 << 16, dtype=np.uint32)
    for upper in (0x3F80, 0x3F81, 0xBF80, 0xBF81, 0x0000, 0x8000, 0x0001, 0x8001, 0x7F7F, 0xFF7F, 0x7F7E):
        master = torch.from_numpy((low | np.uint32(upper << 16)).view(np.float32))
        for second in (torch.zeros(len(low)), torch.rand(len(low))):
            again, moment = there_and_back(master, second)
            assert bits_of(again) == bits_of(master) and bits_of(moment) == bits_of(second), hex(upper)
