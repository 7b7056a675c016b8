"""One sample as the model sees it."""

from __future__ import annotations

from codecs import getincrementaldecoder
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from data_tools.sources import Reader, Source, SourceError, sources
from megatron_vl.data.loader import EncodedSample
from megatron_vl.data.packing import assemble
from megatron_vl.data.sample.pixels import PixelSettings
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.positions import GridTHW, mrope_positions

from .prepared import Prepared
from .stats import printable


@dataclass(frozen=True)
class MediumView:
    """A picture or video of a sample."""

    item: dict[str, Any]
    """What the shard says of it: key, height and width, and of a video frames, fps and perhaps sampling."""
    resized: tuple[int, int]
    """Height and width as the model sees it."""
    grid: GridTHW
    tokens: int
    pixels: Tensor | None
    """uint8 [frames, 3, height, width] as the model sees them; None if the medium does not decode."""

    def __str__(self) -> str:
        item, grid = self.item, self.grid
        what = "pictures" if item.get("sampling") else "frames"
        frames = f", {item['frames']:,} {what}, {item['fps']:g} a second" if grid.kind == "video" else ""
        seen = f", {len(self.pixels)} frames" if frames and self.pixels is not None else ""
        return (
            f"{item['key']}: {item['height']} x {item['width']}{frames} in the file;"
            f" {self.resized[0]} x {self.resized[1]}{seen} as seen,"
            f" grid_thw {grid.t} {grid.h} {grid.w}, {self.tokens:,} tokens"
        )


@dataclass(frozen=True)
class Run:
    """A token, or several equal placeholders, one after another."""

    start: int
    count: int
    token: int
    learnt: bool
    utf8: bytes
    """The token's text. It may begin or end within a character."""


@dataclass(frozen=True)
class SampleView:
    """One sample with everything that the loader makes of it."""

    key: str
    shard: str
    record: str
    problem: tuple[str, str] | None
    """Reason and detail if the loader leaves the sample out or hides its pictures."""
    token_ids: Tensor
    """int64 [n]"""
    loss_mask: Tensor
    """bool [n]: the tokens to learn (not shifted)."""
    position_ids: Tensor
    """int64 [3, n]: time, height and width."""
    runs: list[Run]
    media: list[MediumView]

    @property
    def learnt(self) -> int:
        return int(self.loss_mask.count_nonzero())


def find(prepared: Prepared, index: int | None, key: str) -> tuple[Source, int]:
    """Returns the source of a sample, and the sample's index in that source.

    Args:
        index: counts over all sources, one source after another.
        key: the sample's key; if it is given, ``index`` is ignored.

    Raises:
        SourceError: there is no such sample, or several sources have it.
    """
    all_sources = sources(prepared.path, prepared.split)
    if key:
        found = [(source, at) for source in all_sources if (at := source.find(key)) is not None]
        if len(found) > 1:
            names = ", ".join(str(source.data.path) for source, _ in found)
            raise SourceError(f"{key} is in several data sets; give one of them with --data: {names}")
        if not found:
            raise SourceError(f"{prepared.path} has no sample {key} in {prepared.split}")
        return found[0]

    rest = index or 0
    for source in all_sources:
        if rest < len(source):
            return source, source.indices[rest]
        rest -= len(source)
    total = sum(map(len, all_sources))
    raise SourceError(
        f"{prepared.path} has {total} samples in {prepared.split}: --index is from 0 to {total - 1}"
    )


def view(prepared: Prepared, source: Source, index: int) -> SampleView:
    """Reads and decodes a sample.

    Raises:
        SourceError: the description of the data set excludes it.
    """
    reader = Reader(source, prepared.config.data.sample_timeout_s)
    try:
        raw = reader.read(index, whole=True)
    finally:
        reader.close()
    if raw is None:
        shard, number = source.place(index)
        raise SourceError(f"sample {number} of {shard} is excluded by {source.data.path}'s split.yaml")

    encoder, spec = prepared.encoder, prepared.spec
    encoded: EncodedSample = encoder.preencode_sample(raw)
    if encoded.refused:
        nothing = torch.zeros(0, dtype=torch.int64)
        empty = (nothing, nothing.bool(), nothing.expand(3, 0))
        return SampleView(raw.__key__, raw.shard, encoded.source, encoded.refused, *empty, [], [])

    encoder.dropped_samples.clear()
    ready: assemble.Sample = encoder.postencode_sample(encoded).sample
    problem = next(((one.reason, one.detail) for one in encoder.dropped_samples), None)
    side, merge = encoder.settings.patch_size, spec.vision.spatial_merge_size
    media = []
    for item, grid, decoded in zip(encoded.media, encoded.grids, ready.media, strict=True):
        pixels = None if problem else picture_of(decoded.planes, grid, encoder.settings)
        media.append(MediumView(item, (grid.h * side, grid.w * side), grid, grid.tokens(merge), pixels))
    positions = mrope_positions(ready.token_ids, encoded.grids, spec, prepared.config.data.video_positions)
    runs = runs_of(ready.token_ids, ready.loss_mask, encoder.chat.tokenizer, spec)
    tokens = ready.token_ids, ready.loss_mask, positions
    return SampleView(raw.__key__, raw.shard, encoded.source, problem, *tokens, runs, media)


