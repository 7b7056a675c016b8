"""The mean row of a run, and its FLOPs by part of the model.

Nothing is read: the length of a row and its bound on patches come from the run, and what it holds is assumed.
"""

import math

from megatron_vl.config import TrainConfig
from megatron_vl.estimate.flops import RowFlops, RowSizes, needed_flops, repeated_flops
from megatron_vl.spec.families import ModelSpec

ASSUMED_ROWS_TEXT = "images of about 610 x 460 pixels, each with 150 tokens of text, half of it trained on"
"""The mean of the rows that ``megatron-vl bench`` draws (:mod:`megatron_vl.data.synthetic`)."""
IMAGE_PIXELS, TEXT_TOKENS, MARK_TOKENS = 282_000, 150, 2
DOCUMENT_TOKENS = 500
"""Tokens of a document of a text row; all are trained on."""
FILLED_SHARE = 0.98


def assumed_rows(config: TrainConfig, spec: ModelSpec) -> RowSizes:
    """The mean row: of images (:data:`ASSUMED_ROWS_TEXT`), or of text if ``data.path`` is synthetic text."""
    seq_len, vision = config.data.seq_len, spec.vision
    filled_tokens = FILLED_SHARE * seq_len
    if config.data.path == "synthetic:text":
        return RowSizes(filled_tokens, filled_tokens * min(DOCUMENT_TOKENS, seq_len), filled_tokens)

    image_tokens = IMAGE_PIXELS / (vision.patch_size * vision.spatial_merge_size) ** 2
    document_tokens = image_tokens + MARK_TOKENS + TEXT_TOKENS
    image_patches = image_tokens * vision.merge_unit
    images = min(filled_tokens / document_tokens, (config.data.max_patches or math.inf) / image_patches)
    # A tower without windows has one that holds the whole image.
    window_patches = min(image_patches, ((vision.window_size or math.inf) / vision.patch_size) ** 2)
    tokens = images * document_tokens
    return RowSizes(
        tokens=tokens,
        token_pairs=tokens * min(document_tokens, seq_len),
        loss_tokens=images * TEXT_TOKENS / 2,
        patches=images * image_patches,
        frame_pairs=images * image_patches**2,
        window_pairs=images * image_patches * window_patches,
    )


def executed_flops(config: TrainConfig, spec: ModelSpec, rows: RowSizes) -> RowFlops:
    """FLOPs of a row by part, with what is computed twice."""
    model, lora, is_decoupled = config.model, config.lora, config.vision.placement == "decoupled"
    repeated = repeated_flops(spec, model, lora, config.recompute, rows, is_decoupled)
    return needed_flops(spec, config, rows) + repeated
