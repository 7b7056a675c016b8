"""Checks whether a run fits its GPUs and their hosts, and chooses the share of the state that it offloads."""

import dataclasses
import math

from megatron_vl.config import RunConfigError, TrainConfig, validate_config
from megatron_vl.estimate.gpus import Gpu, reserve_gib
from megatron_vl.estimate.memory import GIB, peak_stage_gib, stage_memories
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.system import host_memory
from megatron_vl.system.plurals import pluralize

EXPERT_OVERESTIMATE = 1.12  # with experts, the estimate was up to this many times too high
FRACTION_STEPS = 20  # the offloaded shares that are tried are multiples of 1 / 20


def with_offload_fraction(config: TrainConfig, offload_fraction: float) -> TrainConfig:
    optimizer = dataclasses.replace(config.optimizer, offload_fraction=offload_fraction)
    return dataclasses.replace(config, optimizer=optimizer)


def least_offload_fraction(
    config: TrainConfig, spec: ModelSpec, layout: Layout, dp: int, gpu_gib: float
) -> float | None:
    """The smallest ``optimizer.offload_fraction`` with which the fullest stage fits; None if none does.

    Args:
        gpu_gib: GiB of a GPU, of which :func:`reserve_gib` stay free.
    """
    for offload_fraction in (step / FRACTION_STEPS for step in range(FRACTION_STEPS + 1)):
        tried_config = with_offload_fraction(config, offload_fraction)
        if peak_stage_gib(stage_memories(tried_config, spec, layout, dp)) <= gpu_gib - reserve_gib(gpu_gib):
            return offload_fraction
    return None


def largest_offload_fraction(
    config: TrainConfig, spec: ModelSpec, layout: Layout, dp: int, host_gib: float
) -> float:
    """The largest ``optimizer.offload_fraction`` for which ``host_gib`` GiB for each rank are enough."""
    stages = [*stage_memories(with_offload_fraction(config, 1.0), spec, layout, dp)]
    full_offload_gib = max(stage.host_bytes for stage in stages) / GIB
    free_gib = max(0.0, host_gib - max(stage.host_input_bytes for stage in stages) / GIB)
    is_enough = full_offload_gib <= free_gib
    return 1.0 if is_enough else math.floor(FRACTION_STEPS * free_gib / full_offload_gib) / FRACTION_STEPS


def resolve_offload_fraction(
    config: TrainConfig,
    spec: ModelSpec,
    layout: Layout,
    dp: int,
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
    least_fraction = least_offload_fraction(config, spec, layout, dp, gpu_gib)
    largest_fraction = largest_offload_fraction(config, spec, layout, dp, host_gib)
    return with_offload_fraction(
        config, largest_fraction if least_fraction is None else min(least_fraction, largest_fraction)
    )


def check_memory(config: TrainConfig, spec: ModelSpec, layout: Layout, world_size: int, gpu: Gpu) -> str:
    """Compares the memory estimate of a run with the GPU's memory.

    Returns a remark if the run may start but leaves less free than it should; empty if it fits.

    Raises:
        RunConfigError: the run does not fit. The message says what to do, and how to start anyway.
    """
    dp, gpu_gib = validate_config(config, world_size), gpu.memory_gib
    resolved_config = resolve_offload_fraction(config, spec, layout, dp, gpu_gib)
    estimated_gib = peak_stage_gib(stage_memories(resolved_config, spec, layout, dp))
    if estimated_gib + reserve_gib(gpu_gib) <= gpu_gib:
        return ""
    estimate_text = (
        f"the memory estimate is {estimated_gib:.0f} GiB on the fullest GPU, with a row full of images, and"
        f" {reserve_gib(gpu_gib):.0f} should stay free; {gpu.name} has {gpu_gib:.0f}"
    )
    offload_fraction = least_offload_fraction(config, spec, layout, dp, gpu_gib)
    offload_advice = (
        "not even --optimizer.offload_fraction 1 would change that"
        if offload_fraction is None
        else f"--optimizer.offload_fraction {offload_fraction:g} would fit"
    )
    refusal_limit_gib = gpu_gib * (EXPERT_OVERESTIMATE if spec.language.moe else 1.0)
    if estimated_gib <= refusal_limit_gib or not config.failures.check_memory:
        return f"{estimate_text}, so the run may end for lack of memory; {offload_advice}"
    raise RunConfigError(
        f"the run does not fit: {estimate_text}; {offload_advice}. `megatron-vl plan --gpus {world_size}`"
        " with the run's fields lists layouts that fit. If the rows hold less than that, data.max_patches"
        " bounds their patches and with them the estimate. --failures.check_memory false starts anyway"
    )


def check_host_memory(
    config: TrainConfig, spec: ModelSpec, layout: Layout, dp: int, gpu_gib: float | None, host_gib: float
) -> None:
    """Checks that a node has enough memory for what is offloaded, before any is allocated.

    Args:
        gpu_gib: memory of a GPU; None on CPU.
        host_gib: host memory for each rank.

    Raises:
        RunConfigError: it does not. The message says how much there is, and which share would fit.
    """
    if gpu_gib is None:
        return
    offload_share, node_ranks = config.optimizer.offload_fraction, host_memory.num_ranks_on_node()
    ranks_text = pluralize(node_ranks, "rank")
    input_gib = max(s.host_input_bytes for s in stage_memories(config, spec, layout, dp)) / GIB
    if input_gib > host_gib:
        raise RunConfigError(
            f"recompute.offload_inputs needs {node_ranks * input_gib:.1f} GiB of host memory for {ranks_text}"
            f" of a node, which has {node_ranks * host_gib:.1f} GiB left; set it to false, lower"
            " data.seq_len, raise parallel.cp, or start fewer ranks per node"
        )
    if offload_share == 0:
        return
    share_text = f"{offload_share}"
    remedy_text = "less would not fit the GPU: take more GPUs or more recompute"
    if offload_share == "auto":
        least_share = least_offload_fraction(config, spec, layout, dp, gpu_gib)
        if least_share is None or not config.failures.check_memory:
            return  # the run takes what host memory allows
        offload_share, share_text = least_share, f"auto ({least_share:g})"
    else:
        remedy_text = f"lower it to {largest_offload_fraction(config, spec, layout, dp, host_gib):g}"

    stages = stage_memories(with_offload_fraction(config, offload_share), spec, layout, dp)
    if (needed_gib := max(stage.host_bytes for stage in stages) / GIB) > host_gib - input_gib:
        raise RunConfigError(
            f"optimizer.offload_fraction {share_text} needs {node_ranks * needed_gib:.1f} GiB of host memory"
            f" for {ranks_text} of a node, which has {node_ranks * (host_gib - input_gib):.1f} GiB left;"
            f" {remedy_text}, or start fewer ranks per node"
        )
