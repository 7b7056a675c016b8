"""Builds a resolved run on this rank: groups, model, optimizer, loader, and what saves and evaluates."""

from __future__ import annotations

import contextlib
import functools
import math
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron_vl import progress
from megatron_vl.config import TrainConfig
from megatron_vl.data.source.blend import Source, sources_of
from megatron_vl.models.build import aux_loss_reason
from megatron_vl.parallel import failures
from megatron_vl.parallel.grid import ProcessGrid, init_distributed, make_grid
from megatron_vl.parallel.groups import end_groups
from megatron_vl.parallel.signs_of_life import longest_s
from megatron_vl.platform import Platform, get_platform
from megatron_vl.signals import asked_to_stop
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.training.checkpoint import CheckpointSaver
from megatron_vl.training.evaluation import Evaluator
from megatron_vl.training.export_hf import HfExporter
from megatron_vl.training.metrics import MetricsLog, say
from megatron_vl.training.model import build_model
from megatron_vl.training.offload.build import chunked_state
from megatron_vl.training.optimizer import build_optimizer
from megatron_vl.training.out_of_memory import explained
from megatron_vl.training.profiling import StepProfiler
from megatron_vl.training.resolved_run import ResolvedRun
from megatron_vl.training.step import SKIPPED, wrap
from megatron_vl.weights.reader import WeightReader
from megatron_vl.words import counted


@dataclass
class Run:
    """The state of a run on one rank."""

    resolved: ResolvedRun
    platform: Platform
    grid: ProcessGrid
    chunks: list[DistributedDataParallel]
    optimizer: ChainedOptimizer
    loader: Any
    """The loader on the rank that owns it; None elsewhere."""
    profiler: StepProfiler
    saver: CheckpointSaver | None = None
    exporter: HfExporter | None = None
    """On rank 0, if the run exports saved steps."""
    evaluator: Evaluator | None = None
    log: MetricsLog | None = None
    """None until the first step."""
    step: int = 0
    """Number of optimizer steps done, including skipped ones."""
    skipped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SKIPPED, 0))
    """Skipped steps of the whole run, by reason."""
    bad_samples: dict[str, Any] | None = None
    """Counts over all ranks from the checkpoint that the run resumes from."""
    source_counts: dict[str, Any] = field(default_factory=dict)
    """What was learnt of each source up to the checkpoint that the run resumes from."""

    @property
    def config(self) -> TrainConfig:
        return self.resolved.config

    @property
    def spec(self) -> ModelSpec:
        return self.resolved.spec

    @property
    def layout(self) -> Layout:
        return self.resolved.layout

    @functools.cached_property
    def sources(self) -> tuple[Source, ...]:
        """The sources of the blend; none if the data set is no blend."""
        sources = sources_of(self.resolved.data["train"].identity)
        return sources if len(sources) > 1 else ()


def join_ranks(config: TrainConfig) -> Platform:
    """Joins the process group of all ranks, and watches them from now on. Collective."""
    timeout_s = config.failures.timeout_s
    # Collectives wait longer than `failures.timeout_s`, whose message says more.
    minutes = max(30, math.ceil(longest_s(timeout_s) / 60) + 10) if timeout_s else 30

    platform = get_platform(config.platform)
    init_distributed(platform, minutes)
    failures.watch(timeout_s)
    return platform


def build(resolved: ResolvedRun, platform: Platform) -> Run:
    """Builds model, optimizer and loader of this rank, with the weights in ``model.checkpoint``. Collective.

    Raises:
        SystemExit: a signal asked a rank to stop, see :func:`end_if_asked`.
    """
    end_if_asked(platform)
    config = resolved.config
    grid = make_grid(resolved.layout)
    context = f", cp {grid.cp_rank}" if grid.cp > 1 else ""
    progress.now.place = f"tp {grid.tp_rank}{context}, pp {grid.pp_rank}, dp {grid.dp_rank}"

    # The run's own checkpoint fills the model later, and model.checkpoint is not opened then.
    starts_from_weights = config.model.checkpoint and not resolved.resumes
    weights = WeightReader(config.model.checkpoint) if starts_from_weights else None
    model = build_model(config, resolved.spec, resolved.layout, platform, grid, weights=weights)
    chunks = wrap(config, model.chunks)
    optimizer = build_optimizer(config, platform, chunks)

    loader = _build_loader(resolved, grid) if grid.owns_loader else None
    run = Run(resolved, platform, grid, chunks, optimizer, loader, StepProfiler(config, grid.rank))
    if config.checkpoint.dir:
        run.exporter = _build_exporter(resolved) if grid.rank == 0 else None
        run.saver = _build_saver(run)
    if config.eval.interval:
        with closed_on_failure(run), explained(resolved):
            facts = resolved.data[config.eval.split]
            run.evaluator = Evaluator(config, resolved.spec, grid, platform, facts)
    return run


