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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron_vl import host_memory
from megatron_vl.data.packing.row import Row, pin
from megatron_vl.models.moe.router import routers
from megatron_vl.parallel.grid import ProcessGrid, init_distributed, make_grid
from megatron_vl.planning.flops import peak_tflops
from megatron_vl.planning.offload import settle_offload
from megatron_vl.platform import Platform, get_platform
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.training.feed import Feed, StepData
from megatron_vl.training.model import HALF, build_model
from megatron_vl.training.offload.build import chunked_state
from megatron_vl.training.optimizer import build_optimizer, set_learning_rates
from megatron_vl.training.step import StepResult, train_step, wrap

from . import calibrate, parts, report
from .options import BenchRun
from .workload import rows

GIB = 2**30


@dataclass
class BenchModel:
    """A rank's part of the model, ready to train."""

    options: BenchRun
    spec: ModelSpec
    platform: Platform
    grid: ProcessGrid
    chunks: list[DistributedDataParallel]
    optimizer: ChainedOptimizer
    memory: dict[str, float]
    """GiB of the weights and gradients; empty on CPU."""
    step: int = 0


def run(options: BenchRun) -> None:
    """Measures all workloads and reports them on rank 0. Collective."""
    config = options.config
    spec = options.spec()
    platform = get_platform(config.platform)
    init_distributed(platform)
    options.check_ranks(dist.get_world_size())
    layout = options.layout(dist.get_world_size())
    kernels = calibrate.measure_kernels(options, spec, platform) if options.calibrate else None
    grid = make_grid(layout)
    live = build(options, spec, platform, grid, layout)

    name = torch.cuda.get_device_name() if platform.name == "cuda" else "cpu"
    peak = peak_tflops(name, config.log.peak_tflops)
    workloads = {
        name: measure(live, name, config.global_batch_size // grid.dp, peak) for name in options.workloads
    }

    figures = {
        "system": "megatron-vl",
        "machine": report.machine(options, platform.device, peak),
        "model": report.model_facts(options, spec),
        "notes": [_layout_note(live)],
        "config": dataclasses.asdict(config),
        "workloads": workloads,
    }
    if kernels is not None and grid.rank == 0:
        figures["calibration"] = calibrate.finish(options, spec, layout, kernels, workloads)
    report.finish(options, figures)


def build(
    options: BenchRun, spec: ModelSpec, platform: Platform, grid: ProcessGrid, layout: Layout
) -> BenchModel:
    """Builds model, DDP and optimizer and records the memory that each takes."""
    config = settle_offload(
        options.config, spec, layout, grid.dp, platform.memory_gib(), host_memory.gib_per_rank()
    )
    memory = {}
    before = allocated(platform)
    chunks = build_model(config, spec, layout, platform, grid, norm=HALF).chunks
    if options.even_routing:
        for router in routers(chunks):
            router.config.moe_router_force_load_balancing = True
    weights = allocated(platform)
    wrapped = wrap(config, chunks)
    if platform.name == "cuda":
        # The distributed optimizer moves the weights into buffers of DDP, so only the gradients are added.
        memory = {"weights": (weights - before) / GIB, "gradients": (allocated(platform) - weights) / GIB}
    optimizer = build_optimizer(config, platform, wrapped)
    return BenchModel(options, spec, platform, grid, wrapped, optimizer, memory)


def allocated(platform: Platform) -> int:
    """Bytes of the live tensors on the device; 0 on CPU."""
    if platform.name != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def measure(live: BenchModel, workload: str, micro_batches: int, peak: float) -> dict[str, Any]:
    """Measures one workload; every rank gets the same figures. Collective."""
    o, platform = live.options, live.platform
    loader = make_loader(live, workload, micro_batches)
    feed = Feed(
        live.grid,
        platform,
        loader,
        micro_batches,
        vision=live.spec.vision,
    )
    for _ in range(o.warm_up):
        one_step(live, feed)
    if chunked := chunked_state(live.optimizer):
        chunked.settle()  # what is on its way back does not stay
    held = allocated(platform)
    if platform.name == "cuda":
        torch.cuda.reset_peak_memory_stats()
    work = report.Work()
    waits = 0.0
    marks = []
    result = None
    dist.barrier()
    platform.synchronize()
    start = time.perf_counter()
    fed: list[StepData] = []

    for _ in range(o.timed):
        result, data = one_step(live, feed)
        # The step has read its loss from the device, so the clock read after it includes all of the step.
        marks.append(time.perf_counter())
        fed.append(_without_tensors(data))

    platform.synchronize()
    marks[-1] = time.perf_counter()
    if live.grid.owns_loader:
        for data in fed:
            waits += data.wait_s
            count(work, live, data)

    assert result is not None
    figures = report.headline(
        sum(report.gather(work), start=report.Work()),
        [end - begin for begin, end in itertools.pairwise([start, *marks])],
        live.grid.world_size,
        peak,
    )
    figures |= {
        "loss": result.loss,
        "data_wait_s": max(report.gather(waits)) / o.timed,
        "memory": memory(live, held),
    }

    if o.part_steps:
        figures |= measure_parts(live, feed, peak)
    if loader is not None and hasattr(loader, "close"):
        loader.close()
    return figures


def one_step(live: BenchModel, feed: Feed) -> tuple[StepResult, StepData]:
    """Runs one step as the training loop does."""
    data = feed.next_step()
    set_learning_rates(live.optimizer, live.options.config, live.step)
    result = train_step(live.chunks, live.optimizer, data.rows, live.grid, live.options.config.data.seq_len)
    live.step += 1
    return result, data


def _without_tensors(data: StepData) -> StepData:
    return dataclasses.replace(data, rows=[])


def count(work: report.Work, live: BenchModel, data: StepData) -> None:
    config = live.options.config
    for lengths, (full, window), loss_tokens in zip(
        data.segment_lengths, data.vision_lengths, data.loss_tokens, strict=True
    ):
        work.add(
            live.spec,
            config.model,
            config.recompute,
            lengths,
            full,
            window,
            loss_tokens,
            decoupled=config.vision.placement == "decoupled",
        )
    work.images += data.counts.get("images", 0)


def make_loader(live: BenchModel, workload: str, micro_batches: int) -> Iterator[Row] | None:
    """Rows of this replica, on the rank that owns its loader.

    Replicas get different rows, so that their steps differ in length as in training.
    """
    if not live.grid.owns_loader:
        return None
    o = live.options
    config = live.options.config
    if workload == "data":
        from megatron_vl.data.loader import build_loader

        return build_loader(config.data, live.spec, o.hf, dp_rank=live.grid.dp_rank, dp_size=live.grid.dp)
    source = rows(live.spec, config.data.seq_len, images=workload == "images", seed=17 + live.grid.dp_rank)
    number = o.distinct_rows or o.steps * micro_batches
    return itertools.cycle([pin(row) for row in itertools.islice(source, number)])


def memory(live: BenchModel, held: int) -> dict[str, Any]:
    """GiB of each part on the rank with the highest peak.

    Args:
        held: bytes that stay allocated between steps: weights, gradients and optimizer.
    """
    mine: dict[str, Any] = {"peak_gib": live.platform.peak_memory_gib()}
    if live.platform.name == "cuda":
        mine |= {f"{part}_gib": size for part, size in live.memory.items()}
        mine["optimizer_gib"] = held / GIB - sum(live.memory.values())
        mine["activations_gib"] = mine["peak_gib"] - held / GIB
        mine["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    everyone = report.gather(mine)
    return max(everyone, key=lambda m: m["peak_gib"]) | {
        "peak_gib_by_rank": [m["peak_gib"] for m in everyone]
    }


def measure_parts(live: BenchModel, feed: Feed, peak: float) -> dict[str, Any]:
    """Times the parts of steps on all ranks and, in one more step, the collectives. Collective."""
    marks = parts.Marks(live.platform)
    work = report.Work()
    waits = []
    with parts.attached(marks, live.chunks, live.optimizer):
        for _ in range(live.options.part_steps):
            dist.barrier()
            with marks.step():
                with marks.span("feed"):
                    data = feed.next_step()
                set_learning_rates(live.optimizer, live.options.config, live.step)
                train_step(
                    live.chunks, live.optimizer, data.rows, live.grid, live.options.config.data.seq_len
                )
                live.step += 1
            waits.append(data.wait_s if live.grid.owns_loader else 0.0)
            if live.grid.owns_loader:
                count(work, live, data)

    live.platform.synchronize()
    mine = [parts.split(step, wait) for step, wait in zip(marks.seconds(), waits, strict=True)]
    everyone = report.gather((mine, (live.grid.pp_rank, live.grid.dp_rank), work.model))
    figures = parts.summarise([e[0] for e in everyone], [e[1] for e in everyone])
    figures["efficiency"] = efficiency([e[0] for e in everyone], [e[2] for e in everyone], peak)
    collectives = report.gather(parts.communication(live.platform, lambda: _discard(one_step(live, feed))))
    figures["communication"] = {
        name: {
            "mean_s": sum(c[name] for c in collectives) / len(collectives),
            "max_s": max(c[name] for c in collectives),
        }
        for name in collectives[0]
    }

    return figures


def _discard(_result: Any) -> None:
    """Ignores the result of a step."""


def efficiency(steps: list[list[dict[str, float]]], flops: list[Any], peak: float) -> dict[str, float | None]:
    """The share of the peak that each half of the model reaches in its own time, summed over ranks."""
    result: dict[str, float | None] = {}
    for half in ("language", "vision"):
        times = [step for rank in steps for step in rank]
        seconds = sum(step[f"{half} forward"] + step[f"{half} backward"] for step in times)
        done = sum(getattr(f, half) for f in flops)
        result[half] = done / seconds / 1e12 / peak if peak and seconds and done else None
    return result


def _layout_note(live: BenchModel) -> str:
    g = live.grid
    c = live.options.config
    context = f" x cp {g.cp}" if g.cp > 1 else ""
    experts = f" x ep {g.cut.ep} (etp {g.cut.etp})" if live.spec.language.moe else ""
    experts += ", experts chosen evenly" if live.options.even_routing else ""
    recompute = f"recompute: language {c.recompute.language}, vision {c.recompute.vision}"
    return (
        f"tp {g.tp}{context} x pp {g.pp} x vpp {g.vpp} x dp {g.dp}{experts}, "
        f"{c.global_batch_size} rows of {c.data.seq_len} tokens per step, {c.dtype}, {recompute}"
    )
