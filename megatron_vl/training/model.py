"""Builds this rank's part of a run's model, with given or random weights."""

from megatron_vl.config import TrainConfig
from megatron_vl.data.sample.pixel_settings import PixelNorm, read_pixel_norm
from megatron_vl.models.build import build_chunks, check_live_tensors, chunk_tensors
from megatron_vl.models.parameter_names import LiveTensor
from megatron_vl.models.vision_language import VisionLanguageModel
from megatron_vl.parallel.process_grid import ProcessGrid
from megatron_vl.platform import Platform
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.training.offload.layer_inputs import offload_layer_inputs
from megatron_vl.training.offload.row_features import offload_row_features
from megatron_vl.training.state.load import load_weights
from megatron_vl.weights.canonical_weights import CanonicalWeights

HALF_PIXEL_NORM = PixelNorm((0.5,) * 3, (0.5,) * 3)


def build_model(
    config: TrainConfig,
    spec: ModelSpec,
    layout: Layout,
    platform: Platform,
    grid: ProcessGrid,
    *,
    start_weights: CanonicalWeights | None = None,
    added_weights: CanonicalWeights | None = None,
    start_lora: CanonicalWeights | None = None,
    pixel_norm: PixelNorm | None = None,
) -> tuple[list[VisionLanguageModel], list[LiveTensor]]:
    """Builds this rank's chunks, checks them against the tensor table, and fills them.

    Args:
        start_weights: weights in any layout, of which each rank reads its own slices; None: random weights.
        added_weights: those of layers that the start weights, or the checkpoint that is loaded later, lack
            (:func:`~megatron_vl.training.start_weights.open_added_weights`); None: they stay random.
        start_lora: matrices of LoRA, and modules that were trained whole, in any layout; None: matrices that
            add nothing yet.

    Returns:
        (one chunk for each virtual stage, not wrapped in DDP; the chunks' parameters with canonical names).
    """
    pixel_norm = pixel_norm or read_pixel_norm(config.model.hf)
    chunks = build_chunks(
        platform, spec, layout, config, pixel_mean=pixel_norm.mean, pixel_std=pixel_norm.std
    )
    live_tensors = chunk_tensors(chunks, layout, grid.pp_rank, grid.ep_rank)
    check_live_tensors(spec, layout, live_tensors, config.lora)

    for weights in (start_weights, added_weights, start_lora):
        if weights is not None:
            load_weights(weights, live_tensors, grid)
    if (decoupled := chunks[0].decoupled) is not None:
        offload_row_features(decoupled, platform)
    if config.recompute.offload_inputs:
        offload_layer_inputs([*chunks, *([decoupled.module] if decoupled is not None else [])], platform)
    return chunks, live_tensors
