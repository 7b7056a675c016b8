"""One sample as the model sees it."""

import itertools
import re
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

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
from megatron_vl.data.row_encoder import RowEncoder
from megatron_vl.data.sample.pixel_settings import PixelSettings
from megatron_vl.data.source.location import DataPath, LoaderError
from megatron_vl.spec.positions import GridTHW

from .statistics import escape_unprintable


@dataclass
class SampleView:
    """One sample with everything that the loader makes of it, as JSON values."""

    key: str
    shard: str
    record: str
    problem: tuple[str, str] | None
    """Reason and detail if the loader leaves the sample out or hides its images."""
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    """1 for the tokens that are trained on (not shifted)."""
    turns: list[dict[str, Any]] = field(default_factory=list)
    """``role`` and ``pieces``: (text, whether it is trained on)."""
    media: list[dict[str, Any]] = field(default_factory=list)
    """What the shard says of each medium; ``name`` of its file before the conversion, ``resized`` (height and
    width as the model sees it), ``tokens``, ``grid_thw`` and ``timestamps``; and ``boxes`` of its objects in
    pixels of the resized image."""
    num_parts: int = 0
    """Number of parts into which a run cuts the sample; 0 if it is whole."""
    pixels: list[Tensor | None] = field(default_factory=list)
    """Each medium as the model sees it, uint8 [frames, 3, height, width]; None if it does not decode. Not in
    the JSON."""

    def __str__(self) -> str:
        origin = f" ({self.record})" if self.record else ""
        parts = f", cut into {self.num_parts} parts" if self.num_parts else ""
        return (
            f"{self.key} of {self.shard}{origin}: {len(self.token_ids):,} tokens, {sum(self.loss_mask):,}"
            f" trained on{parts}"
        )

    def captions(self) -> list[str]:
        lines = []
        for item, pixels in zip(self.media, self.pixels, strict=True):
            height, width = item["resized"]
            frames = f", {item['frames']:,} frames, {item['fps']:g} a second" if "frames" in item else ""
            seen = f", {len(pixels)} frames" if frames and pixels is not None else ""
            lines.append(
                f"{item['name'] or item['key']}: {item['width']} x {item['height']}{frames} in the file,"
                f" {width} x {height}{seen} as seen, {item['tokens']:,} tokens"
            )
        return lines


def find_sample(data_path: DataPath, sample_key: str) -> tuple[SampleSource, int]:
    """The source of a sample by its key or ``SHARD[N]``, and the sample's index in that source.

    The key of a document's part, such as ``KEY#2``, finds the document.

    Raises:
        LoaderError: there is no such sample, or several sources have it.
    """
    found, sample_key = {}, re.sub(r"#\d+$", "", sample_key)
    for source in itertools.chain(*(read_sources(data_path, split) for split in list_splits(data_path))):
        if (sample_index := source.find_sample(sample_key)) is not None:
            shard_name, position = source.shard_position(sample_index)
            found[f"{source.dataset.path}/{shard_name}[{position}]"] = source, sample_index
    if len(found) != 1:
        several = f"several: {', '.join(found)}; name one, with its --data.path" if found else "none"
        raise LoaderError(f"{data_path} has no single sample {sample_key}, but {several}")
    return next(iter(found.values()))


