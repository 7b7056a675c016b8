"""Writes tar shards and Energon's own files about them (``.nv-meta``).

Workers store samples as members of a tar in files of their own (:func:`store_sample`), and the main process
copies them, in order, to the end of a shard (:class:`ShardWriter`).

The index is written with Energon's index classes, in the order of the shards, so that the same input gives
the same files whatever the number of processes. The splits are lists of shards (Energon's ratios may leave a
split empty).
"""

import json
import tarfile
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from megatron_vl.data.sample.medium import MediaInfo
from megatron_vl.data.sample.written_numbers import dump_json
from megatron_vl.data.source.dataset_description import MAX_SHARDS, METADATA_DIR, PLAIN_DATASET_FIELDS
from megatron_vl.data.source.tolerant_reader import append_crc32
from megatron_vl.system import durable_files
from megatron_vl.system.json_files import file_sha256

from .formats import Conversation
from .media import is_embedded
from .records import ConvertError

MEDIA_NAMES_FILE = "media_names.jsonl"
"""For each sample with files of media, a line with its key and their names in the record. Sorted by key."""
CONVERSION_FILE = "convert.json"
"""A file in ``.nv-meta``: what the data set was made of, and its shards."""


@dataclass
class StoredSample:
    """One sample in the file of its batch, on its way into a shard."""

    key: str
    byte_offset: int
    byte_length: int
    """Of its members, headers included."""
    media_infos: list[MediaInfo]
    record_source: dict[str, Any]
    record_identity: str
    ignored_keys: list[tuple[str, str]]
    counts: dict[str, int]
    """What the report sums up, by its fields."""
    media_names: list[str]
    """The media's names in the record; empty for media in the record itself."""

    @property
    def media_bytes(self) -> int:
        return sum(info.size_bytes for info in self.media_infos)


@dataclass
class WrittenShard:
    name: str
    num_samples: int
    size_bytes: int
    sha256: str
    index_rows: list[Any] = field(default_factory=list, repr=False)


def store_sample(
    key: str,
    conversation: Conversation,
    media: list[tuple[MediaInfo, bytes]],
    record_source: dict[str, Any],
    spool_file: BinaryIO,
) -> StoredSample:
    """Appends a sample to a file as members of a tar: its JSON, and the original bytes of its media."""
    media_infos = [info for info, _ in media]
    suffixed_keys = [f"{i}.{info.suffix}" for i, info in enumerate(media_infos)]
    sample_json = _sample_json(conversation, media_infos, suffixed_keys, record_source)
    byte_offset = spool_file.tell()
    _add_member(spool_file, f"{key}.json", sample_json)
    for suffixed_key, (_, media_bytes) in zip(suffixed_keys, media, strict=True):
        _add_member(spool_file, f"{key}.{suffixed_key}", media_bytes)
    return StoredSample(
        key,
        byte_offset,
        spool_file.tell() - byte_offset,
        media_infos,
        record_source,
        conversation.record_identity,
        conversation.ignored_keys,
        {name: getattr(conversation, name) for name in ("answer_media", "unsaid_boxes", "unfinished_turns")},
        ["" if is_embedded(reference) else str(reference) for _, reference in conversation.media_references],
    )


def _add_member(tar_file: BinaryIO, member_name: str, member_bytes: bytes) -> None:
    """Writes a member without times or owners."""
    member_info = tarfile.TarInfo(member_name)
    member_info.size = len(member_bytes)
    tar_file.write(member_info.tobuf(tarfile.USTAR_FORMAT))
    tar_file.write(member_bytes)
    tar_file.write(bytes(-len(member_bytes) % tarfile.BLOCKSIZE))


def _sample_json(
    conversation: Conversation, media_infos: list[MediaInfo], suffixed_keys: list[str], source: dict[str, Any]
) -> bytes:
    """The JSON of a sample: its messages, or the parts of a document, and the sizes of its media, so that
    packing decodes nothing. Media parts of the messages refer to the names of the tar members."""
    member_iterator = iter(suffixed_keys)

    def named_part(part: dict[str, Any]) -> dict[str, Any]:
        kind = part["type"]
        return part if kind == "text" else {"type": kind, kind: next(member_iterator)}

    sample: dict[str, Any] = {"document": list(map(named_part, conversation.document))}
    if conversation.loss_weight != 1:
        sample["loss_weight"] = conversation.loss_weight
    if not conversation.document:
        sample = {"messages": []}
    for message in conversation.messages:
        if not isinstance(message["content"], str):
            message = {**message, "content": [named_part(part) for part in message["content"]]}
        sample["messages"].append(message)
    own_fields = {
        "tools": conversation.tool_definitions,
        "objects": conversation.objects,
        "chat_template_kwargs": conversation.template_arguments,
    }
    sample |= {name: value for name, value in own_fields.items() if value}
    sample["media"] = [
        info.loader_record(key) | ({"limits": limits} if limits else {})
        for key, info, limits in zip(suffixed_keys, media_infos, conversation.media_limits, strict=True)
    ]
    sample["source"] = source
    return append_crc32(dump_json(sample).encode())


