"""The trainer: one rank of a run, from its resolved inputs to its last checkpoint.

Every command that trains or measures runs it: ``train``, ``bench`` and ``parity``. What happens once in a
while is in :mod:`megatron_vl.training.hooks`.
"""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from megatron.core.optimizer.optimizer import ChainedOptimizer

from converters.lora import open_lora
from megatron_vl.config import DataConfig
from megatron_vl.data.source.blend import BlendSource, read_blend_sources
from megatron_vl.data.synthetic import SyntheticRows
from megatron_vl.models.lora import seed_dropout
from megatron_vl.models.parameter_names import LiveTensor
from megatron_vl.parallel import failures
from megatron_vl.parallel.ddp import ReplicaDDP
from megatron_vl.parallel.process_grid import ProcessGrid, make_grid
from megatron_vl.parallel.process_groups import destroy_groups
from megatron_vl.parallel.start import exit_if_stop_requested
from megatron_vl.platform import Platform
from megatron_vl.system import progress
from megatron_vl.system.errors import UserError
from megatron_vl.system.signals import requested_stop_signal
from megatron_vl.training.evaluation import Evaluate
from megatron_vl.training.hooks import Hook, Profile, SaveCheckpoints, ShowProgress
from megatron_vl.training.input_files import check_same_files
from megatron_vl.training.model import HALF_PIXEL_NORM, build_model
from megatron_vl.training.optimizer import build_optimizer, set_learning_rates
from megatron_vl.training.report.metrics import MetricsLog, log_rank_0
from megatron_vl.training.resolved_run import ResolvedRun
from megatron_vl.training.rows.batch_broadcast import BatchBroadcast, StepBatch
from megatron_vl.training.run_messages import end_summary, run_summary, skipped_steps_message
from megatron_vl.training.source_counts import count_sources
from megatron_vl.training.start_weights import open_added_weights, open_start_weights, start_weights_path
from megatron_vl.training.state.export_hf import HfExporter
from megatron_vl.training.state.keep import last_good_text
from megatron_vl.training.state.load import (
    LOADER_STATE_FILE,
    load_checkpoint,
    load_main_weights,
    restore_loader,
)
from megatron_vl.training.state.recorded_fields import (
    field_change_notes,
    learning_rate_notes,
    recorded_fields,
)
from megatron_vl.training.state.save import CheckpointSaver, CheckpointSnapshot, take_snapshot
from megatron_vl.training.step import NO_GRADIENT, SKIP_TEXTS, StepResult, train_step, wrap_in_ddp
from megatron_vl.weights.model_digest import LoraBase
from megatron_vl.weights.run_folder import CheckpointError, SavedCheckpoint, saved_checkpoints

MAX_SKIPPED_STEPS = 10
"""A run stops after this many consecutive steps that were skipped. At the end of a run, two are enough."""


class TrainingStopped(UserError, RuntimeError):
    """The run cannot continue. The message says why."""


