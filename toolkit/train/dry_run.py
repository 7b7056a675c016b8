"""``train --dry-run``: makes every check of a start, and prints the run that would start."""

import math

from megatron_vl.config import TrainConfig
from megatron_vl.estimate.gpus import find_gpu, known_gpus, local_gpu, query_gpus, reserve_gib
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
    world_size = nnodes * ranks_per_node
    _print_run(resolve_run(config, world_size, machine_memory), world_size)


def _least_ranks(config: TrainConfig, nnodes: int) -> int:
    p = config.parallel
    # Dense and expert ranks must both divide the ranks of a stage.
    return -(-p.pp * math.lcm(p.tp * p.cp, p.ep * p.etp) // nnodes)


def stage_contents(layout: Layout, pipeline_stage: int) -> list[str]:
    is_first, is_last = pipeline_stage == 0, pipeline_stage == layout.pp - 1
    contents = ["vision tower"] * (is_first or layout.decoupled) + ["embedding"] * is_first
    for chunk in range(layout.vpp):
        if layers := layout.chunk_layers(pipeline_stage, chunk):
            chunk_text = f" (chunk {chunk})" if layout.vpp > 1 else ""
            contents.append(f"decoder layers {layers[0]} to {layers[-1]}{chunk_text}")
    return contents + ["output layer and loss"] * is_last


def _pass_text(resolved_run: ResolvedRun) -> str:
    from data_tools.sample_sources import open_encoder
    from data_tools.statistics import count_statistics, describe_pass

    config = resolved_run.config
    if config.data.is_synthetic:
        return "random rows have no end"
    not_known = "the steps of a pass over the data are not known"
    if resolved_run.facts_by_split["train"].datasets_without_sizes:
        return f"{not_known}: the first start measures the samples"
    encoder = open_encoder(config.data, resolved_run.spec, config.model.hf)
    try:
        data_statistics = count_statistics(encoder, config.model.hf)
    except UserError as error:
        return f"{not_known}: {error}"
    text = describe_pass(data_statistics.pass_facts(config.global_batch_size), fills_rows=config.steps > 0)
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in data_statistics.left_out_reasons().items())
    return f"{text}; left out of {data_statistics.num_samples:,} samples: {reasons}" if reasons else text


def _print_run(run: ResolvedRun, world_size: int) -> None:
    config, spec, layout = run.config, run.spec, run.layout
    prediction = predict_layout(config, spec, world_size, layout, local_gpu())
    print(f"{spec.family} on {pluralize(world_size, 'rank')}")
    if trained := trained_text(*count_parameters(config, spec)):
        print(trained)
    sequence_text = ", sequence parallel" if config.parallel.sequence_parallel else ""
    print(f"layout: {layout_sizes_text(layout.as_dict() | {'dp': run.dp})}{sequence_text}")
    for stage in range(layout.pp):
        print(f"  stage {stage}: {', '.join(stage_contents(layout, stage))}")
    if run.source_checkpoint:
        of_steps = f" of {config.steps}" if config.steps else ""
        print(f"start: after step {run.source_checkpoint.step}{of_steps}, from {config.checkpoint.dir}")
    print(
        f"step: {pluralize(config.global_batch_size, 'row')},"
        f" {config.global_batch_size * config.data.seq_len:,} tokens,"
        f" {pluralize(prediction.micro_batches, 'micro-batch')} on each data-parallel rank"
    )
    print(_pass_text(run))
    stages = [stage.as_json() for stage in prediction.stages]
    wide_console().print(memory_table(stages, "Memory of a GPU in GiB (estimate)"))
    fullest_text = f"{prediction.peak_gib:.1f} GiB, with a row full of images"
    if config.platform == "cpu":
        print(f"fullest rank: {fullest_text}; the estimate is made for GPUs")
    else:
        print(f"fullest GPU: {fullest_text}; a ninth of a GPU, at most 8 GiB, should stay free")
        is_fp8, gpus = config.fp8.recipe != "none", known_gpus().values()
        gib_by_gpu = {gpu.label: gpu.memory_gib for gpu in gpus if gpu.is_hopper_or_later or not is_fp8}
        fits = [name for name, gib in gib_by_gpu.items() if prediction.peak_gib + reserve_gib(gib) <= gib]
        print(f"fits: {', '.join(fits) or 'none of ' + ', '.join(gib_by_gpu)}")
        if prediction.host_gib:
            print(f"host memory: {prediction.host_gib:.1f} GiB for each rank of the fullest stage")
        gpu = prediction.gpu.name + ("" if prediction.gpu.is_measured else " (not measured)")
        print(
            f"estimated on {gpu} in bf16 with image rows: {prediction.step_seconds:.2f} s a step,"
            f" {prediction.tokens_per_second:,.0f} tokens/s at {prediction.mfu:.0%} MFU"
        )
    for note in run.run_notes:
        print(note)
