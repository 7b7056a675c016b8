"""Boxes and points, in the coordinates of a model's family.

A stored sample lists its ``objects`` in the order of their markers in its texts: the name of one (``ref``), or
a box or point (``box``) with the number of its ``medium`` and its ``frame`` of reference. They are written
when the sample is encoded, because pixels of the resized image follow from the limits of the run. The image is
the upright one (EXIF applied), as the model sees it. ``docs/boxes.md`` says where the coordinates of each
family were read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import batched, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_vl.data.sample.conversation_checks import ChatError
from megatron_vl.spec.families import VisionSpec
from megatron_vl.spec.positions import GridTHW

FRAMES = ("pixels", "thousandths", "resized")
"""Pixels of the stored image, thousandths of its sides, pixels of the resized image."""
BOX_DTYPE = np.dtype([("frame", "u1"), ("numbers", "<f8", (4,))])
"""A box. The last two numbers of a point are NaN."""
MARKER = re.compile(r"""(?P<before>["']\s*:\s*|["'])?<(?P<kind>ref-object|bbox|point)>""")
"""A marker, and what says that it is a value in JSON."""
DIGIT_STEPS = 10.0 ** np.arange(1, 12)
BOX_LIST = re.compile(r"\[\s*" + r"\s*,\s*".join([r"(-?\d+(?:\.\d+)?)"] * 4) + r"\s*\]")
BOX_PAIRS = re.compile(r"\((\d+),(\d+)\),\((\d+),(\d+)\)")

type Floats = NDArray[np.float64]


def map_texts(messages: Sequence[dict[str, Any]], change: Callable[[Any, str], Any]) -> list[dict[str, Any]]:
    """The messages with their texts changed, in the order in which chat templates write them.

    Args:
        change: returns what takes the place of a value. Its arguments are the value and, in a call of a tool,
            the key that it stands under; elsewhere the key is empty.
    """

    def walk(value: Any, key: str, in_call: bool) -> Any:
        if (changed := change(value, key)) is not value:
            return changed
        if isinstance(value, dict):
            return {name: walk(item, name if in_call else "", in_call) for name, item in value.items()}
        return [walk(item, key, in_call) for item in value] if isinstance(value, list) else value

    keys = ("reasoning_content", "content", "tool_calls")
    return [
        message | {key: walk(message[key], "", key == "tool_calls") for key in keys if key in message}
        for message in messages
    ]


def read_boxes(objects: Sequence[dict[str, Any]]) -> tuple[NDArray[np.void], NDArray[np.int64]]:
    """The boxes and points of a sample's objects (:data:`BOX_DTYPE`), and the numbers of their media, [n]."""
    items = [item for item in objects if "box" in item]
    rows = [(FRAMES.index(item["frame"]), (*item["box"], np.nan, np.nan)[:4]) for item in items]
    return np.array(rows, BOX_DTYPE), np.array([item["medium"] for item in items], np.int64)


def frame_sizes(height: int, width: int, grid: GridTHW | None, patch_size: int) -> Floats:
    """Width and height in each of :data:`FRAMES`, [3, 2]: of a stored image, and of its grid if it is known."""
    resized = (grid.w * patch_size, grid.h * patch_size) if grid else (np.inf, np.inf)
    return np.array([(width, height), (1000, 1000), resized], np.float64)


def family_numbers(boxes: NDArray[np.void], sizes: Floats, box_frame: str) -> Floats:
    """The coordinates of boxes in the frame of a family, rounded once: [n, 4].

    As in ``process_bbox.ipynb`` of Qwen's fine-tuning code, halves are rounded to even, and a pixel is at most
    the last one of its row or column.

    Args:
        boxes: :data:`BOX_DTYPE` [n].
        sizes: :func:`frame_sizes` of the image of each, [n, 3, 2].
    """
    new_sizes = sizes[:, FRAMES.index(box_frame)][:, None]
    old_sizes = sizes[np.arange(len(boxes)), boxes["frame"]][:, None]
    numbers = np.rint(boxes["numbers"].reshape(-1, 2, 2) * new_sizes / old_sizes)
    return np.clip(numbers, 0, new_sizes - (box_frame == "resized")).reshape(-1, 4)


def count_digits(boxes: NDArray[np.void], sizes: Floats, box_frame: str) -> NDArray[np.int64]:
    """Number of digits of each box, int64 [n], each a token of Qwen's. Arguments: :func:`family_numbers`."""
    numbers = family_numbers(boxes, sizes, box_frame)
    return np.where(np.isnan(numbers), 0, np.searchsorted(DIGIT_STEPS, numbers, side="right") + 1).sum(1)


def find_box_outside(boxes: NDArray[np.void], sizes: Floats) -> str:
    """Names the first box that is not on its image. Half a unit beyond the edge is a rounding."""
    edges = sizes[np.arange(len(boxes)), boxes["frame"]]
    numbers = boxes["numbers"].reshape(-1, 2, 2)
    outside = ((numbers < -0.5) | (numbers > edges[:, None] + 0.5)).any((1, 2))
    if not outside.any():
        return ""
    i = int(outside.argmax())
    (width, height), frame = edges[i], FRAMES[boxes["frame"][i]]
    return f"{_numbers(boxes['numbers'][i])} is beyond the image, which is {width:g} x {height:g} ({frame})"


def _numbers(box: Floats) -> list[float]:
    return box[~np.isnan(box)].tolist()


class SampleObjects:
    """The objects of a stored sample in a run.

    Args:
        record: the sample's JSON.
        grids: the grids of its media.
    """

    def __init__(self, record: dict[str, Any], grids: Sequence[GridTHW], vision: VisionSpec) -> None:
        self.record, self.vision = record, vision
        self.objects: Sequence[dict[str, Any]] = record.get("objects", ())
        self.boxes, self.media = read_boxes(self.objects)
        sizes = [
            frame_sizes(medium["height"], medium["width"], grid, vision.patch_size)
            for medium, grid in zip(record["media"], grids, strict=True)
        ]
        self.sizes = np.array(sizes, np.float64).reshape(-1, len(FRAMES), 2)[self.media]
        self.numbers = family_numbers(self.boxes, self.sizes, vision.box_frame)

    def check_inside(self) -> None:
        """Raises ChatError if a box is beyond its image. The size of the resized one follows from the run."""
        if outside := find_box_outside(self.boxes, self.sizes):
            raise ChatError(f"the box {outside}; give the run the limits of pixels for which it was written")

    def written_messages(self) -> list[dict[str, Any]]:
        """The messages of the sample, with its objects in the place of their markers."""
        if not self.objects:
            return self.record["messages"]
        boxes = iter(self.numbers)
        values = (
            item["ref"] if "ref" in item else list(map(int, _numbers(next(boxes)))) for item in self.objects
        )

        def written(marker: re.Match[str]) -> str:
            value, before = next(values), marker["before"] or ""
            in_json = before == '"' if marker["kind"] == "ref-object" else ":" in before
            if in_json or not self.vision.box_tokens:
                text = json.dumps(value, ensure_ascii=False)
                if isinstance(value, str):
                    text = text[1:-1] if in_json else value
                return before + text
            if isinstance(value, str):
                return f"{before}<|object_ref_start|>{value}<|object_ref_end|>"
            pairs = ",".join(f"({x},{y})" for x, y in batched(value, 2))
            return f"{before}<|box_start|>{pairs}<|box_end|>"

        def change(value: Any, key: str) -> Any:
            if not isinstance(value, str):
                return value
            # The whole value of an argument becomes a list.
            return next(values) if key and value in ("<bbox>", "<point>") else MARKER.sub(written, value)

        return map_texts(self.record["messages"], change)

    def sized_boxes(self) -> tuple[NDArray[np.void], NDArray[np.int64], int]:
        """The boxes with other coordinates if the run has other limits of pixels, in the order of their media;
        these media; and the number of digits of all of them."""
        is_resized = self.boxes["frame"] == FRAMES.index("resized")
        order = np.argsort(self.media, kind="stable")
        sized = order[(is_resized != (self.vision.box_frame == "resized"))[order]]
        digits = count_digits(self.boxes[sized], self.sizes[sized], self.vision.box_frame)
        return self.boxes[sized], self.media[sized], int(digits.sum())

    def seen_boxes(self, medium: int) -> list[list[float]]:
        """The boxes and points of a medium, in pixels of the resized image, as their coordinates say."""
        new_sizes = self.sizes[:, FRAMES.index(self.vision.box_frame)]
        scales = np.tile(self.sizes[:, FRAMES.index("resized")] / new_sizes, 2)
        return [_numbers(box) for box in (self.numbers * scales)[self.media == medium]]


# --- Boxes in answers ---------------------------------------------------------------------------------------


def boxes_in_text(text: str, vision: VisionSpec) -> list[list[float]]:
    """The boxes in a text: lists of four numbers, or ``(x1,y1),(x2,y2)`` if the family writes them so."""
    found = BOX_LIST.findall(text) + (BOX_PAIRS.findall(text) if vision.box_tokens else [])
    return [list(map(float, numbers)) for numbers in found]


def compare_boxes(answer: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]) -> list[float]:
    """Intersection over union (IoU) of each reference box and its partner in the answer; 0 without one.

    Partners are found one after the other, the largest IoU first. All frames of reference give the same IoU.
    """
    pairs = (
        (_iou(answer[i], reference[j]), i, j) for i, j in product(range(len(answer)), range(len(reference)))
    )
    found: dict[int, float] = {}
    taken: set[int] = set()
    for iou, i, j in sorted(pairs, reverse=True):
        if i not in taken and j not in found:
            found[j] = iou
            taken.add(i)
    return [found.get(j, 0.0) for j in range(len(reference))]


def _iou(first: Sequence[float], second: Sequence[float]) -> float:
    corners = np.array([first, second], np.float64).reshape(2, 2, 2)
    shared = np.maximum(corners[:, 1].min(0) - corners[:, 0].max(0), 0).prod()
    union = np.maximum(corners[:, 1] - corners[:, 0], 0).prod(1).sum() - shared
    return float(shared / union) if union else 0.0
