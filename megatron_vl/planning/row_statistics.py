"""The contents of a step's rows that decide its time: lengths of documents, frames and windows."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import cached_property

from megatron_vl.spec.families import ModelSpec, VisionSpec

PICTURE_SIZES = (
    (640, 480),
    (480, 640),
    (640, 427),
    (427, 640),
    (640, 426),
    (640, 360),
    (500, 375),
    (640, 640),
)
"""Width and height in pixels: the sizes of COCO's pictures, as in ``megatron-vl bench``."""
TEXT_LENGTHS = range(40, 261)
"""Tokens of text with a picture; the second half has loss."""
ASSUMED_ROWS_TEXT = (
    "pictures of about 640 x 480 pixels, each with 40 to 260 tokens of text, as in `megatron-vl bench`"
)
ASSUMED_ROW_COUNT = 16
"""Number of rows that are assumed."""
LOSS_MULTIPLE = 128
"""The number of tokens of the output layer is a multiple of this
(see :mod:`megatron_vl.data.packing.training_row`)."""


@dataclass(frozen=True)
class RowShape:
    """One packed row."""

    document_lengths: tuple[int, ...]
    """Tokens of each document, without the padded tail."""
    frame_lengths: tuple[int, ...] = ()
    """Patches of each picture or frame of a video."""
    window_lengths: tuple[int, ...] = ()
    """Patches of each window; the same as ``frame_lengths`` for a tower without windows."""
    loss_tokens: int = 0
    pictures: int = 0


@dataclass(frozen=True)
class RowStatistics:
    """A sample of rows, and the means that the cost model takes from it."""

    source_text: str
    """The origin of the rows, in words."""
    row_shapes: tuple[RowShape, ...]
    is_sample: bool = False
    """Whether the rows are a random part of a data set, so that their means have an error."""

    @cached_property
    def mean_tokens(self) -> float:
        return self._mean_over_rows(lambda row: sum(row.document_lengths))

    @cached_property
    def mean_token_pairs(self) -> float:
        """Sum of the documents' squared lengths."""
        return self._mean_over_rows(lambda row: sum(n * n for n in row.document_lengths))

    @cached_property
    def loss_tokens(self) -> float:
        return self._mean_over_rows(lambda row: row.loss_tokens)

    @cached_property
    def pictures(self) -> float:
        return self._mean_over_rows(lambda row: row.pictures)

    @cached_property
    def mean_patches(self) -> float:
        return self._mean_over_rows(lambda row: sum(row.frame_lengths))

    @cached_property
    def mean_frame_pairs(self) -> float:
        return self._mean_over_rows(lambda row: sum(n * n for n in row.frame_lengths))

    @cached_property
    def most_patches(self) -> int:
        return max(sum(row.frame_lengths) for row in self.row_shapes)

    @cached_property
    def patch_spread(self) -> float:
        """Standard deviation of a row's patches as a share of their mean."""
        if not self.mean_patches:
            return 0.0
        return statistics.pstdev(sum(row.frame_lengths) for row in self.row_shapes) / self.mean_patches

    @cached_property
    def patches_error(self) -> float:
        """Standard error of the mean of a row's patches, as a share of it; 0 if the rows are no sample."""
        if not self.is_sample or len(self.row_shapes) == 1:
            return 0.0
        return self.patch_spread / math.sqrt(len(self.row_shapes) - 1)

    def head_tokens(self, seq_len: int, rank_count: int = 1) -> float:
        """Mean number of tokens for which one of the ranks that share a row computes the output layer.

        Args:
            seq_len: tokens of a row.
            rank_count: number of ranks that share it.
        """
        multiple = rank_count * LOSS_MULTIPLE
        return self._mean_over_rows(
            lambda row: min(seq_len, max(1, -(-row.loss_tokens // multiple)) * multiple) / rank_count
        )

    def _mean_over_rows(self, value_of_row) -> float:
        return sum(value_of_row(row) for row in self.row_shapes) / len(self.row_shapes)

    def as_json(self) -> dict[str, object]:
        return {
            "source": self.source_text,
            "rows": len(self.row_shapes),
            "tokens": round(self.mean_tokens, 1),
            "loss_tokens": round(self.loss_tokens, 1),
            "pictures": round(self.pictures, 2),
            "patches": {
                "mean": round(self.mean_patches, 1),
                "spread": round(self.patch_spread, 4),
                "max": self.most_patches,
                "standard_error": round(self.patches_error, 4),
            },
        }


def make_assumed_rows(spec: ModelSpec, seq_len: int, max_patches: int = 0) -> RowStatistics:
    """The rows that :data:`ASSUMED_ROWS_TEXT` describes. Sizes and lengths of text take fixed turns.

    Args:
        seq_len: tokens of a row.
        max_patches: ``data.max_patches``; 0: no limit.
    """
    picture_shapes = [_picture_shape(spec.vision, *size) for size in PICTURE_SIZES]
    row_shapes: list[RowShape] = []
    open_documents: list[tuple[int, int, list[int]]] = []
    picture_index = 0

    while len(row_shapes) < ASSUMED_ROW_COUNT:
        picture_tokens, picture_patches, window_lengths = picture_shapes[picture_index % len(picture_shapes)]
        # Multiples of the golden ratio spread evenly over the lengths of text.
        text_length = TEXT_LENGTHS[int(picture_index * 0.6180339887 % 1 * len(TEXT_LENGTHS))]
        # The row with this picture, its two marks and its text.
        row_tokens = picture_tokens + 2 + text_length
        row_patches = picture_patches
        for document_tokens, document_patches, _ in open_documents:
            row_tokens += document_tokens
            row_patches += document_patches
        if open_documents and (row_tokens > seq_len or 0 < max_patches < row_patches):
            row_shapes.append(_assumed_row(open_documents))
            open_documents = []
            continue
        picture_index += 1
        # A picture that is longer than a row is cut, because only its size counts here.
        open_documents.append(
            (min(seq_len, picture_tokens + 2 + text_length), picture_patches, window_lengths)
        )

    return RowStatistics(ASSUMED_ROWS_TEXT, tuple(row_shapes))


def _assumed_row(documents: list[tuple[int, int, list[int]]]) -> RowShape:
    text = statistics.mean(TEXT_LENGTHS)
    return RowShape(
        document_lengths=tuple(length for length, _, _ in documents),
        frame_lengths=tuple(patches for _, patches, _ in documents),
        window_lengths=tuple(window_length for _, _, windows in documents for window_length in windows),
        loss_tokens=round(len(documents) * text / 2),
        pictures=len(documents),
    )


def _picture_shape(
    vision_spec: VisionSpec, pixel_width: int, pixel_height: int
) -> tuple[int, int, list[int]]:
    """Tokens, patches, and patches of each window of a picture."""
    merged_patch_size = vision_spec.patch_size * vision_spec.spatial_merge_size
    merged_columns = max(1, round(pixel_width / merged_patch_size))
    merged_rows = max(1, round(pixel_height / merged_patch_size))
    # A tower without windows has one that holds the whole picture.
    window_side = max(merged_columns, merged_rows)
    if vision_spec.window_size:
        window_side = max(1, vision_spec.window_size // merged_patch_size)

    window_lengths = []
    for column_start in range(0, merged_columns, window_side):
        window_width = min(window_side, merged_columns - column_start)
        for row_start in range(0, merged_rows, window_side):
            window_height = min(window_side, merged_rows - row_start)
            window_lengths.append(window_width * window_height * vision_spec.merge_unit)
    token_count = merged_columns * merged_rows
    return token_count, token_count * vision_spec.merge_unit, window_lengths
