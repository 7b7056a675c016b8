"""Which share of the optimizer state has to be in host memory, by the memory estimate."""

from __future__ import annotations

import dataclasses

from megatron_vl.config import TrainConfig
from megatron_vl.planning.memory import RESERVE_GIB, peak_gib
from megatron_vl.planning.run import estimate
from megatron_vl.spec.families import ModelSpec

STEPS = 20
"""Shares that are tried: multiples of 1 / 20."""


def with_share(config: TrainConfig, share: float) -> TrainConfig:
    """The same run with another ``optimizer.offload_fraction``."""
    return dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, offload_fraction=share)
    )


def least_share(config: TrainConfig, spec: ModelSpec, world_size: int, gpu_gib: float) -> float | None:
    """The smallest ``optimizer.offload_fraction`` with which the fullest stage fits; None if none does.

    Args:
        gpu_gib: what a GPU has, of which :data:`RESERVE_GIB` stay free.
    """
    for step in range(STEPS + 1):
        share = step / STEPS
        if peak_gib(estimate(with_share(config, share), spec, world_size)) + RESERVE_GIB <= gpu_gib:
            return share
    return None


def resolve(config: TrainConfig, spec: ModelSpec, world_size: int, gpu_gib: float | None) -> TrainConfig:
    """The run with a number in place of ``auto``: the least share that fits, or all if none does.

    Args:
        gpu_gib: what a GPU has; None on CPU, where nothing is gained.
    """
    if config.optimizer.offload_fraction != "auto":
        return config
    share = 0.0 if gpu_gib is None else least_share(config, spec, world_size, gpu_gib)
    return with_share(config, 1.0 if share is None else share)


def advice(config: TrainConfig, spec: ModelSpec, world_size: int, gpu_gib: float) -> str:
    """What to say of a run that does not fit by the estimate; empty if it does."""
    needed = peak_gib(estimate(config, spec, world_size))
    if needed + RESERVE_GIB <= gpu_gib:
        return ""
    said = (
        f"by the estimate the fullest GPU needs {needed:.1f} GiB (and {RESERVE_GIB:.0f} to stay free)"
        f" of {gpu_gib:.1f} GiB"
    )
    share = least_share(config, spec, world_size, gpu_gib)
    if share is None:
        return f"{said}; not even optimizer.offload_fraction 1 would fit"
    return f"{said}; --optimizer.offload_fraction {share:g} would fit"
