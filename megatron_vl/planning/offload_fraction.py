"""Chooses the share of the optimizer state in host memory from the memory estimate."""

from __future__ import annotations

import dataclasses
import math

from megatron_vl.config import TrainConfig
from megatron_vl.planning.memory import GIB, RESERVE_GIB, peak_stage_gib, stage_memories
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout

FRACTION_STEPS = 20
"""The shares that are tried are multiples of 1 / 20."""


def with_offload_fraction(config: TrainConfig, offload_fraction: float) -> TrainConfig:
    """The same run with another ``optimizer.offload_fraction``."""
    return dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, offload_fraction=offload_fraction)
    )


def least_offload_fraction(
    config: TrainConfig, spec: ModelSpec, layout: Layout, data_parallel_size: int, gpu_gib: float
) -> float | None:
    """The smallest ``optimizer.offload_fraction`` with which the fullest stage fits; None if none does.

    Args:
        gpu_gib: GiB of a GPU, of which :data:`RESERVE_GIB` stay free.
    """
    for step in range(FRACTION_STEPS + 1):
        offload_fraction = step / FRACTION_STEPS
        tried_config = with_offload_fraction(config, offload_fraction)
        stages = stage_memories(tried_config, spec, layout, data_parallel_size)
        if peak_stage_gib(stages) + RESERVE_GIB <= gpu_gib:
            return offload_fraction
    return None


def largest_offload_fraction(
    config: TrainConfig, spec: ModelSpec, layout: Layout, data_parallel_size: int, host_gib: float
) -> float:
    """The largest ``optimizer.offload_fraction`` for which host memory is large enough.

    Args:
        host_gib: GiB of host memory for each rank.
    """
    whole_config = with_offload_fraction(config, 1.0)
    stages = stage_memories(whole_config, spec, layout, data_parallel_size)
    full_offload_gib = max(stage.host_bytes for stage in stages) / GIB
    free_gib = max(0.0, host_gib - max(stage.host_input_bytes for stage in stages) / GIB)
    if full_offload_gib <= free_gib:
        return 1.0
    return math.floor(FRACTION_STEPS * free_gib / full_offload_gib) / FRACTION_STEPS


def resolve_offload_fraction(
    config: TrainConfig,
    spec: ModelSpec,
    layout: Layout,
    data_parallel_size: int,
    gpu_gib: float | None,
    host_gib: float = math.inf,
) -> TrainConfig:
    """The run with a number in place of ``auto``: the smallest share with which it fits.

    If it does not fit with any share, the number is the largest share for which host memory is large enough.

    Args:
        gpu_gib: GiB of a GPU; None on CPU, where offload gains nothing.
        host_gib: GiB of host memory for each rank.
    """
    if config.optimizer.offload_fraction != "auto":
        return config
    if gpu_gib is None:
        return with_offload_fraction(config, 0.0)
    least_fraction = least_offload_fraction(config, spec, layout, data_parallel_size, gpu_gib)
    largest_fraction = largest_offload_fraction(config, spec, layout, data_parallel_size, host_gib)
    return with_offload_fraction(
        config, largest_fraction if least_fraction is None else min(least_fraction, largest_fraction)
    )
