"""Which tars an indexed data set reads where they lie, and what tells that one of them has changed.

``megatron-vl data index --input`` writes ``tars.json`` into ``.nv-meta``, and nothing into the tars' folder
unless that is the folder of the data set. A converted data set has no such file.
"""

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megatron_vl.data.source.location import (
    LoaderError,
    Location,
    location_is_file,
    read_text_file,
    resolve_location,
)

TARS_FILE = "tars.json"
SPANS_FILE = "tars.idx"
"""uint64 values: of each pair of each tar in order, the first byte and the byte after it."""
STAT_THREADS = 32


@dataclass(frozen=True)
class PairFields:
    """Which members of a tar make a pair, by extension in small letters."""

    image: list[str]
    """Empty for tars of text alone, which ``caption`` names then."""
    caption: list[str]
    """The first that has text counts. ``json:KEY.KEY`` is a field of a JSON member."""
    prompt: str = ""
    """The question that each caption answers; empty: none."""


def parse_fields(words: Iterable[str]) -> PairFields:
    """The fields that words like ``image=jpg|png``, ``caption=txt|json:caption`` and ``prompt=TEXT`` name, or
    ``text=txt|json:text`` alone.

    Raises:
        LoaderError: a word cannot be read.
    """
    fields = {"image": "jpg|jpeg|png|webp", "caption": "txt|json:caption", "prompt": ""}
    for word in (given := [*words]):
        name, _, value = word.partition("=")
        if name == "text" and len(given) == 1:
            name, fields["image"] = "caption", ""
        if name not in fields or not value:
            raise LoaderError(
                f"--members {word}: write image=jpg|png, caption=txt|json:KEY or prompt=TEXT; for text alone,"
                " text=txt|json:KEY"
            )
        fields[name] = value
    # Extensions are compared in small letters, and keys of JSON as they are.
    parts = [caption.partition(":") for caption in fields["caption"].split("|")]
    captions = [f"{extension.lower()}{colon}{keys}" for extension, colon, keys in parts]
    return PairFields(
        fields["image"].lower().split("|") if fields["image"] else [], captions, fields["prompt"]
    )


@dataclass(frozen=True)
class TarList:
    """The tars of a data set."""

    root: Location | str
    fields: PairFields
    stamps: dict[str, str]
    """For each tar, by its path below ``root``, what changes with it (:func:`tar_stamp`)."""

    def changed_tars(self) -> list[str]:
        """The tars that are not as they were when they were indexed."""
        with ThreadPoolExecutor(STAT_THREADS) as threads:
            stamps = list(threads.map(lambda name: tar_stamp(self.root / name), self.stamps))
        return [name for name, stamp in zip(self.stamps, stamps, strict=True) if stamp != self.stamps[name]]


def read_tar_list(metadata_dir: Location) -> TarList | None:
    """The tars of a data set; None for one whose shards lie in its folder.

    Raises:
        LoaderError: the file is damaged.
    """
    list_path = metadata_dir / TARS_FILE
    if not location_is_file(list_path):
        return None
    try:
        values = json.loads(read_text_file(list_path))
        root = metadata_dir.parent if values["root"] == "." else resolve_location(values["root"])
        return TarList(root, PairFields(**values["fields"]), dict(values["stamps"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LoaderError(
            f"{list_path} is damaged ({error!r}); run `megatron-vl data index --input`"
        ) from error


def tar_stamp(tar_path: Location) -> str:
    """Size and time of change of a file, or size and ETag of an object; empty if there is none."""
    try:
        facts = tar_path.stat()
    except FileNotFoundError:
        return ""
    if isinstance(facts, os.stat_result):
        return f"{facts.st_size} {facts.st_mtime_ns}"
    return f"{facts.content_length} {facts.etag or facts.last_modified}"
