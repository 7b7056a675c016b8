"""Which share of the optimizer state has to be in host memory, by the memory estimate."""

from __future__ import annotations

import dataclasses
import math

from megatron_vl.config import TrainConfig
from megatron_vl.planning.memory import GIB, RESERVE_GIB, peak_stage_gib, stage_memories
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout

FRACTION_STEPS = 20
"""Shares that are tried: multiples of 1 / 20."""


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
        gpu_gib: what a GPU has, of which :data:`RESERVE_GIB` stay free.
    """
    for step in range(FRACTION_STEPS + 1):
        offload_fraction = step / FRACTION_STEPS
        if (
            peak_stage_gib(
                stage_memories(
                    with_offload_fraction(config, offload_fraction), spec, layout, data_parallel_size
                )
            )
            + RESERVE_GIB
            <= gpu_gib
        ):
            return offload_fraction
    return None


def largest_offload_fraction(
    config: TrainConfig, spec: ModelSpec, layout: Layout, data_parallel_size: int, host_gib: float
) -> float:
    """The largest ``optimizer.offload_fraction`` that host memory holds.

    Args:
        host_gib: host memory for each rank.
    """
    full_offload_gib = (
        max(
            stage.host_bytes
            for stage in stage_memories(with_offload_fraction(config, 1.0), spec, layout, data_parallel_size)
        )
        / GIB
    )
    return (
        1.0
        if full_offload_gib <= host_gib
        else math.floor(FRACTION_STEPS * host_gib / full_offload_gib) / FRACTION_STEPS
    )


def resolve_offload_fraction(
    config: TrainConfig,
    spec: ModelSpec,
    layout: Layout,
    data_parallel_size: int,
    gpu_gib: float | None,
    host_gib: float = math.inf,
) -> TrainConfig:
    """The run with a number in place of ``auto``: the least share that fits, or all that can be if none does.

    Args:
        gpu_gib: what a GPU has; None on CPU, where nothing is gained.
        host_gib: host memory for each rank, which no share exceeds.
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
