"""Draws packed rows that resemble visual question answering, from a seed.

The pictures have the sizes of COCO's, each with 40 to 260 tokens of text. Only shapes matter for speed, so
tokens and pixels are random. Grids, windows, positions and packing are those of the loader.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import torch

from megatron_vl.data.packing.assemble_row import MediaItem, TokenizedSample, pack_row
from megatron_vl.data.packing.training_row import TrainingRow
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.positions import GridTHW
from toolkit.parity.random_samples import random_text_ids

COCO_SIZES = ((640, 480), (480, 640), (640, 427), (427, 640), (640, 426), (640, 360), (500, 375), (640, 640))
"""Width and height in pixels of pictures whose long side is (mostly) 640, as in COCO."""


def image_sample(spec: ModelSpec, rng: random.Random) -> TokenizedSample:
    """Draws one picture with a question and its answer."""
    vision_spec = spec.vision
    merged_patch_size = vision_spec.patch_size * vision_spec.spatial_merge_size
    picture_width, picture_height = rng.choice(COCO_SIZES)
    patch_columns, patch_rows = (
        max(1, round(side / merged_patch_size)) * vision_spec.spatial_merge_size
        for side in (picture_width, picture_height)
    )
    image_grid = GridTHW(1, patch_rows, patch_columns)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    pixel_planes = torch.randint(
        0,
        256,
        (1, patch_rows * patch_columns, vision_spec.in_channels * vision_spec.patch_size**2),
        generator=generator,
        dtype=torch.uint8,
    )
    placeholder_ids = torch.full(
        (image_grid.num_tokens(vision_spec.spatial_merge_size),), spec.image_token_id
    )
    picture_token_ids = (
        torch.tensor([spec.vision_start_token_id]),
        placeholder_ids,
        torch.tensor([spec.vision_end_token_id]),
    )
    text_token_ids = random_text_ids(spec, rng.randint(40, 260), generator)
    loss_mask = torch.zeros(len(placeholder_ids) + 2 + len(text_token_ids), dtype=torch.bool)
    loss_mask[-len(text_token_ids) // 2 :] = True

    return TokenizedSample(
        token_ids=torch.cat([*picture_token_ids, text_token_ids]),
        loss_mask=loss_mask,
        media_items=[MediaItem(grid_thw=image_grid, planes=pixel_planes)],
    )


def text_sample(spec: ModelSpec, rng: random.Random, max_length: int) -> TokenizedSample:
    """Draws a document about as long as an image sample, without a picture."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    text = random_text_ids(spec, min(max_length, rng.randint(300, 700)), generator)
    return TokenizedSample(token_ids=text, loss_mask=torch.ones(len(text), dtype=torch.bool))


def sample_groups(
    spec: ModelSpec, seq_len: int, *, with_images: bool, seed: int
) -> Iterator[list[TokenizedSample]]:
    """Yields groups of samples without end, as they are drawn. Each fills a row of ``seq_len`` tokens."""
    rng = random.Random(seed)

    def draw_samples() -> Iterator[TokenizedSample]:
        while True:
            yield image_sample(spec, rng) if with_images else text_sample(spec, rng, seq_len)

    return fill_rows(draw_samples(), seq_len)


def fill_rows(samples: Iterable[TokenizedSample], seq_len: int) -> Iterator[list[TokenizedSample]]:
    """Yields groups of consecutive samples. Each fills a row of ``seq_len`` tokens; longer ones go."""
    row_samples: list[TokenizedSample] = []
    tokens_used = 0
    for sample in samples:
        if tokens_used + len(sample) > seq_len:
            if row_samples:
                yield row_samples
            row_samples = []
            tokens_used = 0
            if len(sample) > seq_len:
                continue
        row_samples.append(sample)
        tokens_used += len(sample)


def draw_rows(spec: ModelSpec, seq_len: int, *, with_images: bool, seed: int) -> Iterator[TrainingRow]:
    """Packed rows of ``seq_len`` tokens, without end."""
    return (
        pack_row(samples, spec, seq_len)
        for samples in sample_groups(spec, seq_len, with_images=with_images, seed=seed)
    )
