"""Writes tar shards and Energon's own files about them (``.nv-meta``).

A shard gets its name only when it is complete and on the disk. Then it gets a manifest in the work folder,
which tells a continued conversion what need not be written again.

The index is written with Energon's index classes, in the order of the shards, so that the same input gives
the same files whatever the number of processes. The splits are lists of shards (Energon's ratios may leave a
split empty).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import uuid
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron_vl import durable_files
from megatron_vl.data.source.dataset_description import MAX_SHARDS
from megatron_vl.data.source.tolerant_reader import append_crc32
from megatron_vl.errors import UserError

from .formats import Conversation
from .media import MediaInfo, describe_reference, read_media

WORK_FOLDER = ".convert"
"""Folder within the data set's folder that holds what an unfinished conversion needs to continue."""


@dataclass
class ConvertedSample:
    """One sample on its way into a shard."""

    key: str
    conversation: Conversation
    """Media that are written in the record are on the disk by now, and references lead there."""
    media_infos: list[MediaInfo]
    record_source: dict[str, Any]

    @property
    def media_bytes(self) -> int:
        return sum(info.size_bytes for info in self.media_infos)


@dataclass
class WrittenShard:
    """A written shard and its rows for the index."""

    name: str
    num_samples: int
    size_bytes: int
    sha256: str
    index_rows: list[Any] = field(default_factory=list, repr=False)


class ShardError(UserError, ValueError):
    """A shard could not be written as planned; the message names the file."""


def finish_shard(
    shard_name: str,
    shard_index: int,
    shard_samples: list[ConvertedSample],
    media_root: Path | None,
    dataset_dir: Path,
) -> WrittenShard:
    """Returns the shard of an earlier run if it is intact and has the same samples; otherwise writes it.

    Raises:
        ShardError: a medium changed after it was verified, or Energon does not find all samples.
        OSError: the shard cannot be written.
    """
    manifest_path = dataset_dir / WORK_FOLDER / f"{shard_name}.json"
    content_digest = _content_digest(shard_samples)
    if _is_finished(manifest_path, content_digest, dataset_dir / shard_name):
        shard = _index_shard(shard_name, shard_index, shard_samples, dataset_dir)
        durable_files.fsync_path(_offsets_path(dataset_dir / shard_name))
        return shard

    work_dir = dataset_dir / WORK_FOLDER / f"tmp.{os.getpid()}"
    work_dir.mkdir(exist_ok=True)
    _write_tar(work_dir / shard_name, shard_samples, media_root)
    shard = _index_shard(shard_name, shard_index, shard_samples, work_dir)

    durable_files.publish_file(_offsets_path(work_dir / shard_name), _offsets_path(dataset_dir / shard_name))
    durable_files.publish_file(work_dir / shard_name, dataset_dir / shard_name)
    durable_files.write_file(
        manifest_path,
        json.dumps({"plan": content_digest, "bytes": shard.size_bytes, "sha256": shard.sha256}).encode(),
    )
    return shard


def _content_digest(shard_samples: list[ConvertedSample]) -> str:
    """Checksums stand for the media, so that an intact shard is recognised without reading them again."""
    sample_contents = []
    for sample in shard_samples:
        media_checksums = [media_info.crc32 for media_info in sample.media_infos]
        conversation = sample.conversation
        sample_contents.append(
            [sample.key, conversation.messages, conversation.tool_definitions, media_checksums]
        )
    return hashlib.sha256(json.dumps(sample_contents).encode()).hexdigest()


def _offsets_path(tar_path: Path) -> Path:
    """The path of Energon's file of offsets in a tar."""
    return tar_path.with_suffix(".tar.idx")


