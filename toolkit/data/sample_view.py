"""One sample as the model sees it."""

from __future__ import annotations

from codecs import getincrementaldecoder
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from data_tools.sample_sources import SampleReader, SampleSource, SourceError, read_sources
from megatron_vl.data.loader import EncodedSample
from megatron_vl.data.packing import assemble_row
from megatron_vl.data.sample.pixels import PixelSettings
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.positions import GridTHW, mrope_positions

from .prepared_dataset import PreparedDataset
from .stats import escape_unprintable


@dataclass(frozen=True)
class MediumView:
    """A picture or video of a sample."""

    media_item: dict[str, Any]
    """What the shard says of it: key, height and width, and of a video frames, fps and perhaps sampling."""
    resized_size: tuple[int, int]
    """Height and width as the model sees it."""
    grid_thw: GridTHW
    num_tokens: int
    pixels: Tensor | None
    """uint8 [frames, 3, height, width] as the model sees them; None if the medium does not decode."""

    def __str__(self) -> str:
        item, grid = self.media_item, self.grid_thw
        frames_word = "pictures" if item.get("sampling") else "frames"
        frames = (
            f", {item['frames']:,} {frames_word}, {item['fps']:g} a second" if grid.kind == "video" else ""
        )
        seen_text = f", {len(self.pixels)} frames" if frames and self.pixels is not None else ""
        return (
            f"{item['key']}: {item['height']} x {item['width']}{frames} in the file;"
            f" {self.resized_size[0]} x {self.resized_size[1]}{seen_text} as seen,"
            f" grid_thw {grid.t} {grid.h} {grid.w}, {self.num_tokens:,} tokens"
        )


@dataclass(frozen=True)
class TokenRun:
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
    token_runs: list[TokenRun]
    media: list[MediumView]

    @property
    def learnt(self) -> int:
        return int(self.loss_mask.count_nonzero())


def _find_sample_key(
    prepared: PreparedDataset, all_sources: list[SampleSource], sample_key: str
) -> tuple[SampleSource, int]:
    source_positions = []
    for sample_source in all_sources:
        sample_index = sample_source.find_sample(sample_key)
        if sample_index is not None:
            source_positions.append((sample_source, sample_index))

    if len(source_positions) > 1:
        dataset_paths = ", ".join(str(sample_source.dataset.path) for sample_source, _ in source_positions)
        raise SourceError(
            f"{sample_key} is in several data sets; give one of them with --data: {dataset_paths}"
        )
    if not source_positions:
        raise SourceError(f"{prepared.dataset_location} has no sample {sample_key} in {prepared.split}")
    return source_positions[0]


def find_sample(
    prepared: PreparedDataset, sample_number: int | None, sample_key: str
) -> tuple[SampleSource, int]:
    """The source of a sample, and the sample's index in that source.

    Args:
        sample_number: counts over all sources, one source after another.
        sample_key: the sample's key; if it is given, ``sample_number`` is ignored.

    Raises:
        SourceError: there is no such sample, or several sources have it.
    """
    all_sources = read_sources(prepared.dataset_location, prepared.split)
    if sample_key:
        return _find_sample_key(prepared, all_sources, sample_key)

    remaining_index = sample_number or 0
    for sample_source in all_sources:
        if remaining_index < len(sample_source):
            return sample_source, sample_source.indices[remaining_index]
        remaining_index -= len(sample_source)
    num_samples = sum(map(len, all_sources))
    raise SourceError(
        f"{prepared.dataset_location} has {num_samples} samples in "
        f"{prepared.split}: --index is from 0 to {num_samples - 1}"
    )