def picture_of(planes: Tensor, grid: GridTHW, settings: PixelSettings) -> Tensor:
    """Puts the planes of a medium together again: uint8 [frames, 3, height, width].

    Args:
        planes: uint8 [frames, h * w, 3 * patch * patch], patches in merge-unit order.
    """
    p, m = settings.patch_size, settings.merge_size
    blocks = planes.reshape(-1, grid.h // m, grid.w // m, m, m, 3, p, p)
    return blocks.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, 3, grid.h * p, grid.w * p)


# --- Tokens as text -----------------------------------------------------------------------------------------


def runs_of(token_ids: Tensor, loss_mask: Tensor, tokenizer: Any, spec: ModelSpec) -> list[Run]:
    """Lists the tokens in order; successive placeholders of one picture form one run."""
    runs: list[Run] = []
    placeholders = (spec.image_token_id, spec.video_token_id)
    for at, (token, learnt) in enumerate(zip(token_ids.tolist(), loss_mask.tolist(), strict=True)):
        last = runs[-1] if runs else None
        if last and token in placeholders and last.token == token:
            runs[-1] = Run(last.start, last.count + 1, token, last.learnt, last.utf8)
        else:
            runs.append(Run(at, 1, token, learnt, _utf8(tokenizer, token)))
    return runs


def whole_characters(runs: list[Run]) -> list[list[Run]]:
    """Groups runs so that no character goes on in the next group: rare ones consist of several tokens.

    Bytes that are part of no character stay in a group of their own.
    """
    groups: list[list[Run]] = []
    start = 0
    while start < len(runs):
        end = start + 1
        decoder = getincrementaldecoder("utf-8")()
        try:
            decoder.decode(runs[start].utf8)
            while decoder.getstate()[0]:
                decoder.decode(runs[end].utf8)
                end += 1
        except (UnicodeDecodeError, IndexError):
            end = start + 1
        groups.append(runs[start:end])
        start = end
    return groups


def text_of(runs: list[Run]) -> str:
    """Returns the text of successive runs. Bytes that are part of no character are written as ``\\xe4``."""
    return b"".join(run.utf8 for run in runs).decode(errors="backslashreplace")


def _utf8(tokenizer: Any, token: int) -> bytes:
    """Returns the text of one token, perhaps a part of a character."""
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    if "\ufffd" in text:
        piece = tokenizer.convert_ids_to_tokens(token)
        known = _byte_values()
        if all(character in known for character in piece):
            return bytes(known[character] for character in piece)
    return text.encode()


@cache
def _byte_values() -> dict[str, int]:
    """Maps each character of a byte-level vocabulary to its byte."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def visible(text: str) -> str:
    """Returns a token's text on one line, with invisible characters spelled out."""
    return printable(text.replace("\n", "⏎").replace("\t", "⇥"))


# --- The terminal and JSON ----------------------------------------------------------------------------------


def as_json(sample: SampleView) -> dict[str, Any]:
    """Returns the output of ``--json``."""
    reason, detail = sample.problem or (None, None)
    media = [
        {
            "key": each.item["key"],
            "kind": each.grid.kind,
            "stored": [each.item["height"], each.item["width"]],
            "resized": list(each.resized),
            "frames": each.item.get("frames", 1),
            "fps": each.item.get("fps", 0.0),
            "sampling": each.item.get("sampling", ""),
            "grid_thw": [each.grid.t, each.grid.h, each.grid.w],
            "timestamps": list(each.grid.timestamps),
            "second_per_grid": each.grid.second_per_grid,
            "tokens": each.tokens,
        }
        for each in sample.media
    ]

    return {
        "key": sample.key,
        "shard": sample.shard,
        "record": sample.record,
        "problem": {"reason": reason, "detail": detail} if sample.problem else None,
        "tokens": len(sample.token_ids),
        "learnt_tokens": sample.learnt,
        "media": media,
        "token_ids": sample.token_ids.tolist(),
        "token_texts": [text_of([run]) for run in sample.runs for _ in range(run.count)],
        "loss_mask": sample.loss_mask.bool().int().tolist(),
        "position_ids": sample.position_ids.tolist(),
    }


def print_sample(sample: SampleView) -> None:
    console = Console(highlight=False, width=max(100, Console().width))
    origin = f" ({sample.record})" if sample.record else ""
    console.print(printable(f"sample {sample.key} of {sample.shard}{origin}"), markup=False)
    if sample.problem:
        reason, detail = sample.problem
        console.print(printable(f"the loader leaves it out: {reason}: {detail}"), markup=False, style="red")
        if not sample.runs:
            return
    console.print(
        f"{len(sample.token_ids)} tokens, {sample.learnt} of them learnt; {len(sample.media)} media"
    )

    for each in sample.media:
        console.print(printable(str(each)), markup=False, soft_wrap=True)
    console.print(_token_table(sample))


def _token_table(sample: SampleView) -> Table:
    table = Table("index", "id", "learnt", "time", "height", "width", "text", title_justify="left")
    for group in whole_characters(sample.runs):
        first, last = group[0], group[-1].start + group[-1].count - 1
        positions = [_range(axis, first.start, last) for axis in sample.position_ids]
        times = f" x {first.count}" if first.count > 1 else ""
        table.add_row(
            f"{first.start} to {last}" if last > first.start else str(first.start),
            " ".join(str(run.token) for run in group),
            "yes" if first.learnt else "",
            *positions,
            Text(visible(text_of(group)) + times, style="green" if first.learnt else ""),
        )
    return table


def _range(positions: Tensor, first: int, last: int) -> str:
    own = positions[first : last + 1]
    low, high = int(own.min()), int(own.max())
    return str(low) if low == high else f"{low} to {high}"
