"""Boxes and points of a record: ms-swift's ``objects`` with markers in the texts, and boxes in the texts with
``boxes``, their frame of reference, beside them. Both become the ``objects`` of the stored sample
(:mod:`megatron_vl.data.sample.boxes`)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from megatron_vl.data.sample.boxes import FRAMES, find_box_outside, frame_sizes, map_texts, read_boxes
from megatron_vl.data.sample.medium import MediaInfo

from ..exact_json import EXACT_DECODER
from .conversation import Message, RecordError, checked_text, shorten_value

BOX_TYPES = {"real": ("pixels", 1), "norm1": ("thousandths", 1000)}
"""Values of ``bbox_type``: the frame in which they are stored, and what a number is multiplied by."""
OBJECT_KEYS = {"ref-object": "ref", "bbox": "bbox", "point": "points"}
"""The key of ``objects`` whose entries each marker stands for."""
BOX_LENGTHS = {"bbox_2d": (4,), "point_2d": (2,), "points": (2,)}
_DIGIT_NEXT = r"(?=[\[(\s]*[-.\d])"
_PIECE = re.compile(
    rf"""(?P<key>["'](?P<name>bbox_2d|point_2d)["']\s*:\s*){_DIGIT_NEXT}(?P<list>\[[^\[\]]*\])?"""
    rf"""|<\|box_start\|>{_DIGIT_NEXT}(?P<pairs>[^<]*)<\|box_end\|>|<(?P<marker>ref-object|bbox|point)>"""
)
"""A box that is written in a text, or a marker."""


class ObjectReader:
    """Reads the objects of one record.

    Args:
        media_kinds: ``image`` or ``video`` of each medium, in the order of the text.

    Raises:
        RecordError: something is wrong or ambiguous. So do the methods.
    """

    def __init__(self, record: dict[str, Any], media_kinds: Sequence[str]) -> None:
        self.media_kinds = media_kinds
        self.frame = record.get("boxes") or ""
        if self.frame and self.frame not in FRAMES:
            detail = f"{shorten_value(self.frame)} is no frame of reference; valid: {', '.join(FRAMES)}"
            raise RecordError("bad objects", detail, "boxes")
        self.listed = self._listed_objects(record.get("objects") or {})
        self.totals = {marker: len(items) for marker, items in self.listed.items()}
        self.counts = dict.fromkeys(OBJECT_KEYS, 0)
        self.is_read = bool(self.frame) or any(self.totals.values())
        """Whether markers in the texts stand for objects. In other records they are text."""
        self.objects: list[dict[str, Any]] = []
        """In the order of their markers."""
        self.has_unsaid = False
        """Whether the message has boxes whose frame of reference nothing says."""

    def _listed_objects(self, objects: Any) -> dict[str, list[dict[str, Any]]]:
        """The entries of ``objects`` by the marker that stands for them."""
        if isinstance(objects, str):  # as tables hold them
            try:
                objects = EXACT_DECODER.decode(objects)
            except ValueError as error:
                raise RecordError("bad objects", f"not JSON: {error}", "objects") from error
        keys = (*OBJECT_KEYS.values(), "image_id")
        if not isinstance(objects, dict) or not all(isinstance(objects.get(key) or [], list) for key in keys):
            raise RecordError("bad objects", f"an object with lists {', '.join(keys)} is required", "objects")
        names, boxes, points, image_ids = (objects.get(key) or [] for key in keys)
        box_type = objects.get("bbox_type") or "real"
        if box_type not in BOX_TYPES:
            detail = f"bbox_type {shorten_value(box_type)} is unknown; valid: {', '.join(BOX_TYPES)}"
            raise RecordError("bad objects", detail, "objects.bbox_type")
        num_boxes = len(boxes) + len(points)
        if len(image_ids) not in (0, num_boxes):
            detail = f"{len(image_ids)} image_id for {num_boxes} boxes and points"
            raise RecordError("bad objects", detail, "objects.image_id")

        image_numbers = iter(image_ids or [0] * num_boxes)
        frame, factor = BOX_TYPES[box_type]
        listed = {"ref-object": [{"ref": checked_text(name, "objects.ref")} for name in names]}
        for marker, entries in (("bbox", boxes), ("point", points)):
            path = f"objects.{OBJECT_KEYS[marker]}"
            listed[marker] = [
                self._box(box, OBJECT_KEYS[marker], f"{path}[{i}]", frame, next(image_numbers), factor)
                for i, box in enumerate(entries)
            ]
        return listed

    def _box(
        self, numbers: Any, key: str, field_path: str, frame: str, image_number: Any, factor: int = 1
    ) -> dict[str, Any]:
        """A box or point as it is stored; ``image_number`` counts the record's images from 0."""
        is_list = isinstance(numbers, list) and len(numbers) in BOX_LENGTHS.get(key, (2, 4))
        if not is_list or not all(type(n) in (int, float) and math.isfinite(n) for n in numbers):
            detail = f"{shorten_value(numbers)} is not [x, y] or [x1, y1, x2, y2]"
            raise RecordError("bad objects", detail, field_path)
        if len(numbers) == 4 and (numbers[2] < numbers[0] or numbers[3] < numbers[1]):
            detail = f"{shorten_value(numbers)} ends before it begins; write [x1, y1, x2, y2]"
            raise RecordError("bad objects", detail, field_path)

        images = [i for i, kind in enumerate(self.media_kinds) if kind == "image"]
        if not images:
            raise RecordError(
                "bad objects", "a box without an image; boxes of videos are not read", field_path
            )
        if type(image_number) is not int or not 0 <= image_number < len(images):
            detail = (
                f"image_id {shorten_value(image_number)} is out of range; the record has {len(images)} images"
            )
            raise RecordError("bad objects", f"{detail}, counted from 0", field_path)
        return {"box": [n * factor for n in numbers], "medium": images[image_number], "frame": frame}

    def read_messages(self, messages: Sequence[Message]) -> tuple[list[Message], int]:
        """The messages with a marker in the place of each written box whose frame of reference is known, and
        the number of answers with boxes of an unknown one."""
        new_messages, unsaid = [], 0
        for message in messages:
            self.has_unsaid = False
            new_messages += map_texts([message], self._changed)
            unsaid += self.has_unsaid and message["role"] == "assistant"
        for marker, key in OBJECT_KEYS.items():
            if self.is_read and self.counts[marker] != self.totals[marker]:
                detail = f"{self.counts[marker]} <{marker}> in the text"
                detail = f"{detail}, but {self.totals[marker]} in objects.{key}"
                raise RecordError("objects and markers differ", detail, f"objects.{key}")
        return new_messages, unsaid

    def _changed(self, value: Any, key: str) -> Any:
        if isinstance(value, str):
            return _PIECE.sub(self._replaced, value)
        if isinstance(value, list) and key in BOX_LENGTHS and self._add_written(value, key):
            return "<bbox>"
        return value

    def _replaced(self, match: re.Match[str]) -> str:
        if marker := match["marker"]:
            self.counts[marker] += 1
            self.has_unsaid |= not self.is_read
            self.objects += self.listed[marker][self.counts[marker] - 1 : self.counts[marker]]
            return match[0]
        numbers: Any = re.sub(r"[\[\]()\s]", "", match["list"] or match["pairs"] or "").split(",")
        with suppress(ValueError):
            numbers = list(map(float, numbers))
        return f"{match['key'] or ''}<bbox>" if self._add_written(numbers, match["name"] or "") else match[0]

    def _add_written(self, numbers: Any, key: str) -> bool:
        """Adds a box that is written in a text. Returns whether its frame of reference is known."""
        self.has_unsaid |= not self.frame
        if self.frame and len(self.media_kinds) > 1:
            detail = f"boxes in the text, and {len(self.media_kinds)} media; write objects with image_id"
            raise RecordError("bad objects", detail, "boxes")
        if self.frame:
            self.objects.append(self._box(numbers, key, "boxes", self.frame, 0))
        return bool(self.frame)


def check_boxes(objects: list[dict[str, Any]], media_infos: Sequence[MediaInfo]) -> None:
    """Raises RecordError if a box is beyond its image. Boxes of resized images are checked when encoded."""
    boxes, media = read_boxes(objects)
    sizes = [frame_sizes(info.height, info.width, None, 1) for info in media_infos]
    if len(boxes) and (outside := find_box_outside(boxes, np.array(sizes)[media])):
        raise RecordError("box outside the image", f"the box {outside}", "objects")
