"""Image-text pairs, or texts, in tars that were not written by this toolkit, read where they lie.

The members of a pair become what a shard of ``data convert`` holds: the JSON of a sample with the size of
its image, which comes from the image's header, and the bytes of the image. Names in a tar are only compared
and shown; nothing is unpacked.
"""

import contextlib
import json
import tarfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from megatron.energon.edataclass import edataclass
from megatron.energon.errors import FatalSampleError
from megatron.energon.flavors.webdataset.config import skip_meta_re, split_name_re
from megatron.energon.flavors.webdataset.itar import ITarFile, ITarSamplePointer
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from megatron.energon.flavors.webdataset.structs import ShardInfo
from numpy.typing import NDArray

from megatron_vl.data.sample.conversation_checks import find_special_token
from megatron_vl.data.sample.frame_archive import PixelError
from megatron_vl.data.sample.images import JPEG_MAGIC, image_size
from megatron_vl.data.sample.medium import UnusableError, refuse_narrow
from megatron_vl.data.source.tar_list import PairFields
from megatron_vl.system.errors import is_machine_fault

HEAD_BYTES = 1 << 16
"""Bytes at the beginning of a JPEG in which its size is looked for first."""
MAX_MEMBER_BYTES = 256 << 20
"""Largest image or text that is read. A header may claim any size."""


@edataclass
class TarShard(ShardInfo):
    """A tar that is read where it lies."""

    fields: PairFields
    spans: NDArray[np.uint64]
    """uint64 [count, 2]: first byte of each pair, and the byte after it."""


class _BoundedTarInfo(tarfile.TarInfo):
    """Python reads what is no file, such as a header with a long name, into memory at any size."""

    def _proc_member(self, tar_file: tarfile.TarFile) -> Any:
        if self.size > MAX_MEMBER_BYTES and not self.isreg():
            raise tarfile.ReadError(f"a header of {self.size:,} bytes")
        return super()._proc_member(tar_file)  # type: ignore[misc]


class TarMember(NamedTuple):
    """A file in a tar."""

    name: str
    extension: str
    content: bytes
    """What is needed of it: nothing, its head, or all."""
    key: str
    """Its name up to the first dot of the last part, as WebDataset groups files."""
    problem: str
    """Why it cannot be used."""
    info: tarfile.TarInfo


def iter_members(tar_file: ITarFile, end: int, fields: PairFields, max_head: int) -> Iterator[TarMember]:
    """Yields the files of a tar up to ``end``, or to what is no file. Of a JPEG, the head may be enough."""
    tar_file.tarinfo = _BoundedTarInfo
    text_extensions = {alternative.partition(":")[0] for alternative in fields.caption}
    while tar_file.offset < end:
        try:
            info = tar_file.next()
        except Exception as error:  # tarfile raises all kinds of errors on a damaged tar
            if is_machine_fault(error) or isinstance(error, OSError | FatalSampleError):
                raise
            return
        if info is None or info.size < 0 or tar_file.offset <= info.offset:
            return
        tar_file.members.clear()  # it would remember each member
        # Names may have any length and any bytes. Some programs write a hidden file before each other one.
        name = info.name.encode(errors="backslashreplace").decode()
        name_parts = split_name_re.match("" if name.rpartition("/")[2].startswith(".") else name)
        if not name_parts or not info.isreg() or info.issparse() or skip_meta_re.match(name):
            continue
        key, extension = name_parts[1], name_parts[2].lower()
        content, problem = b"", ""
        if extension in text_extensions or extension in fields.image:
            if info.offset_data + info.size > end:
                problem = "member truncated"
            elif info.size > MAX_MEMBER_BYTES:
                problem = "member too large"
            else:
                content = _read_content(tar_file, info, max_head)
        yield TarMember(name, extension, content, key, problem, info)


def _read_content(tar_file: ITarFile, info: tarfile.TarInfo, max_head: int) -> bytes:
    tar_file.fileobj.seek(info.offset_data)
    head = bytes(tar_file.fileobj.read(min(info.size, max_head)))
    with contextlib.suppress(PixelError):  # only a JPEG says all of it at its beginning
        if len(head) == info.size or head.startswith(JPEG_MAGIC) and image_size(head):
            return head
    return head + bytes(tar_file.fileobj.read(info.size - len(head)))


def read_pair(members: Sequence[TarMember], fields: PairFields, origin: dict[str, str]) -> dict[str, Any]:
    """The sample of a key's members as a converted shard holds it: ``json``, and the image by its extension.

    Args:
        members: all of one key. Of a JPEG, the head is enough.
        origin: where the pair lies, for messages.

    Raises:
        UnusableError: they are no pair.
    """
    image = _only_member(members, fields.image, "image")
    caption = ""
    for alternative in fields.caption:
        extension, _, json_keys = alternative.partition(":")
        if not caption and (member := _only_member(members, [extension], "text")):
            caption = _caption_text(member, json_keys)
    names = ", ".join(member.name for member in members[:8])
    if image is None and fields.image:
        raise UnusableError("image missing", f"{names}: no {'|'.join(fields.image)}")
    if not caption:
        raise UnusableError("text missing", f"{names}: no text in {'|'.join(fields.caption)}")

    parts, media, pixels = [], [], {}
    if image is not None:
        try:
            height, width = image_size(image.content)
        except PixelError as error:
            raise UnusableError("image does not decode", f"{image.name}: {error}") from error
        refuse_narrow("image", image.name, height, width)
        parts = [{"type": "image", "image": image.extension}]
        media = [{"key": image.extension, "kind": "image", "height": height, "width": width}]
        pixels = {image.extension: image.content}
    record: dict[str, Any] = {"document": [*parts, {"type": "text", "text": caption}]}
    if fields.prompt:
        question = {"role": "user", "content": [*parts, {"type": "text", "text": fields.prompt}]}
        record = {"messages": [question, {"role": "assistant", "content": caption}]}
    return {"json": json.dumps({**record, "media": media, "source": origin}).encode(), **pixels}


def _only_member(members: Sequence[TarMember], extensions: list[str], kind: str) -> TarMember | None:
    """The member of these extensions; None if there is none. Raises UnusableError if it cannot be used."""
    found = [member for member in members if member.extension in extensions]
    if len(found) > 1:
        raise UnusableError(f"several {kind}s", ", ".join(member.name for member in found[:8]))
    if found and found[0].problem:
        raise UnusableError(found[0].problem, f"{found[0].name} of {found[0].info.size:,} bytes")
    return found[0] if found else None


def _caption_text(member: TarMember, json_keys: str) -> str:
    try:
        text: Any = member.content.decode("utf-8-sig")
        if json_keys:
            text = json.loads(text)
            for key in json_keys.split("."):
                text = text.get(key) if isinstance(text, dict) else None
        text = "" if text is None else text.strip()
        text.encode()  # half of a surrogate pair is no text
    except (ValueError, AttributeError, RecursionError) as error:
        raise UnusableError("text unreadable", f"{member.name}: {error!r}") from error
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
        [[start, end]] = shard.spans[number : number + 1].tolist()
        return ITarSamplePointer(
            tar_file_id=self.shard_tar_file_idxs[shard_number], byte_offset=start, byte_size=end - start
        )

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
            found = list(iter_members(tar_file, end, shard.fields, MAX_MEMBER_BYTES))
        key = found[0].key if found else ""
        pair = read_pair(
            [member for member in found if member.key == key],
            shard.fields,
            {"file": shard.name, "record": key},
        )
        return {**pair, "__key__": f"{shard.name}[{number}]", "__shard__": shard.name}
