"""Everything about a run that is decided before it starts (see :mod:`megatron_vl.training.resolve`)."""

from dataclasses import dataclass, field
from typing import Literal

from megatron_vl.config import TrainConfig
from megatron_vl.data.source.dataset_description import SplitFacts
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.weights.run_folder import SavedCheckpoint


@dataclass(frozen=True)
class ResolvedRun:
    """Everything about a run that is decided before it starts. It is equal on all ranks."""

    config: TrainConfig
    """The run's config, with the split of the decoder layers and the offloaded share as numbers."""
    spec: ModelSpec
    layout: Layout
    dp: int
    layer_split_origin: Literal["given", "saved", "planned"]
    source_checkpoint: SavedCheckpoint | None
    """The checkpoint that the run resumes from; None: it begins anew."""
    facts_by_split: dict[str, SplitFacts] = field(default_factory=dict)
    """Facts of ``train`` and, if the run evaluates, of ``eval.split``."""
    run_notes: tuple[str, ...] = ()
    base_digest: str = ""
    """Of a run with LoRA: which model is its base
    (:func:`~megatron_vl.weights.model_digest.model_digest`)."""
    model_digests: dict[str, str] = field(default_factory=dict)
    """What every rank reads (:func:`~megatron_vl.training.input_files.read_model_digests`)."""
    loader_digests: dict[str, str] = field(default_factory=dict)
    """What ranks that own a loader read (:func:`~megatron_vl.training.input_files.read_loader_digests`)."""

    @property
    def last_step(self) -> int:
        return min(self.config.steps, self.config.stop_after or self.config.steps)