def view_sample(prepared: PreparedDataset, sample_source: SampleSource, sample_index: int) -> SampleView:
    """Reads and decodes a sample.

    Raises:
        SourceError: the description of the data set excludes it.
    """
    raw_sample = _read_sample(prepared, sample_source, sample_index)
    encoder, spec = prepared.row_encoder, prepared.spec
    encoded: EncodedSample = encoder.preencode_sample(raw_sample)
    if encoded.refused:
        empty_ids = torch.zeros(0, dtype=torch.int64)
        empty_tensors = (empty_ids, empty_ids.bool(), empty_ids.expand(3, 0))
        return SampleView(
            raw_sample.key, raw_sample.shard_name, encoded.source, encoded.refused, *empty_tensors, [], []
        )

    encoder.dropped_samples.clear()
    decoded_sample: assemble_row.TokenizedSample = encoder.postencode_sample(encoded)
    problem = None
    if encoder.dropped_samples:
        dropped_sample = encoder.dropped_samples[0]
        problem = (dropped_sample.reason, dropped_sample.detail)

    patch_size, merge_size = encoder.pixel_settings.patch_size, spec.vision.spatial_merge_size
    media = []
    for item, grid, medium in zip(encoded.media, encoded.grids, decoded_sample.media_items, strict=True):
        pixels = None if problem else planes_to_pixels(medium.planes, grid, encoder.pixel_settings)
        resized_size = (grid.h * patch_size, grid.w * patch_size)
        media.append(MediumView(item, resized_size, grid, grid.num_tokens(merge_size), pixels))

    position_ids = mrope_positions(decoded_sample.token_ids, encoded.grids, spec)
    runs = find_token_runs(
        decoded_sample.token_ids, decoded_sample.loss_mask, encoder.chat_encoder.tokenizer, spec
    )
    token_tensors = decoded_sample.token_ids, decoded_sample.loss_mask, position_ids
    return SampleView(
        raw_sample.key, raw_sample.shard_name, encoded.source, problem, *token_tensors, runs, media
    )


def _read_sample(prepared: PreparedDataset, sample_source: SampleSource, sample_index: int) -> Any:
    """A sample as its shard holds it, with its media."""
    sample_reader = SampleReader(sample_source)
    with closing(sample_reader):
        raw_sample = sample_reader.read_sample(sample_index, with_media=True)
    if raw_sample is None:
        shard_name, sample_position = sample_source.shard_position(sample_index)
        raise SourceError(
            f"sample {sample_position} of {shard_name} is excluded "
            f"by {sample_source.dataset.path}'s split.yaml"
        )
    return raw_sample


def planes_to_pixels(planes: Tensor, grid: GridTHW, settings: PixelSettings) -> Tensor:
    """Puts the planes of a medium together again: uint8 [frames, 3, height, width].

    Args:
        planes: uint8 [frames, h * w, 3 * patch * patch], patches in merge-unit order.
    """
    p, m = settings.patch_size, settings.merge_size
    patch_blocks = planes.reshape(-1, grid.h // m, grid.w // m, m, m, 3, p, p)
    return patch_blocks.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, 3, grid.h * p, grid.w * p)


# --- Tokens as text -----------------------------------------------------------------------------------------


def find_token_runs(token_ids: Tensor, loss_mask: Tensor, tokenizer: Any, spec: ModelSpec) -> list[TokenRun]:
    """Lists the tokens in order. Successive placeholders of one picture form one run."""
    runs: list[TokenRun] = []
    placeholder_ids = (spec.image_token_id, spec.video_token_id)
    for token_index, (token, is_learnt) in enumerate(
        zip(token_ids.tolist(), loss_mask.tolist(), strict=True)
    ):
        last_run = runs[-1] if runs else None
        if last_run and token in placeholder_ids and last_run.token == token:
            runs[-1] = TokenRun(last_run.start, last_run.count + 1, token, last_run.learnt, last_run.utf8)
        else:
            runs.append(TokenRun(token_index, 1, token, is_learnt, _token_utf8(tokenizer, token)))
    return runs


def whole_characters(runs: list[TokenRun]) -> list[list[TokenRun]]:
    """Groups runs so that no character goes on in the next group: rare ones consist of several tokens.

    Bytes that are part of no character stay in a group of their own.
    """
    groups: list[list[TokenRun]] = []
    group_start = 0
    while group_start < len(runs):
        group_end = group_start + 1
        utf8_decoder = getincrementaldecoder("utf-8")()
        try:
            utf8_decoder.decode(runs[group_start].utf8)
            while utf8_decoder.getstate()[0]:
                utf8_decoder.decode(runs[group_end].utf8)
                group_end += 1
        except (UnicodeDecodeError, IndexError):
            group_end = group_start + 1
        groups.append(runs[group_start:group_end])
        group_start = group_end
    return groups


def runs_text(runs: list[TokenRun]) -> str:
    """Returns the text of successive runs. Bytes that are part of no character are written as ``\\xe4``."""
    return b"".join(run.utf8 for run in runs).decode(errors="backslashreplace")


