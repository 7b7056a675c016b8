"""Evaluation during training: the loss on the held-out split, and answers to a few of its prompts.

The rows are read once, before the first step. They are the same for each evaluation and in every layout: each
data-parallel replica reads all of them and keeps its share. Training is not affected: evaluation changes no
gradient, no random number generator and no training row (tests/training/test_run.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_vl.config import RunConfigError, TrainConfig
from megatron_vl.data.packing.training_row import TrainingRow
from megatron_vl.data.source.dataset_description import SplitFacts
from megatron_vl.errors import describe_error
from megatron_vl.parallel.process_grid import ProcessGrid
from megatron_vl.platform import Platform
from megatron_vl.spec.families import ModelSpec
from megatron_vl.training.batch_broadcast import BatchBroadcast
from megatron_vl.training.generate import PromptRow, generate_greedily, inference_context
from megatron_vl.training.step import reduce_losses, run_schedule


@dataclass
class EvaluationAnswer:
    """One prompt of the held-out split and the model's answer to it."""

    key: str
    """Key of the sample in the data set."""
    prompt: str
    reference: str
    """The answer in the data set."""
    answer: str = ""


@dataclass
class ValidationResult:
    """The result of an evaluation. The loss is equal on all ranks; the answers are on rank 0 only."""

    loss: float
    """Mean loss over all loss tokens of the rows."""
    loss_tokens: int
    elapsed_s: float
    answers: list[EvaluationAnswer] = field(default_factory=list)


class Evaluator:
    """Evaluates the loss on rows of the held-out split, and generates answers to some of its prompts.

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
        self.eval_prompts: list[PromptRow] = []
        self.reference_answers: list[EvaluationAnswer] = []
        self.tokenizer: Any = None
        self.stop_token_ids: list[int] = []
        failure_text, failure_cause = "", None
        if grid.owns_loader:
            try:
                with _preserved_rng_state():
                    self._read_rows_and_prompts(spec)
            except (ValueError, OSError, RuntimeError) as error:
                # All ranks must raise this error. Otherwise, the others would wait and report a lost peer.
                failure_text, failure_cause = describe_error(error), error

        owned_counts = (failure_text, len(self.eval_rows), len(self.eval_prompts), self.stop_token_ids)
        shared_counts = grid.from_loader_owner(owned_counts)
        failure_text, self.row_count, self.prompt_count, self.stop_token_ids = shared_counts
        if failure_text:
            raise RunConfigError(failure_text) from failure_cause

    def _read_rows_and_prompts(self, spec: ModelSpec) -> None:
        from megatron_vl.data.sample.chat import ChatEncoder, read_stop_tokens

        eval_config, hf_dir = self.eval_config, self.hf_dir
        self.eval_rows = self._rows_of_replica(
            list(self._load_rows(spec, eval_config.rows, pack=self.data_config.pack))
        )
        if eval_config.samples:
            self.tokenizer = ChatEncoder(hf_dir, spec).tokenizer
            self.stop_token_ids = read_stop_tokens(hf_dir, self.tokenizer)
            for row in self._load_rows(spec, eval_config.samples, pack=False):
                if row.loss_mask.any():
                    self._add_prompt(row)

    def _load_rows(self, spec: ModelSpec, max_rows: int, pack: bool) -> Iterator[TrainingRow]:
        """The first ``max_rows`` rows of the split, equal on every replica."""
        from megatron_vl.data.loader import validation_rows

        data_config = dataclasses.replace(self.data_config, pack=pack)
        rows = validation_rows(data_config, spec, self.hf_dir, self.eval_config.split, self.split_facts)
        return itertools.islice(rows, max_rows)

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

    def _add_prompt(self, row: TrainingRow) -> None:
        """Adds the prompt for the first assistant turn of a row that holds one sample.

        The row's own text of that turn follows the prompt. It becomes the answer to compare with.
        """
        bears_loss = row.loss_mask.bool()
        answer_start = int(bears_loss.nonzero()[0])
        answer_end = len(bears_loss)
        if not bears_loss[answer_start:].all():
            answer_end = answer_start + int((~bears_loss[answer_start:]).nonzero()[0])

        prompt_tokens, reference_tokens = row.tokens[: answer_start + 1], row.labels[answer_start:answer_end]
        self.eval_prompts.append(PromptRow(row, len(prompt_tokens)))

        decode = self.tokenizer.decode
        decoded_texts = [
            decode(tokens, skip_special_tokens=True) for tokens in (prompt_tokens, reference_tokens)
        ]
        self.reference_answers.append(EvaluationAnswer(row.sample_keys[0], *decoded_texts))

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether to evaluate after ``step`` steps.

        An evaluation is due before the first step, every ``eval.interval`` steps, and at the end.
        """
        return step % self.eval_config.interval == 0 or step == last_step

    def evaluate(self, ddp_chunks: list[DistributedDataParallel]) -> ValidationResult:
        """Evaluates the current weights. Collective over all ranks."""
        start = time.perf_counter()
        chunks = [chunk.module for chunk in ddp_chunks]
        with _gathered_weights(ddp_chunks):
            with inference_context(chunks):
                loss, tokens = self._evaluate_loss(chunks)
            generated_answers = self._generate_answers(chunks) if self.prompt_count else []
        self.platform.synchronize()
        return ValidationResult(loss, tokens, time.perf_counter() - start, generated_answers)

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

    def _generate_answers(self, model_chunks: list[Any]) -> list[EvaluationAnswer]:
        eval_prompts = self.eval_prompts if self.grid.owns_loader else None
        answer_tokens = generate_greedily(
            model_chunks,
            self.grid,
            self.platform,
            eval_prompts,
            max_new_tokens=self.eval_config.max_new_tokens,
            stop_token_ids=frozenset(self.stop_token_ids),
        )
        if self.grid.rank:
            return []
        answer_texts = [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answer_tokens]
        return [
            dataclasses.replace(reference_answer, answer=text)
            for reference_answer, text in zip(self.reference_answers, answer_texts, strict=True)
        ]


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


@contextmanager
def _preserved_rng_state() -> Iterator[None]:
    """Restores this process's random number generators at the end of the context."""
    rng_states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(rng_states[0])
        np.random.set_state(rng_states[1])
        torch.set_rng_state(rng_states[2])