class _OpenShard:
    def __init__(self, tar_path: Path) -> None:
        self.tar_file = tar_path.open("w+b")
        self.name = tar_path.name
        self.samples: list[StoredSample] = []
        self.media_bytes = 0

    def append(self, sample: StoredSample, source_file: BinaryIO, byte_offset: int) -> None:
        source_file.seek(byte_offset)
        bytes_left = sample.byte_length
        while bytes_left:
            bytes_left -= self.tar_file.write(source_file.read(min(bytes_left, 1 << 20)))
        self.samples.append(sample)
        self.media_bytes += sample.media_bytes

    def close(self) -> None:
        self.tar_file.write(bytes(2 * tarfile.BLOCKSIZE))
        self.tar_file.write(bytes(-self.tar_file.tell() % tarfile.RECORDSIZE))
        self.tar_file.close()


class ShardWriter:
    """Distributes samples over train and val and writes their shards, in order.

    Every ``1 / val_fraction``-th sample goes to val. With two or more samples, both splits get at least one:
    the first sample never goes to val, and the last train sample moves to val if val would stay empty.

    Args:
        submit: runs a function with arguments, perhaps in another process.
    """

    def __init__(
        self,
        dataset_dir: Path,
        submit: Callable[..., Future[Any]],
        val_fraction: float,
        samples_per_shard: int,
        bytes_per_shard: int,
        max_pending: int,
    ) -> None:
        self.dataset_dir, self.submit = dataset_dir, submit
        self.val_fraction, self.max_pending = val_fraction, max_pending
        self.samples_per_shard, self.bytes_per_shard = samples_per_shard, bytes_per_shard
        self.index_writer = IndexWriter(dataset_dir / METADATA_DIR)
        self.open_shards: dict[str, _OpenShard] = {}
        self.num_samples = {"train": 0, "val": 0}
        self.num_shards = {"train": 0, "val": 0}
        self.pending_shards: deque[Future[WrittenShard]] = deque()

    def add_sample(self, sample: StoredSample, spool_file: BinaryIO) -> None:
        # A sample goes to val when the number of val samples that are due passes the next integer.
        samples_seen = sum(self.num_samples.values())
        val_before = int(samples_seen * self.val_fraction + 1e-9)
        val_after = int((samples_seen + 1) * self.val_fraction + 1e-9)
        self._append(sample, "val" if val_after > val_before else "train", spool_file, sample.byte_offset)

    def _append(self, sample: StoredSample, split_name: str, source_file: BinaryIO, byte_offset: int) -> None:
        # A full shard is closed when the next sample arrives; the last one stays open until the end.
        shard = self.open_shards.get(split_name)
        if shard is not None and (
            len(shard.samples) >= self.samples_per_shard
            or shard.media_bytes + sample.media_bytes > self.bytes_per_shard
        ):
            self._close_shard(split_name)
            shard = None
        if shard is None:
            shard_name = f"{split_name}-{self.num_shards[split_name]:06d}.tar"
            shard = self.open_shards[split_name] = _OpenShard(self.dataset_dir / shard_name)
        shard.append(sample, source_file, byte_offset)
        self.num_samples[split_name] += 1

    def _close_shard(self, split_name: str) -> None:
        shard = self.open_shards.pop(split_name)
        shard.close()
        shard_number = sum(self.num_shards.values())
        self.num_shards[split_name] += 1
        self.pending_shards.append(
            self.submit(index_shard, shard.name, shard_number, len(shard.samples), self.dataset_dir)
        )
        while len(self.pending_shards) > self.max_pending:
            self.index_writer.add_shard(self.pending_shards.popleft().result())

    def _move_last_to_val(self) -> None:
        """Moves the last train sample to val, from the end of the open shard."""
        shard = self.open_shards["train"]
        sample = shard.samples.pop()
        byte_offset = shard.tar_file.tell() - sample.byte_length
        self.num_samples["train"] -= 1
        self._append(sample, "val", shard.tar_file, byte_offset)
        shard.tar_file.seek(byte_offset)
        shard.tar_file.truncate()
        if not shard.samples:
            shard.tar_file.close()
            (self.dataset_dir / shard.name).unlink()
            del self.open_shards["train"]

    def finish(self) -> list[WrittenShard]:
        """Writes the last shards of both splits, and the index. Returns all shards."""
        if self.val_fraction > 0 and not self.num_samples["val"] and self.num_samples["train"] > 1:
            self._move_last_to_val()
        for split_name in sorted(self.open_shards):  # train, then val
            self._close_shard(split_name)
        for shard_future in self.pending_shards:
            self.index_writer.add_shard(shard_future.result())
        self.index_writer.finish()
        return self.index_writer.written_shards


