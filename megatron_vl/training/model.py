"""Builds this rank's part of a run's model, with given or random weights."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vl.config import TrainConfig
from megatron_vl.data.sample.pixels import PixelNorm, read_pixel_norm
from megatron_vl.models.build import build_chunks, check_tensors, chunk_tensors
from megatron_vl.models.names import LiveTensor
from megatron_vl.models.vision_language import VisionLanguageModel
from megatron_vl.parallel.grid import ProcessGrid
from megatron_vl.platform import Platform
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.training.checkpoint import load_weights
from megatron_vl.weights.reader import WeightReader

HALF = PixelNorm((0.5,) * 3, (0.5,) * 3)
"""Pixel statistics for models that are not given real pictures."""


@dataclass(frozen=True)
class BuiltModel:
    """One rank's part of a model."""

    chunks: list[VisionLanguageModel]
    """One chunk for each virtual stage, not wrapped in DDP."""
    tensors: list[LiveTensor]
    """The chunks' parameters with canonical names."""


def build_model(
    config: TrainConfig,
    spec: ModelSpec,
    layout: Layout,
    platform: Platform,
    grid: ProcessGrid,
    *,
    weights: WeightReader | None = None,
    norm: PixelNorm | None = None,
) -> BuiltModel:
    """Builds this rank's chunks, checks them against the tensor table, and fills them.

    Args:
        grid: the grid of ``layout``, whose process groups must exist.
        weights: weights in any layout, of which each rank reads its own slices; None: random weights.
        norm: statistics of pixels; None: those of ``model.hf``.

    Raises:
        RuntimeError: the modules do not match the tensor table.
        WeightsError: a stored tensor is damaged.
    """
    norm = norm or read_pixel_norm(config.model.hf)
    chunks = build_chunks(platform, spec, layout, config, pixel_mean=norm.mean, pixel_std=norm.std)

    tensors = chunk_tensors(chunks, layout, grid.pp_rank, grid.ep_rank)
    check_tensors(spec, layout, tensors)

    if weights is not None:
        load_weights(weights, tensors, grid)
    return BuiltModel(chunks, tensors)