def _token_utf8(tokenizer: Any, token_id: int) -> bytes:
    """Returns the text of one token, perhaps a part of a character."""
    text = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
    if "\ufffd" in text:
        vocabulary_piece = tokenizer.convert_ids_to_tokens(token_id)
        byte_values = _byte_values()
        if all(character in byte_values for character in vocabulary_piece):
            return bytes(byte_values[character] for character in vocabulary_piece)
    return text.encode()


@cache
def _byte_values() -> dict[str, int]:
    """Maps each character of a byte-level vocabulary to its byte."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def visible_text(token_text: str) -> str:
    """Returns a token's text on one line, with invisible characters spelled out."""
    return escape_unprintable(token_text.replace("\n", "⏎").replace("\t", "⇥"))


# --- The terminal and JSON ----------------------------------------------------------------------------------


def sample_as_json(sample: SampleView) -> dict[str, Any]:
    """Returns the output of ``--json``."""
    reason, detail = sample.problem or (None, None)

    media_facts = []
    for medium in sample.media:
        media_facts.append(
            {
                "key": medium.media_item["key"],
                "kind": medium.grid_thw.kind,
                "stored": [medium.media_item["height"], medium.media_item["width"]],
                "resized": list(medium.resized_size),
                "frames": medium.media_item.get("frames", 1),
                "fps": medium.media_item.get("fps", 0.0),
                "sampling": medium.media_item.get("sampling", ""),
                "grid_thw": [medium.grid_thw.t, medium.grid_thw.h, medium.grid_thw.w],
                "timestamps": list(medium.grid_thw.timestamps),
                "second_per_grid": medium.grid_thw.second_per_grid,
                "tokens": medium.num_tokens,
            }
        )

    return {
        "key": sample.key,
        "shard": sample.shard,
        "record": sample.record,
        "problem": {"reason": reason, "detail": detail} if sample.problem else None,
        "tokens": len(sample.token_ids),
        "learnt_tokens": sample.learnt,
        "media": media_facts,
        "token_ids": sample.token_ids.tolist(),
        "token_texts": [runs_text([run]) for run in sample.token_runs for _ in range(run.count)],
        "loss_mask": sample.loss_mask.bool().int().tolist(),
        "position_ids": sample.position_ids.tolist(),
    }


def print_sample(sample: SampleView) -> None:
    console = Console(highlight=False, width=max(100, Console().width))
    origin = f" ({sample.record})" if sample.record else ""
    console.print(escape_unprintable(f"sample {sample.key} of {sample.shard}{origin}"), markup=False)
    if sample.problem:
        reason, detail = sample.problem
        console.print(
            escape_unprintable(f"the loader leaves it out: {reason}: {detail}"), markup=False, style="red"
        )
        if not sample.token_runs:
            return
    console.print(
        f"{len(sample.token_ids)} tokens, {sample.learnt} of them learnt; {len(sample.media)} media"
    )

    for medium_view in sample.media:
        console.print(escape_unprintable(str(medium_view)), markup=False, soft_wrap=True)
    console.print(_token_table(sample))


def _token_table(sample: SampleView) -> Table:
    token_table = Table("index", "id", "learnt", "time", "height", "width", "text", title_justify="left")
    for group in whole_characters(sample.token_runs):
        first_run, last_index = group[0], group[-1].start + group[-1].count - 1
        position_ranges = [_position_range(axis, first_run.start, last_index) for axis in sample.position_ids]
        repeat_text = f" x {first_run.count}" if first_run.count > 1 else ""
        token_table.add_row(
            f"{first_run.start} to {last_index}" if last_index > first_run.start else str(first_run.start),
            " ".join(str(run.token) for run in group),
            "yes" if first_run.learnt else "",
            *position_ranges,
            Text(visible_text(runs_text(group)) + repeat_text, style="green" if first_run.learnt else ""),
        )
    return token_table


def _position_range(axis_positions: Tensor, first_index: int, last_index: int) -> str:
    range_positions = axis_positions[first_index : last_index + 1]
    smallest_position, largest_position = int(range_positions.min()), int(range_positions.max())
    return (
        str(smallest_position)
        if smallest_position == largest_position
        else f"{smallest_position} to {largest_position}"
    )
