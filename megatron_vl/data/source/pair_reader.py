"""Image-text pairs, or texts, in tars that were not written by this toolkit, read where they lie.

The members of a pair become what a shard of ``data convert`` holds: the JSON of a sample with the size of
its image, which comes from the image's header, and the bytes of the image. Names in a tar are only compared
and shown; nothing is unpacked.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.config import skip_meta_re
from megatron.energon.flavors.webdataset.itar import ITarFile, ITarSamplePointer
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader

from megatron_vl.data.sample.conversation_checks import find_special_token
from megatron_vl.data.sample.frame_archive import PixelError
from megatron_vl.data.sample.images import image_size
from megatron_vl.data.sample.medium import UnusableError, refuse_narrow
from megatron_vl.data.source.tar_list import PairFields

BROKEN_FIELD = "__broken__"
"""Field of a crude sample that could not be read; its value is (reason, detail)."""
HEAD_BYTES = 1 << 16
"""Bytes at the beginning of a JPEG in which its size is looked for first."""
MAX_TEXT_BYTES = 16 << 20
"""Largest member, or header, that is read as text."""
MAX_IMAGE_BYTES = 256 << 20
"""Largest image that is read."""
HEADER_TYPES = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
JPEG_MAGIC = b"\xff\xd8"


@dataclass
class TarShard:
    """A tar that is read where it lies, with the fields of Energon's ``ShardInfo``."""

    name: str
    path: EPath
    count: int
    fields: PairFields
    spans: Any
    """A slice is uint64 [n, 3]: first byte of each pair, the byte after it, :func:`key_hash` of its key."""


def key_hash(key: str) -> int:
    """What the list of spans has of a key, in 64 bits."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")


class _BoundedTarInfo(tarfile.TarInfo):
    """A header, which may claim any size. Python reads one about the next file's name into memory."""

    def _proc_member(self, tar_file: tarfile.TarFile) -> Any:
        if self.type in HEADER_TYPES and self.size > MAX_TEXT_BYTES:
            raise tarfile.ReadError(f"a header of {self.size:,} bytes")
        return super()._proc_member(tar_file)  # type: ignore[misc]


