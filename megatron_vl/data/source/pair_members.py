"""Pairs of an image and a caption in tars that another program wrote, read in place.

``.nv-meta/members.json`` says which member of a sample is the image and which is the caption. A sample is
then read as if :mod:`data_tools` had stored a document, or a conversation if there is a question for
captions. The size of an image comes from its header.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from megatron_vl.data.sample.frame_archive import PixelError
from megatron_vl.data.sample.images import image_size
from megatron_vl.data.sample.medium import UnusableError
from megatron_vl.data.source.location import Location, location_is_file, read_text_file
from megatron_vl.data.source.tolerant_reader import BROKEN_FIELD
from megatron_vl.system.errors import UserError

MEMBERS_FILE = "members.json"


class MembersError(UserError, ValueError):
    """The members of a pair are not given as they must be."""


@dataclass(frozen=True)
class PairMembers:
    """Where a sample has its image and its caption."""

    image: tuple[str, ...]
    """Endings of names, of which a sample has one; empty: the samples are text."""
    caption: tuple[str, ...]
    """The same of captions, by preference. ``json:alt`` is the key ``alt`` of the member that ends in
    .json."""
    prompt: str = ""
    """The question to which the caption is the answer; empty: a pair is a document."""

    @staticmethod
    def parse(members_text: str) -> PairMembers:
        """``image=jpg|png caption=txt|json:alt``, perhaps with ``prompt=...`` to the end of the text.

        Raises:
            MembersError: it is something else.
        """
        endings_text, _, prompt = members_text.partition(" prompt=")
        parts = dict(part.partition("=")[::2] for part in endings_text.split())
        endings = {name: tuple(value.split("|")) for name, value in parts.items()}
        if not {"caption"} <= set(endings) <= {"image", "caption"} or not all(sum(endings.values(), ())):
            raise MembersError(
                f"{members_text!r} is not such as 'image=jpg|png|webp caption=txt|json:caption'"
            )
        return PairMembers(endings.get("image", ()), endings["caption"], prompt.strip())

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    def stored_sample(self, members: dict[str, Any]) -> bytes:
        """The JSON of a sample as :mod:`data_tools.shards` writes it, from its members by their endings.

        Raises:
            UnusableError: the image or the caption is missing or cannot be read.
        """
        names = {name.lower(): name for name in members}
        images = [names[ending] for ending in self.image if ending in names]
        if self.image and len(images) != 1:
            found = f"it has {', '.join(images)}" if images else f"it has only {', '.join(sorted(members))}"
            reason = "two images" if images else "image missing"
            raise UnusableError(reason, f"one of the members {', '.join(self.image)} is required; {found}")
        parts: list[dict[str, Any]] = [{"type": "image", "image": name} for name in images]
        caption = {"type": "text", "text": self._read_caption(members, names)}
        media = []
        for name in images:
            try:
                height, width = image_size(members[name])
            except PixelError as error:
                raise UnusableError("image does not decode", f"{name}: {error}") from error
            media.append({"key": name, "kind": "image", "height": height, "width": width})
        sample: dict[str, Any] = {"document": [*parts, caption]}
        if self.prompt:
            question = [*parts, {"type": "text", "text": self.prompt}]
            answer = {"role": "assistant", "content": caption["text"]}
            sample = {"messages": [{"role": "user", "content": question}, answer]}
        return json.dumps(sample | {"media": media}).encode()

    def _read_caption(self, members: dict[str, Any], names: dict[str, str]) -> str:
        for ending in self.caption:
            member, _, key = ending.partition(":")
            if member not in names:
                continue
            try:
                text = members[names[member]].decode()
                value = json.loads(text).get(key) if key else text
            except (ValueError, AttributeError, RecursionError) as error:
                raise UnusableError("caption unreadable", f"{names[member]}: {error}") from error
            if isinstance(value, str) and value.strip():
                return value
        raise UnusableError("no caption", f"none of {', '.join(self.caption)} has text")


class PairReader:
    """Wraps a :class:`~megatron_vl.data.source.tolerant_reader.TolerantReader`."""

    def __init__(self, reader: Any, members: PairMembers) -> None:
        self.reader, self.members = reader, members

    def __getitem__(self, sample_index: int) -> dict[str, Any] | None:
        crude_sample = self.reader[sample_index]
        if crude_sample is None or BROKEN_FIELD in crude_sample:
            return crude_sample
        members = {name: data for name, data in crude_sample.items() if not name.startswith("__")}
        try:
            return crude_sample | {"json": self.members.stored_sample(members)}
        except UnusableError as error:
            return crude_sample | {BROKEN_FIELD: (error.reason, str(error))}


def read_pair_members(metadata_dir: Location) -> PairMembers | None:
    """The members of a data set that was indexed in place; None for another."""
    members_path = metadata_dir / MEMBERS_FILE
    if not location_is_file(members_path):
        return None
    fields = json.loads(read_text_file(members_path))
    return PairMembers(tuple(fields["image"]), tuple(fields["caption"]), fields["prompt"])
