"""Everything about a run that is decided before it starts (see :mod:`megatron_vl.training.resolve`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_vl.config import TrainConfig
from megatron_vl.data.source.description import SplitFacts
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.weights.run_folder import Lineage, Saved


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    source: Saved | None
    """The checkpoint to resume from. None: the run starts from ``model.checkpoint`` or random weights."""
    lineage: Lineage
    """Lineage of the checkpoints that the run will save."""
    restart_data: bool
    """Whether the data set is read from its start."""
    notes: tuple[str, ...] = ()
    """Lines to print for the user."""


@dataclass(frozen=True)
class ResolvedRun:
    """Everything about a run that is decided before it starts. It is equal on all ranks."""

    config: TrainConfig
    """The run's config, with the split of the decoder layers and the offloaded share as numbers."""
    spec: ModelSpec
    layout: Layout
    dp: int
    """Data-parallel size."""
    split: Literal["given", "saved", "planned", "even"]
    """Where the split of the decoder layers comes from."""
    start: Start
    data: dict[str, SplitFacts]
    """Facts of ``train`` and, if the run evaluates, of ``eval.split``. Empty for a run that is only shown."""
    notes: tuple[str, ...]
    """Lines to print for the user."""

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        return min(self.config.steps, self.config.stop_after or self.config.steps)

    @property
    def resumes(self) -> bool:
        """Whether weights come from the run's own checkpoint."""
        return self.start.source is not None

    @property
    def resumes_data(self) -> bool:
        """Whether the run continues in its data where a checkpoint stopped."""
        return self.resumes and not self.start.restart_data
