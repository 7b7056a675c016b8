"""Builds a resolved run on this rank: groups, model, optimizer, loader, and what saves and evaluates."""

from __future__ import annotations

import contextlib
import functools
import math
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron_vl import progress
from megatron_vl.config import TrainConfig
from megatron_vl.data.source.blend import BlendSource, read_blend_sources
from megatron_vl.models.build import aux_loss_reason
from megatron_vl.parallel import failures
from megatron_vl.parallel.heartbeat import slow_start_timeout_s
from megatron_vl.parallel.joining import STOPPED_EARLY, join_limit_s
from megatron_vl.parallel.process_grid import ProcessGrid, init_distributed, make_grid
from megatron_vl.parallel.process_groups import destroy_groups
from megatron_vl.planning.memory import count_parameters, trained_text
from megatron_vl.platform import Platform, get_platform
from megatron_vl.plurals import pluralize
from megatron_vl.signals import requested_stop_signal
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.training.checkpoint import CheckpointSaver, load_main_weights
from megatron_vl.training.evaluation import Evaluator
from megatron_vl.training.export_hf import HfExporter
from megatron_vl.training.input_files import check_same_files
from megatron_vl.training.metrics import MetricsLog, log_rank_0
from megatron_vl.training.model import BuiltModel, build_model
from megatron_vl.training.offload.build import chunked_state
from megatron_vl.training.optimizer import build_optimizer
from megatron_vl.training.out_of_memory import explain_memory_errors
from megatron_vl.training.profiling import StepProfiler
from megatron_vl.training.resolved_run import ResolvedRun
from megatron_vl.training.step import SKIP_REASONS, wrap_in_ddp
from megatron_vl.weights.weight_reader import WeightReader


@dataclass
class TrainingRun:
    """The state of a run on one rank."""

    resolved_run: ResolvedRun
    platform: Platform
    grid: ProcessGrid
    model_chunks: list[DistributedDataParallel]
    optimizer: ChainedOptimizer
    data_loader: Any
    """The loader on the rank that owns it; None elsewhere."""
    step_profiler: StepProfiler
    checkpoint_saver: CheckpointSaver | None = None
    hf_exporter: HfExporter | None = None
    """On rank 0, if the run exports saved steps."""
    evaluator: Evaluator | None = None
    metrics_log: MetricsLog | None = None
    """None until the first step."""
    completed_steps: int = 0
    """Number of optimizer steps done, including skipped ones."""
    skipped_steps: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SKIP_REASONS, 0))
    """Skipped steps of the whole run, by reason."""
    bad_samples: dict[str, Any] | None = None
    """Counts of bad samples over all ranks, from the checkpoint that the run resumes from; otherwise None."""
    source_counts: dict[str, Any] = field(default_factory=dict)
    """Samples, loss tokens and losses of each source up to the checkpoint that the run resumes from."""

    @property
    def config(self) -> TrainConfig:
        return self.resolved_run.config

    @property
    def spec(self) -> ModelSpec:
        return self.resolved_run.spec

    @property
    def layout(self) -> Layout:
        return self.resolved_run.layout

    @functools.cached_property
    def blend_sources(self) -> tuple[BlendSource, ...]:
        """The sources of the blend; none if the data set is no blend."""
        sources = read_blend_sources(self.resolved_run.facts_by_split["train"].dataset_identity)
        return sources if len(sources) > 1 else ()


def join_ranks(config: TrainConfig) -> Platform:
    """Joins the process group of all ranks, and watches them from now on. Collective."""
    timeout_s = config.failures.timeout_s

    # Collectives wait longer than `failures.timeout_s`, whose message says more.
    timeout_minutes = max(30, math.ceil(slow_start_timeout_s(timeout_s) / 60) + 10) if timeout_s else 30

    platform = get_platform(config.platform)
    init_distributed(platform, timeout_minutes, join_limit_s(timeout_s))
    failures.watch_ranks(timeout_s)
    return platform


def _build_start_model(resolved_run: ResolvedRun, platform: Platform, grid: ProcessGrid) -> BuiltModel:
    # The run's own checkpoint fills the model later, and model.checkpoint is not opened then. With LoRA, the
    # checkpoint has only the adapters.
    config = resolved_run.config
    starts_from_weights = config.model.checkpoint and (config.lora.rank or not resolved_run.is_resumed)
    starts_from_adapter = config.lora.adapter and not resolved_run.is_resumed
    adapter_reader = WeightReader(config.lora.adapter, takes_adapters=True) if starts_from_adapter else None
    return build_model(
        config,
        resolved_run.spec,
        resolved_run.layout,
        platform,
        grid,
        weight_reader=WeightReader(config.model.checkpoint) if starts_from_weights else None,
        adapter_reader=adapter_reader,
    )


