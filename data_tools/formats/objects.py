"""Boxes and points of a record: ms-swift's ``objects`` with markers in the texts, and boxes in the texts with
``boxes``, their frame of reference, beside them. Both become the ``objects`` of the stored sample
(:mod:`megatron_vl.data.sample.boxes`)."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from megatron_vl.data.sample.boxes import FRAMES, find_outside, map_texts
from megatron_vl.data.sample.medium import MediaInfo

from .conversation import Message, RecordError, checked_text, shorten_value
from .tool_calls import parse_json_text

BOX_TYPES = {"real": ("pixels", 1), "norm1": ("thousandths", 1000)}
"""Values of ``bbox_type``: the frame in which they are stored, and what a number is multiplied by."""
OBJECT_KEYS = {"ref-object": "ref", "bbox": "bbox", "point": "points"}
"""The key of ``objects`` whose entries each marker stands for."""
BOX_LENGTHS = {"bbox_2d": (4,), "point_2d": (2,)}
_SPACE = r"\s|\\{1,8}[nrt]"
"""White space, also as JSON within JSON has it."""
_DIGIT_NEXT = rf"""(?=(?:[\[(]|{_SPACE})*-?\.?\d|\\{{0,8}}["'](?:[\[(]|{_SPACE})*[-.\d]+\s*,)"""
_PIECE = re.compile(
    rf"""(?P<key>["'](?P<name>bbox_2d|point_2d)\\{{0,8}}["']\s*:\s*){_DIGIT_NEXT}(?P<list>\[[^\[\]<]*\])?"""
    rf"""|<\|box_start\|>{_DIGIT_NEXT}(?P<pairs>[^<]*)<\|box_end\|>|<(?P<marker>ref-object|bbox|point)>"""
)
"""A box that is written in a text, or a marker."""


class ObjectReader:
    """Reads the objects of one record. All methods raise RecordError for what is wrong or ambiguous.

    Args:
        media_kinds: ``image`` or ``video`` of each medium, in the order of the text.
        num_media: number of media in the turns that are kept.
    """

    def __init__(self, record: dict[str, Any], media_kinds: Sequence[str], num_media: int) -> None:
        self.num_media = num_media
        self.images = [i for i, kind in enumerate(media_kinds) if kind == "image"]
        self.frame = record.get("boxes") or ""
        if self.frame and self.frame not in FRAMES:
            raise _bad(f"{shorten_value(self.frame)} is unknown; valid: {', '.join(FRAMES)}", "boxes")
        self.image_ids: Iterator[Any] | None = None
        """The images of the listed boxes and points, then of those in the texts; None: not numbered."""
        self.listed = self._listed_objects(record.get("objects") or {})
        self.counts = dict.fromkeys(OBJECT_KEYS, 0)
        self.is_read = bool(self.frame) or any(self.listed.values())
        """Whether markers in the texts stand for objects. In other records they are text."""
        self.objects: list[dict[str, Any]] = []
        """Those of the message, in the order of their markers."""
        self.has_unsaid = False
        """Whether the message has boxes whose frame of reference nothing says."""
        self.unsaid_boxes = 0
        """Number of answers and documents with such boxes."""

    def _listed_objects(self, objects: Any) -> dict[str, list[dict[str, Any]]]:
        """The entries of ``objects`` by the marker that stands for them."""
        objects = parse_json_text(objects, "objects", "bad objects")  # text, as tables hold them
        keys = (*OBJECT_KEYS.values(), "image_id")
        if not isinstance(objects, dict) or not all(isinstance(objects.get(key) or [], list) for key in keys):
            raise _bad(f"an object with lists {', '.join(keys)} is required", "objects")
        names, boxes, points, image_ids = (objects.get(key) or [] for key in keys)
        box_type = str(objects.get("bbox_type") or "real")
        if box_type not in BOX_TYPES:
            raise _bad(
                f"{shorten_value(box_type)} is unknown; valid: {', '.join(BOX_TYPES)}", "objects.bbox_type"
            )
        self.image_ids = iter(image_ids) if image_ids else None
        frame, factor = BOX_TYPES[box_type]
        listed = {"ref-object": [{"ref": checked_text(name, "objects.ref")} for name in names]}
        for marker, name, entries in (("bbox", "", boxes), ("point", "point_2d", points)):
            listed[marker] = [self._box(box, name, "objects", frame, factor) for box in entries]
        return listed

    def _box(self, box: Any, key: str, field_path: str, frame: str, factor: int = 1) -> dict[str, Any]:
        """A box or point as it is stored."""
        is_list = isinstance(box, list) and len(box) in BOX_LENGTHS.get(key, (2, 4))
        if not is_list or not all(isinstance(n, int | float) and abs(n) < 1e9 for n in box):
            raise _bad(f"{shorten_value(box)} is not [x, y] or [x1, y1, x2, y2]", field_path)
        if len(box) == 4 and (box[2] < box[0] or box[3] < box[1]):
            raise _bad(f"the box {shorten_value(box)} ends before it begins: x2 < x1 or y2 < y1", field_path)
        if not self.images:
            raise _bad(
                f"the box {shorten_value(box)} is on no image; boxes of videos are not read", field_path
            )
        image_number = next(self.image_ids, None) if self.image_ids else 0
        if not isinstance(image_number, int) or not 0 <= image_number < len(self.images):
            detail = f"image_id {shorten_value(image_number)} is not in 0 to {len(self.images) - 1}"
            raise _bad(f"{detail}, the numbers of the record's images", field_path)
        return {"box": [n * factor for n in box], "medium": self.images[image_number], "frame": frame}

    def read_messages(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with a marker in the place of each written box whose frame of reference is known, and
        with their ``objects``."""
        new_messages = []
        for message in messages:
            self.has_unsaid, self.objects = False, []
            new_messages += map_texts([message], self._changed)
            if self.objects:
                new_messages[-1]["objects"] = self.objects
            is_trained_on = message["role"] in ("assistant", "document") and self.num_media
            self.unsaid_boxes += bool(self.has_unsaid and is_trained_on)
        for marker, key in OBJECT_KEYS.items():
            if self.is_read and self.counts[marker] != len(self.listed[marker]):
                counts = f"{self.counts[marker]} <{marker}> in the text, but {len(self.listed[marker])}"
                raise RecordError("objects and markers differ", f"{counts} in objects.{key}", "objects")
        if self.image_ids and (spare := len(list(self.image_ids))):
            raise _bad(f"{spare} numbers more than boxes in the text", "objects.image_id")
        return new_messages

    def _changed(self, value: Any, key: str) -> Any:
        is_text = isinstance(value, str)
        is_box = key in BOX_LENGTHS and (isinstance(value, list) or is_text and re.match(_DIGIT_NEXT, value))
        if is_box and self._add_written(value, key):
            return "<bbox>"
        return _PIECE.sub(self._replaced, value) if is_text else value

    def _replaced(self, match: re.Match[str]) -> str:
        if marker := match["marker"]:
            self.has_unsaid |= not self.is_read
            self.objects += self.listed[marker][self.counts[marker] : self.counts[marker] + 1]
            self.counts[marker] += 1
            return match[0]
        numbers: Any = re.sub(rf"[\[\]()]|{_SPACE}", "", match["list"] or match["pairs"] or "").split(",")
        with suppress(ValueError):
            numbers = list(map(float, numbers))
        return f"{match['key'] or ''}<bbox>" if self._add_written(numbers, match["name"] or "") else match[0]

    def _add_written(self, box: Any, key: str) -> bool:
        """Adds a box that is written in a text. Returns whether its frame of reference is known."""
        if not self.frame:
            self.has_unsaid = True
            return False
        self.objects.append(self._box(box, key, "boxes", self.frame))
        if self.image_ids is None and self.num_media > 1:
            del self.objects[-1]["medium"]  # check_boxes says whether it is needed
        return True

    def take_objects(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The objects of the messages, which lose them."""
        objects = [item for message in messages for item in message.pop("objects", ())]
        if any(item.get("medium", -1) >= self.num_media for item in objects):
            raise _bad("a box is on an image of a turn that is left out", "objects")
        return objects


def _bad(detail: str, field_path: str) -> RecordError:
    return RecordError("bad objects", detail, field_path)


def check_boxes(
    objects: Sequence[dict[str, Any]], media_infos: Sequence[MediaInfo], limits: Sequence[dict[str, Any]]
) -> None:
    """Raises RecordError if a box is beyond its image, or on one of several images that must be known.

    The size of a resized image follows from the run.
    """
    sizes = [(info.width, info.height) for info in media_infos]
    has_several = any(size != sizes[0] for size in sizes) or any(each != limits[0] for each in limits)
    for item in objects:
        if "box" not in item:
            continue
        frame, medium = item["frame"], item.get("medium")
        if has_several and frame != "thousandths" and medium is None:
            detail = "boxes on images of several sizes; number the image of each in objects.image_id"
            raise _bad(detail, "boxes")
        size = sizes[medium or 0] if frame == "pixels" else (1000, 1000)
        if frame != "resized" and (outside := find_outside(item["box"], frame, size)):
            raise RecordError("box outside the image", outside, "objects")