def view_sample(encoder: RowEncoder, source: SampleSource, sample_index: int) -> SampleView:
    with closing(SampleReader(source)) as sample_reader:
        raw_sample = sample_reader.read_sample(sample_index, with_media=True)
    encoded = encoder.preencode_sample(raw_sample)
    view = SampleView(raw_sample.key, raw_sample.shard_name, encoded.source, encoded.refused)
    if encoded.refused:
        return view
    encoder.dropped_samples.clear()
    decoded = encoder.postencode_sample(encoded)
    if encoder.dropped_samples:
        view.problem = encoder.dropped_samples[0].reason, encoder.dropped_samples[0].detail
    view.token_ids, view.loss_mask = decoded.token_ids.tolist(), decoded.loss_mask.bool().int().tolist()
    view.turns = split_turns(decoded.token_ids, decoded.loss_mask, encoder)
    view.num_parts = len(encoded.parts)
    if encoded.is_document:
        view.turns[0]["role"] = "document"

    names = original_media_names(source.dataset.path, raw_sample.key)[: len(encoded.media)]
    settings = encoder.pixel_settings
    media = itertools.zip_longest(encoded.media, encoded.grids, decoded.media_items, names)
    for i, (item, grid, medium, name) in enumerate(media):
        view.pixels.append(None if view.problem else planes_to_pixels(medium.planes, grid, settings))
        facts = {
            "name": name or "",
            "resized": (grid.h * settings.patch_size, grid.w * settings.patch_size),
            "tokens": grid.num_tokens(encoder.spec.vision.spatial_merge_size),
            "grid_thw": [grid.t, grid.h, grid.w],
            "timestamps": grid.timestamps,
        }
        boxes = encoded.objects.seen_boxes(i) if encoded.objects else []
        view.media.append(item | facts | ({"boxes": boxes} if boxes else {}))
    return view


def planes_to_pixels(planes: Tensor, grid: GridTHW, settings: PixelSettings) -> Tensor:
    """Puts the planes of a medium together again: uint8 [frames, 3, height, width].

    Args:
        planes: uint8 [frames, h * w, patch * patch * 3], patches in merge-unit order.
    """
    p, m = settings.patch_size, settings.merge_size
    blocks = planes.reshape(-1, grid.h // m, grid.w // m, m, m, p, p, 3).permute(0, 7, 1, 3, 5, 2, 4, 6)
    return blocks.reshape(-1, 3, grid.h * p, grid.w * p)


def split_turns(token_ids: Tensor, loss_mask: Tensor, encoder: RowEncoder) -> list[dict[str, Any]]:
    """The text of a sample by speaker, as the tokenizer gives it back. Placeholders are counted."""
    tokenizer, spec = encoder.chat_encoder.tokenizer, encoder.spec
    start_token = tokenizer.convert_tokens_to_ids("<|im_start|>")
    placeholders = {spec.image_token_id: "image", spec.video_token_id: "video"}
    turn_numbers, ids = (token_ids == start_token).cumsum(0).tolist(), token_ids.tolist()
    marked_ids = zip(turn_numbers, loss_mask.tolist(), map(placeholders.get, ids), ids, strict=True)
    turns: dict[int, dict[str, Any]] = {}
    for mark, group in itertools.groupby(marked_ids, key=lambda marked: marked[:3]):
        (number, is_trained, placeholder), piece_ids = mark, [token_id for *_, token_id in group]
        text = f"[{placeholder}: {len(piece_ids):,} tokens]"
        if placeholder is None:
            text = tokenizer.decode(piece_ids, clean_up_tokenization_spaces=False)
        turn = turns.setdefault(number, {"role": "", "pieces": []})
        if not turn["pieces"] and text.startswith("<|im_start|>"):
            turn["role"], _, text = text.removeprefix("<|im_start|>").partition("\n")
        turn["pieces"].append((text, is_trained))
    return list(turns.values())


def print_sample(sample: SampleView) -> None:
    console = Console(highlight=False, soft_wrap=True)

    def print_text(text: str, style: str = "", end: str = "\n") -> None:
        console.print(Text(escape_unprintable(text), style=style), end=end)

    print_text(f"sample {sample}")
    if sample.problem:
        print_text(f"a run leaves it out: {sample.problem[0]}: {sample.problem[1]}", "red")
    for caption in sample.captions():
        print_text(caption)
    for turn in sample.turns:
        print_text(turn["role"] or "(no speaker)", "bold")
        for text, is_trained in turn["pieces"]:
            print_text(text, "green" if is_trained else "", end="")
        console.print()
