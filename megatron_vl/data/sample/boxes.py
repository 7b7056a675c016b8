"""Boxes and points, in the coordinates of a model's family.

A stored sample lists its ``objects`` in the order of their markers in the texts: the name of one (``ref``),
or a box or point (``box``) with the number of its ``medium`` (without it, all its images have one size, or it
counts thousandths) and its ``frame`` of reference. They are written when the sample is encoded, because
pixels of the resized image follow from the limits of the run. ``docs/boxes.md`` says more.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import batched
from typing import Any

import torch

from megatron_vl.data.sample.medium import UnusableError
from megatron_vl.spec.families import VisionSpec
from megatron_vl.spec.positions import GridTHW

FRAMES = ("pixels", "thousandths", "resized")
"""Pixels of the stored image, thousandths of its sides, pixels of the resized image."""
MARKER = re.compile(r"""(?P<before>["']\s*:\s*|["'])?<(?P<kind>ref-object|bbox|point)>""")
"""A marker, and what says that it is a value in JSON."""
BOX_LIST = re.compile(r"\[\s*" + r"\s*,\s*".join([r"(-?\d+(?:\.\d+)?)"] * 4) + r"\s*\]")
BOX_PAIRS = re.compile(r"\((\d+),(\d+)\),\((\d+),(\d+)\)")

type FrameSizes = dict[str, tuple[int, int]]
"""Width and height of an image in each of :data:`FRAMES`."""


def frame_sizes(height: int, width: int, grid: GridTHW, vision: VisionSpec) -> FrameSizes:
    """Args: height and width of the stored image, and its grid."""
    return {
        "pixels": (width, height),
        "thousandths": (1000, 1000),
        "resized": (grid.w * vision.patch_size, grid.h * vision.patch_size),
    }


def scale_number(number: float, frame: str, axis: int, sizes: FrameSizes, box_frame: str) -> int:
    """A coordinate in the frame of a family, rounded once.

    As in ``process_bbox.ipynb`` of Qwen's fine-tuning code, halves are rounded to even, and a pixel is at
    most the last one of its row or column. The ``axis`` of x is 0, that of y 1.
    """
    new_size = sizes[box_frame][axis]
    return min(max(round(number * new_size / sizes[frame][axis]), 0), new_size - (box_frame == "resized"))


def find_outside(box: Sequence[float], frame: str, size: tuple[int, int]) -> str:
    """What is wrong with a box that is not on its image. Half a unit beyond the edge is a rounding."""
    if all(-0.5 <= number <= size[i % 2] + 0.5 for i, number in enumerate(box)):
        return ""
    return f"the box {list(box)} is beyond the image, which is {size[0]} x {size[1]} ({frame})"


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


class SampleObjects:
    """The objects of a stored sample, whose JSON is ``record``, in a run."""

    def __init__(self, record: dict[str, Any], grids: Sequence[GridTHW], vision: VisionSpec) -> None:
        self.record, self.grids, self.vision = record, grids, vision
        self.objects: list[dict[str, Any]] = record.get("objects", [])

    @cached_property
    def sizes(self) -> list[FrameSizes]:
        """Those of each medium. Most samples have no objects, and need none."""
        return [
            frame_sizes(medium["height"], medium["width"], grid, self.vision)
            for medium, grid in zip(self.record["media"], self.grids, strict=True)
        ]

    def check_inside(self) -> None:
        """Raises UnusableError if a box is beyond the resized image, whose size follows from the run."""
        for item in self.objects:
            if item.get("frame") == "resized":
                if outside := find_outside(item["box"], "resized", self._sizes_of(item)["resized"]):
                    raise UnusableError(
                        "box outside the image",
                        f"{outside}; give the run the limits of pixels that it was written for",
                    )

    def _sizes_of(self, item: dict[str, Any]) -> FrameSizes:
        """Those of the image of a box. Raises UnusableError if it may be on images of several sizes."""
        if "medium" not in item and self.vision.box_frame != "thousandths":
            if any(sizes != self.sizes[0] for sizes in self.sizes):
                raise UnusableError(
                    "bad objects",
                    "boxes on images of several sizes; number the image of each in objects.image_id",
                )
        return self.sizes[item.get("medium", 0)]

    def numbers(self, item: dict[str, Any]) -> list[int]:
        """The coordinates of a box or point in the frame of the family."""
        sizes, box_frame = self._sizes_of(item), self.vision.box_frame
        return [scale_number(n, item["frame"], i % 2, sizes, box_frame) for i, n in enumerate(item["box"])]

    def written_messages(self) -> list[dict[str, Any]]:
        """The messages of the sample, or one with the parts of a document, with its objects in the place of
        their markers."""
        messages = self.record.get("messages") or [{"content": self.record["document"]}]
        values = (item["ref"] if "ref" in item else self.numbers(item) for item in self.objects)

        def written(marker: re.Match[str]) -> str:
            value, before = next(values), marker["before"] or ""
            has_tokens = self.vision.box_tokens
            if isinstance(value, str):
                if before == '"':
                    return before + json.dumps(value, ensure_ascii=False)[1:-1]
                return before + (f"<|object_ref_start|>{value}<|object_ref_end|>" if has_tokens else value)
            if ":" in before or not has_tokens:
                return before + json.dumps(value)
            return f"{before}<|box_start|>{','.join(f'({x},{y})' for x, y in batched(value, 2))}<|box_end|>"

        def change(value: Any, key: str) -> Any:
            if not isinstance(value, str):
                return value
            # The whole value of an argument becomes a list.
            return next(values) if key and value in ("<bbox>", "<point>") else MARKER.sub(written, value)

        return map_texts(messages, change) if self.objects else messages

    @property
    def has_boxes(self) -> bool:
        return any("box" in item for item in self.objects)

    def sized_boxes(self) -> list[dict[str, Any]]:
        """The boxes and points with other coordinates if the run has other limits of pixels."""
        is_resized = self.vision.box_frame == "resized"
        return [item for item in self.objects if "box" in item and (item["frame"] == "resized") != is_resized]

    def seen_boxes(self, medium: int) -> list[list[float]]:
        """The boxes and points of a medium, in pixels of the resized image, as their coordinates say."""
        old_size, new_size = self.sizes[medium][self.vision.box_frame], self.sizes[medium]["resized"]
        return [
            [number * new_size[i % 2] / old_size[i % 2] for i, number in enumerate(self.numbers(item))]
            for item in self.objects
            if item.get("medium") == medium
        ]


# --- Boxes in answers ---------------------------------------------------------------------------------------


def boxes_in_text(text: str, vision: VisionSpec) -> list[list[float]]:
    """The boxes in a text: lists of four numbers, or ``(x1,y1),(x2,y2)`` if the family writes them so."""
    found = BOX_LIST.findall(text) + (BOX_PAIRS.findall(text) if vision.box_tokens else [])
    return [list(map(float, numbers)) for numbers in found]


def compare_boxes(answer: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]) -> list[float]:
    """Intersection over union (IoU) of each reference box and its partner in the answer; 0 without one.

    Partners are found one after the other, the largest IoU first. All frames of reference give the same IoU.
    """
    from torchvision.ops import box_iou

    boxes = (torch.tensor(each, dtype=torch.float64).reshape(-1, 4) for each in (answer, reference))
    ious = enumerate(box_iou(*boxes).nan_to_num().tolist())
    pairs = sorted((iou, i, j) for i, row in ious for j, iou in enumerate(row))
    found, taken = dict[int, float](), set[int]()
    for iou, i, j in reversed(pairs):
        if i not in taken and j not in found:
            found[j] = iou
            taken.add(i)
    return [found.get(j, 0.0) for j in range(len(reference))]
