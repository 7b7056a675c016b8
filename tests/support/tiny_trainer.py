"""Makes a trainer of a small model, for functions in a separate process (:func:`tests.support.ranks.call`).

This selects the CPU platform, which changes torch for the rest of the process.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_vl.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from megatron_vl.data.given_rows import GivenRows
from megatron_vl.data.packing.assemble_row import pack_row
from megatron_vl.data.packing.training_row import TrainingRow
from megatron_vl.parallel.process_grid import init_distributed
from megatron_vl.platform import get_platform
from megatron_vl.training.optimizer import set_learning_rates
from megatron_vl.training.rows.batch_broadcast import BatchBroadcast
from megatron_vl.training.step import StepResult
from megatron_vl.training.trainer import Trainer
from toolkit.parity.case import resolve_on_given_rows
from toolkit.parity.random_samples import make_sample

SEQ_LEN = 256
ROWS = 2
"""Rows of each data-parallel rank per step."""


class TinyTrainer(Trainer):
    """A trainer of a model with random weights, whose rows alternate between image and text."""

    def __init__(self, config: TrainConfig, **model_options: Any) -> None:
        run = resolve_on_given_rows(config)
        super().__init__(run, get_platform("cpu"), make_loader=lambda grid: GivenRows(self._rows()))
        self.build(**model_options)

    def _rows(self) -> Iterator[TrainingRow]:
        samples = [[make_sample(kind, self.spec, 0)] for kind in ("image", "text")]
        return itertools.cycle([pack_row(row, self.spec, SEQ_LEN) for row in samples])

    @property
    def chunks(self) -> list[Any]:
        """This rank's chunks without DDP."""
        return [chunk.module for chunk in self.model_chunks]

    def run_step(self, number: int = 0) -> StepResult:
        """Sets the learning rates of a step and runs it on the loader's next rows."""
        set_learning_rates(self.optimizer, self.config, number)
        return self.train_step(self.batches.next_batch())

    def feed_of(self, rows: Iterable[Any], count: int) -> BatchBroadcast:
        """Makes a feed of other rows, ``count`` of them per step."""
        return BatchBroadcast(self.grid, self.platform, iter(rows), count)

    def again(self, **sections: Any) -> TinyTrainer:
        """Builds the same model with the same random weights again, with other sections of the config."""
        return TinyTrainer(dataclasses.replace(self.config, **sections))


def tiny_trainer(
    hf: str | Path, dtype: str = "float32", pp: int = 1, freeze_language: bool = False, **optimizer: Any
) -> TinyTrainer:
    """Makes a trainer whose rows alternate between image and text.

    Args:
        freeze_language: whether the vision tower and the merger alone are trained.
        optimizer: fields of :class:`OptimizerConfig` that override the defaults here.
    """
    init_distributed(get_platform("cpu"))
    rates = {"lr": 1e-3, "vision_lr": 5e-4, "merger_lr": 2e-4, "weight_decay": 0.1, "schedule": "constant"}
    config = TrainConfig(
        dtype=dtype,  # type: ignore[arg-type]
        steps=10,
        global_batch_size=ROWS * dist.get_world_size() // pp,
        parallel=ParallelConfig(pp=pp),
        data=DataConfig(seq_len=SEQ_LEN),
        model=ModelConfig(hf=str(hf), freeze_language=freeze_language),
        optimizer=OptimizerConfig(**(rates | optimizer)),
    )
    return TinyTrainer(config)
