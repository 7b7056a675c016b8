"""``train --dry-run``: makes every check of a start, and prints the run that would start."""

from __future__ import annotations

import math
from typing import Any

from megatron_vl.config import TrainConfig
from megatron_vl.estimate.gpus import find_gpu, known_gpus, local_gpu, query_gpus, reserve_gib
from megatron_vl.estimate.memory_check import least_offload_fraction
from megatron_vl.estimate.parameters import count_parameters
from megatron_vl.estimate.step import predict_layout
from megatron_vl.spec.layout import Layout
from megatron_vl.system import host_memory
from megatron_vl.system.errors import UserError
from megatron_vl.system.plurals import pluralize, trained_text
from megatron_vl.training.resolve import MachineMemory, resolve_run
from megatron_vl.training.resolved_run import ResolvedRun
from toolkit.common.layouts import layout_sizes_text
from toolkit.common.memory_table import memory_table, wide_console


def show_dry_run(config: TrainConfig, ranks_per_node: int | None, nnodes: int) -> None:
    """Prints the run. Raises the errors of a start (:func:`resolve_run`)."""
    local_gpus = query_gpus()
    ranks_per_node = ranks_per_node or len(local_gpus) or _least_ranks(config, nnodes)
    machine_memory = None
    if local_gpus and config.platform != "cpu":
        host_gib = host_memory.available_bytes() / host_memory.GIB / ranks_per_node
        machine_memory = MachineMemory((local_gpu() or find_gpu()).memory_gib, host_gib)
    resolved_run = resolve_run(config, nnodes * ranks_per_node, machine_memory)
    _print_facts(resolved_run, _run_facts(resolved_run, nnodes * ranks_per_node))


