"""Makes random samples of every kind (text, images, videos, mixtures), as small as possible."""

import torch

from megatron_vl.data.packing.assemble_row import MediaItem, TokenizedSample
from megatron_vl.data.synthetic import random_medium, random_text_ids
from megatron_vl.spec.families import ModelSpec

LARGE_IMAGE, SMALL_IMAGE = ("image", (1, 10, 14)), ("image", (1, 4, 6))
"""Grids in patches: one fills several 112-pixel windows (with ragged edges), one is smaller than a window."""
VIDEO = ("video", (2, 6, 10))

SAMPLE_KINDS: dict[str, list[str | tuple[str, tuple[int, int, int]]]] = {
    "text": ["text"],
    "short_text": ["short"],
    "image": [LARGE_IMAGE, "text"],
    "two_images": [SMALL_IMAGE, LARGE_IMAGE, "text"],
    "image_between": ["text", LARGE_IMAGE, "text"],
    "video": [VIDEO, "text"],
    "video_between": [LARGE_IMAGE, "short", VIDEO, "short", SMALL_IMAGE, "text"],
    "mixed": ["short", SMALL_IMAGE, "short", VIDEO, LARGE_IMAGE, "text"],
    "without_loss": [SMALL_IMAGE, "question"],
    "word": ["one"],
    "words": ["three"],
}
"""Maps each kind to the parts of a sample, in order."""
LENGTHS = {"short": 9, "one": 1, "three": 3}
"""Lengths in tokens of parts that are text; others have 30."""


def make_sample(sample_kind: str, spec: ModelSpec, seed: int) -> TokenizedSample:
    """Makes a sample of a kind with random tokens and pixels.

    About half of the text tokens have loss; those of a question have none.
    """
    generator = torch.Generator().manual_seed(seed * 1000 + sorted(SAMPLE_KINDS).index(sample_kind))
    token_parts: list[torch.Tensor] = []
    mask_parts: list[torch.Tensor] = []
    media_items: list[MediaItem] = []

    for sample_part in SAMPLE_KINDS[sample_kind]:
        if isinstance(sample_part, str):
            part_token_ids = random_text_ids(spec, LENGTHS.get(sample_part, 30), generator)
            part_loss_mask = torch.rand(len(part_token_ids), generator=generator) < 0.5
            part_loss_mask[-1] = True
            part_loss_mask &= sample_part != "question"
        else:
            part_token_ids, media_item = random_medium(spec, *sample_part, generator)
            part_loss_mask = torch.zeros(len(part_token_ids), dtype=torch.bool)
            media_items.append(media_item)
        token_parts.append(part_token_ids)
        mask_parts.append(part_loss_mask)

    return TokenizedSample(
        token_ids=torch.cat(token_parts), loss_mask=torch.cat(mask_parts), media_items=media_items
    )