def index_shard(shard_name: str, shard_number: int, num_samples: int, dataset_dir: Path) -> WrittenShard:
    """Writes Energon's ``.idx`` file of a tar. Returns the shard with its rows for the index.

    Raises:
        ConvertError: Energon does not find all samples.
    """
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.webdataset.prepare import IndexShardInfo, WebdatasetPreparator

    tar_path = dataset_dir / shard_name
    rows = list(
        WebdatasetPreparator._preprocess_tar(
            shard_name, {shard_name: shard_number}, EPath(dataset_dir), max_parts=0
        )
    )
    found = sum(row.shard_info.count for row in rows if isinstance(row, IndexShardInfo))
    if found != num_samples:
        raise ConvertError(f"{tar_path}: Energon finds {found} of {num_samples} samples")

    durable_files.fsync_path(tar_path)  # here, so that the end need not wait for all of them
    rows = [row for row in rows if not isinstance(row, IndexShardInfo)]
    return WrittenShard(shard_name, num_samples, tar_path.stat().st_size, file_sha256(tar_path), rows)


class IndexWriter:
    """Writes Energon's ``.nv-meta`` for shards that arrive in order, into ``meta_dir`` (a new folder)."""

    def __init__(self, meta_dir: Path) -> None:
        from megatron.energon.epathlib import EPath
        from megatron.energon.flavors.webdataset.indexing import SqliteIndexWriter

        self.meta_dir = meta_dir
        self.meta_dir.mkdir()
        self.sqlite_writer = SqliteIndexWriter(EPath(self.meta_dir / "index.sqlite"))
        self.written_shards: list[WrittenShard] = []

    def add_shard(self, shard: WrittenShard) -> None:
        """Adds a shard to the index. Raises :class:`ConvertError` at a shard that no loader would read."""
        if len(self.written_shards) == MAX_SHARDS:
            raise ConvertError(
                f"{shard.name} is one more than the {MAX_SHARDS} shards that the loader reads of a data set;"
                " convert the input in parts (--part)"
            )
        from megatron.energon.flavors.webdataset.prepare import IndexSample, IndexSamplePart

        self.sqlite_writer.append_samples([row for row in shard.index_rows if isinstance(row, IndexSample)])
        self.sqlite_writer.append_parts([row for row in shard.index_rows if isinstance(row, IndexSamplePart)])
        shard.index_rows = []
        self.written_shards.append(shard)

    def finish(self) -> None:
        """Closes the index and writes the data set's description, as Energon reads it."""
        self.sqlite_writer.close()
        shards_digest = "".join(f"{shard.name} {shard.sha256}\n" for shard in self.written_shards)
        sample_counts = {shard.name: shard.num_samples for shard in self.written_shards}
        split_shards = {
            split: [name for name in sample_counts if name.startswith(f"{split}-")]
            for split in ("train", "val")
        }
        content_id = str(uuid.uuid5(uuid.NAMESPACE_OID, shards_digest))
        write_description(
            self.meta_dir, content_id, sample_counts, {"split_parts": split_shards, "exclude": []}
        )


def write_description(
    meta_dir: Path, content_id: str, sample_counts: dict[str, int], splits: dict[str, Any]
) -> None:
    """Writes a data set's description, as Energon reads it."""
    from megatron.energon import __version__

    facts = {"energon_version": __version__, "shard_counts": sample_counts}
    (meta_dir / "index.uuid").write_text(content_id)
    (meta_dir / ".info.json").write_text(json.dumps(facts, indent=2))
    (meta_dir / "split.yaml").write_text(yaml.safe_dump(splits, sort_keys=False))
    (meta_dir / "dataset.yaml").write_text(yaml.safe_dump(PLAIN_DATASET_FIELDS, sort_keys=False))