def _least_ranks(config: TrainConfig, nnodes: int) -> int:
    """Number of ranks per node if none is given: as few as the layout needs."""
    parallel_config = config.parallel
    # Dense and expert ranks must both divide the ranks of a stage.
    stage_ranks = math.lcm(parallel_config.tp * parallel_config.cp, parallel_config.ep * parallel_config.etp)
    return max(1, -(-parallel_config.pp * stage_ranks // nnodes))


def _run_facts(resolved_run: ResolvedRun, world_size: int) -> dict[str, Any]:
    config, spec, layout, dp = resolved_run.config, resolved_run.spec, resolved_run.layout, resolved_run.dp
    is_on_cpu, source = config.platform == "cpu", resolved_run.source_checkpoint
    prediction = predict_layout(config, spec, world_size, layout, local_gpu())
    gib_by_gpu = {} if is_on_cpu else {gpu.label: gpu.memory_gib for gpu in known_gpus().values()}
    key_ranks = {"key_ranks": layout.key_ranks} if layout.key_ranks > 1 else {}
    return {
        "family": spec.family,
        "ranks": world_size,
        "layout": layout.as_dict() | {"dp": dp} | key_ranks,
        "stages": [_stage_contents(layout, stage) for stage in range(layout.pp)],
        "split": resolved_run.layer_split_origin,
        "step": source.step if source else 0,
        "micro_batches": prediction.micro_batches,
        "pass": _pass_text(resolved_run),
        "memory_gib": [stage.as_json() for stage in prediction.stages],
        "peak_gib": round(prediction.peak_gib, 1),
        "host_gib": round(prediction.host_gib, 1),
        "offload_fraction": config.optimizer.offload_fraction,
        "least_offload_fraction": {
            name: least_offload_fraction(config, spec, layout, dp, gib) for name, gib in gib_by_gpu.items()
        },
        "fits": [name for name, gib in gib_by_gpu.items() if prediction.peak_gib + reserve_gib(gib) <= gib],
        "speed": None if is_on_cpu else prediction.as_json(),
        "notes": list(resolved_run.run_notes),
    }


def _stage_contents(layout: Layout, pipeline_stage: int) -> list[str]:
    """The contents of a stage, in the order of the model."""
    stage_contents = ["vision tower"] if pipeline_stage == 0 or layout.decoupled else []
    stage_contents += ["embedding"] if pipeline_stage == 0 else []
    for chunk_index in range(layout.vpp):
        layers = list(layout.chunk_layers(pipeline_stage, chunk_index))
        chunk = f" (chunk {chunk_index})" if layout.vpp > 1 else ""
        if layers:
            stage_contents.append(f"decoder layers {layers[0]} to {layers[-1]}{chunk}")
    return stage_contents + (["output layer and loss"] if pipeline_stage == layout.pp - 1 else [])


def _pass_text(resolved_run: ResolvedRun) -> str:
    """How many steps a pass over the data takes, from the stored sizes of its samples."""
    from data_tools.sample_sources import open_encoder
    from data_tools.statistics import count_statistics, describe_pass

    config = resolved_run.config
    if config.data.is_synthetic:
        return "random rows have no end"
    encoder = open_encoder(config.data, resolved_run.spec, config.model.hf)
    try:
        data_statistics = count_statistics(encoder, config.model.hf)
    except UserError as error:  # the first start writes the sizes
        return f"the steps of a pass over the data are not known: {error}"
    return describe_pass(data_statistics.pass_facts(config.global_batch_size))


def _print_facts(resolved_run: ResolvedRun, run_facts: dict[str, Any]) -> None:
    config = resolved_run.config
    sequence_text = ", sequence parallel" if config.parallel.sequence_parallel else ""
    print(f"{run_facts['family']} on {pluralize(run_facts['ranks'], 'rank')}")
    if trained := trained_text(*count_parameters(config, resolved_run.spec)):
        print(trained)
    print(f"layout: {layout_sizes_text(run_facts['layout'])}{sequence_text}")
    for pipeline_stage, stage_contents in enumerate(run_facts["stages"]):
        print(f"  stage {pipeline_stage}: {', '.join(stage_contents)}")
    if run_facts["step"]:
        print(f"start: after step {run_facts['step']} of {config.steps}, from {config.checkpoint.dir}")
    print(
        f"step: {pluralize(config.global_batch_size, 'row')},"
        f" {config.global_batch_size * config.data.seq_len:,} tokens,"
        f" {pluralize(run_facts['micro_batches'], 'micro-batch')} on each data-parallel rank"
    )
    print(run_facts["pass"])
    wide_console().print(memory_table(run_facts["memory_gib"], "Memory of a GPU in GiB (estimate)"))
    _print_fits(run_facts, is_on_cpu=config.platform == "cpu")
    if speed := run_facts["speed"]:
        note = "" if speed["measured"] else " (not measured)"
        speed_text = f"{speed['step_s']:.2f} s a step, {speed['tokens_per_second']:,} tokens/s"
        print(f"estimated on {speed['gpu']}{note} with image rows: {speed_text} at {speed['mfu']:.0%} MFU")
    for note in run_facts["notes"]:
        print(note)


def _print_fits(run_facts: dict[str, Any], is_on_cpu: bool) -> None:
    """Prints the memory of the fullest rank, and on which kinds of GPU it fits."""
    fullest_text = f"{run_facts['peak_gib']} GiB, with a row full of images"
    if is_on_cpu:
        print(f"fullest rank: {fullest_text}; the estimate is made for GPUs")
        return
    print(f"fullest GPU: {fullest_text}; a ninth of a GPU, at most 8 GiB, should stay free")
    print(
        f"fits: {', '.join(run_facts['fits']) or 'none of ' + ', '.join(run_facts['least_offload_fraction'])}"
    )
    if run_facts["host_gib"]:
        print(f"host memory: {run_facts['host_gib']} GiB for each rank of the fullest stage")
    for name, least_fraction in run_facts["least_offload_fraction"].items():
        if name not in run_facts["fits"] and least_fraction is not None:
            print(f"would fit {name}: --optimizer.offload_fraction {least_fraction:g}")
