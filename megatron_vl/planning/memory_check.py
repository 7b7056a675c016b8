"""Checks whether a run fits its GPUs and their hosts by the memory estimate."""

from __future__ import annotations

from megatron_vl import host_memory
from megatron_vl.config import RunConfigError, TrainConfig, validate_config
from megatron_vl.planning.calibration import Calibration
from megatron_vl.planning.memory import RESERVE_GIB, peak_stage_gib, stage_memories
from megatron_vl.planning.offload_fraction import (
    largest_offload_fraction,
    least_offload_fraction,
    resolve_offload_fraction,
    with_offload_fraction,
)
from megatron_vl.plurals import pluralize
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout

EXPERT_OVERESTIMATE = 1.12
"""With experts, the estimate was up to this many times too high."""


def check_memory(
    config: TrainConfig,
    spec: ModelSpec,
    layout: Layout,
    world_size: int,
    calibration: Calibration,
) -> str:
    """Compares the memory estimate of a run with the GPU's memory.

    Returns a remark if the run may start but leaves less than :data:`RESERVE_GIB` free; empty if it fits.

    Raises:
        RunConfigError: the run does not fit. The message says what to do, and how to start anyway.
    """
    data_parallel_size = validate_config(config, world_size)
    resolved_config = resolve_offload_fraction(
        config, spec, layout, data_parallel_size, calibration.memory_gib
    )
    estimated_gib = peak_stage_gib(stage_memories(resolved_config, spec, layout, data_parallel_size))
    gpu_memory_gib = calibration.memory_gib
    if estimated_gib + RESERVE_GIB <= gpu_memory_gib:
        return ""
    estimate_text = (
        f"the memory estimate is {estimated_gib:.0f} GiB on the fullest GPU, with a row full of pictures, and"
        f" {RESERVE_GIB:.0f} should stay free; {calibration.gpu} has {gpu_memory_gib:.0f}"
    )
    offload_fraction = least_offload_fraction(config, spec, layout, data_parallel_size, gpu_memory_gib)
    offload_advice = (
        "not even --optimizer.offload_fraction 1 would change that"
        if offload_fraction is None
        else f"--optimizer.offload_fraction {offload_fraction:g} would fit"
    )
    refusal_limit_gib = gpu_memory_gib * (EXPERT_OVERESTIMATE if spec.language.moe else 1.0)
    if estimated_gib <= refusal_limit_gib or not config.failures.check_memory:
        return f"{estimate_text}, so the run may end for lack of memory; {offload_advice}"
    raise RunConfigError(
        f"the run does not fit: {estimate_text}; {offload_advice}. `megatron-vl plan --gpus {world_size}"
        " --search` with the run's fields finds layouts that fit. If the rows hold less than that,"
        " data.max_patches bounds their patches and with them the estimate. --failures.check_memory false"
        " starts anyway"
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
    offload_share = config.optimizer.offload_fraction
    if gpu_gib is None:
        return
    free_gib = host_gib - _check_input_memory(config, spec, layout, dp, host_gib)
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

    stage_memory_list = stage_memories(with_offload_fraction(config, offload_share), spec, layout, dp)
    needed_gib = max(stage.host_bytes for stage in stage_memory_list) / host_memory.GIB
    node_ranks = host_memory.num_ranks_on_node()
    if needed_gib > free_gib:
        raise RunConfigError(
            f"optimizer.offload_fraction {share_text} needs {node_ranks * needed_gib:.1f} GiB of host memory"
            f" for {pluralize(node_ranks, 'rank')} of a node, which has {node_ranks * free_gib:.1f} GiB left;"
            f" {remedy_text}, or start fewer ranks per node"
        )


def _check_input_memory(
    config: TrainConfig, spec: ModelSpec, layout: Layout, dp: int, host_gib: float
) -> float:
    """GiB of host memory that a rank needs for the inputs of its layers (``recompute.offload_inputs``).

    Raises RunConfigError if a node has less.
    """
    if not config.recompute.offload_inputs:
        return 0.0
    needed_bytes = max(stage.host_input_bytes for stage in stage_memories(config, spec, layout, dp))
    needed_gib = needed_bytes / host_memory.GIB
    if needed_gib > host_gib:
        node_ranks = host_memory.num_ranks_on_node()
        raise RunConfigError(
            f"recompute.offload_inputs needs {node_ranks * needed_gib:.1f} GiB of host memory for"
            f" {pluralize(node_ranks, 'rank')} of a node, which has {node_ranks * host_gib:.1f} GiB left;"
            " set it to false, lower data.seq_len, raise parallel.cp, or start fewer ranks per node"
        )
    return needed_gib