def build_run(resolved_run: ResolvedRun, platform: Platform) -> TrainingRun:
    """Builds model, optimizer and loader of this rank. Collective.

    A new run takes its weights from ``model.checkpoint``; a resumed run gets them from :func:`.restore_run`.

    Raises:
        SystemExit: a signal asked a rank to stop, see :func:`exit_if_stop_requested`.
    """
    exit_if_stop_requested(platform)  # what follows takes minutes with large models
    config = resolved_run.config
    grid = make_grid(resolved_run.layout)
    check_same_files(resolved_run, grid.owns_loader)
    context = f", cp {grid.cp_rank}" if grid.cp > 1 else ""
    progress.current_progress.grid_position = (
        f"tp {grid.tp_rank}{context}, pp {grid.pp_rank}, dp {grid.dp_rank}"
    )

    built_model = _build_start_model(resolved_run, platform, grid)
    model_chunks = wrap_in_ddp(config, built_model.model_chunks)
    optimizer = build_optimizer(config, platform, model_chunks)
    if config.lora.adapter and not resolved_run.is_resumed:
        adapter_reader = WeightReader(config.lora.adapter, takes_adapters=True)
        load_main_weights(adapter_reader, optimizer, built_model.live_tensors, grid)

    # One rank of each replica reads the rows, and sends them to the others.
    data_loader = _build_data_loader(resolved_run, grid) if grid.owns_loader else None
    training_run = TrainingRun(
        resolved_run, platform, grid, model_chunks, optimizer, data_loader, StepProfiler(config, grid.rank)
    )

    if config.checkpoint.dir:
        _open_run_dir(training_run)

    # The validation rows are planned here. If that fails, the loader and the lock of the folder are released.
    if config.eval.interval:
        with close_on_failure(training_run), explain_memory_errors(resolved_run):
            split_facts = resolved_run.facts_by_split[config.eval.split]
            training_run.evaluator = Evaluator(config, resolved_run.spec, grid, platform, split_facts)
    return training_run


def _build_data_loader(resolved_run: ResolvedRun, grid: ProcessGrid) -> Any:
    from megatron_vl.data.loader import build_loader

    return build_loader(
        resolved_run.config.data,
        resolved_run.spec,
        resolved_run.config.model.hf,
        dp_rank=grid.dp_rank,
        dp_size=grid.dp,
        split_facts=resolved_run.facts_by_split["train"],
        rows_per_step=resolved_run.config.global_batch_size,
    )


def _open_run_dir(training_run: TrainingRun) -> None:
    """Makes what saves checkpoints and, on rank 0, exports them if the run does so."""
    config, run_dir = training_run.config, Path(training_run.config.checkpoint.dir)
    if training_run.grid.rank == 0 and config.checkpoint.export_hf:
        last_step = training_run.resolved_run.last_step
        training_run.hf_exporter = HfExporter(
            run_dir, Path(config.model.hf), config.checkpoint.export_hf, last_step
        )
    training_run.checkpoint_saver = CheckpointSaver(
        run_dir,
        training_run.spec,
        training_run.layout,
        training_run.grid,
        config.checkpoint.keep,
        config.checkpoint.keep_every,
        training_run.hf_exporter,
    )


def exit_if_stop_requested(platform: Platform) -> None:
    """Ends all ranks if a signal asked any of them to stop before the first step. Collective.

    Raises:
        SystemExit: on all ranks, with 128 + the number of the signal.
    """
    signal_name = requested_stop_signal()
    signal_tensor = torch.tensor(
        signal.Signals[signal_name].value if signal_name else 0, device=platform.device
    )
    dist.all_reduce(signal_tensor, op=dist.ReduceOp.MAX)
    signal_number = int(signal_tensor)
    if not signal_number:
        return

    if dist.get_rank() == 0:
        print(STOPPED_EARLY, flush=True)
    failures.stop_watching()
    raise SystemExit(128 + signal_number)


