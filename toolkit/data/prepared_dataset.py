"""The input of ``megatron-vl data index | show``: a run, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from data_tools.sample_sources import open_encoder
from megatron_vl.config import TrainConfig
from megatron_vl.data.row_encoder import RowEncoder
from megatron_vl.spec.families import ModelSpec, read_spec


@dataclass(frozen=True)
class PreparedDataset:
    """A data set, and the settings with which a run makes rows from it."""

    config: TrainConfig

    @cached_property
    def spec(self) -> ModelSpec:
        return read_spec(self.config.model.hf)

    @cached_property
    def row_encoder(self) -> RowEncoder:
        return open_encoder(self.config.data, self.spec, self.config.model.hf)