def _is_finished(manifest_path: Path, content_digest: str, tar_path: Path) -> bool:
    """Whether the shard exists, has these samples, and has the bytes that were written."""
    try:
        manifest_fields = json.loads(manifest_path.read_text())
        is_same = (
            manifest_fields["plan"] == content_digest and tar_path.stat().st_size == manifest_fields["bytes"]
        )
        return is_same and file_sha256(tar_path) == manifest_fields["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_tar(tar_path: Path, shard_samples: list[ConvertedSample], media_root: Path | None) -> None:
    """Writes the media's original bytes, without times or owners in the headers."""
    with tarfile.open(tar_path, "w", format=tarfile.USTAR_FORMAT) as tar_file:
        for sample in shard_samples:
            keys = [f"{i}.{media_info.suffix}" for i, media_info in enumerate(sample.media_infos)]
            _add_member(tar_file, f"{sample.key}.json", _sample_json(sample, keys))
            for key, media_info, (media_kind, reference) in zip(
                keys, sample.media_infos, sample.conversation.media_references, strict=True
            ):
                try:
                    media_bytes = read_media(media_kind, reference, media_root)
                except ValueError as error:
                    raise ShardError(
                        f"{_sample_origin(sample)}: {error}, but was "
                        f"there when it was verified; {RESTART_ADVICE}"
                    ) from error
                if zlib.crc32(media_bytes) != media_info.crc32:
                    raise ShardError(
                        f"{_sample_origin(sample)}: {describe_reference(reference)} "
                        f"changed after it was verified; {RESTART_ADVICE}"
                    )
                _add_member(tar_file, f"{sample.key}.{key}", media_bytes)


RESTART_ADVICE = "start again with --force, or with another --out"


def _sample_origin(sample: ConvertedSample) -> str:
    return f"{sample.record_source['file']}: record {sample.record_source['record']}"


def _index_shard(
    shard_name: str, shard_index: int, shard_samples: list[ConvertedSample], shard_dir: Path
) -> WrittenShard:
    """Writes Energon's ``.idx`` file of a tar. Returns the shard with its rows for the index."""
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.webdataset.prepare import IndexShardInfo, WebdatasetPreparator

    energon_rows = WebdatasetPreparator._preprocess_tar(
        shard_name, {shard_name: shard_index}, EPath(shard_dir), max_parts=0
    )
    index_rows = []
    energon_sample_count = 0
    for row in energon_rows:
        if isinstance(row, IndexShardInfo):
            energon_sample_count = row.shard_info.count
        else:
            index_rows.append(row)

    if energon_sample_count != len(shard_samples):
        raise ShardError(
            f"{shard_dir / shard_name}: Energon finds {energon_sample_count} of {len(shard_samples)} samples"
        )
    return WrittenShard(
        shard_name,
        len(shard_samples),
        (shard_dir / shard_name).stat().st_size,
        file_sha256(shard_dir / shard_name),
        index_rows + _media_rows(shard_samples),
    )


def _sample_json(sample: ConvertedSample, keys: list[str]) -> bytes:
    """The JSON of a sample: its messages, and the sizes of its media, so that packing decodes nothing.

    Args:
        keys: names of the tar members of the media. Media parts of the messages refer to them.
    """
    member_iterator = iter(keys)

    def named_part(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] == "text":
            return part
        return {"type": part["type"], part["type"]: next(member_iterator)}

    messages = []
    for message in sample.conversation.messages:
        if not isinstance(message["content"], str):
            message = {**message, "content": [named_part(part) for part in message["content"]]}
        messages.append(message)

    media_records = [info.loader_record(key) for key, info in zip(keys, sample.media_infos, strict=True)]
    tool_definitions = sample.conversation.tool_definitions
    tools_field = {"tools": tool_definitions} if tool_definitions else {}
    sample_fields = {
        "messages": messages,
        **tools_field,
        "media": media_records,
        "source": sample.record_source,
    }
    return append_crc32(json.dumps(sample_fields, ensure_ascii=False).encode())


def _add_member(tar_file: tarfile.TarFile, member_name: str, member_bytes: bytes) -> None:
    member_info = tarfile.TarInfo(member_name)
    member_info.size = len(member_bytes)
    tar_file.addfile(member_info, io.BytesIO(member_bytes))


def _media_rows(shard_samples: list[ConvertedSample]) -> list[Any]:
    """The rows of the media's sizes that Energon's own ``prepare`` would store: before EXIF orientation."""
    from megatron.energon.flavors.webdataset.prepare import IndexMediaMetadata
    from megatron.energon.media.metadata import AVMetadata, ImageMetadata, serialize_media_metadata

    metadata_rows = []
    for sample in shard_samples:
        for i, media_info in enumerate(sample.media_infos):
            if media_info.kind == "image":
                media_metadata: Any = ImageMetadata(
                    width=media_info.stored_width,
                    height=media_info.stored_height,
                    format=media_info.image_format,
                    mode=media_info.image_mode,
                )
            else:
                media_metadata = AVMetadata(
                    video_width=media_info.width,
                    video_height=media_info.height,
                    video_duration=media_info.num_frames / media_info.fps,
                    video_num_frames=media_info.num_frames,
                    video_fps=media_info.fps,
                )

            metadata_type, metadata_json = serialize_media_metadata(media_metadata)
            metadata_rows.append(
                IndexMediaMetadata(
                    entry_key=f"{sample.key}.{i}.{media_info.suffix}",
                    metadata_type=metadata_type.value,
                    metadata_json=metadata_json,
                )
            )

    return metadata_rows


def file_sha256(file_path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with file_path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class IndexWriter:
    """Writes Energon's ``.nv-meta`` for shards that arrive in order, into ``meta_dir`` (a new folder)."""

    def __init__(self, meta_dir: Path) -> None:
        from megatron.energon.epathlib import EPath
        from megatron.energon.flavors.webdataset.indexing import SqliteIndexWriter

        self.meta_dir = meta_dir
        self.meta_dir.mkdir()
        self.sqlite_writer = SqliteIndexWriter(
            EPath(self.meta_dir / "index.sqlite"), enable_media_metadata=True
        )
        self.written_shards: list[WrittenShard] = []

    def add_shard(self, shard: WrittenShard) -> None:
        """Adds a shard to the index. Raises :class:`ShardError` at a shard that no loader would read."""
        if len(self.written_shards) == MAX_SHARDS:
            raise ShardError(
                f"{shard.name} is one more than the {MAX_SHARDS} shards that the loader reads of a data "
                "set; start again with --force and larger shards (--samples-per-shard, --shard-mb), or "
                "convert the input as several data sets"
            )
        from megatron.energon.flavors.webdataset.prepare import (
            IndexMediaMetadata,
            IndexSample,
            IndexSamplePart,
        )

        def rows_of_type(row_type: type) -> list[Any]:
            return [row for row in shard.index_rows if isinstance(row, row_type)]

        self.sqlite_writer.append_samples(rows_of_type(IndexSample))
        self.sqlite_writer.append_parts(rows_of_type(IndexSamplePart))
        self.sqlite_writer.append_media_metadata_batch(rows_of_type(IndexMediaMetadata))
        shard.index_rows = []
        self.written_shards.append(shard)

    def finish(self) -> None:
        """Closes the index and writes the data set's description, as Energon reads it."""
        from megatron.energon import __version__

        self.sqlite_writer.close()
        shards_digest = "".join(f"{shard.name} {shard.sha256}\n" for shard in self.written_shards)
        (self.meta_dir / "index.uuid").write_text(str(uuid.uuid5(uuid.NAMESPACE_OID, shards_digest)))
        sample_counts = {shard.name: shard.num_samples for shard in self.written_shards}
        (self.meta_dir / ".info.json").write_text(
            json.dumps({"energon_version": __version__, "shard_counts": sample_counts}, indent=2)
        )

        split_shards: dict[str, list[str]] = {"train": [], "val": []}
        for shard in self.written_shards:
            split_shards[shard.name.partition("-")[0]].append(shard.name)
        (self.meta_dir / "split.yaml").write_text(
            yaml.safe_dump({"split_parts": split_shards, "exclude": []}, sort_keys=False)
        )
        dataset_fields = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
        (self.meta_dir / "dataset.yaml").write_text(yaml.safe_dump(dataset_fields, sort_keys=False))
