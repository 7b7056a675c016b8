"""Measures the tokens, pictures and patches of a prepared data set's rows with the trainer's loader."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from typing import TYPE_CHECKING

from megatron_vl.config import TrainConfig
from megatron_vl.planning.row_statistics import RowShape, RowStatistics
from megatron_vl.spec.families import ModelSpec

if TYPE_CHECKING:
    from megatron_vl.data.packing.training_row import TrainingRow


MAX_READ_SECONDS = 120.0
"""After this many seconds, reading stops, and the rows that were read so far are used."""


def measure_rows(
    config: TrainConfig, spec: ModelSpec, row_count: int, max_seconds: float = MAX_READ_SECONDS
) -> RowStatistics:
    """Reads up to ``row_count`` rows in this process, as the first rank of a run would get them.

    The time does not grow with the data set, except that missing sizes of samples are written first, as the
    start of a run does. After ``max_seconds``, two rows are enough.

    Raises:
        RunConfigError, LoaderError: there is no data set, it is empty, or its sizes are missing and cannot be
            written.
    """
    from megatron_vl.data.loader import build_loader
    from megatron_vl.data.source.location import check_data_path
    from megatron_vl.training.missing_sizes import write_missing_sizes_alone
    from megatron_vl.training.resolve import read_split_facts

    check_data_path(config.data.path)
    data_facts = read_split_facts(config)["train"]
    write_missing_sizes_alone(config.data, config.model.hf)
    single_process_config = dataclasses.replace(config.data, num_workers=0)
    row_shapes = []
    with contextlib.closing(
        build_loader(single_process_config, spec, config.model.hf, split_facts=data_facts)
    ) as row_loader:
        read_deadline = time.monotonic() + max_seconds
        for packed_row in itertools.islice(row_loader, row_count):
            row_shapes.append(row_shape(packed_row))
            if len(row_shapes) >= 2 and time.monotonic() > read_deadline:
                break

    shortfall_note = (
        f" (more than {max_seconds:.0f} s for {row_count})" if len(row_shapes) < row_count else ""
    )
    return RowStatistics(
        f"{len(row_shapes)} rows of {config.data.path}{shortfall_note}", tuple(row_shapes), is_sample=True
    )


def row_shape(row: TrainingRow) -> RowShape:
    """The lengths and counts of a row that determine the time of a step."""
    lengths = row.cu_seqlens.diff().tolist()[: row.num_samples]
    frames: list[int] = []
    window_lengths: list[int] = []
    if row.num_patches:
        frames, window_lengths = (
            row.vision.cu_seqlens.diff().tolist(),
            row.vision.cu_window_seqlens.diff().tolist(),
        )
    return RowShape(
        tuple(lengths),
        tuple(frames),
        tuple(window_lengths),
        int(row.loss_mask.count_nonzero()),
        row.num_images,
    )
