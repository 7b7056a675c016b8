"""Measures what the rows of a prepared data set hold, with the trainer's own loader."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from megatron_vl.config import TrainConfig
from megatron_vl.planning.rows import RowShape, RowStatistics
from megatron_vl.spec.families import ModelSpec

if TYPE_CHECKING:
    from megatron_vl.data.row import Row


def measured_rows(config: TrainConfig, spec: ModelSpec, number: int) -> RowStatistics:
    """Reads ``number`` rows in this process, as the first rank of a run would get them.

    Raises:
        RunConfigError, LoaderError: there is no data set, or it is empty.
    """
    from megatron_vl.data.loader import build_loader
    from megatron_vl.training.preflight import check_data_path, read_data

    check_data_path(config.data.path)
    facts = read_data(config)["train"]
    alone = dataclasses.replace(config.data, num_workers=0)
    loader = build_loader(alone, spec, config.model.hf, dp_rank=0, dp_size=1, facts=facts)
    try:
        shapes = tuple(_shape(row) for row in itertools.islice(loader, number))
    finally:
        loader.close()
    return RowStatistics(f"{len(shapes)} rows of {config.data.path}", shapes)


def _shape(row: Row) -> RowShape:
    lengths = row.cu_seqlens.diff().tolist()[: row.num_samples]
    frames: list[int] = []
    windows: list[int] = []
    if row.num_patches:
        frames, windows = row.vision.cu_seqlens.diff().tolist(), row.vision.cu_window_seqlens.diff().tolist()
    return RowShape(
        tuple(lengths), tuple(frames), tuple(windows), int(row.loss_mask.count_nonzero()), row.num_images
    )