def _build_loader(resolved: ResolvedRun, grid: ProcessGrid) -> Any:
    from megatron_vl.data.loader import build_loader

    return build_loader(
        resolved.config.data,
        resolved.spec,
        resolved.config.model.hf,
        dp_rank=grid.dp_rank,
        dp_size=grid.dp,
        facts=resolved.data["train"],
        rows_per_step=resolved.config.global_batch_size,
    )


def _build_saver(run: Run) -> CheckpointSaver:
    c = run.config.checkpoint
    lineage = run.resolved.start.lineage
    return CheckpointSaver(
        Path(c.dir), run.spec, run.layout, run.grid, c.keep, c.keep_every, lineage, run.exporter
    )


def _build_exporter(resolved: ResolvedRun) -> HfExporter | None:
    """The exporter of saved steps, if the run exports them."""
    c = resolved.config.checkpoint
    if not c.export_hf:
        return None
    return HfExporter(Path(c.dir), Path(resolved.config.model.hf), c.export_hf, resolved.last_step)


def end_if_asked(platform: Platform) -> None:
    """Ends all ranks if a signal asked any of them to stop before the first step. Collective.

    Raises:
        SystemExit: on all ranks, with 128 + the number of the signal.
    """
    name = asked_to_stop()
    number = torch.tensor(signal.Signals[name].value if name else 0, device=platform.device)
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    asked = int(number)
    if not asked:
        return

    if dist.get_rank() == 0:
        print("a signal stopped the run before its first step; nothing was saved", flush=True)
    failures.stop()
    raise SystemExit(128 + asked)


def announce(run: Run) -> None:
    """Prints on rank 0 what this run is, and what its user should know before the first step."""
    say(run.grid, _banner(run))
    if reason := aux_loss_reason(run.spec, run.config.model):
        say(run.grid, f"load-balancing loss of the experts: {reason}")
    for note in run.resolved.notes:
        say(run.grid, note)

    # The loader's notes look at all ranks, so only the rank that prints them asks for them.
    for note in run.loader.notes if run.loader is not None and run.grid.rank == 0 else []:
        say(run.grid, note)
    if run.step >= run.resolved.last_step:
        last = run.resolved.last_step
        say(
            run.grid,
            f"nothing to do: step {run.step} of {last} is done; raise steps (or stop_after) to continue",
        )


def _banner(run: Run) -> str:
    grid, layout = run.grid, run.layout
    experts = f" x ep {layout.ep} (etp {layout.etp})" if run.spec.language.moe else ""
    moments = run.config.optimizer.moments_dtype
    state = f", moments in {moments}" if moments != "float32" else ""
    chunked = chunked_state(run.optimizer)
    if chunked is not None and chunked.host_bytes:
        state += f", {chunked.host_bytes / 2**30:.1f} GiB of optimizer state in host memory"
    context = f" x cp {layout.cp}" if layout.cp > 1 else ""
    sizes = f"tp {layout.tp}{context} x pp {layout.pp} x vpp {layout.vpp} x dp {grid.dp}{experts}"
    return (
        f"{run.spec.family} on {run.platform.name}: {sizes},"
        f" layers {list(layout.layers)}, {run.config.dtype}, rows of {run.config.data.seq_len} tokens,"
        f" {counted(run.config.global_batch_size, 'row')} a step{state}"
    )


# --- The end ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def closed_on_failure(run: Run) -> Iterator[None]:
    """A context that closes log, loader and folder of a run that fails in it.

    A failure is first reported to the other ranks, because closing may take a while. It also remains the
    error that is raised: if the log cannot be closed then, the cause is usually the same.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception):
            failures.report(error)
        closing = [run.profiler.drop]
        closing += [run.exporter.stop] if run.exporter is not None else []
        closing += [lambda: close_log_and_loader(run, failed=True)]
        # Other ranks may write their parts of a checkpoint until they end.
        closing += [lambda: close_folder(run)] if run.grid.world_size == 1 else []
        for close in closing:
            with contextlib.suppress(Exception):
                close()
        raise


def close_log_and_loader(run: Run, failed: bool = False) -> None:
    try:
        if run.log is not None:
            run.log.close(failed=failed)
    finally:
        if run.loader is not None:
            run.loader.close()


def close(run: Run) -> None:
    """Ends a run whose steps are done. Rank 0 waits for its exports, while the other ranks may end."""
    try:
        close_log_and_loader(run)
        if run.exporter is not None:
            end_groups()  # first, because ending them may wait for all ranks
            run.exporter.wait(asked_to_stop)  # a signal ends the wait
            assert run.saver is not None
            run.saver.prune()  # deletes the checkpoints that were kept only for their export
    finally:
        close_folder(run)


def close_folder(run: Run) -> None:
    """Lets other runs write to the run's folder. Call it when this one writes no more."""
    if run.saver is not None:
        run.saver.close()