class TarMember(NamedTuple):
    """A file in a tar."""

    info: tarfile.TarInfo
    name: str
    key: str
    """Its name up to the first dot of the last part, as WebDataset groups files."""
    extension: str
    content: bytes | UnusableError
    """What is needed of it: nothing, its head, or all; or why it cannot be read."""

    @property
    def end(self) -> int:
        """The first byte of the tar after it."""
        return int(self.info.offset_data - -self.info.size // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE)


def iter_members(
    tar_file: ITarFile, end: int, fields: PairFields, *, reads_pixels: bool
) -> Iterator[TarMember]:
    """Yields the files of a tar from its present offset on to ``end``.

    Args:
        reads_pixels: whether to read whole images. Otherwise, only the head of a JPEG is read.
    """
    tar_file.tarinfo = _BoundedTarInfo
    while tar_file.offset < end and (info := tar_file.next()) is not None:
        tar_file.members.clear()  # it would remember each member
        if info.size < 0 or tar_file.offset <= info.offset:
            raise tarfile.ReadError(f"a file of {info.size} bytes")
        # Names may have any length and any bytes.
        name = info.name.encode(errors="backslashreplace").decode()
        folder, slash, file_name = name.rpartition("/")
        stem, dot, extension = file_name.partition(".")
        if not info.isreg() or not stem or not dot or skip_meta_re.match(name):
            continue
        extension = extension.lower()
        content: bytes | UnusableError = b""
        try:
            if extension in fields.image:
                _check_content(info, end, "image too large", MAX_IMAGE_BYTES)
                content = _read_content(tar_file, info, info.size if reads_pixels else HEAD_BYTES)
                if not reads_pixels and not content.startswith(JPEG_MAGIC):
                    content = _read_content(tar_file, info, info.size)
            elif extension in fields.text_extensions:
                _check_content(info, end, f"{fields.text_kind} too long", MAX_TEXT_BYTES)
                content = _read_content(tar_file, info, info.size)
        except UnusableError as error:
            content = error
        yield TarMember(info, name, f"{folder}{slash}{stem}", extension, content)


def _check_content(info: tarfile.TarInfo, end: int, size_reason: str, max_bytes: int) -> None:
    """Raises UnusableError for a member that cannot be read. Its header may claim any size."""
    if info.offset_data + info.size > end:
        raise UnusableError("member truncated", f"{info.name} does not end within the tar")
    if info.issparse():
        raise UnusableError("sparse member", info.name)
    if info.size > max_bytes:
        raise UnusableError(size_reason, f"{info.name} has {info.size} bytes")


def _read_content(tar_file: ITarFile, info: tarfile.TarInfo, max_bytes: int) -> bytes:
    tar_file.fileobj.seek(info.offset_data)
    return bytes(tar_file.fileobj.read(min(info.size, max_bytes)))


def read_pair(
    tar_file: ITarFile, members: Sequence[TarMember], fields: PairFields, origin: dict[str, str]
) -> dict[str, Any]:
    """The sample of a key's members as a converted shard holds it: ``json``, and the image by its extension.

    Args:
        members: all of one key. Of a JPEG, the head is enough.
        origin: where the pair lies, for messages.

    Raises:
        UnusableError: they are no pair.
    """
    image = _only_member(members, fields.image, "image")
    kind, caption = fields.text_kind, ""
    for alternative in fields.caption:
        extension, _, json_keys = alternative.partition(":")
        if not caption and (member := _only_member(members, (extension,), kind)):
            caption = _caption_text(member, json_keys, kind)
    names = ", ".join(member.name for member in members[:8])
    if image is None and fields.image:
        raise UnusableError("image missing", f"{names}: no {'|'.join(fields.image)}")
    if not caption:
        has_member = any(member.extension in fields.text_extensions for member in members)
        reason = f"{kind} empty" if has_member else f"{kind} missing"
        raise UnusableError(reason, f"{names}: no text in {'|'.join(fields.caption)}")
    if image is None:
        return {"json": json.dumps(pair_text("", caption, "") | {"media": [], "source": origin}).encode()}
    try:
        try:
            height, width = image_size(image.content)
        except PixelError:  # its head does not say it
            height, width = image_size(_read_content(tar_file, image.info, image.info.size))
    except PixelError as error:
        raise UnusableError("image does not decode", f"{image.name}: {error}") from error
    refuse_narrow("image", image.name, height, width)
    medium = {"key": image.extension, "kind": "image", "height": height, "width": width}
    record = {**pair_text(image.extension, caption, fields.prompt), "media": [medium], "source": origin}
    return {"json": json.dumps(record).encode(), image.extension: image.content}


def pair_text(image_key: str, caption: str, prompt: str) -> dict[str, Any]:
    """The part of a sample's JSON that says in which order image, if there is one, and caption are read."""
    image = [{"type": "image", "image": image_key}] if image_key else []
    if not prompt:
        return {"document": [*image, {"type": "text", "text": caption}]}
    question = {"role": "user", "content": [*image, {"type": "text", "text": prompt}]}
    return {"messages": [question, {"role": "assistant", "content": caption}]}


def _only_member(members: Sequence[TarMember], extensions: tuple[str, ...], kind: str) -> Any:
    """The member of these extensions; None if there is none. Raises UnusableError if it cannot be used."""
    found = [member for member in members if member.extension in extensions]
    if len(found) > 1:
        raise UnusableError(f"several {kind}s", ", ".join(member.name for member in found[:8]))
    if found and isinstance(found[0].content, UnusableError):
        raise found[0].content
    return found[0] if found else None


def _caption_text(member: Any, json_keys: str, kind: str) -> str:
    try:
        text = member.content.decode("utf-8-sig")
        if json_keys:
            text = json.loads(text)
            for key in json_keys.split("."):
                text = text.get(key) if isinstance(text, dict) else None
        text = "" if text is None else text.strip()
        text.encode()  # half of a surrogate pair is no text
    except (ValueError, AttributeError, RecursionError) as error:
        raise UnusableError(f"{kind} unreadable", f"{member.name}: {error!r}") from error
    if special_token := find_special_token(text):
        reason, detail = special_token
        raise UnusableError(reason, f"{member.name}: {detail}")
    return str(text)


def shard_place(shard_starts: Sequence[int], index: int) -> tuple[int, int]:
    """The number of a sample's shard, and the sample's number in it.

    Args:
        shard_starts: number of samples before each shard, and at last of all.
    """
    shard_number = min(bisect_right(shard_starts, index) - 1, len(shard_starts) - 2)
    return shard_number, index - shard_starts[shard_number]


class PairReader(ShardInfosITarReader):
    """Energon's reader of shards, which also reads pairs of :class:`TarShard`."""

    def _get_itar_sample_pointer(self, sample_index: int) -> ITarSamplePointer:
        shard_number, number = shard_place(self.shard_count_cumsum, sample_index)
        shard = self.shard_infos[shard_number]
        if not isinstance(shard, TarShard):
            return super()._get_itar_sample_pointer(sample_index)
        [[start, end, _]] = shard.spans[number : number + 1].tolist()
        tar_file_id = self.shard_tar_file_idxs[shard_number]
        return ITarSamplePointer(tar_file_id=tar_file_id, byte_offset=start, byte_size=end - start)

    def _get_item_by_sample_pointer(
        self, sample_pointer: ITarSamplePointer, restore_index: Any, entry_match_fn: Any = None
    ) -> Any:
        shard_number, number = shard_place(self.shard_count_cumsum, restore_index)
        shard: Any = self.shard_infos[shard_number]
        if not isinstance(shard, TarShard):
            return super()._get_item_by_sample_pointer(sample_pointer, restore_index, entry_match_fn)
        with self._open_itarfile(sample_pointer.tar_file_id) as tar_file:
            tar_file.offset = sample_pointer.byte_offset
            end = sample_pointer.byte_offset + sample_pointer.byte_size
            reads_pixels = self.part_filter is None or self.part_filter("image")
            found = iter_members(tar_file, end, shard.fields, reads_pixels=reads_pixels)
            # The first key's: what cannot be used lies between two pairs.
            members = list(next(groupby(found, lambda member: member.key), ("", ()))[1])
            key = members[0].key if members else ""
            sample = {"__key__": f"{shard.name}[{number}]", "__shard__": shard.name}
            try:
                origin = {"file": shard.name, "record": key}
                return {**read_pair(tar_file, members, shard.fields, origin), **sample}
            except UnusableError as error:
                return {**sample, BROKEN_FIELD: (error.reason, str(error))}
