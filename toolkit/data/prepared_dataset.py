"""The input of ``megatron-vl data index | show``: a prepared data set and a run's settings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from data_tools.sample_sources import open_encoder
from megatron_vl.config import RunConfigError, TrainConfig, parse_config
from megatron_vl.data.row_encoder import RowEncoder
from megatron_vl.data.source.location import DataPath, check_data_path
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.system.errors import UsageError

from .options import PreparedOptions


@dataclass(frozen=True)
class PreparedDataset:
    """A data set, and the settings with which a run makes rows from it."""

    config: TrainConfig
    spec: ModelSpec

    @property
    def data_path(self) -> DataPath:
        return self.config.data.path

    @property
    def processor_dir(self) -> Path:
        return Path(self.config.model.hf)

    @cached_property
    def row_encoder(self) -> RowEncoder:
        return open_encoder(self.config.data, self.spec, self.processor_dir)


def open_prepared(options: PreparedOptions, new_dataset: Path | None = None) -> PreparedDataset:
    """Reads the settings of the run and finds the data set.

    Args:
        new_dataset: the data set that is about to be written.

    Raises:
        UsageError: no data set or no processor is given, or a field is invalid.
        RunConfigError: ``data.path`` is not a data set.
        ConfigError: the processor's ``config.json`` cannot be used.
    """
    run_args = [*options.fields]
    dataset_path = new_dataset or options.data
    run_args += ["--data.path", str(dataset_path)] if dataset_path else []
    run_args += ["--model.hf", str(options.processor)] if options.processor else []
    try:
        config = parse_config(run_args)
    except RunConfigError as error:
        raise UsageError(str(error)) from error
    missing = [] if config.data.path else ["--data (or data.path of a run)"]
    missing += [] if config.model.hf else ["--processor (or model.hf of a run)"]
    if missing:
        raise UsageError(f"give {' and '.join(missing)}")
    if not new_dataset:
        check_data_path(config.data.path)
    return PreparedDataset(config, read_spec(config.model.hf))
