"""AdamW with moments in bf16: one pass over weights, gradients and state.

The arithmetic is fp32 and that of Loshchilov and Hutter (2019, Algorithm 2): decay is added to Adam's update
and scaled by the learning rate. Every operation is rounded by itself, to the nearest number, and none is
fused. So a GPU and a CPU compute the same bits, whatever share of the state is in host memory, and in every
layout.

The master weight is joined from the model's bf16 weight and its lower half
(:mod:`megatron_vl.kernels.master_halves`), and split again. The moments are rounded as
:mod:`megatron_vl.kernels.moments` says. A parameter takes 20 bytes of traffic: 12 are read, 8 are written.

A Triton kernel runs on a GPU (and in Triton's interpreter), one launch for all stretches of a chunk; torch
code runs elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_vl.kernels.master_halves import join_master, on_kernels, split_master
from megatron_vl.kernels.moments import hash_of_step, round_moments


class Rates(NamedTuple):
    """The numbers of a step of some parameters; all but the last are rounded to fp32 before they are used."""

    beta1: float
    rest1: float
    """1 - beta1."""
    beta2: float
    rest2: float
    """1 - beta2."""
    scale1: float
    """1 / (1 - beta1 to the power of ``step``), which corrects the first moment's bias."""
    scale2: float
    eps: float
    lr: float
    weight_decay: float
    step: int
    """Adam's step count after this step."""

    @classmethod
    def of_group(cls, group: dict[str, Any], step: int) -> Rates:
        """The rates of a torch optimizer's group, which has lr, betas, eps and weight_decay."""
        beta1, beta2 = group["betas"]
        scales = (1 / (1 - beta1**step), 1 / (1 - beta2**step))
        return cls(
            beta1, 1 - beta1, beta2, 1 - beta2, *scales, group["eps"], group["lr"],
            group["weight_decay"], step,
        )  # fmt: skip


class StepRates:
    """The rates of one step, on a device.

    Args:
        rates: of the parameters that have the same, by a key of the caller's choice.
    """

    def __init__(self, rates: Mapping[Any, Rates], device: torch.device) -> None:
        self.index = {key: index for index, key in enumerate(rates)}
        self.steps = [one.step for one in rates.values()]
        table = torch.tensor([[*one[:-1], 0.0] for one in rates.values()], dtype=torch.float32)
        table.view(torch.int32)[:, -1] = torch.tensor([hash_of_step(step) for step in self.steps])
        on_gpu = device.type == "cuda"
        self.table = table.pin_memory().to(device, non_blocking=True) if on_gpu else table
        """fp32 [rates, 10]: the numbers, and the bits of the step's part of the hash."""


@dataclass(frozen=True, eq=False)
class Stretch:
    """Consecutive elements of one parameter."""

    weight: Tensor
    """bf16 [N], or fp32 [N] if it is its own master. The parameter's tensor; N elements of it from ``start``
    on are the stretch."""
    gradient: Tensor
    """fp32 [N], contiguous, with the elements of ``weight``."""
    start: int
    size: int
    offset: int
    """Where their state begins in the chunk."""
    rates: int
    """Index of the :class:`Rates` of the step."""

    def of(self, tensor: Tensor) -> Tensor:
        """The stretch of ``weight`` or ``gradient``."""
        return tensor.detach().view(-1)[self.start : self.start + self.size]


@dataclass(eq=False)
class Launch:
    """What the kernel needs to know of a chunk's stretches, on the device. It is kept from step to step."""

    known: list[tuple[int, ...]] = field(default_factory=list)
    """Of each stretch: addresses of weight and gradient, offset, size, first block, index of its rates."""
    parts: list[tuple[Tensor, Tensor, bool]] = field(default_factory=list)
    """One launch each, of the aligned stretches and of the others: int64 [stretches, 6] with the numbers of
    ``known``, int32 [blocks] with the index of each block's stretch, and whether they are aligned."""

    def follow(self, stretches: Sequence[Stretch], block: int, device: torch.device) -> None:
        """Brings the parts up to date. It copies to the device only if an address or an index differs.

        Args:
            block: elements of a block.
        """
        found = [_numbers(stretch) for stretch in stretches]
        if found == self.known:
            return

        self.known, self.parts = found, []
        for aligned in (True, False):
            table = torch.tensor([one for one in found if _is_aligned(one) == aligned], dtype=torch.int64)
            if not len(table):
                continue
            blocks = (table[:, 3] + block - 1) // block
            table[:, 4] = blocks.cumsum(0) - blocks
            owners = torch.repeat_interleave(torch.arange(len(table), dtype=torch.int32), blocks)
            self.parts.append((table.to(device), owners.to(device), aligned))


def _numbers(stretch: Stretch) -> tuple[int, ...]:
    """The numbers of a stretch in :class:`Launch`, with 0 for its first block."""
    addresses = [
        tensor.data_ptr() + tensor.itemsize * stretch.start for tensor in (stretch.weight, stretch.gradient)
    ]
    return *addresses, stretch.offset, stretch.size, 0, stretch.rates


def _is_aligned(numbers: tuple[int, ...]) -> bool:
    """Whether the kernel can load 8 elements of a stretch at once."""
    weight, gradient, _, size, *_ = numbers
    return not (weight % 16 or gradient % 16 or size % 8)


def adam_step(
    stretches: Sequence[Stretch],
    rates: StepRates,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    low: Tensor,
    launch: Launch,
) -> None:
    """Updates weights and state of a chunk in place.

    Args:
        exp_avg: bf16 [chunk].
        exp_avg_sq: bf16 [chunk]. Its signs mark ties of master weights.
        low: int16 [chunk], or empty if the weights are fp32.
        launch: of this chunk, empty before its first step.
    """
    if on_kernels(exp_avg):
        from megatron_vl.kernels import adam_triton

        launch.follow(stretches, adam_triton.BLOCK, exp_avg.device)
        halves = bool(stretches) and stretches[0].weight.dtype == torch.bfloat16
        for table, owners, aligned in launch.parts:
            adam_triton.adam_step(
                table, owners, rates.table, exp_avg, exp_avg_sq, low, halves=halves, aligned=aligned
            )
        return

    for stretch in stretches:
        weight, gradient = stretch.of(stretch.weight), stretch.of(stretch.gradient)
        own = slice(stretch.offset, stretch.offset + stretch.size)
        avg, square = exp_avg[own].float(), exp_avg_sq[own].float()
        halves = weight.dtype == torch.bfloat16
        master = torch.empty_like(avg) if halves else weight
        if halves:
            join_master(weight, low[own], square, master)

        avg, square = _update(master, gradient, avg, square, rates.table[stretch.rates])
        if halves:
            split_master(master, weight, low[own], square)
        round_moments(avg, square, rates.steps[stretch.rates], exp_avg[own], exp_avg_sq[own])


def _update(
    master: Tensor, gradient: Tensor, avg: Tensor, square: Tensor, rates: Tensor
) -> tuple[Tensor, Tensor]:
    """Updates ``master`` and returns the new moments; all fp32 [N]."""
    beta1, rest1, beta2, rest2, scale1, scale2, eps, lr, decay, _ = rates.unbind()
    avg = beta1 * avg + rest1 * gradient
    square = beta2 * square + rest2 * (gradient * gradient)

    # torch's root of fp32 numbers is not rounded to the nearest on a CPU, and depends on their place.
    root = (square * scale2).double().sqrt().float()
    update = avg * scale1 / (root + eps) + decay * master
    if lr != 0:  # With a rate of 0, -0 would become 0.
        master.copy_(master - lr * update)
    return avg, square
