"""Makes a trainer of a small model, for functions in a separate process (:func:`tests.support.ranks.call`).

This selects the CPU platform, which changes torch for the rest of the process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vl.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from megatron_vl.data.packing.assemble_row import pack_row
from megatron_vl.parallel.process_grid import ProcessGrid, init_distributed, make_grid
from megatron_vl.platform import Platform, get_platform
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.layout import Layout, make_layout
from megatron_vl.training.batch_broadcast import BatchBroadcast
from megatron_vl.training.model import HALF_PIXEL_NORM, build_model
from megatron_vl.training.optimizer import build_optimizer, set_learning_rates
from megatron_vl.training.step import train_step, wrap_in_ddp
from toolkit.parity.random_samples import make_sample

SEQ_LEN = 256
ROWS = 2
"""Micro-batches per step."""


@dataclass
class TinyTrainer:
    """The objects of a training loop, with a model of random weights."""

    platform: Platform
    spec: ModelSpec
    layout: Layout
    grid: ProcessGrid
    config: TrainConfig
    chunks: list[Any]
    wrapped: list[Any]
    optimizer: Any
    feed: BatchBroadcast

    def step(self, number: int = 0) -> Any:
        """Sets the learning rates of a step and runs it on the feed's next rows."""
        rows = self.feed.next_batch().rows
        set_learning_rates(self.optimizer, self.config, number)
        return train_step(self.wrapped, self.optimizer, rows, self.grid, SEQ_LEN)

    def feed_of(self, rows: Iterable[Any], count: int) -> BatchBroadcast:
        """Makes a feed of other rows, ``count`` of them per step."""
        return BatchBroadcast(self.grid, self.platform, iter(rows), count)

    def new_chunks(self, config: TrainConfig | None = None) -> list[Any]:
        """Builds the same model again, with the same random weights."""
        config = config or self.config
        return build_model(
            config, self.spec, self.layout, self.platform, self.grid, pixel_norm=HALF_PIXEL_NORM
        ).model_chunks


def tiny_trainer(
    hf: str | Path, dtype: str = "float32", pp: int = 1, freeze_language: bool = False, **optimizer: Any
) -> TinyTrainer:
    """Makes a trainer whose rows alternate between image and text.

    Args:
        freeze_language: whether the vision tower and the merger alone are trained.
        optimizer: fields of :class:`OptimizerConfig` that override the defaults here.
    """
    platform = get_platform("cpu")
    spec = read_spec(hf)
    layout = make_layout(spec, pp=pp)
    init_distributed(platform)
    grid = make_grid(layout)

    rates = {"lr": 1e-3, "vision_lr": 5e-4, "merger_lr": 2e-4, "weight_decay": 0.1, "schedule": "constant"}
    config = TrainConfig(
        dtype=dtype,  # type: ignore[arg-type]
        steps=10,
        global_batch_size=ROWS,
        parallel=ParallelConfig(pp=pp),
        data=DataConfig(seq_len=SEQ_LEN),
        model=ModelConfig(freeze_language=freeze_language),
        optimizer=OptimizerConfig(**(rates | optimizer)),
    )
    trainer = TinyTrainer(platform, spec, layout, grid, config, [], [], None, None)  # type: ignore[arg-type]

    trainer.chunks = trainer.new_chunks()
    trainer.wrapped = wrap_in_ddp(config, trainer.chunks)
    trainer.optimizer = build_optimizer(config, platform, trainer.wrapped)
    rows = itertools.cycle(
        [pack_row([make_sample(kind, spec, 0)], spec, SEQ_LEN) for kind in ("image", "text")]
    )
    trainer.feed = trainer.feed_of(rows, ROWS)
    return trainer
