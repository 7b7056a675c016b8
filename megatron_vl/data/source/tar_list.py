"""Which tars an indexed data set reads where they lie, and what tells that one of them has changed.

``megatron-vl data index --input`` writes ``tars.json`` into ``.nv-meta``, and nothing into the tars' folder
unless that is the folder of the data set. A converted data set has no such file.
"""

from __future__ import annotations

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
"""uint64 values: of each pair of each tar in order, the first byte, the byte after it, and its key's hash."""
DEFAULT_FIELDS = {"image": "jpg|jpeg|png|webp", "caption": "txt|json:caption"}
STAT_THREADS = 32


@dataclass(frozen=True)
class PairFields:
    """Which members of a tar make a pair, by extension in small letters."""

    image: tuple[str, ...]
    """Empty for tars of text alone, which ``caption`` names then."""
    caption: tuple[str, ...]
    """The first that has text counts. ``json:KEY.KEY`` is a field of a JSON member."""
    prompt: str = ""
    """The question that each caption answers; empty: none."""

    @property
    def text_kind(self) -> str:
        """What messages call the text."""
        return "caption" if self.image else "text"

    @property
    def text_extensions(self) -> set[str]:
        return {extension.partition(":")[0] for extension in self.caption}


def parse_fields(words: Iterable[str]) -> PairFields:
    """The fields that words like ``image=jpg|png``, ``caption=txt|json:caption`` and ``prompt=TEXT`` name, or
    ``text=txt|json:text`` alone.

    Raises:
        LoaderError: a word cannot be read.
    """
    fields = DEFAULT_FIELDS | {"prompt": "", "text": ""}
    for word in words:
        name, _, alternatives = word.partition("=")
        is_image_key = name == "image" and ":" in word
        if name not in fields or not all(alternatives.split("|")) or is_image_key:
            raise LoaderError(
                f"--members {word}: write image=jpg|png, caption=txt|json:KEY or prompt=TEXT; for text alone,"
                " text=txt|json:KEY"
            )
        fields[name] = alternatives
    if text := fields.pop("text"):
        if fields != DEFAULT_FIELDS | {"prompt": ""}:
            raise LoaderError(f"--members text={text} is for text alone: leave out image, caption and prompt")
        fields |= {"image": "", "caption": text}
    # Extensions are compared in small letters, and keys of JSON as they are.
    parts = {
        name: [text.partition(":") for text in filter(None, fields[name].split("|"))]
        for name in DEFAULT_FIELDS
    }
    image, caption = (
        tuple(f"{extension.lower()}{colon}{keys}" for extension, colon, keys in parts[name])
        for name in DEFAULT_FIELDS
    )
    pair_fields = PairFields(image, caption, fields["prompt"])
    if pair_fields.text_extensions & {*pair_fields.image}:
        raise LoaderError(f"--members image={fields['image']}: image and caption are files of their own")
    return pair_fields


@dataclass(frozen=True)
class TarList:
    """The tars of a data set."""

    root: Location | str
    fields: PairFields
    samples_by_tar: dict[str, int]
    """Number of pairs of each tar, by its path below ``root``, in the order of their places."""
    stamps: dict[str, str]
    """For each tar, what changes with it (:func:`tar_stamp`)."""

    def as_json(self) -> str:
        values = {"root": str(self.root), "fields": vars(self.fields)}
        return json.dumps(values | {"samples": self.samples_by_tar, "stamps": self.stamps}, indent=1)

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
        image, caption = (tuple(map(str, values["fields"][name])) for name in DEFAULT_FIELDS)
        fields = PairFields(image, caption, str(values["fields"]["prompt"]))
        samples = {name: int(count) for name, count in values["samples"].items()}
        if min(samples.values(), default=0) < 0:
            raise ValueError("a negative number of pairs")
        return TarList(root, fields, samples, {name: str(values["stamps"][name]) for name in samples})
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
