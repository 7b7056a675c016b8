"""Evaluation during training: the loss on the held-out split.

The rows are read once, before the first step. They are the same for each evaluation and in every layout: each
data-parallel replica reads all of them and keeps its share. Training is not affected: evaluation changes no
gradient and no training row (tests/training/test_run.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_vl.config import RunConfigError, TrainConfig
from megatron_vl.data.packing.training_row import TrainingRow
from megatron_vl.data.source.dataset_description import SplitFacts
from megatron_vl.parallel.process_grid import ProcessGrid
from megatron_vl.platform import Platform
from megatron_vl.spec.families import ModelSpec
from megatron_vl.system.errors import describe_error
from megatron_vl.training.rows.batch_broadcast import BatchBroadcast
from megatron_vl.training.step import reduce_losses, run_schedule


@dataclass
class ValidationResult:
    """The result of an evaluation, equal on all ranks."""

    loss: float
    """Mean loss over all loss tokens of the rows."""
    loss_tokens: int
    elapsed_s: float


class Evaluator:
    """Evaluates the loss on rows of the held-out split.

    The constructor reads the rows. It is collective.

    Raises:
        RunConfigError: on all ranks, if the split cannot be read or none of its samples can be used.
    """

    def __init__(
        self,
        config: TrainConfig,
        spec: ModelSpec,
        grid: ProcessGrid,
        platform: Platform,
        split_facts: SplitFacts,
    ) -> None:
        self.grid, self.platform, self.split_facts = grid, platform, split_facts
        self.eval_config, self.data_config, self.hf_dir = config.eval, config.data, config.model.hf
        self.rows_per_step = config.global_batch_size // grid.dp
        self.vision_spec = spec.vision
        self.eval_rows: list[TrainingRow] = []
        failure_text, failure_cause = "", None
        if grid.owns_loader:
            try:
                self.eval_rows = self._rows_of_replica(self._load_rows(spec))
            except (ValueError, OSError, RuntimeError) as error:
                # All ranks must raise this error. Otherwise, the others would wait and report a lost peer.
                failure_text, failure_cause = describe_error(error), error

        failure_text, self.row_count = grid.from_loader_owner((failure_text, len(self.eval_rows)))
        if failure_text:
            raise RunConfigError(failure_text) from failure_cause

    def _load_rows(self, spec: ModelSpec) -> list[TrainingRow]:
        """The first ``eval.rows`` rows of the split, equal on every replica."""
        from megatron_vl.data.loader import validation_rows

        rows = validation_rows(self.data_config, spec, self.hf_dir, self.eval_config.split, self.split_facts)
        return list(itertools.islice(rows, self.eval_config.rows))

    def _rows_of_replica(self, rows: list[TrainingRow]) -> list[TrainingRow]:
        """This replica's rows. All replicas get the same number: rows without loss pad shorter shares."""
        grid, data_config = self.grid, self.data_config
        if not rows:
            raise RunConfigError(
                f"{data_config.path}: no sample of the split {self.eval_config.split!r} can be used, for the"
                f" reasons above; correct the data set, raise data.seq_len (now {data_config.seq_len}), or"
                " set eval.interval to 0"
            )
        rows_per_replica = -(-len(rows) // grid.dp)
        if grid.vpp > 1:  # the interleaved schedule needs a multiple of the number of stages
            rows_per_replica = -(-rows_per_replica // grid.pp) * grid.pp
        replica_rows = rows[grid.dp_rank :: grid.dp]
        padding_row = dataclasses.replace(rows[0], loss_mask=torch.zeros_like(rows[0].loss_mask))
        return replica_rows + [padding_row] * (rows_per_replica - len(replica_rows))

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether to evaluate after ``step`` steps.

        An evaluation is due before the first step, every ``eval.interval`` steps, and at the end.
        """
        return step % self.eval_config.interval == 0 or step == last_step

    def evaluate(self, ddp_chunks: list[DistributedDataParallel]) -> ValidationResult:
        """Evaluates the current weights. Collective over all ranks."""
        start = time.perf_counter()
        chunks = [chunk.module for chunk in ddp_chunks]
        with _gathered_weights(ddp_chunks), _inference_context(chunks):
            loss, tokens = self._evaluate_loss(chunks)
        self.platform.synchronize()
        return ValidationResult(loss, tokens, time.perf_counter() - start)

    def _evaluate_loss(self, model_chunks: list[Any]) -> tuple[float, int]:
        """(mean loss, number of loss tokens) over the rows of all replicas. Collective."""
        loss_sum, token_count = 0.0, 0
        row_iterator = iter(self.eval_rows) if self.grid.owns_loader else None
        # At most as many rows as in a training step, so that there is enough memory.
        rows_at_once = self.rows_per_step

        for first_row in range(0, self.row_count, rows_at_once):
            step_batch = BatchBroadcast(
                self.grid,
                self.platform,
                row_iterator,
                min(rows_at_once, self.row_count - first_row),
                vision_spec=self.vision_spec,
            ).next_batch()
            row_reports = run_schedule(
                model_chunks, step_batch.rows, seq_len=self.data_config.seq_len, forward_only=True
            )
            batch_loss, loss_tokens, *_ = reduce_losses(row_reports, self.grid, self.platform.device)
            loss_sum += batch_loss
            token_count += loss_tokens
        return loss_sum / max(token_count, 1), token_count


@contextmanager
def _inference_context(model_chunks: list[Any]) -> Iterator[None]:
    """A context without gradients, dropout and recomputation."""
    for chunk in model_chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk in model_chunks:
            chunk.train()


@contextmanager
def _gathered_weights(ddp_chunks: list[DistributedDataParallel]) -> Iterator[None]:
    """A context in which the weights of the last update are complete.

    With the overlapped gather, they would arrive only in DDP's next forward pass. They are gathered now, and
    the hooks that would wait for them are removed until the context ends.
    """
    overlapped_chunks = [ddp_chunk for ddp_chunk in ddp_chunks if ddp_chunk.ddp_config.overlap_param_gather]
    for ddp_chunk in overlapped_chunks:
        ddp_chunk.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for ddp_chunk in overlapped_chunks:
            ddp_chunk.enable_forward_pre_hook()
