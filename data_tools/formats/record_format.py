"""What a format is: a name, how it is recognised, and how its records are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .conversation import Message, RecordError
from .record_reader import RecordReader

COMMON_FIELDS = ("id", "system", "image", "images", "video", "videos", "markers", "tools", "functions")
WEIGHT_FIELDS = ("loss_weight", "sample_weight", "weight")


def listed_turns(record: dict[str, Any], turns_field: str) -> list[Any]:
    """The list of turns in a field. Raises RecordError if it is something else."""
    turns = record.get(turns_field)
    if not isinstance(turns, list) or not turns:
        raise RecordError(
            "no conversation", f"'{turns_field}' is not a list with at least one turn", turns_field
        )
    return turns


def read_listed_turns(record: dict[str, Any], reader: RecordReader) -> list[Message]:
    """Reads the list of turns in the format's field."""
    return reader.read_turns(listed_turns(record, reader.turns_field))


@dataclass(frozen=True)
class RecordFormat:
    """One way to write a conversation.

    A format is recognised by its fields alone, so that every record of a file is judged by itself.
    """

    name: str
    turns_field: str
    """The field with the turns, or the one that says that there is a conversation."""
    description: str
    matches_record: Callable[[dict[str, Any]], bool]
    read_messages: Callable[[dict[str, Any], RecordReader], list[Message]] = read_listed_turns
    """Raises RecordError if the turns are something else."""
    read_fields: tuple[str, ...] = ()
    """Fields of the record that it reads, beside those of every format."""
    strip_user_text: bool = False
    """Whether white space around the user's texts, also between media, is removed."""
    media_folder_field: str = ""
    """The field that holds the folder of the record's media."""

    def open_reader(self, record: dict[str, Any]) -> RecordReader:
        """A reader for one record."""
        media_folder = record.get(self.media_folder_field) if self.media_folder_field else ""
        if media_folder is not None and not isinstance(media_folder, str):
            raise RecordError(
                "bad media reference",
                f"{self.media_folder_field!r} must be a folder",
                self.media_folder_field,
            )
        read_keys = (*COMMON_FIELDS, *WEIGHT_FIELDS, self.turns_field, *self.read_fields)
        return RecordReader(
            record,
            self.turns_field,
            read_keys,
            strip_user_text=self.strip_user_text,
            media_folder=media_folder or "",
        )
