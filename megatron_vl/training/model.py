"""Builds this rank's part of a run's model, with given or random weights."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vl.config import TrainConfig
from megatron_vl.data.sample.pixel_settings import PixelNorm, read_pixel_norm
from megatron_vl.models.build import build_chunks, check_live_tensors, chunk_tensors
from megatron_vl.models.parameter_names import LiveTensor
from megatron_vl.models.vision_language import VisionLanguageModel
from megatron_vl.parallel.process_grid import ProcessGrid
from megatron_vl.platform import Platform
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.spec.lora import is_adapter_tensor
from megatron_vl.training.offload.layer_inputs import offload_layer_inputs
from megatron_vl.training.state.checkpoint import load_weights
from megatron_vl.weights.canonical_weights import CanonicalWeights

HALF_PIXEL_NORM = PixelNorm((0.5,) * 3, (0.5,) * 3)
"""Pixel statistics for models that are not given real pictures."""


@dataclass(frozen=True)
class BuiltModel:
    """One rank's part of a model."""

    model_chunks: list[VisionLanguageModel]
    """One chunk for each virtual stage, not wrapped in DDP."""
    live_tensors: list[LiveTensor]
    """The chunks' parameters with canonical names."""


def build_model(
    config: TrainConfig,
    spec: ModelSpec,
    layout: Layout,
    platform: Platform,
    grid: ProcessGrid,
    *,
    weight_reader: CanonicalWeights | None = None,
    adapter_reader: CanonicalWeights | None = None,
    pixel_norm: PixelNorm | None = None,
) -> BuiltModel:
    """Builds this rank's chunks, checks them against the tensor table, and fills them.

    Args:
        grid: the grid of ``layout``, whose process groups must exist.
        weight_reader: weights in any layout, of which each rank reads its own slices; None: random weights.
        adapter_reader: adapters, and modules that were trained whole, in any layout; None: adapters that add
            nothing yet.
        pixel_norm: statistics of pixels; None: those of ``model.hf``.

    Raises:
        RuntimeError: the modules do not match the tensor table.
        WeightsError: a stored tensor is damaged.
    """
    pixel_norm = pixel_norm or read_pixel_norm(config.model.hf)
    model_chunks = build_chunks(
        platform, spec, layout, config, pixel_mean=pixel_norm.mean, pixel_std=pixel_norm.std
    )

    live_tensors = chunk_tensors(model_chunks, layout, grid.pp_rank, grid.ep_rank)
    check_live_tensors(spec, layout, live_tensors, config.lora)

    if weight_reader is not None:
        base_tensors = [tensor for tensor in live_tensors if not is_adapter_tensor(tensor.tensor_name)]
        load_weights(weight_reader, base_tensors, grid)
    if adapter_reader is not None:
        trained_names = adapter_reader.tensor_infos
        trained_tensors = [tensor for tensor in live_tensors if tensor.tensor_name in trained_names]
        load_weights(adapter_reader, trained_tensors, grid)
    if config.recompute.offload_inputs:
        decoupled = model_chunks[0].decoupled
        offload_layer_inputs(
            [*model_chunks, *([decoupled.module] if decoupled is not None else [])], platform
        )
    return BuiltModel(model_chunks, live_tensors)
