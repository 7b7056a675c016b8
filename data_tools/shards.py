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

from megatron_vl import durable
from megatron_vl.data.source.description import MOST_SHARDS
from megatron_vl.data.source.reading import with_crc
from megatron_vl.errors import UserError

from .media import MediaInfo, describe, read_media

WORK = ".convert"
"""Folder within the data set's folder that holds what an unfinished conversion needs to continue."""


@dataclass
class Entry:
    """One sample on its way into a shard."""

    key: str
    messages: list[dict[str, Any]]
    references: list[tuple[str, Any]]
    infos: list[MediaInfo]
    source: dict[str, Any]
    identity: str = ""
    """The record's id, see :class:`~data_tools.formats.Conversation`, which also has the next two fields."""
    ignored: list[tuple[str, str]] = field(default_factory=list)
    answer_media: int = 0
    tools: list[dict[str, Any]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(info.bytes for info in self.infos)


@dataclass
class Shard:
    """A written shard and its rows for the index."""

    name: str
    samples: int
    bytes: int
    sha256: str
    rows: list[Any] = field(default_factory=list, repr=False)


class ShardError(UserError, ValueError):
    """A shard could not be written as planned; the message names the file."""


def finish_shard(name: str, index: int, entries: list[Entry], root: Path | None, out: Path) -> Shard:
    """Returns the shard of an earlier run if it is intact and has the same samples; otherwise writes it.

    Raises:
        ShardError: a medium changed after it was verified, or Energon does not find all samples.
        OSError: the shard cannot be written.
    """
    manifest = out / WORK / f"{name}.json"
    plan = _digest(
        json.dumps([[e.key, e.messages, e.tools, [i.crc32 for i in e.infos]] for e in entries]).encode()
    )
    if _is_finished(manifest, plan, out / name):
        shard = _indexed(name, index, entries, out)
        durable.sync(_idx(out / name))
        return shard

    work = out / WORK / f"tmp.{os.getpid()}"
    work.mkdir(exist_ok=True)
    _write_tar(work / name, entries, root)
    shard = _indexed(name, index, entries, work)

    durable.put(_idx(work / name), _idx(out / name))
    durable.put(work / name, out / name)
    durable.write(manifest, json.dumps({"plan": plan, "bytes": shard.bytes, "sha256": shard.sha256}).encode())
    return shard


def _idx(tar: Path) -> Path:
    """The path of Energon's file of offsets in a tar."""
    return tar.with_suffix(".tar.idx")


def _is_finished(manifest: Path, plan: str, tar: Path) -> bool:
    """Whether the shard exists, has these samples, and has the bytes that were written."""
    try:
        written = json.loads(manifest.read_text())
        same = written["plan"] == plan and tar.stat().st_size == written["bytes"]
        return same and _sha256(tar) == written["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_tar(path: Path, entries: list[Entry], root: Path | None) -> None:
    """Writes the media's original bytes, without times or owners in the headers."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for entry in entries:
            keys = [f"{i}.{info.suffix}" for i, info in enumerate(entry.infos)]
            _add(tar, f"{entry.key}.json", _sample_json(entry, keys))
            for key, info, (kind, reference) in zip(keys, entry.infos, entry.references, strict=True):
                try:
                    data = read_media(kind, reference, root)
                except ValueError as error:
                    raise ShardError(
                        f"{_where(entry)}: {error}, but was there when it was verified; {AGAIN}"
                    ) from error
                if zlib.crc32(data) != info.crc32:
                    raise ShardError(
                        f"{_where(entry)}: {describe(reference)} changed after it was verified; {AGAIN}"
                    )
                _add(tar, f"{entry.key}.{key}", data)


AGAIN = "start again with --force, or with another --out"


def _where(entry: Entry) -> str:
    return f"{entry.source['file']}: record {entry.source['record']}"


def _indexed(name: str, index: int, entries: list[Entry], folder: Path) -> Shard:
    """Writes Energon's ``.idx`` beside the tar. Returns the shard with its rows for the index."""
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.webdataset.prepare import IndexShardInfo, WebdatasetPreparator

    rows = list(WebdatasetPreparator._preprocess_tar(name, {name: index}, EPath(folder), max_parts=0))
    found = next(row.shard_info.count for row in rows if isinstance(row, IndexShardInfo))
    if found != len(entries):
        raise ShardError(f"{folder / name}: Energon finds {found} of {len(entries)} samples")
    rows = [row for row in rows if not isinstance(row, IndexShardInfo)]
    return Shard(
        name,
        len(entries),
        (folder / name).stat().st_size,
        _sha256(folder / name),
        rows + _media_rows(entries),
    )


def _sample_json(entry: Entry, keys: list[str]) -> bytes:
    """Messages whose media parts name their tar members, and the media's sizes, so that
    packing decodes nothing."""
    names = iter(keys)

    def part(p: dict[str, Any]) -> dict[str, Any]:
        return p if p["type"] == "text" else {"type": p["type"], p["type"]: next(names)}

    messages = [
        m if isinstance(m["content"], str) else {**m, "content": [part(p) for p in m["content"]]}
        for m in entry.messages
    ]
    media = [info.record(key) for key, info in zip(keys, entry.infos, strict=True)]
    tools = {"tools": entry.tools} if entry.tools else {}
    sample = {"messages": messages, **tools, "media": media, "source": entry.source}
    return with_crc(json.dumps(sample, ensure_ascii=False).encode())


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def _media_rows(entries: list[Entry]) -> list[Any]:
    """Sizes as Energon's own ``prepare`` would store them (images as in the file,
    before EXIF orientation)."""
    from megatron.energon.flavors.webdataset.prepare import IndexMediaMetadata
    from megatron.energon.media.metadata import AVMetadata, ImageMetadata, serialize_media_metadata

    rows = []
    for entry in entries:
        for i, info in enumerate(entry.infos):
            if info.kind == "image":
                meta: Any = ImageMetadata(
                    width=info.stored_width, height=info.stored_height, format=info.format, mode=info.mode
                )
            else:
                size = {"video_width": info.width, "video_height": info.height}
                meta = AVMetadata(
                    video_duration=info.frames / info.fps,
                    video_num_frames=info.frames,
                    video_fps=info.fps,
                    **size,
                )

            kind, text = serialize_media_metadata(meta)
            rows.append(
                IndexMediaMetadata(
                    entry_key=f"{entry.key}.{i}.{info.suffix}", metadata_type=kind.value, metadata_json=text
                )
            )

    return rows


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class IndexWriter:
    """Writes Energon's ``.nv-meta`` for shards that arrive in order, into ``meta`` (a new folder)."""

    def __init__(self, meta: Path) -> None:
        from megatron.energon.epathlib import EPath
        from megatron.energon.flavors.webdataset.indexing import SqliteIndexWriter

        self.meta = meta
        self.meta.mkdir()
        self.sqlite = SqliteIndexWriter(EPath(self.meta / "index.sqlite"), enable_media_metadata=True)
        self.shards: list[Shard] = []

    def add(self, shard: Shard) -> None:
        """Adds a shard to the index. Raises :class:`ShardError` at a shard that no loader would read."""
        if len(self.shards) == MOST_SHARDS:
            raise ShardError(
                f"{shard.name} is one more than the {MOST_SHARDS} shards that the loader reads of a data "
                "set; start again with --force and larger shards (--samples-per-shard, --shard-mb), or "
                "convert the input as several data sets"
            )
        from megatron.energon.flavors.webdataset.prepare import (
            IndexMediaMetadata,
            IndexSample,
            IndexSamplePart,
        )

        def rows(kind: type) -> list[Any]:
            return [row for row in shard.rows if isinstance(row, kind)]

        self.sqlite.append_samples(rows(IndexSample))
        self.sqlite.append_parts(rows(IndexSamplePart))
        self.sqlite.append_media_metadata_batch(rows(IndexMediaMetadata))
        shard.rows = []
        self.shards.append(shard)

    def finish(self) -> None:
        """Closes the index and writes the data set's description, as Energon reads it."""
        from megatron.energon import __version__

        self.sqlite.close()
        digest = "".join(f"{shard.name} {shard.sha256}\n" for shard in self.shards)
        (self.meta / "index.uuid").write_text(str(uuid.uuid5(uuid.NAMESPACE_OID, digest)))
        counts = {shard.name: shard.samples for shard in self.shards}
        (self.meta / ".info.json").write_text(
            json.dumps({"energon_version": __version__, "shard_counts": counts}, indent=2)
        )
        splits = {part: [s.name for s in self.shards if s.name.startswith(part)] for part in ("train", "val")}
        (self.meta / "split.yaml").write_text(
            yaml.safe_dump({"split_parts": splits, "exclude": []}, sort_keys=False)
        )
        dataset = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
        (self.meta / "dataset.yaml").write_text(yaml.safe_dump(dataset, sort_keys=False))
