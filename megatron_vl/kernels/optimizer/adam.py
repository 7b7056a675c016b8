"""AdamW with moments in bf16: one pass over weights, gradients and state.

The arithmetic is in fp32 and follows Loshchilov and Hutter (2019, Algorithm 2): decay is added to Adam's
update and scaled by the learning rate. Every operation is rounded separately, to the nearest number, and none
is fused. So a GPU and a CPU compute the same bits, in every layout, whatever share of the state is in host
memory.

The master weight is joined from the model's bf16 weight and its lower half
(:mod:`megatron_vl.kernels.optimizer.master_halves`), and split again. A parameter takes 20 bytes of traffic:
12 are read, 8 are written.

Moments are rounded from fp32 to bf16 so that their mean is exact. Each step changes the second moment by up
to a share of 1 - beta2. If that is less than half the distance of two bf16 numbers (0.2 to 0.4 %, so for
beta2 above 0.996), rounding to the nearest never lets the moment fall. Stochastic rounding rounds up with the
probability that makes the mean exact. The random bits are a hash of both unrounded moments and of the step.
So they need no generator, no state and no index of the element. A step gives the same bits in every layout,
after every resume, and for every division of the state into chunks.

A Triton kernel (:mod:`megatron_vl.kernels.optimizer.adam_triton`) runs on a GPU and in Triton's interpreter,
with one launch for all slices of a chunk. Torch code runs elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_vl.kernels.optimizer.master_halves import join_master, split_master
from megatron_vl.kernels.where_kernels_run import runs_on_kernels

SECOND_MOMENT_FACTOR, STEP_FACTOR = 0x9E3779B1 - (1 << 32), 0x27D4EB2F
"""Odd factors of the second moment's bits and of the step in the hash."""
MIX_FACTORS = (0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32))
"""Odd factors that spread each bit over all others. All factors are the int32 of their bits."""


class AdamCoefficients(NamedTuple):
    """The numbers of a step of some parameters. All but the last are rounded to fp32 before they are used."""

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    bias_correction1: float
    """1 / (1 - beta1 to the power of ``step_count``), which corrects the first moment's bias."""
    bias_correction2: float
    eps: float
    lr: float
    weight_decay: float
    gradient_scale: float
    step_count: int

    @classmethod
    def from_param_group(
        cls, param_group: dict[str, Any], step_count: int, gradient_scale: float = 1.0
    ) -> AdamCoefficients:
        """The coefficients of a torch optimizer's group, which has lr, betas, eps and weight_decay."""
        beta1, beta2 = param_group["betas"]
        bias_corrections = (1 / (1 - beta1**step_count), 1 / (1 - beta2**step_count))
        return cls(
            beta1, 1 - beta1, beta2, 1 - beta2, *bias_corrections, param_group["eps"], param_group["lr"],
            param_group["weight_decay"], gradient_scale, step_count,
        )  # fmt: skip


class StepCoefficients:
    """The coefficients of one step, on a device.

    Args:
        coefficients_by_key: by a key of the caller's choice, the coefficients of the parameters that share
            them.
    """

    def __init__(self, coefficients_by_key: Mapping[Any, AdamCoefficients], device: torch.device) -> None:
        self.index_by_key = {key: index for index, key in enumerate(coefficients_by_key)}
        self.step_counts = [coefficients.step_count for coefficients in coefficients_by_key.values()]
        table_rows = [[*coefficients[:-1], 0.0] for coefficients in coefficients_by_key.values()]
        host_table = torch.tensor(table_rows, dtype=torch.float32)
        host_table.view(torch.int32)[:, -1] = torch.tensor([step_hash(step) for step in self.step_counts])
        on_gpu = device.type == "cuda"
        self.device_table = host_table.pin_memory().to(device, non_blocking=True) if on_gpu else host_table
        """fp32 [keys, 11]: the coefficients, and the bits of the step's part of the hash."""


@dataclass(frozen=True, eq=False)
class ParameterSlice:
    """Consecutive elements of one parameter."""

    weight: Tensor
    """The parameter's tensor: bf16, or fp32 if it is its own master."""
    gradient: Tensor
    """fp32, contiguous, with the elements of ``weight``."""
    start_element: int
    num_elements: int
    state_offset: int
    coefficients_index: int

    def slice_of(self, tensor: Tensor) -> Tensor:
        """The slice [num_elements] of ``weight`` or ``gradient``."""
        return tensor.detach().view(-1)[self.start_element : self.start_element + self.num_elements]


@dataclass(eq=False)
class LaunchTables:
    """The tables on the device from which the kernel finds a chunk's slices. They are kept from step to
    step."""

    slice_records: list[tuple[int, ...]] = field(default_factory=list)
    """For each slice: addresses of weight and gradient, state offset, size, first block, coefficients
    index."""
    launch_tables: list[tuple[Tensor, Tensor, bool]] = field(default_factory=list)
    """One launch for the aligned slices and one for the others: int64 [slices, 6] with the numbers of
    ``slice_records``, int32 [blocks] with the index of each block's slice, and whether they are aligned."""

    def update_tables(
        self, parameter_slices: Sequence[ParameterSlice], block_size: int, device: torch.device
    ) -> None:
        """Updates the tables. It copies to the device only if an address or an index has changed."""
        new_records = [_slice_record(parameter_slice) for parameter_slice in parameter_slices]
        if new_records == self.slice_records:
            return

        self.slice_records = new_records
        self.launch_tables = []
        for is_aligned in (True, False):
            chosen_records = [record for record in new_records if _is_slice_aligned(record) == is_aligned]
            if not chosen_records:
                continue
            slice_table = torch.tensor(chosen_records, dtype=torch.int64)
            blocks_per_slice = (slice_table[:, 3] + block_size - 1) // block_size
            slice_table[:, 4] = blocks_per_slice.cumsum(0) - blocks_per_slice
            slice_indices = torch.arange(len(slice_table), dtype=torch.int32)
            slice_of_block = torch.repeat_interleave(slice_indices, blocks_per_slice)
            self.launch_tables.append((slice_table.to(device), slice_of_block.to(device), is_aligned))


