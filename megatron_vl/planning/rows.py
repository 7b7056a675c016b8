"""What a step's rows hold, as far as it decides time: lengths of documents, frames and windows."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import cached_property

from megatron_vl.spec.families import ModelSpec, VisionSpec

PICTURES = ((640, 480), (480, 640), (640, 427), (427, 640), (640, 426), (640, 360), (500, 375), (640, 640))
"""Width and height in pixels: the sizes of COCO's pictures, as in ``megatron-vl bench``."""
TEXT = range(40, 261)
"""Tokens of text with a picture; the second half has loss."""
STATED = "pictures of about 640 x 480 pixels, each with 40 to 260 tokens of text, as in `megatron-vl bench`"
ROWS = 16
"""Number of rows of the stated kind."""
LOSS_MULTIPLE = 128
"""The output layer is computed for a multiple of so many tokens (:mod:`megatron_vl.data.packing.row`)."""


@dataclass(frozen=True)
class RowShape:
    """One packed row."""

    lengths: tuple[int, ...]
    """Tokens of each document, without the padded tail."""
    frames: tuple[int, ...] = ()
    """Patches of each picture or frame of a video."""
    windows: tuple[int, ...] = ()
    """Patches of each window; the same as ``frames`` for a tower without windows."""
    loss_tokens: int = 0
    pictures: int = 0


@dataclass(frozen=True)
class RowStatistics:
    """A sample of rows, and the means that the cost model takes from it."""

    source: str
    """Where the rows come from, in words."""
    rows: tuple[RowShape, ...]
    sampled: bool = False
    """Whether they are a random part of a data set, so that their means have an error."""

    @cached_property
    def tokens(self) -> float:
        return self._mean(lambda row: sum(row.lengths))

    @cached_property
    def token_pairs(self) -> float:
        """Sum of the documents' squared lengths."""
        return self._mean(lambda row: sum(n * n for n in row.lengths))

    @cached_property
    def loss_tokens(self) -> float:
        return self._mean(lambda row: row.loss_tokens)

    @cached_property
    def pictures(self) -> float:
        return self._mean(lambda row: row.pictures)

    @cached_property
    def patches(self) -> float:
        return self._mean(lambda row: sum(row.frames))

    @cached_property
    def frame_pairs(self) -> float:
        return self._mean(lambda row: sum(n * n for n in row.frames))

    @cached_property
    def most_patches(self) -> int:
        return max(sum(row.frames) for row in self.rows)

    @cached_property
    def spread(self) -> float:
        """Standard deviation of a row's patches as a share of their mean."""
        return statistics.pstdev(sum(row.frames) for row in self.rows) / self.patches if self.patches else 0.0

    @cached_property
    def patches_error(self) -> float:
        """Standard error of the mean of a row's patches as a share of it. 0 where the rows are no sample."""
        return self.spread / math.sqrt(len(self.rows) - 1) if self.sampled and len(self.rows) > 1 else 0.0

    @cached_property
    def with_pictures(self) -> float:
        """Share of the rows that have a picture; the others skip the tower."""
        return self._mean(lambda row: float(bool(row.frames)))

    def head_tokens(self, seq_len: int) -> float:
        """Mean number of tokens for which the output layer is computed."""
        return self._mean(
            lambda row: min(seq_len, max(1, -(-row.loss_tokens // LOSS_MULTIPLE)) * LOSS_MULTIPLE)
        )

    def _mean(self, of) -> float:
        return sum(of(row) for row in self.rows) / len(self.rows)

    def as_json(self) -> dict[str, object]:
        return {
            "source": self.source,
            "rows": len(self.rows),
            "tokens": round(self.tokens, 1),
            "loss_tokens": round(self.loss_tokens, 1),
            "pictures": round(self.pictures, 2),
            "patches": {
                "mean": round(self.patches, 1),
                "spread": round(self.spread, 4),
                "max": self.most_patches,
                "standard_error": round(self.patches_error, 4),
            },
        }


def stated_rows(spec: ModelSpec, seq_len: int, max_patches: int = 0) -> RowStatistics:
    """Rows of :data:`STATED`, without chance: sizes and lengths of text take turns.

    Args:
        max_patches: as ``data.max_patches``; 0: no limit.
    """
    shapes = [_picture(spec.vision, *size) for size in PICTURES]
    rows: list[RowShape] = []
    current: list[tuple[int, int, list[int]]] = []
    drawn = 0

    while len(rows) < ROWS:
        tokens, patches, windows = shapes[drawn % len(shapes)]
        # The golden ratio's multiples spread evenly over the lengths of text.
        text = TEXT[int(drawn * 0.6180339887 % 1 * len(TEXT))]
        full = sum(length for length, _, _ in current) + tokens + 2 + text > seq_len
        full = full or 0 < max_patches < sum(p for _, p, _ in current) + patches
        if full and current:
            rows.append(_row(current, drawn))
            current = []
            continue
        drawn += 1
        # A picture that fills a whole row is cut to it: only its size counts here.
        current.append((min(seq_len, tokens + 2 + text), patches, windows))

    return RowStatistics(STATED, tuple(rows))


def _row(documents: list[tuple[int, int, list[int]]], drawn: int) -> RowShape:
    text = statistics.mean(TEXT)
    return RowShape(
        lengths=tuple(length for length, _, _ in documents),
        frames=tuple(patches for _, patches, _ in documents),
        windows=tuple(n for _, _, windows in documents for n in windows),
        loss_tokens=round(len(documents) * text / 2),
        pictures=len(documents),
    )


def _picture(v: VisionSpec, width: int, height: int) -> tuple[int, int, list[int]]:
    """Tokens, patches, and patches of each window of a picture."""
    unit = v.patch_size * v.spatial_merge_size
    columns, rows = (max(1, round(side / unit)) for side in (width, height))
    patches = columns * rows * v.merge_unit
    side = max(1, v.window_size // unit) if v.window_size else max(columns, rows)
    sides = [[min(side, n - start) for start in range(0, n, side)] for n in (columns, rows)]
    return columns * rows, patches, [w * h * v.merge_unit for w in sides[0] for h in sides[1]]
