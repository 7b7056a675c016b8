"""Times the trainer itself with random weights: its model, pipeline schedule, DDP, optimizer and feed.

Rows are drawn, packed and pinned before the clock starts and used in turn, or come from the real loader
(``data``). Each workload begins with warm-up steps. Then consecutive whole steps are timed, as in training.
Further steps time the parts of a step, and in the last one, the collectives are profiled.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron_vl import host_memory
from megatron_vl.data.packing.training_row import TrainingRow, pin_row
from megatron_vl.models.moe.router import iterate_routers
from megatron_vl.parallel.process_grid import ProcessGrid, init_distributed, make_grid
from megatron_vl.planning.flops import peak_tflops
from megatron_vl.planning.offload_fraction import resolve_offload_fraction
from megatron_vl.platform import Platform, get_platform
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.training.batch_broadcast import BatchBroadcast, StepBatch
from megatron_vl.training.model import HALF_PIXEL_NORM, build_model
from megatron_vl.training.offload.build import chunked_state
from megatron_vl.training.optimizer import build_optimizer, set_learning_rates
from megatron_vl.training.step import StepResult, train_step, wrap_in_ddp

from . import calibrate, report, step_parts
from .options import BenchRun
from .workload import draw_rows

GIB = 2**30


@dataclass
class BenchModel:
    """A rank's part of the model, ready to train."""

    bench_run: BenchRun
    spec: ModelSpec
    platform: Platform
    grid: ProcessGrid
    ddp_chunks: list[DistributedDataParallel]
    optimizer: ChainedOptimizer
    memory_gib: dict[str, float]
    """GiB of the weights and gradients; empty on CPU."""
    step_number: int = 0


def measure_benchmark(options: BenchRun) -> dict[str, Any]:
    """Measures all workloads. Every rank gets the same figures. Collective."""
    config = options.config
    spec = options.read_model_spec()
    platform = get_platform(config.platform)
    init_distributed(platform)
    options.check_ranks(dist.get_world_size())
    layout = options.resolve_layout(dist.get_world_size())
    # Before the model is built, while the GPU's memory is free.
    kernel_calibration = calibrate.measure_kernels(options, spec, platform) if options.calibrate else None
    grid = make_grid(layout)
    bench_model = build_bench_model(options, spec, platform, grid, layout)

    gpu_peak_tflops = peak_tflops(calibrate.device_name(platform), config.log.peak_tflops)
    micro_batches = config.global_batch_size // grid.dp
    figures_by_workload = {}
    for workload in options.workloads:
        figures_by_workload[workload] = measure_workload(
            bench_model, workload, micro_batches, gpu_peak_tflops
        )

    bench_figures = {
        "system": "megatron-vl",
        "machine": report.describe_machine(platform.device, gpu_peak_tflops),
        "model": report.describe_model(options, spec),
        "notes": [_layout_note(bench_model)],
        "config": dataclasses.asdict(config),
        "workloads": figures_by_workload,
    }
    if kernel_calibration is not None and grid.rank == 0:
        bench_figures["calibration"] = calibrate.finish_calibration(
            options, spec, layout, kernel_calibration, figures_by_workload
        )
    return bench_figures


def build_bench_model(
    options: BenchRun, spec: ModelSpec, platform: Platform, grid: ProcessGrid, layout: Layout
) -> BenchModel:
    """Builds model, DDP and optimizer and records the memory that each takes."""
    config = resolve_offload_fraction(
        options.config,
        spec,
        layout,
        grid.dp,
        platform.total_memory_gib(),
        host_memory.available_gib_per_rank(),
    )

    memory_gib = {}
    bytes_before = allocated_bytes(platform)
    model_chunks = build_model(config, spec, layout, platform, grid, pixel_norm=HALF_PIXEL_NORM).model_chunks
    if options.even_routing:
        for router in iterate_routers(model_chunks):
            router.config.moe_router_force_load_balancing = True

    bytes_with_weights = allocated_bytes(platform)
    ddp_chunks = wrap_in_ddp(config, model_chunks)
    if platform.name == "cuda":
        # The distributed optimizer moves the weights into buffers of DDP, so only the gradients are added.
        memory_gib = {
            "weights": (bytes_with_weights - bytes_before) / GIB,
            "gradients": (allocated_bytes(platform) - bytes_with_weights) / GIB,
        }
    optimizer = build_optimizer(config, platform, ddp_chunks)
    return BenchModel(options, spec, platform, grid, ddp_chunks, optimizer, memory_gib)


