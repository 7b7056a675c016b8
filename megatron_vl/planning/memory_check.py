"""Checks whether a run fits its GPUs by the memory estimate, and finds options with which it would.

The start of a run, ``doctor`` and a rank that has run out of memory all call this module.
"""

from __future__ import annotations

import math

from megatron_vl.config import RunConfigError, TrainConfig, validate_config
from megatron_vl.planning.calibration import Calibration
from megatron_vl.planning.layout_search import SearchRequest, changed_options_text, search_fastest_fit
from megatron_vl.planning.memory import RESERVE_GIB, peak_stage_gib, stage_memories
from megatron_vl.planning.offload_fraction import least_offload_fraction, resolve_offload_fraction
from megatron_vl.planning.row_statistics import make_assumed_rows
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
    host_gib: float = math.inf,
) -> str:
    """Compares the memory estimate of a run with the GPU's memory.

    Args:
        host_gib: GiB of host memory for each rank, within which options are advised.

    Returns a remark if the run may start but leaves less than :data:`RESERVE_GIB` free; empty if it fits.

    Raises:
        RunConfigError: the run does not fit. The message says which options would, and how to start anyway.
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
    refusal_limit_gib = gpu_memory_gib * (EXPERT_OVERESTIMATE if spec.language.moe else 1.0)
    if estimated_gib <= refusal_limit_gib or not config.failures.check_memory:
        offload_advice = _offload_advice(config, spec, layout, data_parallel_size, gpu_memory_gib)
        return f"{estimate_text}, so the run may end for lack of memory; {offload_advice}"

    options_advice = fitting_options_advice(config, spec, world_size, calibration, host_gib=host_gib)
    raise RunConfigError(
        f"the run does not fit: {estimate_text}. {options_advice} If the rows hold less than that,"
        " data.max_patches bounds their patches and with them the estimate. --failures.check_memory false"
        " starts anyway"
    )


def _offload_advice(
    config: TrainConfig, spec: ModelSpec, layout: Layout, data_parallel_size: int, gpu_memory_gib: float
) -> str:
    offload_fraction = least_offload_fraction(config, spec, layout, data_parallel_size, gpu_memory_gib)
    if offload_fraction is None:
        return "not even --optimizer.offload_fraction 1 would change that"
    return f"--optimizer.offload_fraction {offload_fraction:g} would fit"


def fitting_options_advice(
    config: TrainConfig,
    spec: ModelSpec,
    world_size: int,
    calibration: Calibration,
    *,
    keep_parallel_sizes: bool = False,
    host_gib: float = math.inf,
) -> str:
    """A sentence with the options of the fastest layout that fits the same model, rows and GPUs.

    Args:
        keep_parallel_sizes: whether to keep the run's parallel sizes if they fit with another split,
            recompute, offload or placement of the tower.
        host_gib: GiB of host memory for each GPU.
    """
    rows = make_assumed_rows(spec, config.data.seq_len, config.data.max_patches)
    search_request = SearchRequest(config, spec, world_size, calibration, rows, host_gib=host_gib)
    fitting_prediction = (
        search_fastest_fit(search_request, keep_parallel_sizes=True) if keep_parallel_sizes else None
    ) or search_fastest_fit(search_request)
    if fitting_prediction is None:
        return f"No layout of {world_size} GPUs fits: take more, or lower data.seq_len or data.max_patches."
    return (
        f"What would fit, by `megatron-vl plan`: {changed_options_text(config, fitting_prediction)}"
        f" ({fitting_prediction.peak_gib:.0f} GiB)."
    )
