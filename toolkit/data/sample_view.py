"""One sample as the model sees it."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from data_tools.sample_sources import (
    SampleReader,
    SampleSource,
    list_splits,
    original_media_names,
    read_sources,
)
from megatron_vl.data.sample.pixel_settings import PixelSettings
from megatron_vl.data.source.location import LoaderError
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.positions import GridTHW

from .prepared_dataset import PreparedDataset
from .statistics import escape_unprintable


@dataclass(frozen=True)
class MediumView:
    """An image or video of a sample."""

    media_item: dict[str, Any]
    """What the shard says of it: key, height and width, and of a video frames, fps and perhaps sampling."""
    original_name: str
    """The name of its file before the conversion; empty if it is not known."""
    resized_size: tuple[int, int]
    """Height and width as the model sees it."""
    grid_thw: GridTHW
    num_tokens: int
    pixels: Tensor | None
    """uint8 [frames, 3, height, width] as the model sees them; None if the medium does not decode."""
    boxes: list[list[float]]
    """Boxes and points of its objects, in pixels of the resized image."""

    def __str__(self) -> str:
        item, (height, width) = self.media_item, self.resized_size
        frames = f", {item['frames']:,} frames, {item['fps']:g} a second" if "frames" in item else ""
        seen = f", {len(self.pixels)} frames" if frames and self.pixels is not None else ""
        return (
            f"{self.original_name or item['key']}: {item['width']} x {item['height']}{frames} in the file,"
            f" {width} x {height}{seen} as seen, {self.num_tokens:,} tokens"
        )


@dataclass
class Turn:
    """What one speaker says, in pieces: (text, whether it is trained on)."""

    role: str
    pieces: list[tuple[str, bool]] = field(default_factory=list)


@dataclass
class SampleView:
    """One sample with everything that the loader makes of it."""

    key: str
    shard: str
    record: str
    problem: tuple[str, str] | None
    """Reason and detail if the loader leaves the sample out or hides its images."""
    token_ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [n]"""
    loss_mask: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    """bool [n]: the tokens that are trained on (not shifted)."""
    turns: list[Turn] = field(default_factory=list)
    media: list[MediumView] = field(default_factory=list)
    num_parts: int = 0
    """Number of parts into which a run cuts the sample; 0 if it is whole."""

    def __str__(self) -> str:
        origin = f" ({self.record})" if self.record else ""
        trained = int(self.loss_mask.count_nonzero())
        parts = f", cut into {self.num_parts} parts" if self.num_parts else ""
        return (
            f"{self.key} of {self.shard}{origin}: {len(self.token_ids):,} tokens, {trained:,} trained"
            f" on{parts}"
        )


def find_sample(prepared: PreparedDataset, sample_key: str) -> tuple[SampleSource, int]:
    """The source of a sample by its key or ``SHARD[N]``, and the sample's index in that source.

    The key of a document's part, such as ``KEY#2``, finds the document.

    Raises:
        LoaderError: there is no such sample, or several sources have it.
    """
    found, sample_key = {}, re.sub(r"#\d+$", "", sample_key)
    for split in list_splits(prepared.config.data.path):
        for source in read_sources(prepared.config.data.path, split):
            if (sample_index := source.find_sample(sample_key)) is not None:
                shard_name, position = source.shard_position(sample_index)
                found[f"{source.dataset.path}/{shard_name}[{position}]"] = source, sample_index
    if len(found) != 1:
        several = f"several: {', '.join(found)}; name one, with its --data" if found else "none"
        raise LoaderError(f"{prepared.config.data.path} has no single sample {sample_key}, but {several}")
    return next(iter(found.values()))


