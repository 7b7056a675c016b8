"""Shows a run without a GPU: its layout, its schedule, the predicted memory and speed.

If its data are on this machine, the steps of a pass over them are shown too. Only this imports torch.
"""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

from megatron_vl.config import TrainConfig
from megatron_vl.errors import UserError
from megatron_vl.planning.gpus import calibration_for_platform, query_gpus
from megatron_vl.planning.memory import (
    GPU_MEMORY_GIB,
    RESERVE_GIB,
    count_parameters,
    peak_stage_gib,
    trained_text,
)
from megatron_vl.planning.offload_fraction import least_offload_fraction
from megatron_vl.planning.predict import RunPrediction, predict_layout
from megatron_vl.planning.run_layout import rates_apply
from megatron_vl.planning.schedule import warmup_forward_passes
from megatron_vl.plurals import pluralize
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.training.resolve import resolve_run
from toolkit.layouts import layout_sizes_text
from toolkit.memory_table import memory_table, wide_console


def show_dry_run(config: TrainConfig, ranks_per_node: int | None, nnodes: int, as_json: bool) -> None:
    """Prints the plan. It raises the errors of :func:`plan_run`."""
    world_size = nnodes * (ranks_per_node or len(query_gpus()) or _least_ranks(config, nnodes))
    run_facts = plan_run(config, world_size)
    if as_json:
        print(json.dumps(run_facts, indent=2))
    else:
        _print_facts(run_facts)


def plan_run(config: TrainConfig, world_size: int) -> dict[str, Any]:
    """Layout, schedule and memory (GiB) of a run of ``world_size`` ranks.

    Raises:
        RunConfigError, LayoutError, ConfigError: the run is impossible; the message names the field.
    """
    resolved_run = resolve_run(config, world_size, show_only=True)
    config, spec, layout = resolved_run.config, resolved_run.spec, resolved_run.layout
    data_parallel_size = resolved_run.dp
    micro_batches = config.global_batch_size // data_parallel_size
    gpu_calibration = calibration_for_platform(config.platform)
    gib_by_gpu = {} if config.platform == "cpu" else GPU_MEMORY_GIB

    least_offload_shares = {}
    for name, gib in gib_by_gpu.items():
        least_offload_shares[name] = least_offload_fraction(config, spec, layout, data_parallel_size, gib)

    prediction = predict_layout(config, spec, world_size, layout, calibration=gpu_calibration)
    stage_memories = [stage.stage_memory for stage in prediction.stage_plans]
    needed_gib = peak_stage_gib(stage_memories) + RESERVE_GIB
    fitting_gpus = [name for name, gib in gib_by_gpu.items() if needed_gib <= gib]

    parameter_count, trained_count = count_parameters(config, spec)
    return {
        "family": spec.family,
        "parameters": parameter_count,
        "trained_parameters": trained_count,
        "platform": config.platform,
        "ranks": world_size,
        "layout": {
            **layout.as_dict(),
            **({"key_ranks": layout.key_ranks} if layout.key_ranks > 1 else {}),
            "dp": data_parallel_size,
            "sequence_parallel": config.parallel.sequence_parallel,
        },
        "stages": list(map(partial(_stage_contents, layout), range(layout.pp))),
        "rows_per_step": config.global_batch_size,
        "tokens_per_step": config.global_batch_size * config.data.seq_len,
        "pass": _data_pass(config, spec),
        "schedule": _schedule_facts(layout, micro_batches),
        "memory_gib": [stage.as_json() for stage in stage_memories],
        "peak_gib": round(peak_stage_gib(stage_memories), 1),
        "fits": fitting_gpus,
        "moments_dtype": config.optimizer.moments_dtype,
        "offload_fraction": config.optimizer.offload_fraction,
        "least_offload_fraction": least_offload_shares,
        "host_gib_per_rank": round(max(stage.host_bytes for stage in stage_memories) / 2**30, 1),
        "host_input_gib_per_rank": round(max(stage.host_input_bytes for stage in stage_memories) / 2**30, 1),
        "split": resolved_run.layer_split_origin,
        "speed": _speed_facts(prediction) if rates_apply(config) else None,
    }


