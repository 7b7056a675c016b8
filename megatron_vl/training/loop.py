"""The training run: set-up in order, then steps until the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron_vl.config import RunConfigError, TrainConfig, validate
from megatron_vl.models.build import build_chunks, check_tensors, chunk_tensors
from megatron_vl.models.families import ModelSpec, read_spec
from megatron_vl.parallel.grid import Grid, init_distributed, make_grid
from megatron_vl.parallel.layout import Layout, make_layout
from megatron_vl.platform import Platform, get_platform
from megatron_vl.weights import WeightReader

from . import checkpoint
from .feed import Feed
from .metrics import MetricsLog, say
from .optimizer import build_optimizer, set_learning_rates
from .step import train_step, wrap


class TrainingStopped(RuntimeError):
    """The run cannot go on; the message says why."""


@dataclass
class Run:
    """Everything a running training consists of on one rank."""

    config: TrainConfig
    spec: ModelSpec
    layout: Layout
    platform: Platform
    grid: Grid
    chunks: list[DistributedDataParallel]
    optimizer: ChainedOptimizer
    loader: Any
    """The loader on the rank that owns it, None elsewhere."""
    step: int = 0
    """Optimizer steps done."""


def set_up(config: TrainConfig) -> Run:
    """Builds the run: platform, groups, model, weights, optimizer, loader, and state when resuming. Collective.

    Everything that can be refused is refused before a process group starts.
    """
    spec, layout, platform = check(config)
    init_distributed(platform)
    validate(config, dist.get_world_size())
    grid = make_grid(layout)
    chunks = build_model(config, spec, layout, platform, grid)
    wrapped = wrap(config, chunks)
    optimizer = build_optimizer(config, platform, wrapped)
    loader = build_run_loader(config, spec, grid) if grid.owns_loader else None
    run = Run(config, spec, layout, platform, grid, wrapped, optimizer, loader)
    resume(run)
    return run


def check(config: TrainConfig) -> tuple[ModelSpec, Layout, Platform]:
    """Reads the model's config and checks layout and paths, before any process group starts."""
    if not config.model.hf:
        raise RunConfigError("model.hf is empty; give the Hugging Face folder that the model comes from")
    spec = read_spec(config.model.hf)
    p = config.parallel
    layout = make_layout(spec, p.tp, p.pp, p.vpp, p.layers)
    if not config.data.path:
        raise RunConfigError("data.path is empty; give a folder written by `megatron-vl data convert`")
    if not Path(config.data.path).exists():
        raise RunConfigError(f"data.path {config.data.path} does not exist")
    return spec, layout, get_platform(config.platform)


def build_model(config: TrainConfig, spec: ModelSpec, layout: Layout, platform: Platform, grid: Grid) -> list[Any]:
    """This rank's chunks with the weights of ``model.checkpoint``, or random ones."""
    from megatron_vl.data.pixels import read_pixel_norm

    norm = read_pixel_norm(config.model.hf)
    chunks = build_chunks(
        platform,
        spec,
        layout,
        seq_len=config.data.seq_len,
        dtype=getattr(torch, config.dtype),
        model=config.model,
        recompute=config.recompute,
        sequence_parallel=config.parallel.sequence_parallel,
        pixel_mean=norm.mean,
        pixel_std=norm.std,
        seed=config.seed,
    )
    tensors = chunk_tensors(chunks, layout, grid.pp_rank)
    check_tensors(spec, layout, tensors)
    if config.model.checkpoint:
        reader = WeightReader(config.model.checkpoint)
        if reader.spec.family != spec.family or reader.spec.vision != spec.vision or reader.spec.language != spec.language:
            raise RunConfigError(
                f"model.checkpoint {config.model.checkpoint} holds another model than model.hf {config.model.hf}"
            )
        checkpoint.load_weights(reader, tensors, grid)
    return chunks


def build_run_loader(config: TrainConfig, spec: ModelSpec, grid: Grid) -> Any:
    from megatron_vl.data.loader import build_loader

    return build_loader(config.data, spec, config.model.hf, dp_rank=grid.dp_rank, dp_size=grid.dp, split="train")


def _run_facts(config: TrainConfig) -> dict[str, Any]:
    """What must be equal for a resumed run to read the same samples."""
    return {"num_workers": config.data.num_workers, "global_batch_size": config.global_batch_size, "seq_len": config.data.seq_len}


def resume(run: Run) -> None:
    """Goes on from the latest checkpoint of ``checkpoint.dir``, when there is one and it is wanted."""
    c = run.config.checkpoint
    step = checkpoint.latest_step(Path(c.dir)) if c.dir and c.resume else None
    if step is None:
        return
    state = checkpoint.load(
        Path(c.dir),
        step,
        chunks=run.chunks,
        optimizer=run.optimizer,
        layout=run.layout,
        grid=run.grid,
        run=_run_facts(run.config),
    )
    if run.loader is not None and state is not None:
        run.loader.load_state_dict(state)
    run.step = step
    say(run.grid, f"resumed at step {step} from {c.dir}")


def save(run: Run) -> None:
    c = run.config.checkpoint
    folder = checkpoint.save(
        Path(c.dir),
        run.step,
        chunks=run.chunks,
        optimizer=run.optimizer,
        spec=run.spec,
        layout=run.layout,
        grid=run.grid,
        loader_state=run.loader.state_dict() if run.loader is not None else None,
        run=_run_facts(run.config),
        keep=c.keep,
    )
    say(run.grid, f"saved {folder}")


def train(config: TrainConfig) -> None:
    """Runs a training from set-up to its last step. Raises TrainingStopped when it cannot go on."""
    run = set_up(config)
    grid = run.grid
    say(grid, _banner(run))
    feed = Feed(grid, run.platform, run.loader, config.global_batch_size // grid.dp)
    log = MetricsLog(config, run.spec, grid, run.platform)
    last = min(config.steps, config.stop_after or config.steps)
    bad, saved = 0, run.step
    try:
        while run.step < last:
            data = feed.next_step()
            lr = set_learning_rates(run.optimizer, config, run.step)
            result = train_step(run.chunks, run.optimizer, data.rows, grid, config.data.seq_len)
            run.step += 1
            log.add(data)
            if run.step % config.log.interval == 0 or run.step == last or not result.updated:
                log.write(run.step, result, lr)
            bad = 0 if result.updated else bad + 1
            if bad >= config.max_bad_steps:
                raise TrainingStopped(f"loss or gradient was not finite in {bad} steps in a row, the last one step {run.step}")
            if config.checkpoint.dir and config.checkpoint.interval and run.step % config.checkpoint.interval == 0:
                save(run)
                saved = run.step
        if config.checkpoint.dir and saved != run.step:
            save(run)
    finally:
        log.close()
        if run.loader is not None:
            run.loader.close()


def _banner(run: Run) -> str:
    g, p = run.grid, run.layout
    return (
        f"{run.spec.family} on {run.platform.name}: tp {p.tp} x pp {p.pp} x vpp {p.vpp} x dp {g.dp}, layers {list(p.layers)}, "
        f"{run.config.dtype}, rows of {run.config.data.seq_len} tokens, {run.config.global_batch_size} rows a step"
    )
