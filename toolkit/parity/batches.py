"""Makes random samples of every kind (text, images, videos, mixtures), as small as possible."""

from __future__ import annotations

import torch

from megatron_vl.data.packing.assemble import MediaItem, Sample
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.positions import GridTHW, placeholder_runs

IMAGE_A, IMAGE_B = (1, 10, 14), (1, 4, 6)
"""Grids in patches: one fills several 112-pixel windows (with ragged edges), one is smaller than a window."""
VIDEO = (2, 6, 10)
SECONDS = 3.75
"""Seconds per frame group. In Qwen2.5-VL, time positions then reach further than rows and columns."""

KINDS: dict[str, list[str | tuple[str, tuple[int, int, int]]]] = {
    "text": ["text"],
    "short_text": ["short"],
    "image": [("image", IMAGE_A), "text"],
    "two_images": [("image", IMAGE_B), ("image", IMAGE_A), "text"],
    "image_between": ["text", ("image", IMAGE_A), "text"],
    "video": [("video", VIDEO), "text"],
    "video_between": [("image", IMAGE_A), "short", ("video", VIDEO), "short", ("image", IMAGE_B), "text"],
    "mixed": ["short", ("image", IMAGE_B), "short", ("video", VIDEO), ("image", IMAGE_A), "text"],
    "without_loss": [("image", IMAGE_B), "question"],
    "word": ["one"],
    "words": ["three"],
}
"""Maps each kind to the parts of a sample, in order."""
LENGTHS = {"short": 9, "one": 1, "three": 3}
"""Lengths in tokens of parts that are text; others have 30."""


def make_sample(kind: str, spec: ModelSpec, seed: int) -> Sample:
    """Makes a sample of a kind with random tokens and pixels.

    About half of the text tokens have loss; those of a question have none.
    """
    generator = torch.Generator().manual_seed(seed * 1000 + sorted(KINDS).index(kind))
    tokens: list[torch.Tensor] = []
    masks: list[torch.Tensor] = []
    media: list[MediaItem] = []

    for part in KINDS[kind]:
        if isinstance(part, str):
            ids = _text(spec, LENGTHS.get(part, 30), generator)
            mask = torch.rand(len(ids), generator=generator) < 0.5
            mask[-1] = True
            mask &= part != "question"
        else:
            ids, item = _medium(spec, *part, generator)
            mask = torch.zeros(len(ids), dtype=torch.bool)
            media.append(item)
        tokens.append(ids)
        masks.append(mask)

    return Sample(token_ids=torch.cat(tokens), loss_mask=torch.cat(masks), media=media)


def _text(spec: ModelSpec, length: int, generator: torch.Generator) -> torch.Tensor:
    special = {spec.image_token_id, spec.video_token_id, spec.vision_start_token_id, spec.vision_end_token_id}
    limit = min(special)
    return torch.randint(0, limit, (length,), generator=generator)


def _medium(
    spec: ModelSpec, kind: str, thw: tuple[int, int, int], generator: torch.Generator
) -> tuple[torch.Tensor, MediaItem]:
    """Returns the tokens of an image or a video with random pixels, and the medium itself."""
    v = spec.vision
    t, h, w = thw
    grid = GridTHW(t, h, w, kind=kind, second_per_grid=SECONDS)  # type: ignore[arg-type]
    frames = t * v.temporal_patch_size if kind == "video" else 1
    planes = torch.randint(
        0, 256, (frames, h * w, v.in_channels * v.patch_size**2), generator=generator, dtype=torch.uint8
    )

    pad = spec.image_token_id if kind == "image" else spec.video_token_id
    ids = []
    for run in placeholder_runs([grid], spec):
        if run.kind == "video" and v.video_timestamps:
            ids += _text(spec, 4, generator).tolist()
        ids += [
            spec.vision_start_token_id,
            *([pad] * run.tokens(v.spatial_merge_size)),
            spec.vision_end_token_id,
        ]

    return torch.tensor(ids), MediaItem(grid=grid, planes=planes)
