"""Evaluation during training: the loss on the held-out split.

The rows are read once, before the first step. They are the same for each evaluation and in every layout: each
data-parallel replica reads all of them and keeps its share. Training is not affected: evaluation changes no
gradient and no training row (tests/training/test_run.py).
"""

import contextlib
import dataclasses
import hashlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_vl.config import RunConfigError
from megatron_vl.data.packing.training_row import TrainingRow
from megatron_vl.data.source.dataset_description import SplitFacts
from megatron_vl.parallel.process_grid import ProcessGrid
from megatron_vl.parallel.process_groups import broadcast_from_rank_0
from megatron_vl.platform import Platform
from megatron_vl.system import progress
from megatron_vl.system.errors import describe_error
from megatron_vl.training.hooks import Hook, Trainer
from megatron_vl.training.report.sinks import ValidationResult
from megatron_vl.training.resolved_run import ResolvedRun
from megatron_vl.training.rows.batch_broadcast import BatchBroadcast, StepBatch
from megatron_vl.training.state.keep import read_validations
from megatron_vl.training.step import StepResult, reduce_losses, run_schedule, split_sums


class Evaluate(Hook):
    """Evaluates the loss on rows of the held-out split: before the first step, every ``eval.interval`` steps,
    and at the end.

    The constructor reads the rows. It is collective.

    Raises:
        RunConfigError: on all ranks, if the split cannot be read or none of its samples can be used.
    """

    def __init__(self, resolved_run: ResolvedRun, grid: ProcessGrid, platform: Platform) -> None:
        self.config, self.spec = resolved_run.config, resolved_run.spec
        self.grid, self.platform = grid, platform
        self.rows: list[TrainingRow] = []
        self.digest = ""
        """Of the tokens of all rows, and of which of them have loss."""
        failure, cause = "", None
        if grid.owns_loader:
            try:
                self.rows = self._rows_of_replica(resolved_run.facts_by_split[self.config.eval.split])
            except (ValueError, OSError, RuntimeError) as error:
                # All ranks must raise this error. Otherwise, the others would wait and report a lost peer.
                failure, cause = describe_error(error), error

        failure, self.num_rows, self.digest = grid.from_loader_owner((failure, len(self.rows), self.digest))
        if failure:
            raise RunConfigError(failure) from cause

    def _rows_of_replica(self, split_facts: SplitFacts) -> list[TrainingRow]:
        """This replica's rows. All replicas get the same number: rows without loss pad shorter shares."""
        from megatron_vl.data.loader import validation_rows  # it imports Energon

        grid, data, eval_config = self.grid, self.config.data, self.config.eval
        held_out = validation_rows(data, self.spec, self.config.model.hf, eval_config.split, split_facts)
        if not (rows := list(itertools.islice(held_out, eval_config.rows))):
            raise RunConfigError(
                f"{data.path}: no sample of the split {eval_config.split!r} can be used, for the reasons"
                f" above; correct the data set, raise data.seq_len (now {data.seq_len}), or set eval.interval"
                " to 0"
            )
        row_bytes = (part.numpy().tobytes() for row in rows for part in (row.tokens, row.loss_mask))
        self.digest = hashlib.blake2s(b"".join(row_bytes), digest_size=8).hexdigest()
        rows_per_replica = -(-len(rows) // grid.dp)
        if grid.vpp > 1:  # the interleaved schedule needs a multiple of the number of stages
            rows_per_replica = -(-rows_per_replica // grid.pp) * grid.pp
        own_rows = rows[grid.dp_rank :: grid.dp]
        padding_row = dataclasses.replace(rows[0], loss_mask=torch.zeros_like(rows[0].loss_mask))
        return own_rows + [padding_row] * (rows_per_replica - len(own_rows))

    def begin(self, trainer: Trainer) -> None:
        # Later losses are compared with that of the start weights. An evaluation that a kill or a stop
        # prevented, even the last one, is made now.
        run_dir = self.config.checkpoint.dir

        def is_evaluated() -> bool:
            known = ((each.step, each.rows) for each in read_validations(Path(run_dir)))
            return (trainer.step, self.digest) in known

        if trainer.step == 0 or run_dir and not broadcast_from_rank_0(is_evaluated):
            self._evaluate_if_due(trainer)

    def after_step(self, trainer: Trainer, step_batch: StepBatch, step_result: StepResult) -> None:
        # A run that was asked to stop has little time left.
        if not trainer.stop_requested or trainer.step == trainer.last_step:
            self._evaluate_if_due(trainer)

    def _evaluate_if_due(self, trainer: Trainer) -> None:
        if trainer.step % self.config.eval.interval == 0 or trainer.step == trainer.last_step:
            progress.enter_phase(progress.RUNNING_EVALUATION)
            trainer.metrics_log.log_evaluation(trainer.step, self.evaluate(trainer.model_chunks))

    def evaluate(self, ddp_chunks: list[DistributedDataParallel]) -> ValidationResult:
        """Evaluates the current weights. Collective over all ranks."""
        start = time.perf_counter()
        chunks, sums = [chunk.module for chunk in ddp_chunks], torch.zeros(())
        row_iterator = iter(self.rows) if self.grid.owns_loader else None
        # At most as many rows as in a training step, so that there is enough memory.
        rows_at_once = self.config.global_batch_size // self.grid.dp
        with torch.no_grad(), _inference(ddp_chunks):
            for first in range(0, self.num_rows, rows_at_once):
                num_rows = min(rows_at_once, self.num_rows - first)
                batches = BatchBroadcast(self.grid, self.platform, row_iterator, num_rows, spec=self.spec)
                rows = batches.next_batch().rows
                reports = run_schedule(chunks, rows, seq_len=self.config.data.seq_len, forward_only=True)
                sums = sums + reduce_losses(reports, rows, self.grid).read()[0]
                rows.clear()  # frees their memory before the next rows are loaded
        self.platform.synchronize()  # the time includes what still runs on the device
        loss_sum, loss_tokens, more_metrics, more_text = split_sums(sums)
        return ValidationResult(
            loss=loss_sum / max(loss_tokens, 1),
            loss_tokens=loss_tokens,
            elapsed_s=time.perf_counter() - start,
            rows=self.digest,
            more_metrics=more_metrics,
            more_text=more_text,
        )


@contextlib.contextmanager
def _inference(ddp_chunks: list[DistributedDataParallel]) -> Iterator[None]:
    """A context without dropout and recomputation, in which the weights of the last update are complete.

    With the overlapped gather, they would arrive only in DDP's next forward pass. They are gathered now, and
    the hooks that would wait for them are removed until the context ends.
    """
    overlapped_chunks = [chunk for chunk in ddp_chunks if chunk.ddp_config.overlap_param_gather]
    for chunk in overlapped_chunks:
        chunk.disable_forward_pre_hook(param_sync=True)
    for chunk in ddp_chunks:
        chunk.module.eval()
    try:
        yield
    finally:
        for chunk in ddp_chunks:
            chunk.module.train()
        for chunk in overlapped_chunks:
            chunk.enable_forward_pre_hook()