def view_sample(prepared: PreparedDataset, source: SampleSource, sample_index: int) -> SampleView:
    """Reads and decodes a sample."""
    with closing(SampleReader(source)) as sample_reader:
        raw_sample = sample_reader.read_sample(sample_index, with_media=True)
    encoder, spec = prepared.row_encoder, prepared.spec
    encoded = encoder.preencode_sample(raw_sample)
    view = SampleView(raw_sample.key, raw_sample.shard_name, encoded.source, encoded.refused)
    if encoded.refused:
        return view
    encoder.dropped_samples.clear()
    decoded = encoder.postencode_sample(encoded)
    if encoder.dropped_samples:
        view.problem = encoder.dropped_samples[0].reason, encoder.dropped_samples[0].detail
    view.token_ids, view.loss_mask = decoded.token_ids, decoded.loss_mask.bool()
    view.turns = split_turns(view.token_ids, decoded.loss_mask, encoder.chat_encoder.tokenizer, spec)
    view.num_parts = len(encoded.parts)
    if encoded.is_document:
        view.turns[0].role = "document"

    names = original_media_names(source.dataset.path, raw_sample.key)
    settings = encoder.pixel_settings
    media = zip_longest(encoded.media, encoded.grids, decoded.media_items, names[: len(encoded.media)])
    for i, (item, grid, medium, name) in enumerate(media):
        pixels = None if view.problem else planes_to_pixels(medium.planes, grid, settings)
        size = (grid.h * settings.patch_size, grid.w * settings.patch_size)
        tokens = grid.num_tokens(spec.vision.spatial_merge_size)
        boxes = encoded.objects.seen_boxes(i) if encoded.objects else []
        view.media.append(MediumView(item, name or "", size, grid, tokens, pixels, boxes))
    return view


def planes_to_pixels(planes: Tensor, grid: GridTHW, settings: PixelSettings) -> Tensor:
    """Puts the planes of a medium together again: uint8 [frames, 3, height, width].

    Args:
        planes: uint8 [frames, h * w, patch * patch * 3], patches in merge-unit order.
    """
    p, m = settings.patch_size, settings.merge_size
    patch_blocks = planes.reshape(-1, grid.h // m, grid.w // m, m, m, p, p, 3)
    return patch_blocks.permute(0, 7, 1, 3, 5, 2, 4, 6).reshape(-1, 3, grid.h * p, grid.w * p)


def split_turns(token_ids: Tensor, loss_mask: Tensor, tokenizer: Any, spec: ModelSpec) -> list[Turn]:
    """The text of a sample by speaker, as the tokenizer gives it back. Placeholders are counted."""
    start_token = tokenizer.convert_tokens_to_ids("<|im_start|>")
    placeholders = {spec.image_token_id: "image", spec.video_token_id: "video"}
    turn_numbers = (token_ids == start_token).cumsum(0).tolist()
    turns: list[Turn] = []
    marked_tokens = zip(turn_numbers, loss_mask.tolist(), token_ids.tolist(), strict=True)
    for _, turn_tokens in groupby(marked_tokens, key=lambda marked: marked[0]):
        turn = Turn("")
        pieces = groupby(turn_tokens, key=lambda marked: (marked[1], placeholders.get(marked[2])))
        for (is_trained, placeholder), group in pieces:
            piece_ids = [token_id for _, _, token_id in group]
            text = f"[{placeholder}: {len(piece_ids):,} tokens]"
            if placeholder is None:
                text = tokenizer.decode(piece_ids, clean_up_tokenization_spaces=False)
            if not turn.pieces and text.startswith("<|im_start|>"):
                turn.role, _, text = text.removeprefix("<|im_start|>").partition("\n")
            turn.pieces.append((text, is_trained))
        turns.append(turn)
    return turns


def sample_as_json(sample: SampleView) -> dict[str, Any]:
    """Returns the output of ``--json``."""
    media = []
    for medium in sample.media:
        grid = medium.grid_thw
        facts = {"name": medium.original_name, "resized": medium.resized_size, "tokens": medium.num_tokens}
        facts |= {"grid_thw": [grid.t, grid.h, grid.w], "timestamps": grid.timestamps}
        facts |= {"boxes": medium.boxes} if medium.boxes else {}
        media.append(medium.media_item | facts)
    return vars(sample) | {
        "turns": [vars(turn) for turn in sample.turns],
        "media": media,
        "token_ids": sample.token_ids.tolist(),
        "loss_mask": sample.loss_mask.int().tolist(),
    }


def print_sample(sample: SampleView) -> None:
    """Prints a sample; what is trained on is green."""
    console = Console(highlight=False)

    def print_text(text: str, style: str = "", end: str = "\n") -> None:
        lines = "\n".join(map(escape_unprintable, text.split("\n")))
        console.print(Text(lines, style=style), soft_wrap=True, end=end)

    print_text(f"sample {sample}")
    if sample.problem:
        print_text(f"a run leaves it out: {sample.problem[0]}: {sample.problem[1]}", "red")
    for medium in sample.media:
        print_text(str(medium))
    for turn in sample.turns:
        print_text(turn.role or "(no speaker)", "bold")
        for text, is_trained in turn.pieces:
            print_text(text, "green" if is_trained else "", end="")
        console.print()
