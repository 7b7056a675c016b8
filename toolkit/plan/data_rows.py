"""Measures what the rows of a prepared data set hold, with the trainer's own loader."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import TYPE_CHECKING

from megatron_vl.config import TrainConfig
from megatron_vl.planning.rows import RowShape, RowStatistics
from megatron_vl.spec.families import ModelSpec

if TYPE_CHECKING:
    from megatron_vl.data.packing.row import Row


SECONDS = 120.0
"""After so long, the rows that were read count."""


def measured_rows(
    config: TrainConfig, spec: ModelSpec, number: int, seconds: float = SECONDS
) -> RowStatistics:
    """Reads up to ``number`` rows in this process, as the first rank of a run would get them.

    The time does not grow with the data set, except that missing sizes of samples are written first, as the
    start of a run does. After ``seconds``, two rows are enough.

    Raises:
        RunConfigError, LoaderError: there is no data set, it is empty, or its sizes are missing and cannot be
            written.
    """
    from megatron_vl.data.loader import build_loader
    from megatron_vl.training.missing_sizes import write_missing_sizes_alone
    from megatron_vl.training.preflight import check_data_path
    from megatron_vl.training.resolve import read_data

    check_data_path(config.data.path)
    facts = read_data(config)["train"]
    write_missing_sizes_alone(config.data, config.model.hf)
    alone = dataclasses.replace(config.data, num_workers=0)
    loader = build_loader(alone, spec, config.model.hf, facts=facts)
    try:
        shapes = []
        end = time.monotonic() + seconds
        for row in itertools.islice(loader, number):
            shapes.append(shape_of(row))
            if len(shapes) >= 2 and time.monotonic() > end:
                break
    finally:
        loader.close()
    fewer = f" (more than {seconds:.0f} s for {number})" if len(shapes) < number else ""
    return RowStatistics(f"{len(shapes)} rows of {config.data.path}{fewer}", tuple(shapes), sampled=True)


def shape_of(row: Row) -> RowShape:
    """What a row holds, as far as it decides time."""
    lengths = row.cu_seqlens.diff().tolist()[: row.num_samples]
    frames: list[int] = []
    windows: list[int] = []
    if row.num_patches:
        frames, windows = row.vision.cu_seqlens.diff().tolist(), row.vision.cu_window_seqlens.diff().tolist()
    return RowShape(
        tuple(lengths), tuple(frames), tuple(windows), int(row.loss_mask.count_nonzero()), row.num_images
    )
