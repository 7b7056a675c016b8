"""What a format is: a name, how it is recognised, and how its records are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .canonical import Message, RecordError
from .content import Reader

COMMON = ("id", "system", "image", "images", "video", "videos", "markers", "tools", "functions")
WEIGHTS = ("loss_weight", "sample_weight", "weight")


@dataclass(frozen=True)
class Format:
    """One way to write a conversation.

    A format is recognised by its fields alone, so that every record of a file is judged by itself.
    """

    name: str
    place: str
    """The field with the turns, or the one that says that there is a conversation."""
    about: str
    matches: Callable[[dict[str, Any]], bool]
    read: Callable[[dict[str, Any], Reader], list[Message]]
    """Raises RecordError if the turns are something else."""
    fields: tuple[str, ...] = ()
    """Fields of the record that it reads, beside those of every format."""
    strip: bool = False
    """Whether white space around the user's texts, also between media, is removed."""
    base: str = ""
    """The field that holds the folder of the record's media."""

    def reader(self, record: dict[str, Any]) -> Reader:
        """A reader for one record."""
        base = record.get(self.base) if self.base else ""
        if base is not None and not isinstance(base, str):
            raise RecordError("bad media reference", f"{self.base!r} must be a folder", self.base)
        read = (*COMMON, *WEIGHTS, self.place, *self.fields)
        return Reader(record, self.place, read, strip=self.strip, base=base or "")


def listed_turns(record: dict[str, Any], place: str) -> list[Any]:
    """The list of turns in a field. Raises RecordError if it is something else."""
    turns = record.get(place)
    if not isinstance(turns, list) or not turns:
        raise RecordError("no conversation", f"'{place}' is not a list with at least one turn", place)
    return turns
