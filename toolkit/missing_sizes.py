"""Writes the sizes of samples that a command reads rows of, as the start of a run does."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_vl.config import DataConfig
from megatron_vl.spec.families import ModelSpec


def write_missing_sizes(data: DataConfig, spec: ModelSpec, hf: str | Path) -> None:
    """Writes the sizes of a data set that has none for this tokenizer and chat template, and says so.

    Raises:
        SizesWriteError: they cannot be written.
        LoaderError, DescriptionError: there is no data set.
    """
    from data_tools.convert import default_workers
    from data_tools.sample_sizes import index
    from megatron_vl.data.source.description import read_description
    from megatron_vl.data.source.location import location
    from megatron_vl.data.source.sizes import without_sizes

    if lacking := without_sizes(read_description(location(data.path)), hf, data):
        names = ", ".join(str(one.path) for one in lacking)
        print(f"writing the sizes of the samples of {names}, once (megatron-vl data index)", file=sys.stderr)
        index(data, spec, hf, default_workers(), lambda line: print(f"  {line}", file=sys.stderr))