def print_run_summary(training_run: TrainingRun) -> None:
    """Prints model, layout and notes of the run on rank 0, before the first step."""
    log_rank_0(training_run.grid, _run_summary(training_run))
    if trained := trained_text(*count_parameters(training_run.config, training_run.spec)):
        log_rank_0(training_run.grid, trained)
    if aux_loss_note := aux_loss_reason(training_run.spec, training_run.config.model):
        log_rank_0(training_run.grid, f"load-balancing loss of the experts: {aux_loss_note}")
    for run_note in training_run.resolved_run.run_notes:
        log_rank_0(training_run.grid, run_note)

    # The loader's notes look at all ranks, so only the rank that prints them asks for them.
    if training_run.grid.rank == 0:
        for run_note in training_run.data_loader.start_notes:
            print(run_note, flush=True)

    last_step = training_run.resolved_run.last_step
    if training_run.completed_steps >= last_step:
        log_rank_0(
            training_run.grid,
            f"nothing to do: step {training_run.completed_steps} of {last_step} is done; raise steps (or"
            " stop_after) to continue",
        )


def _run_summary(training_run: TrainingRun) -> str:
    grid, layout = training_run.grid, training_run.layout
    expert_sizes = f" x ep {layout.ep} (etp {layout.etp})" if training_run.spec.language.moe else ""
    moments_dtype = training_run.config.optimizer.moments_dtype
    optimizer_note = f", moments in {moments_dtype}" if moments_dtype != "float32" else ""
    state_chunks = chunked_state(training_run.optimizer)
    if state_chunks is not None and state_chunks.host_bytes:
        optimizer_note += f", {state_chunks.host_bytes / 2**30:.1f} GiB of optimizer state in host memory"
    context = f" x cp {layout.cp}" if layout.cp > 1 else ""
    if layout.key_ranks > 1:
        context += f" ({layout.key_ranks} ranks gather keys)"
    parallel_sizes = (
        f"tp {layout.tp}{context} x pp {layout.pp} x vpp {layout.vpp} x dp {grid.dp}{expert_sizes}"
    )
    return (
        f"{training_run.spec.family} on {training_run.platform.name}: {parallel_sizes},"
        f" layers {list(layout.layers_per_chunk)}, {training_run.config.dtype}, rows of"
        f" {training_run.config.data.seq_len} tokens,"
        f" {pluralize(training_run.config.global_batch_size, 'row')} a step{optimizer_note}"
    )


# --- The end ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def close_on_failure(training_run: TrainingRun) -> Iterator[None]:
    """A context that closes log, loader and folder of a run that fails in it.

    The failure is reported to the other ranks first, because closing may take a while. Errors while closing
    are dropped, because they usually have the same cause; the failure itself is raised.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception):
            failures.report_failure(error)
        close_actions: list[Callable[[], None]] = [training_run.step_profiler.drop_trace]
        if training_run.hf_exporter is not None:
            close_actions.append(training_run.hf_exporter.stop_exports)
        close_actions.append(lambda: close_log_and_data_loader(training_run, has_failed=True))
        if training_run.grid.world_size == 1:  # other ranks may still write their parts of a checkpoint
            close_actions.append(lambda: release_run_dir(training_run))
        for close_action in close_actions:
            with contextlib.suppress(Exception):
                close_action()
        raise


def close_log_and_data_loader(training_run: TrainingRun, has_failed: bool = False) -> None:
    try:
        if training_run.metrics_log is not None:
            training_run.metrics_log.close(has_failed=has_failed)
    finally:
        if training_run.data_loader is not None:
            training_run.data_loader.close()


def close_run(training_run: TrainingRun) -> None:
    """Ends a run whose steps are done. Rank 0 waits for its exports, while the other ranks may end."""
    try:
        close_log_and_data_loader(training_run)
        if training_run.hf_exporter is not None:
            destroy_groups()  # first, because ending them may wait for all ranks
            training_run.hf_exporter.wait_for_exports(requested_stop_signal)  # a signal ends the wait
            assert training_run.checkpoint_saver is not None
            # Some checkpoints were kept only for their export.
            if training_run.completed_steps == training_run.resolved_run.last_step:
                training_run.checkpoint_saver.delete_old_checkpoints()
    finally:
        release_run_dir(training_run)


def release_run_dir(training_run: TrainingRun) -> None:
    """Lets other runs write to the run's folder. Call it when this one writes no more."""
    if training_run.checkpoint_saver is not None:
        training_run.checkpoint_saver.close()
