"""The input of ``megatron-vl data index | stats | inspect``: a prepared data set and a run's settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from data_tools.sources import open_encoder
from data_tools.statistics import Statistics, statistics
from megatron_vl.config import RunConfigError, TrainConfig, parse_config
from megatron_vl.data.loader import RowEncoder
from megatron_vl.data.source.location import Location, location
from megatron_vl.errors import UsageError
from megatron_vl.spec.families import ModelSpec, read_spec

from .options import PreparedOptions


@dataclass(frozen=True)
class Prepared:
    """A data set, and the settings with which a run makes rows from it."""

    config: TrainConfig
    spec: ModelSpec
    split: str

    @property
    def path(self) -> Location:
        return location(self.config.data.path)

    @property
    def processor(self) -> Path:
        return Path(self.config.model.hf)

    @cached_property
    def encoder(self) -> RowEncoder:
        return open_encoder(self.config.data, self.spec, self.processor)

    def statistics(self, progress: Callable[[str], None] | None = None) -> Statistics:
        return statistics(self.encoder, self.processor, self.split, progress)


def open_prepared(options: PreparedOptions) -> Prepared:
    """Reads the settings of the run and finds the data set.

    Raises:
        UsageError: no data set or no processor is given, or a field is invalid.
        RunConfigError: ``data.path`` is not a data set.
        ConfigError: the processor's ``config.json`` cannot be used.
    """
    from megatron_vl.training.preflight import check_data_path

    fields = [*options.fields]
    fields += ["--data.path", str(options.data)] if options.data else []
    fields += ["--model.hf", str(options.processor)] if options.processor else []
    try:
        config = parse_config(fields)
    except RunConfigError as error:
        raise UsageError(str(error)) from error

    missing = [
        f"{name} (or {field} of a run)"
        for name, field, value in (
            ("--data", "data.path", config.data.path),
            ("--processor", "model.hf", config.model.hf),
        )
        if not value
    ]
    if missing:
        raise UsageError(f"give {' and '.join(missing)}")

    check_data_path(config.data.path)
    return Prepared(config, read_spec(config.model.hf), options.split)
