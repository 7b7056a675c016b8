"""Draws packed rows that resemble visual question answering, from a seed.

The pictures have the sizes of COCO's, each with 40 to 260 tokens of text. Only shapes matter for speed, so
tokens and pixels are random. Grids, windows, positions and packing are those of the loader.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from megatron_vl.data.packing.assemble import MediaItem, Sample, pack_row
from megatron_vl.data.packing.row import Row
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.positions import GridTHW

COCO_SIZES = ((640, 480), (480, 640), (640, 427), (427, 640), (640, 426), (640, 360), (500, 375), (640, 640))
"""Width and height in pixels of pictures whose long side is (mostly) 640, as in COCO."""


def image_sample(spec: ModelSpec, rng: random.Random) -> Sample:
    """Draws one picture with a question and its answer."""
    v = spec.vision
    unit = v.patch_size * v.spatial_merge_size
    width, height = rng.choice(COCO_SIZES)
    w, h = (max(1, round(side / unit)) * v.spatial_merge_size for side in (width, height))
    grid = GridTHW(1, h, w)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    planes = torch.randint(
        0, 256, (1, h * w, v.in_channels * v.patch_size**2), generator=generator, dtype=torch.uint8
    )
    pads = torch.full((grid.tokens(v.spatial_merge_size),), spec.image_token_id)
    frame = (torch.tensor([spec.vision_start_token_id]), pads, torch.tensor([spec.vision_end_token_id]))
    text = _text(spec, rng.randint(40, 260), generator)
    mask = torch.zeros(len(pads) + 2 + len(text), dtype=torch.bool)
    mask[-len(text) // 2 :] = True

    return Sample(
        token_ids=torch.cat([*frame, text]), loss_mask=mask, media=[MediaItem(grid=grid, planes=planes)]
    )


def text_sample(spec: ModelSpec, rng: random.Random, longest: int) -> Sample:
    """Draws a document about as long as an image sample, without a picture."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    text = _text(spec, min(longest, rng.randint(300, 700)), generator)
    return Sample(token_ids=text, loss_mask=torch.ones(len(text), dtype=torch.bool))


def _text(spec: ModelSpec, length: int, generator: torch.Generator) -> torch.Tensor:
    special = (spec.image_token_id, spec.video_token_id, spec.vision_start_token_id, spec.vision_end_token_id)
    return torch.randint(0, min(min(special), spec.language.vocab_size), (length,), generator=generator)


def groups(spec: ModelSpec, seq_len: int, *, images: bool, seed: int) -> Iterator[list[Sample]]:
    """Yields groups of samples without end, as they are drawn. Each fills a row of ``seq_len`` tokens."""
    rng = random.Random(seed)
    samples: list[Sample] = []
    used = 0
    while True:
        sample = image_sample(spec, rng) if images else text_sample(spec, rng, seq_len)
        if used + len(sample) > seq_len:
            if samples:
                yield samples
            samples = []
            used = 0
            if len(sample) > seq_len:
                continue
        samples.append(sample)
        used += len(sample)


def rows(spec: ModelSpec, seq_len: int, *, images: bool, seed: int) -> Iterator[Row]:
    """Packed rows of ``seq_len`` tokens, without end."""
    return (pack_row(samples, spec, seq_len) for samples in groups(spec, seq_len, images=images, seed=seed))
