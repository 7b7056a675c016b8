"""Which share of the optimizer state has to be in host memory, by the memory estimate."""

from __future__ import annotations

import dataclasses
import math

from megatron_vl.config import TrainConfig
from megatron_vl.planning.memory import GIB, RESERVE_GIB, peak_gib, stage_memories
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout

STEPS = 20
"""Shares that are tried: multiples of 1 / 20."""


def with_share(config: TrainConfig, share: float) -> TrainConfig:
    """The same run with another ``optimizer.offload_fraction``."""
    return dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, offload_fraction=share)
    )


def least_share(
    config: TrainConfig, spec: ModelSpec, layout: Layout, dp: int, gpu_gib: float
) -> float | None:
    """The smallest ``optimizer.offload_fraction`` with which the fullest stage fits; None if none does.

    Args:
        gpu_gib: what a GPU has, of which :data:`RESERVE_GIB` stay free.
    """
    for step in range(STEPS + 1):
        share = step / STEPS
        if peak_gib(stage_memories(with_share(config, share), spec, layout, dp)) + RESERVE_GIB <= gpu_gib:
            return share
    return None


def largest_share(config: TrainConfig, spec: ModelSpec, layout: Layout, dp: int, host_gib: float) -> float:
    """The largest ``optimizer.offload_fraction`` that host memory holds.

    Args:
        host_gib: host memory for each rank.
    """
    whole = max(stage.host for stage in stage_memories(with_share(config, 1.0), spec, layout, dp)) / GIB
    return 1.0 if whole <= host_gib else math.floor(STEPS * host_gib / whole) / STEPS


def settle_offload(
    config: TrainConfig,
    spec: ModelSpec,
    layout: Layout,
    dp: int,
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
        return with_share(config, 0.0)
    least = least_share(config, spec, layout, dp, gpu_gib)
    most = largest_share(config, spec, layout, dp, host_gib)
    return with_share(config, most if least is None else min(least, most))