def _data_pass(config: TrainConfig, spec: ModelSpec) -> dict[str, Any] | None:
    """Rows and steps of a pass over the data, from the stored sizes of its samples.

    It is None if the data set or the tokenizer is not on this machine. This imports torch.
    """
    if not config.data.path or not Path(config.data.path).exists() or not Path(config.model.hf).is_dir():
        return None
    from data_tools.sample_sources import open_encoder
    from data_tools.statistics import count_statistics

    try:
        data_statistics = count_statistics(open_encoder(config.data, spec, config.model.hf), config.model.hf)
    except (UserError, OSError, ValueError) as error:
        return {"unknown": str(error)}
    return data_statistics.pass_facts(config.global_batch_size)


def _print_pass(run_facts: dict[str, Any]) -> None:
    """Prints how long a pass over the data is, or why that is not known."""
    if run_facts["pass"] is None:
        return
    if "unknown" in run_facts["pass"]:
        print(f"the steps of a pass over the data are not known: {run_facts['pass']['unknown']}")
        return
    from data_tools.statistics import describe_pass

    print(describe_pass(run_facts["pass"]))


def _least_ranks(config: TrainConfig, nnodes: int) -> int:
    """Number of ranks per node if none is given: as few as the layout needs."""
    parallel_config = config.parallel
    dense_ranks = parallel_config.tp * parallel_config.cp
    expert_ranks = parallel_config.ep * parallel_config.etp
    # Both must divide the ranks of a stage.
    layout_ranks = parallel_config.pp * math.lcm(dense_ranks, expert_ranks)
    return max(1, -(-layout_ranks // nnodes))


def _stage_contents(layout: Layout, pipeline_stage: int) -> list[str]:
    """The contents of a stage, in the order of the model."""
    stage_contents = ["vision tower"] if pipeline_stage == 0 or layout.decoupled else []
    stage_contents += ["embedding"] if pipeline_stage == 0 else []
    for chunk_index in range(layout.vpp):
        layers = list(layout.chunk_layers(pipeline_stage, chunk_index))
        chunk = f" (chunk {chunk_index})" if layout.vpp > 1 else ""
        if layers:
            stage_contents.append(f"decoder layers {layers[0]} to {layers[-1]}{chunk}")
    if pipeline_stage == layout.pp - 1:
        stage_contents.append("output layer and loss")
    return stage_contents


def _schedule_facts(layout: Layout, micro_batches: int) -> dict[str, Any]:
    """The passes of each stage, in micro-batches (with virtual chunks: chunk-micro-batches)."""
    pass_count = micro_batches * layout.vpp
    warm_up = [
        warmup_forward_passes(layout.pp, layout.vpp, stage, micro_batches) for stage in range(layout.pp)
    ]
    return {
        "kind": "interleaved 1F1B" if layout.vpp > 1 else "1F1B" if layout.pp > 1 else "no pipeline",
        "micro_batches": micro_batches,
        "warm_up": warm_up,
        "steady": [pass_count - warm_up_count for warm_up_count in warm_up],
        "idle_share": round((layout.pp - 1) / (pass_count + layout.pp - 1), 4),
    }


def _speed_facts(prediction: RunPrediction) -> dict[str, float | str]:
    """The predicted speed with image rows."""
    return {
        "gpu": prediction.calibration.gpu,
        "rates": prediction.calibration.source,
        "step_s": round(prediction.step_seconds, 3),
        "bubble": round(prediction.bubble_share, 3),
        "mfu": round(prediction.mfu, 3),
        "tokens_per_second": round(prediction.tokens_per_second),
        "hours_per_billion_tokens": round(prediction.hours_per_billion_tokens, 1),
    }


SPLIT_ORIGINS = {
    "planned": "planned, as parallel.layers is left out",
    "even": "even, as parallel.layers is left out and no rates of a CPU are known",
    "saved": "that of the checkpoint that the run resumes from",
}


def _print_offload(run_facts: dict[str, Any]) -> None:
    """Prints the share of optimizer state in host memory, and the share that smaller GPUs need there."""
    if run_facts["moments_dtype"] != "float32":
        print(f"Adam's moments: {run_facts['moments_dtype']}")
    if offload_fraction := run_facts["offload_fraction"]:
        print(
            f"optimizer state in host memory: {offload_fraction:.0%}, "
            f"{run_facts['host_gib_per_rank']} GiB for each rank of the fullest stage"
        )
    if host_input_gib := run_facts["host_input_gib_per_rank"]:
        print(f"inputs of layers in host memory: {host_input_gib} GiB for each rank of the fullest stage")
    for name, least_fraction in run_facts["least_offload_fraction"].items():
        if name not in run_facts["fits"] and least_fraction is not None:
            print(f"would fit {name}: --optimizer.offload_fraction {least_fraction:g}")


def _print_facts(run_facts: dict[str, Any]) -> None:
    layout_sizes, schedule = run_facts["layout"], run_facts["schedule"]
    sequence_note = ", sequence parallel" if layout_sizes["sequence_parallel"] else ""
    print(f"{run_facts['family']} on {pluralize(run_facts['ranks'], 'rank')}")
    if trained := trained_text(run_facts["parameters"], run_facts["trained_parameters"]):
        print(trained)
    print(f"layout: {layout_sizes_text(layout_sizes)}{sequence_note}")

    for pipeline_stage, stage_contents in enumerate(run_facts["stages"]):
        print(f"  stage {pipeline_stage}: {', '.join(stage_contents)}")

    if run_facts["split"] in SPLIT_ORIGINS:
        print(f"  split {layout_sizes['layers']}: {SPLIT_ORIGINS[run_facts['split']]}")
    print(f"step: {pluralize(run_facts['rows_per_step'], 'row')}, {run_facts['tokens_per_step']:,} tokens")
    _print_pass(run_facts)
    micro_batch_text = f"{pluralize(schedule['micro_batches'], 'micro-batch')} on each data-parallel rank"
    print(f"schedule: {schedule['kind']}, {micro_batch_text}")
    if layout_sizes["pp"] > 1:
        for pipeline_stage, (warm_up_count, steady_count) in enumerate(
            zip(schedule["warm_up"], schedule["steady"], strict=True)
        ):
            print(
                f"  stage {pipeline_stage}: {warm_up_count} forward, "
                f"{steady_count} x (forward, backward), {warm_up_count} backward"
            )
        speed_facts = run_facts["speed"]
        bubble_note = (
            f"{speed_facts['bubble']:.1%} of the pipeline's time (estimate); " if speed_facts else ""
        )
        print(f"  idle: {bubble_note}{schedule['idle_share']:.1%} if all stages took equally long")

    stage_table = memory_table(
        run_facts["memory_gib"], "Memory per GPU of each pipeline stage in GiB (estimate)"
    )
    wide_console().print(stage_table)
    _print_fits(run_facts)
    if speed_facts := run_facts["speed"]:
        print(
            f"estimated speed on {speed_facts['gpu']} with image rows: {speed_facts['step_s']:.2f} s a step,"
            f" {speed_facts['tokens_per_second']:,} tokens/s at {speed_facts['mfu']:.0%} MFU,"
            f" {speed_facts['hours_per_billion_tokens']} hours per billion tokens ({speed_facts['rates']})"
        )


def _print_fits(run_facts: dict[str, Any]) -> None:
    """Prints the memory of the fullest rank, and on which kinds of GPU it fits."""
    fullest_text = f"{run_facts['peak_gib']} GiB, with a row full of pictures"
    if run_facts["platform"] == "cpu":
        print(f"fullest rank: {fullest_text}; the estimate is made for GPUs")
        return
    print(f"fullest GPU: {fullest_text}; {RESERVE_GIB:.0f} GiB more should stay free")
    print(f"fits: {', '.join(run_facts['fits']) or 'none of ' + ', '.join(GPU_MEMORY_GIB)}")
    _print_offload(run_facts)