def allocated_bytes(platform: Platform) -> int:
    """Bytes of the live tensors on the device; 0 on CPU."""
    if platform.name != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def measure_workload(
    bench_model: BenchModel, workload: str, micro_batches: int, gpu_peak_tflops: float
) -> dict[str, Any]:
    """Measures one workload. Every rank gets the same figures. Collective.

    Args:
        workload: one of ``images``, ``text`` and ``data``.
        micro_batches: rows of this replica in a step.
        gpu_peak_tflops: TFLOP/s of one accelerator; 0 if unknown.
    """
    bench_run, grid = bench_model.bench_run, bench_model.grid
    row_loader = make_loader(bench_model, workload, micro_batches)
    batch_broadcast = BatchBroadcast(
        grid, bench_model.platform, row_loader, micro_batches, vision_spec=bench_model.spec.vision
    )

    # Kernels are compiled and memory is allocated in the first steps, which are not timed.
    for _ in range(bench_run.warm_up):
        run_one_step(bench_model, batch_broadcast.next_batch)
    if bench_model.platform.name == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step_seconds, fed_steps, step_result = time_steps(bench_model, batch_broadcast)

    # Memory and FLOPs are counted after the clock has stopped.
    measured_memory = memory_figures(bench_model)
    work_counts = report.WorkCounts()
    data_wait_seconds = 0.0
    for step_data in fed_steps if grid.owns_loader else ():
        data_wait_seconds += step_data.loader_wait_s
        count_work(work_counts, bench_model, step_data)

    total_work = sum(report.gather_to_all(work_counts), start=report.WorkCounts())
    workload_figures = report.speed_figures(total_work, step_seconds, grid.world_size, gpu_peak_tflops)
    workload_figures |= {
        "loss": step_result.loss,
        "data_wait_s": max(report.gather_to_all(data_wait_seconds)) / bench_run.timed,
        "memory": measured_memory,
    }
    if bench_run.part_steps:
        workload_figures |= measure_parts(bench_model, batch_broadcast, gpu_peak_tflops)
    if row_loader is not None and hasattr(row_loader, "close"):
        row_loader.close()
    return workload_figures


def time_steps(
    bench_model: BenchModel, batch_broadcast: BatchBroadcast
) -> tuple[list[float], list[StepBatch], StepResult]:
    """Runs the timed steps. Returns their seconds, what was fed to them, and the result of the last one.

    A step reads its loss and gradient norm, equal on all ranks, and then launches its update. So the time
    between two returns has exactly one update in it, and copies of offloaded state that go on beside passes
    are hidden as in training. Nothing waits for the device here: that would take them out of hiding.
    """
    fed_steps: list[StepBatch] = []
    clock_times = [time.perf_counter()]
    for _ in range(bench_model.bench_run.timed):
        step_result, step_data = run_one_step(bench_model, batch_broadcast.next_batch)
        clock_times.append(time.perf_counter())
        fed_steps.append(dataclasses.replace(step_data, rows=[]))  # the rows' memory is freed
    return [end - begin for begin, end in itertools.pairwise(clock_times)], fed_steps, step_result


def run_one_step(
    bench_model: BenchModel, next_batch: Callable[[], StepBatch]
) -> tuple[StepResult, StepBatch]:
    """Runs one step as the training loop does, with the rows of ``next_batch``."""
    step_data = next_batch()
    set_learning_rates(bench_model.optimizer, bench_model.bench_run.config, bench_model.step_number)
    step_result = train_step(
        bench_model.ddp_chunks,
        bench_model.optimizer,
        step_data.rows,
        bench_model.grid,
        bench_model.bench_run.config.data.seq_len,
    )
    bench_model.step_number += 1
    return step_result, step_data


def count_work(work_counts: report.WorkCounts, bench_model: BenchModel, step_data: StepBatch) -> None:
    """Adds the rows of a step of this replica to ``work_counts``."""
    config = bench_model.bench_run.config
    for document_lengths, (frame_lengths, window_lengths), loss_tokens in zip(
        step_data.segment_lengths, step_data.vision_lengths, step_data.loss_tokens, strict=True
    ):
        work_counts.add_row(
            bench_model.spec,
            config.model,
            config.recompute,
            document_lengths,
            frame_lengths,
            window_lengths,
            loss_tokens,
            lora=config.lora,
            decoupled=config.vision.placement == "decoupled",
        )
    work_counts.image_count += step_data.item_counts.get("images", 0)


def make_loader(bench_model: BenchModel, workload: str, micro_batches: int) -> Iterator[TrainingRow] | None:
    """Rows of this replica, on the rank that owns its loader.

    Replicas get different rows, so that their steps differ in length as in training.
    """
    if not bench_model.grid.owns_loader:
        return None
    bench_run = bench_model.bench_run
    config = bench_model.bench_run.config
    if workload == "data":
        from megatron_vl.data.loader import build_loader

        return build_loader(
            config.data,
            bench_model.spec,
            bench_run.hf,
            dp_rank=bench_model.grid.dp_rank,
            dp_size=bench_model.grid.dp,
        )
    drawn_rows = draw_rows(
        bench_model.spec,
        config.data.seq_len,
        with_images=workload == "images",
        seed=17 + bench_model.grid.dp_rank,
    )
    row_count = bench_run.distinct_rows or bench_run.steps_per_workload * micro_batches
    return itertools.cycle([pin_row(row) for row in itertools.islice(drawn_rows, row_count)])


