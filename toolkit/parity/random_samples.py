"""Makes random samples of every kind (text, images, videos, mixtures), as small as possible."""

from __future__ import annotations

import torch

from megatron_vl.data.packing.assemble_row import MediaItem, TokenizedSample
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.positions import GridTHW, placeholder_runs

LARGE_IMAGE_GRID, SMALL_IMAGE_GRID = (1, 10, 14), (1, 4, 6)
"""Grids in patches: one fills several 112-pixel windows (with ragged edges), one is smaller than a window."""
VIDEO_GRID = (2, 6, 10)
SECONDS_PER_GRID = 3.75
"""Seconds per frame group. In Qwen2.5-VL, time positions then reach further than rows and columns."""

SAMPLE_KINDS: dict[str, list[str | tuple[str, tuple[int, int, int]]]] = {
    "text": ["text"],
    "short_text": ["short"],
    "image": [("image", LARGE_IMAGE_GRID), "text"],
    "two_images": [("image", SMALL_IMAGE_GRID), ("image", LARGE_IMAGE_GRID), "text"],
    "image_between": ["text", ("image", LARGE_IMAGE_GRID), "text"],
    "video": [("video", VIDEO_GRID), "text"],
    "video_between": [
        ("image", LARGE_IMAGE_GRID),
        "short",
        ("video", VIDEO_GRID),
        "short",
        ("image", SMALL_IMAGE_GRID),
        "text",
    ],
    "mixed": [
        "short",
        ("image", SMALL_IMAGE_GRID),
        "short",
        ("video", VIDEO_GRID),
        ("image", LARGE_IMAGE_GRID),
        "text",
    ],
    "without_loss": [("image", SMALL_IMAGE_GRID), "question"],
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


def random_text_ids(spec: ModelSpec, token_count: int, generator: torch.Generator) -> torch.Tensor:
    """Draws tokens below all special ones."""
    first_special_id = min(
        spec.image_token_id,
        spec.video_token_id,
        spec.vision_start_token_id,
        spec.vision_end_token_id,
        spec.language.vocab_size,
    )
    return torch.randint(0, first_special_id, (token_count,), generator=generator)


def random_medium(
    spec: ModelSpec, media_kind: str, grid_size: tuple[int, int, int], generator: torch.Generator
) -> tuple[torch.Tensor, MediaItem]:
    """Returns the tokens of an image or a video with random pixels, and the medium itself."""
    vision_spec = spec.vision
    t, h, w = grid_size
    media_grid = GridTHW(t, h, w, kind=media_kind, second_per_grid=SECONDS_PER_GRID)  # type: ignore[arg-type]
    frame_count = t * vision_spec.temporal_patch_size if media_kind == "video" else 1
    pixel_planes = torch.randint(
        0,
        256,
        (frame_count, h * w, vision_spec.in_channels * vision_spec.patch_size**2),
        generator=generator,
        dtype=torch.uint8,
    )

    placeholder_id = spec.image_token_id if media_kind == "image" else spec.video_token_id
    token_ids = []
    for placeholder_run in placeholder_runs([media_grid], spec):
        if placeholder_run.kind == "video" and vision_spec.video_timestamps:
            token_ids += random_text_ids(spec, 4, generator).tolist()
        token_ids += [
            spec.vision_start_token_id,
            *([placeholder_id] * placeholder_run.num_tokens(vision_spec.spatial_merge_size)),
            spec.vision_end_token_id,
        ]

    return torch.tensor(token_ids), MediaItem(grid_thw=media_grid, planes=pixel_planes)
