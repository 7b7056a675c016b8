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
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from megatron_vl.config import RunConfigError, TrainConfig
from megatron_vl.data.packing.row import Row
from megatron_vl.data.source.description import SplitFacts
from megatron_vl.errors import describe
from megatron_vl.parallel.grid import ProcessGrid
from megatron_vl.platform import Platform
from megatron_vl.spec.families import ModelSpec
from megatron_vl.training.feed import Feed
from megatron_vl.training.generate import Prompt, generate, inference
from megatron_vl.training.step import reduce_losses, run_schedule


@dataclass
class Answer:
    """One prompt of the held-out split and the model's answer to it."""

    key: str
    """Key of the sample in the data set."""
    prompt: str
    wanted: str
    """The answer in the data set."""
    answer: str = ""


@dataclass
class Evaluation:
    """The result of an evaluation. The loss is equal on all ranks; the answers are on rank 0 only."""

    loss: float
    """Mean loss over all loss tokens of the rows."""
    loss_tokens: int
    seconds: float
    answers: list[Answer] = field(default_factory=list)


class Evaluator:
    """Holds the rows and prompts to evaluate. The constructor is collective.

    Raises:
        RunConfigError: on all ranks, if the split cannot be read or none of its samples can be used.
    """

    def __init__(
        self, config: TrainConfig, spec: ModelSpec, grid: ProcessGrid, platform: Platform, facts: SplitFacts
    ) -> None:
        self.grid, self.platform, self.facts = grid, platform, facts
        self.settings, self.data, self.hf = config.eval, config.data, config.model.hf
        self.rows_per_step = config.global_batch_size // grid.dp
        self.vision = spec.vision
        self.rows: list[Row] = []
        self.prompts: list[Prompt] = []
        self.answers: list[Answer] = []
        self.tokenizer: Any = None
        self.stop: list[int] = []

        failure, cause = "", None
        if grid.owns_loader:
            try:
                with _random_state_kept():
                    self._read(spec)
            except (ValueError, OSError, RuntimeError) as error:
                # All ranks must raise this error. Otherwise, the others would wait and report a lost peer.
                failure, cause = describe(error), error

        counts: list[Any] = [(failure, len(self.rows), len(self.prompts), self.stop)]
        if grid.replica_ranks > 1:
            dist.broadcast_object_list(counts, src=grid.replica_source, group=grid.replica_gloo)
        failure, self.row_count, self.prompt_count, self.stop = counts[0]
        if failure:
            raise RunConfigError(failure) from cause

    def _read(self, spec: ModelSpec) -> None:
        from megatron_vl.data.sample.chat import ChatEncoder, stop_tokens

        e, hf = self.settings, self.hf
        self.rows = self._share(list(self._loaded(spec, e.rows, pack=self.data.pack)))
        if e.samples:
            self.tokenizer = ChatEncoder(hf, spec).tokenizer
            self.stop = stop_tokens(hf, self.tokenizer)
            for row in self._loaded(spec, e.samples, pack=False):
                if row.loss_mask.any():
                    self._add_prompt(row)

    def _loaded(self, spec: ModelSpec, count: int, pack: bool) -> Iterator[Row]:
        """The first ``count`` rows of the split, equal on every replica."""
        from megatron_vl.data.loader import validation_rows

        data = dataclasses.replace(self.data, pack=pack)
        rows = validation_rows(data, spec, self.hf, self.settings.split, self.facts)
        return itertools.islice(rows, count)

    def _share(self, rows: list[Row]) -> list[Row]:
        """This replica's rows. All replicas get the same number: rows without loss pad shorter shares."""
        grid, data = self.grid, self.data
        if not rows:
            raise RunConfigError(
                f"{data.path}: no sample of the split {self.settings.split!r} can be used, for the reasons"
                f" above; correct the data set, raise data.seq_len (now {data.seq_len}), or set eval.interval"
                " to 0"
            )
        count = -(-len(rows) // grid.dp)
        if grid.vpp > 1:  # the interleaved schedule needs a multiple of the number of stages
            count = -(-count // grid.pp) * grid.pp
        mine = rows[grid.dp_rank :: grid.dp]
        filler = dataclasses.replace(rows[0], loss_mask=torch.zeros_like(rows[0].loss_mask))
        return mine + [filler] * (count - len(mine))

    def _add_prompt(self, row: Row) -> None:
        """Adds the prompt for the first assistant turn of a row that holds one sample.

        The row's own text of that turn follows the prompt and becomes the wanted answer.
        """
        learnt = row.loss_mask.bool()
        start = int(learnt.nonzero()[0])
        end = len(learnt)
        if not learnt[start:].all():
            end = start + int((~learnt[start:]).nonzero()[0])

        prompt, wanted = row.tokens[: start + 1], row.labels[start:end]
        self.prompts.append(Prompt(row, len(prompt)))

        decode = self.tokenizer.decode
        texts = [decode(tokens, skip_special_tokens=True) for tokens in (prompt, wanted)]
        self.answers.append(Answer(row.keys[0], *texts))

    def due(self, step: int, last: int) -> bool:
        """Whether to evaluate after ``step`` steps.

        An evaluation is due before the first step, every ``eval.interval`` steps, and at the end.
        """
        return step % self.settings.interval == 0 or step == last

    def run(self, wrapped: list[DistributedDataParallel]) -> Evaluation:
        """Evaluates the current weights. Collective over all ranks."""
        start = time.perf_counter()
        chunks = [chunk.module for chunk in wrapped]
        with _weights_in_place(wrapped):
            with inference(chunks):
                loss, tokens = self._loss(chunks)
            answers = self._answer(chunks) if self.prompt_count else []
        self.platform.synchronize()
        return Evaluation(loss, tokens, time.perf_counter() - start, answers)

    def _loss(self, chunks: list[Any]) -> tuple[float, int]:
        total, tokens = 0.0, 0
        rows = iter(self.rows) if self.grid.owns_loader else None
        # At most as many rows as in a training step, so that there is enough memory.
        at_once = self.rows_per_step

        for start in range(0, self.row_count, at_once):
            count = min(at_once, self.row_count - start)
            data = Feed(self.grid, self.platform, rows, count, vision=self.vision).next_step()
            reports = run_schedule(chunks, data.rows, seq_len=self.data.seq_len, forward_only=True)
            loss, loss_tokens, *_ = reduce_losses(reports, self.grid, self.platform.device)
            total += loss
            tokens += loss_tokens
        return total / max(tokens, 1), tokens

    def _answer(self, chunks: list[Any]) -> list[Answer]:
        prompts = self.prompts if self.grid.owns_loader else None
        most = self.settings.max_new_tokens
        found = generate(
            chunks, self.grid, self.platform, prompts, max_new_tokens=most, stop=frozenset(self.stop)
        )
        if self.grid.rank:
            return []
        texts = [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in found]
        return [dataclasses.replace(a, answer=text) for a, text in zip(self.answers, texts, strict=True)]


@contextmanager
def _weights_in_place(wrapped: list[DistributedDataParallel]) -> Iterator[None]:
    """A context in which the weights of the last update are complete.

    With the overlapped gather, they would arrive only in DDP's next forward pass. They are gathered now, and
    the hooks that would wait for them are removed until the context ends.
    """
    overlapped = [chunk for chunk in wrapped if chunk.ddp_config.overlap_param_gather]
    for chunk in overlapped:
        chunk.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for chunk in overlapped:
            chunk.enable_forward_pre_hook()


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Restores this process's random number generators at the end of the context."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