def memory_figures(bench_model: BenchModel) -> dict[str, Any]:
    """GiB of each part on the rank with the highest peak. Waits for copies of offloaded state. Collective."""
    local_memory: dict[str, Any] = {"peak_gib": bench_model.platform.peak_memory_gib()}
    if bench_model.platform.name == "cuda":
        if chunked_optimizer := chunked_state(bench_model.optimizer):
            # The buffers of copies that are still under way would count as allocated.
            chunked_optimizer.chunk_streamer.wait_for_host_state()

        # What stays allocated between steps: weights, gradients and optimizer.
        steady_gib = allocated_bytes(bench_model.platform) / GIB
        local_memory |= {f"{part}_gib": size for part, size in bench_model.memory_gib.items()}
        local_memory["optimizer_gib"] = steady_gib - sum(bench_model.memory_gib.values())
        local_memory["activations_gib"] = local_memory["peak_gib"] - steady_gib
        local_memory["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB

    memory_by_rank = report.gather_to_all(local_memory)
    fullest_memory = max(memory_by_rank, key=lambda rank_memory: rank_memory["peak_gib"])
    peak_gib_by_rank = [rank_memory["peak_gib"] for rank_memory in memory_by_rank]
    return fullest_memory | {"peak_gib_by_rank": peak_gib_by_rank}


def measure_parts(
    bench_model: BenchModel, batch_broadcast: BatchBroadcast, gpu_peak_tflops: float
) -> dict[str, Any]:
    """Times the parts of steps on all ranks and, in one more step, the collectives. Collective."""
    span_timer = step_parts.SpanTimer(bench_model.platform)
    timed_feed = span_timer.time_calls("feed", batch_broadcast.next_batch)
    work_counts = report.WorkCounts()
    data_wait_seconds = []
    with step_parts.timing_hooks(span_timer, bench_model.ddp_chunks, bench_model.optimizer):
        for _ in range(bench_model.bench_run.part_steps):
            dist.barrier()
            with span_timer.time_step():
                _, step_data = run_one_step(bench_model, timed_feed)
            data_wait_seconds.append(step_data.loader_wait_s if bench_model.grid.owns_loader else 0.0)
            if bench_model.grid.owns_loader:
                count_work(work_counts, bench_model, step_data)

    bench_model.platform.synchronize()

    local_parts = []
    for step, wait in zip(span_timer.seconds_by_step(), data_wait_seconds, strict=True):
        local_parts.append(step_parts.split_into_parts(step, wait))

    rank_coordinates = (bench_model.grid.pp_rank, bench_model.grid.dp_rank)
    gathered_facts = report.gather_to_all((local_parts, rank_coordinates, work_counts.model_flops))
    parts_by_rank, coordinates_by_rank, flops_by_rank = map(list, zip(*gathered_facts, strict=True))
    part_figures = step_parts.summarize_parts(parts_by_rank, coordinates_by_rank)
    part_figures["efficiency"] = compute_efficiency(parts_by_rank, flops_by_rank, gpu_peak_tflops)

    # The profiler slows a step down, so this step is not among the timed ones.
    communication_by_rank = report.gather_to_all(
        step_parts.profile_communication(
            bench_model.platform, lambda: run_one_step(bench_model, batch_broadcast.next_batch)
        )
    )
    part_figures["communication"] = step_parts.mean_and_max(communication_by_rank)
    return part_figures


def compute_efficiency(
    parts_by_rank: list[list[dict[str, float]]], flops_by_rank: list[Any], gpu_peak_tflops: float
) -> dict[str, float | None]:
    """The share of the peak that each half of the model reaches in its own time, summed over ranks."""
    efficiency_by_half: dict[str, float | None] = {}
    for model_half in ("language", "vision"):
        all_steps = [step for rank in parts_by_rank for step in rank]
        seconds = sum(step[f"{model_half} forward"] + step[f"{model_half} backward"] for step in all_steps)
        total_flops = sum(getattr(rank_flops, model_half) for rank_flops in flops_by_rank)
        efficiency_by_half[model_half] = (
            total_flops / seconds / 1e12 / gpu_peak_tflops
            if gpu_peak_tflops and seconds and total_flops
            else None
        )
    return efficiency_by_half


def _layout_note(bench_model: BenchModel) -> str:
    grid = bench_model.grid
    config = bench_model.bench_run.config
    context = f" x cp {grid.cp}" if grid.cp > 1 else ""
    experts = f" x ep {grid.sharding.ep} (etp {grid.sharding.etp})" if bench_model.spec.language.moe else ""
    experts += ", experts chosen evenly" if bench_model.bench_run.even_routing else ""
    recompute_note = f"recompute: language {config.recompute.language}, vision {config.recompute.vision}"
    recompute_note += ", inputs of layers in host memory" if config.recompute.offload_inputs else ""
    return (
        f"tp {grid.tp}{context} x pp {grid.pp} x vpp {grid.vpp} x dp "
        f"{grid.dp}{experts}, {config.global_batch_size} rows of "
        f"{config.data.seq_len} tokens per step, {config.dtype}, {recompute_note}"
    )
