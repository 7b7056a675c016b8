"""The training run: set-up in order, then steps until the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron_vl.config import RunConfigError, TrainConfig, validate
from megatron_vl.models.build import build_chunks, check_tensors, chunk_tensors
from megatron_vl.models.families import ModelSpec, read_spec
from megatron_vl.parallel.grid import Grid, init_distributed, make_grid
from megatron_vl.parallel.layout import Layout, run_layout
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
    saver: checkpoint.CheckpointSaver | None = None
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
    if config.checkpoint.dir:
        c = config.checkpoint
        run.saver = checkpoint.CheckpointSaver(Path(c.dir), spec, layout, grid, c.keep, c.keep_every)
    resume(run)
    return run


def check(config: TrainConfig) -> tuple[ModelSpec, Layout, Platform]:
    """Reads the model's config and checks layout and paths, before any process group starts."""
    if not config.model.hf:
        raise RunConfigError("model.hf is empty; give the Hugging Face folder that the model comes from")
    if not (Path(config.model.hf) / "config.json").is_file():
        raise RunConfigError(
            f"model.hf {config.model.hf} holds no config.json; give the Hugging Face folder that the model comes from"
        )
    spec = read_spec(config.model.hf)
    layout = run_layout(spec, config.parallel)
    if config.model.moe_aux_loss is not None and spec.language.moe is None:
        raise RunConfigError(f"model.moe_aux_loss is for models with experts; {spec.family} is dense: leave it empty")
    if config.optimizer.cpu_offload and config.checkpoint.dir:
        raise RunConfigError(
            "optimizer.cpu_offload cannot be saved yet: its moments live outside the optimizer that a checkpoint reads. "
            "Leave checkpoint.dir empty, or cpu_offload off"
        )
    if not config.data.path:
        raise RunConfigError("data.path is empty; give a folder written by `megatron-vl data convert`")
    if not Path(config.data.path).exists():
        raise RunConfigError(f"data.path {config.data.path} does not exist")
    return spec, layout, get_platform(config.platform)


def build_model(config: TrainConfig, spec: ModelSpec, layout: Layout, platform: Platform, grid: Grid) -> list[Any]:
    """This rank's chunks with the weights of ``model.checkpoint``, or random ones."""
    from megatron_vl.data.pixels import read_pixel_norm

    norm = read_pixel_norm(config.model.hf)
    chunks = build_chunks(platform, spec, layout, config, pixel_mean=norm.mean, pixel_std=norm.std)
    tensors = chunk_tensors(chunks, layout, grid.pp_rank, grid.ep_rank)
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
    return {"num_workers": config.data.num_workers, "seq_len": config.data.seq_len}


def resume(run: Run) -> None:
    """Goes on from the latest checkpoint of ``checkpoint.dir``, when there is one and it is wanted."""
    c = run.config.checkpoint
    if not (c.dir and c.resume):
        return
    step = c.step if c.step is not None else checkpoint.latest_step(Path(c.dir))
    if step is None:
        return
    state = checkpoint.load(
        Path(c.dir),
        step,
        chunks=run.chunks,
        optimizer=run.optimizer,
        spec=run.spec,
        layout=run.layout,
        grid=run.grid,
        run=_run_facts(run.config),
        restart_data=c.restart_data,
    )
    if run.loader is not None and state is not None:
        run.loader.load_state_dict(state)
    run.step = step
    say(run.grid, f"resumed at step {step} from {c.dir}")


def save(run: Run) -> None:
    """Begins a checkpoint of the current step; collective."""
    assert run.saver is not None

    def take() -> checkpoint.Snapshot:
        return checkpoint.take_snapshot(
            run.step,
            chunks=run.chunks,
            optimizer=run.optimizer,
            spec=run.spec,
            layout=run.layout,
            grid=run.grid,
            loader_state=run.loader.state_dict() if run.loader is not None else None,
            run=_run_facts(run.config),
        )

    run.saver.start(take, run.step)
    if not run.config.checkpoint.background:
        run.saver.wait()


def train(config: TrainConfig) -> None:
    """Runs a training from set-up to its last step. Raises TrainingStopped or CheckpointError when it cannot go on."""
    run = set_up(config)
    say(run.grid, _banner(run))
    log = MetricsLog(config, run.spec, run.grid, run.platform)
    try:
        _steps(run, log)
        if run.saver is not None:
            run.saver.wait()
            dist.barrier()  # rank 0 names the checkpoint; nobody leaves before
            say(run.grid, f"checkpoints in {config.checkpoint.dir}: {checkpoint.saved_steps(Path(config.checkpoint.dir))}")
    finally:
        log.close()
        if run.loader is not None:
            run.loader.close()


def _steps(run: Run, log: MetricsLog) -> None:
    """All steps that are left, with their checkpoints."""
    config, grid, c = run.config, run.grid, run.config.checkpoint
    feed = Feed(grid, run.platform, run.loader, config.global_batch_size // grid.dp, config.data.balance)
    last = min(config.steps, config.stop_after or config.steps)
    bad = 0
    while run.step < last:
        data = feed.next_step()
        lr = set_learning_rates(run.optimizer, config, run.step)
        failed = run.saver.error() is not None if run.saver is not None else False
        result = train_step(run.chunks, run.optimizer, data.rows, grid, config.data.seq_len, failed)
        run.step += 1
        log.add(data)
        if run.step % config.log.interval == 0 or run.step == last or not result.updated:
            log.write(run.step, result, lr)
        if problem := log.too_many_bad():
            raise TrainingStopped(f"{problem}; they are listed in quarantine.jsonl")
        bad = 0 if result.updated else bad + 1
        if bad >= config.max_bad_steps:
            raise TrainingStopped(f"loss or gradient was not finite in {bad} steps in a row, the last one step {run.step}")
        if result.failed:
            raise TrainingStopped(_save_failure(run))
        if c.dir and (run.step == last or c.interval and run.step % c.interval == 0):
            save(run)


def _save_failure(run: Run) -> str:
    own = run.saver.error() if run.saver is not None else None
    good = checkpoint.saved_steps(Path(run.config.checkpoint.dir))
    return (
        f"{own or 'another rank could not write its checkpoint'}; the last good checkpoint is step {good[-1] if good else 'none'}"
    )


def _banner(run: Run) -> str:
    g, p = run.grid, run.layout
    return (
        f"{run.spec.family} on {run.platform.name}: tp {p.tp} x pp {p.pp} x vpp {p.vpp} x dp {g.dp}, layers {list(p.layers)}, "
        f"{run.config.dtype}, rows of {run.config.data.seq_len} tokens, {run.config.global_batch_size} rows a step"
    )