def _slice_record(parameter_slice: ParameterSlice) -> tuple[int, ...]:
    """The numbers of a slice in :class:`LaunchTables`, with 0 for its first block."""
    weight, gradient = parameter_slice.weight, parameter_slice.gradient
    return (
        weight.data_ptr() + weight.itemsize * parameter_slice.start_element,
        gradient.data_ptr() + gradient.itemsize * parameter_slice.start_element,
        parameter_slice.state_offset,
        parameter_slice.num_elements,
        0,
        parameter_slice.coefficients_index,
    )


def _is_slice_aligned(slice_record: tuple[int, ...]) -> bool:
    """Whether the kernel can load 8 elements of a slice at once."""
    weight_address, gradient_address, _, num_elements, *_ = slice_record
    return not (weight_address % 16 or gradient_address % 16 or num_elements % 8)


def adam_step(
    parameter_slices: Sequence[ParameterSlice],
    step_coefficients: StepCoefficients,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    low_bits: Tensor,
    launch_tables: LaunchTables,
) -> None:
    """Updates weights and state of a chunk in place.

    Args:
        exp_avg: bf16 [chunk].
        exp_avg_sq: bf16 [chunk]. Its signs mark ties of master weights.
        low_bits: int16 [chunk], or empty if the weights are fp32.
        launch_tables: the tables of this chunk; empty before its first step.
    """
    if not runs_on_kernels(exp_avg):
        for parameter_slice in parameter_slices:
            _step_slice_in_torch(parameter_slice, step_coefficients, exp_avg, exp_avg_sq, low_bits)
        return

    from megatron_vl.kernels.optimizer import adam_triton

    launch_tables.update_tables(parameter_slices, adam_triton.BLOCK_ELEMENTS, exp_avg.device)
    has_split_master = bool(parameter_slices) and parameter_slices[0].weight.dtype == torch.bfloat16
    for slice_table, slice_of_block, is_aligned in launch_tables.launch_tables:
        adam_triton.adam_step(
            slice_table,
            slice_of_block,
            step_coefficients.device_table,
            exp_avg,
            exp_avg_sq,
            low_bits,
            has_split_master=has_split_master,
            is_aligned=is_aligned,
        )


def _step_slice_in_torch(
    parameter_slice: ParameterSlice,
    step_coefficients: StepCoefficients,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    low_bits: Tensor,
) -> None:
    weight = parameter_slice.slice_of(parameter_slice.weight)
    gradient = parameter_slice.slice_of(parameter_slice.gradient)
    coefficients_index = parameter_slice.coefficients_index
    state_end = parameter_slice.state_offset + parameter_slice.num_elements
    state_slice = slice(parameter_slice.state_offset, state_end)

    first_moment, second_moment = exp_avg[state_slice].float(), exp_avg_sq[state_slice].float()
    has_split_master = weight.dtype == torch.bfloat16
    master = torch.empty_like(first_moment) if has_split_master else weight
    if has_split_master:
        join_master(weight, low_bits[state_slice], second_moment, master)

    coefficients = step_coefficients.device_table[coefficients_index]
    first_moment, second_moment = _adamw_update(master, gradient, first_moment, second_moment, coefficients)

    if has_split_master:
        split_master(master, weight, low_bits[state_slice], second_moment)
    step_count = step_coefficients.step_counts[coefficients_index]
    round_moments(first_moment, second_moment, step_count, exp_avg[state_slice], exp_avg_sq[state_slice])


def _adamw_update(
    master_weight: Tensor, gradient: Tensor, first_moment: Tensor, second_moment: Tensor, coefficients: Tensor
) -> tuple[Tensor, Tensor]:
    """Updates ``master_weight`` and returns the new moments; all fp32 [N]."""
    (
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        bias_correction1,
        bias_correction2,
        eps,
        learning_rate,
        weight_decay,
        gradient_scale,
        _,
    ) = coefficients.unbind()
    gradient = gradient_scale * gradient
    first_moment = beta1 * first_moment + one_minus_beta1 * gradient
    second_moment = beta2 * second_moment + one_minus_beta2 * (gradient * gradient)

    # On a CPU, torch's root of fp32 numbers is not always rounded to the nearest, and it depends on the
    # element's position in the tensor.
    corrected_root = (second_moment * bias_correction2).double().sqrt().float()
    weight_update = first_moment * bias_correction1 / (corrected_root + eps) + weight_decay * master_weight
    if learning_rate != 0:  # With a rate of 0, -0 would become 0.
        master_weight.copy_(master_weight - learning_rate * weight_update)
    return first_moment, second_moment


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