class Trainer:
    """One rank of a run. All ranks call its methods together, in this order::

        with Trainer(resolved_run, platform) as trainer:
            trainer.build()
            trainer.restore()
            trainer.run()

    The context ends the run: it releases the loader and the folder, even if the run fails.

    Args:
        platform: the result of :func:`~megatron_vl.parallel.start.join_ranks`.
        hooks: extra hooks, called after the run's own.
        make_loader: makes the loader of a rank that owns one, such as
            :class:`~megatron_vl.data.given_rows.GivenRows`; None: the loader of ``data.path``.
    """

    grid: ProcessGrid
    model_chunks: list[ReplicaDDP]
    live_tensors: list[LiveTensor]
    optimizer: ChainedOptimizer
    batches: BatchBroadcast
    metrics_log: MetricsLog

    def __init__(
        self,
        resolved_run: ResolvedRun,
        platform: Platform,
        hooks: Iterable[Hook] = (),
        *,
        make_loader: Callable[[ProcessGrid], Any] | None = None,
    ) -> None:
        self.resolved_run, self.platform = resolved_run, platform
        self.config, self.spec = resolved_run.config, resolved_run.spec
        self.layout, self.last_step = resolved_run.layout, resolved_run.last_step

        self.hooks: list[Hook] = []
        self.further_hooks = list(hooks)
        self.make_loader = make_loader
        self.data_loader: Any = None
        self.checkpoint_saver: CheckpointSaver | None = None
        self.hf_exporter: HfExporter | None = None

        self.start_time = time.monotonic()
        self.step = 0
        """Number of optimizer steps done, including skipped ones."""
        self.first_step = 0
        """Those that were done before this start."""
        self.skipped_steps = dict.fromkeys(SKIP_TEXTS, 0)
        self.consecutive_skips: list[str] = []
        self.stop_requested = False
        """Whether a signal asked any rank to stop. Each step reports it to all ranks."""
        self.bad_samples: dict[str, Any] | None = None
        """Counts of bad samples over all ranks, from the checkpoint that the run resumes from."""
        self.source_totals: dict[str, Any] = {}
        """Samples and loss tokens of each source up to that checkpoint."""
        self._on_close = contextlib.ExitStack()
        self._on_close.callback(self._close_loader)

    # --- Build ----------------------------------------------------------------------------------------------

    def build(self, **model_options: Any) -> None:
        """Builds model, optimizer and loader of this rank. Collective.

        A new run takes its weights from ``model.checkpoint`` or ``model.hf``; a resumed run gets them in
        :meth:`restore`.

        Raises:
            SystemExit: a signal asked a rank to stop.
        """
        exit_if_stop_requested(self.platform)  # the next part takes minutes for large models
        self.build_model(**model_options)
        self.read_rows_of(self.config.data)
        self._build_hooks()

    def build_model(
        self, *, overlap: bool = True, bucket_size: int | None = None, with_optimizer: bool = True
    ) -> None:
        """Builds this rank's groups and chunks, wraps these chunks in DDP, builds the optimizer. Collective.

        Args:
            overlap, bucket_size: those of :func:`~megatron_vl.training.step.wrap_in_ddp`.
            with_optimizer: if false, there is no ``optimizer``, and the model cannot be trained.
        """
        config, source = self.config, self.resolved_run.source_checkpoint
        self.grid = grid = make_grid(self.layout)
        if dist.get_rank():  # rank 0 made the digests
            check_same_files(self.resolved_run, grid.owns_loader)
        cp_text = f", cp {grid.cp_rank}" if grid.cp > 1 else ""
        progress.current_progress.grid_position = (
            f"tp {grid.tp_rank}{cp_text}, pp {grid.pp_rank}, dp {grid.dp_rank}"
        )

        # A resumed run gets its weights in `restore`, so its start weights are not opened. But checkpoints
        # of LoRA do not hold the base.
        start_weights = open_start_weights(config) if config.lora.rank or source is None else None
        begins_with_lora = config.lora.adapter and source is None
        start_lora = open_lora(config.lora.adapter, self.spec) if begins_with_lora else None
        chunks, self.live_tensors = build_model(
            config,
            self.spec,
            self.layout,
            self.platform,
            grid,
            start_weights=start_weights,
            added_weights=open_added_weights(config, source),
            start_lora=start_lora,
            pixel_norm=HALF_PIXEL_NORM if config.data.is_synthetic else None,
        )
        self.model_chunks = wrap_in_ddp(config, chunks, overlap=overlap, bucket_size=bucket_size)
        if not with_optimizer:
            return
        self.optimizer = build_optimizer(config, self.platform, self.model_chunks)
        if start_lora is not None:
            # The optimizer has copied parameters that are rounded to bfloat16: its copies are read again.
            load_main_weights(start_lora, self.optimizer, self.live_tensors, grid)

    @property
    def saved_tensors(self) -> list[LiveTensor]:
        """The parameters that checkpoints hold: with LoRA, those that are trained, otherwise all."""
        return [
            each for each in self.live_tensors if each.parameter.requires_grad or not self.config.lora.rank
        ]

    def read_rows_of(self, data_config: DataConfig) -> None:
        """From now on, reads rows from the start of this data set, which need not be the run's own."""
        # One rank of each replica reads the rows, and sends them to the others.
        if self.grid.owns_loader:
            self._close_loader()
            self.data_loader = self._open_loader(data_config)
        self.batches = BatchBroadcast(
            self.grid,
            self.platform,
            self.data_loader,
            num_micro_batches=self.config.global_batch_size // self.grid.dp,
            spec=self.spec,
        )

    def _open_loader(self, data_config: DataConfig) -> Any:
        grid, rows_per_step = self.grid, self.config.global_batch_size
        if self.make_loader is not None:
            return self.make_loader(grid)
        if data_config.is_synthetic:
            return SyntheticRows(data_config, self.spec, grid.dp_rank, grid.dp, rows_per_step)
        from megatron_vl.data.loader import build_loader  # it imports Energon

        is_of_run = data_config.path == self.config.data.path
        return build_loader(
            data_config,
            self.spec,
            self.config.model.hf,
            dp_rank=grid.dp_rank,
            dp=grid.dp,
            split_facts=self.resolved_run.facts_by_split["train"] if is_of_run else None,
            rows_per_step=rows_per_step,
            epochs=self.config.epochs if is_of_run else 0,
        )

    def _build_hooks(self) -> None:
        """Opens the run's folder, reads the validation rows, and lists the hooks in their order."""
        config, grid = self.config, self.grid
        # None if only the output is piped: lines that `tee` prints would break up the bar.
        if grid.rank == 0 and (sys.stdout.isatty() or not sys.stderr.isatty()):
            self.hooks.append(ShowProgress())
        self.hooks.append(Profile(config, grid.rank))
        if config.checkpoint.dir:
            run_dir, checkpoint_config = Path(config.checkpoint.dir), config.checkpoint
            if grid.rank == 0 and checkpoint_config.export_hf:
                self.hf_exporter = HfExporter(
                    run_dir, Path(config.model.hf), checkpoint_config.export_hf, self.last_step
                )
            self.checkpoint_saver = CheckpointSaver(
                run_dir,
                self.spec,
                self.layout,
                grid,
                checkpoint_config.keep,
                checkpoint_config.keep_every,
                self.hf_exporter,
            )
            self.hooks.append(SaveCheckpoints(self.checkpoint_saver, self.hf_exporter))
        if config.eval.interval:
            self.hooks.append(Evaluate(self.resolved_run, grid, self.platform))
        self.hooks += self.further_hooks

    # --- Restore --------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Resumes from the latest checkpoint, if there is one. Collective.

        Raises:
            CheckpointError: the checkpoint cannot be used. The message says what to do.
            SystemExit: a signal asked a rank to stop.
        """
        if self.resolved_run.source_checkpoint is not None:
            self._restore_checkpoint(self.resolved_run.source_checkpoint)
        exit_if_stop_requested(self.platform)  # building and loading take minutes with large models
        if self.hf_exporter is not None:  # an earlier start may not have finished its exports
            self.hf_exporter.enqueue_missing_exports(saved_checkpoints(Path(self.config.checkpoint.dir)))

    def _restore_checkpoint(self, source: SavedCheckpoint) -> None:
        """Restores model, optimizer, loader and counts, and prints what has changed since the save."""
        run_dir = self.config.checkpoint.dir
        metadata, loader_state = load_checkpoint(
            source.path,
            live_tensors=self.saved_tensors,
            optimizer=self.optimizer,
            spec=self.spec,
            grid=self.grid,
        )
        if loader_state is not None:
            restore_loader(self.data_loader, loader_state, run_dir)
        restarts_data = LOADER_STATE_FILE not in metadata["files"]
        self.step, self.bad_samples = source.step, metadata.get("bad_samples")

        # The notes name fields that may change between two starts. A user who did not mean to change one
        # sees it.
        current_fields = self._recorded_fields()
        if not restarts_data:
            del current_fields["data.path"]  # the loader has refused another data set, wherever it lies
        try:
            self.skipped_steps = {each: int(metadata["skipped_steps"].get(each, 0)) for each in SKIP_TEXTS}
            self.source_totals = dict(metadata["sources"])
            saved_fields = dict(metadata["fields"])
            notes = field_change_notes(current_fields, saved_fields)
            notes += learning_rate_notes(self.config, saved_fields, self.step)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{source.path / 'run.json'} is damaged: {reason}") from error

        restart_text = "; the data set is read from its start" if restarts_data else ""
        log_rank_0(self.grid, f"resumed at step {self.step} from {run_dir}{restart_text}")
        for note in notes:
            log_rank_0(self.grid, f"NOTE: {note}")

    # --- Run ------------------------------------------------------------------------------------------------

    @property
    def is_at_end(self) -> bool:
        """Whether this start has no steps left."""
        return self.step >= self.last_step or self.stop_requested

    def run(self) -> None:
        """Runs the remaining steps, and saves the last one. Collective.

        Raises:
            TrainingStopped, CheckpointError: the run cannot continue.
        """
        self._print_summary()
        self._open_metrics_log()
        self.first_step = self.step
        for hook in self.hooks:
            hook.begin(self)

        # Until it is incremented, `step` is also the number of the running step, from zero.
        while not self.is_at_end:
            progress.enter_phase(progress.LOADING_ROWS, self.step + 1)
            for hook in self.hooks:
                hook.before_step(self)

            # One rank of each replica reads the rows here; the others receive them.
            step_batch = self.batches.next_batch()
            learning_rates = set_learning_rates(self.optimizer, self.config, self.step)
            # Forward and backward passes, and the update. The host waits for the device here: the sums of the
            # losses and the norm of the gradients over all ranks decide whether weights are updated.
            step_result = self.train_step(step_batch)
            # Frees the rows' device memory before the next ones are loaded. Log and hooks need only counts.
            step_batch.rows.clear()

            # A step is done whether or not its update was skipped.
            self.step += 1
            progress.current_progress.steps_done += 1
            progress.note_progress()
            self.stop_requested = step_result.stop_requested
            self.metrics_log.add_step(step_batch, step_result.source_counts)
            if step_result.skip_reason:
                self.skipped_steps[step_result.skip_reason] += 1
            if self.step % self.config.log.interval == 0 or self.is_at_end or step_result.skip_reason:
                # Rank 0 prints, and its loader knows how often the steps so far have passed through a source.
                passes = self.data_loader.source_passes if self.grid.rank == 0 and self.blend_sources else {}
                self.metrics_log.log_step(self.step, step_result, learning_rates, self.skipped_steps, passes)

            # A run that cannot continue saves nothing more, so that its last checkpoint is a good one.
            self._stop_if_unrecoverable(step_result)
            for hook in self.hooks:  # once in a while: save, evaluate, ...
                hook.after_step(self, step_batch, step_result)

        self._finish()

    def train_step(self, step_batch: StepBatch) -> StepResult:
        """Trains on the rows of a step. Collective."""
        local_source_counts = None
        if self.blend_sources:
            row_sources = (header["source_loss_tokens"] for header in step_batch.headers)
            local_source_counts = count_sources(row_sources, len(self.blend_sources))
        if self.config.lora.dropout:
            seed_dropout(self.config.seed, self.step)

        # Each rank sends, along with its loss, whether it failed to save or was asked to stop, so that all
        # ranks learn of it after the same step.
        saver = self.checkpoint_saver
        return train_step(
            self.model_chunks,
            self.optimizer,
            step_batch.rows,
            self.grid,
            self.config.data.seq_len,
            has_failed=saver is not None and saver.save_error is not None,
            stop_requested=bool(requested_stop_signal()),
            local_source_counts=local_source_counts,
            # The update changes what a save in the background may still be copying.
            before_update=saver.no_copy_running.wait if saver is not None else lambda: None,
        )

    def save(self) -> None:
        """Starts to save a checkpoint of the current step in the background. Collective."""
        assert self.checkpoint_saver is not None
        progress.enter_phase(progress.SAVING_CHECKPOINT)
        self.checkpoint_saver.start_save(self.take_snapshot, self.step)

    def take_snapshot(self) -> CheckpointSnapshot:
        """This rank's state after the current step. Collective."""
        bad_sample_counts, unlogged_counts = self.metrics_log.bad_sample_state()
        base = LoraBase(self.resolved_run.base_digest, str(Path(start_weights_path(self.config)).resolve()))
        metadata = {
            "dp": self.grid.dp,
            "num_workers": self.config.data.num_workers,
            "seq_len": self.config.data.seq_len,
            "skipped_steps": dict(self.skipped_steps),
            **base.entry(),
            "fields": self._recorded_fields(),
            "sources": self.metrics_log.source_meter.state_dict(),
            "bad_samples": bad_sample_counts,
        }
        # All loaders plan the same steps, so the state of one is that of all.
        loader_state = self.data_loader.state_dict() if self.grid.rank == 0 else None
        return take_snapshot(self, loader_state, metadata, unlogged_counts)

    def _recorded_fields(self) -> dict[str, Any]:
        """The fields to record. They are complete on ranks that own a loader, as rank 0 does."""
        if self.data_loader is None:
            return recorded_fields(self.config, self.spec, {})
        # The loader refuses another tokenizer or processor of `model.hf`, unless the data are restarted.
        return {
            **recorded_fields(self.config, self.spec, self.data_loader.row_settings),
            **self.data_loader.model_folder_settings,
        }

    @functools.cached_property
    def blend_sources(self) -> tuple[BlendSource, ...]:
        sources = read_blend_sources(self.resolved_run.facts_by_split["train"].dataset_identity)
        return sources if len(sources) > 1 else ()

    def _open_metrics_log(self) -> None:
        self.metrics_log = MetricsLog(self.config, self.spec, self.grid, self.platform, self.blend_sources)
        self._on_close.push(lambda kind, *_: self.metrics_log.close(has_failed=kind is not None))
        self.metrics_log.source_meter.load_state_dict(self.source_totals)
        if self.bad_samples is not None:
            self.metrics_log.bad_sample_meter.load_state_dict(self.bad_samples)

    def _stop_if_unrecoverable(self, step_result: StepResult) -> None:
        """Raises TrainingStopped, on all ranks at once, if data, weights or checkpoints are unusable."""
        run_dir, skip_reason = self.config.checkpoint.dir, step_result.skip_reason
        # More than data.max_bad_share of the samples could not be used. All ranks count the same.
        if bad_sample_problem := self.metrics_log.bad_sample_meter.stop_reason():
            list_name = Path(run_dir) / "quarantine.jsonl" if run_dir else "a run with checkpoint.dir"
            raise TrainingStopped(f"{bad_sample_problem}; {list_name} lists them")

        # NO_GRADIENT is harmless (only the tower is trained, and no row had an image): it neither adds to a
        # series of skips nor ends one.
        if skip_reason != NO_GRADIENT:
            self.consecutive_skips = [*self.consecutive_skips, skip_reason] if skip_reason else []
        # At the end of the run, two skipped steps are enough. One may be chance, but nobody looks at the
        # skipped steps of a run that seems to have ended well.
        if len(self.consecutive_skips) >= (2 if self.step == self.config.steps else MAX_SKIPPED_STEPS):
            raise TrainingStopped(skipped_steps_message(self.consecutive_skips, self.step))
        if self.step == self.config.steps == self.skipped_steps[NO_GRADIENT]:
            raise TrainingStopped(f"nothing was trained: in every step, {SKIP_TEXTS[NO_GRADIENT]}")

        if step_result.any_rank_failed:
            own_error = self.checkpoint_saver.save_error if self.checkpoint_saver is not None else None
            if own_error is None and (first_failure := failures.first_failure_message()):
                raise TrainingStopped(first_failure)
            error = own_error or "another rank could not write its checkpoint"
            raise TrainingStopped(f"{error}; {last_good_text(Path(run_dir))}")

    def _print_summary(self) -> None:
        if self.grid.rank != 0:
            return
        lines = run_summary(self.resolved_run, self.platform, self.optimizer)
        lines += self.data_loader.start_notes
        if self.step >= self.last_step:
            lines.append(
                f"nothing to do: step {self.step} of {self.last_step} is done; raise steps (or epochs, or"
                " stop_after) to continue, or give another checkpoint.dir to begin anew"
            )
        print(*lines, sep="\n", flush=True)

    def _finish(self) -> None:
        """Waits until all files of this run are written. Collective."""
        for hook in self.hooks:
            hook.end(self, has_failed=False)
        progress.enter_phase(progress.ENDING_RUN)
        dist.barrier()  # no rank ends before the others have saved
        if self.stop_requested and self.step < self.last_step:
            hint = (
                "start it again to continue"
                if self.config.checkpoint.dir
                else "nothing is saved, as checkpoint.dir is empty"
            )
            log_rank_0(
                self.grid, f"a signal stopped the run after step {self.step} of {self.config.steps}; {hint}"
            )
        failures.stop_watching()

    # --- Close ----------------------------------------------------------------------------------------------

    def _close_loader(self) -> None:
        if self.data_loader is not None:
            self.data_loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._close_after_failure(error, trace)

    def close(self) -> None:
        """Ends a run whose steps are done. Rank 0 waits for its exports, while the other ranks may end."""
        try:
            self._on_close.close()
            if self.hf_exporter is not None and self.checkpoint_saver is not None:
                destroy_groups()  # the other ranks end theirs now, and may wait for this one
                self.hf_exporter.wait_for_exports(requested_stop_signal)  # a signal ends the wait
                # Some checkpoints were kept only for their export.
                if self.step == self.last_step:
                    self.checkpoint_saver.delete_old_checkpoints()
            if self.grid.rank == 0 and self.is_at_end:
                new_steps, seconds = self.step - self.first_step, time.monotonic() - self.start_time
                print(*end_summary(self.config, self.step, new_steps, seconds), sep="\n", flush=True)
        finally:
            if self.checkpoint_saver is not None:
                self.checkpoint_saver.close()

    def _close_after_failure(self, error: BaseException, trace: TracebackType | None) -> None:
        """Reports the failure to the other ranks, and closes what it can, which may take a while.

        Errors while closing are dropped, because they usually have the same cause.
        """
        if isinstance(error, Exception):
            failures.report_failure(error)
        for hook in self.hooks:
            with contextlib.suppress(Exception):
                hook.end(self, has_failed=True)
        with contextlib.suppress(Exception):
            self._on_close.__exit__(type(error), error, trace)
        # Other ranks may still write their parts of a checkpoint, so only a single rank unlocks the folder.
        if self.checkpoint_saver is not None and self.grid.world_size == 1:
            with contextlib.suppress(Exception):
                self.checkpoint_saver.close()
