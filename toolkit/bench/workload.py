"""Draws packed rows that resemble visual question answering, from a seed.

The pictures have the sizes of COCO's, each with 40 to 260 tokens of text. Only shapes matter for speed, so
tokens and pixels are random. Grids, windows, positions and packing are those of the loader.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import torch

from megatron_vl.data.packing.assemble_row import TokenizedSample, pack_row
from megatron_vl.data.packing.training_row import TrainingRow
from megatron_vl.planning.row_statistics import PICTURE_SIZES
from megatron_vl.spec.families import ModelSpec
from toolkit.parity.random_samples import random_medium, random_text_ids


def image_sample(spec: ModelSpec, rng: random.Random) -> TokenizedSample:
    """Draws one picture with a question and its answer."""
    vision_spec = spec.vision
    merged_patch_size = vision_spec.patch_size * vision_spec.spatial_merge_size
    picture_width, picture_height = rng.choice(PICTURE_SIZES)
    merged_columns = max(1, round(picture_width / merged_patch_size))
    merged_rows = max(1, round(picture_height / merged_patch_size))
    image_grid = (
        1,
        merged_rows * vision_spec.spatial_merge_size,
        merged_columns * vision_spec.spatial_merge_size,
    )
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    picture_token_ids, media_item = random_medium(spec, "image", image_grid, generator)
    text_token_ids = random_text_ids(spec, rng.randint(40, 260), generator)
    loss_mask = torch.zeros(len(picture_token_ids) + len(text_token_ids), dtype=torch.bool)
    loss_mask[-len(text_token_ids) // 2 :] = True

    return TokenizedSample(
        token_ids=torch.cat([picture_token_ids, text_token_ids]),
        loss_mask=loss_mask,
        media_items=[media_item],
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
