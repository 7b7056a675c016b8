"""Indexes tars that another program wrote, where they are: nothing is copied or changed.

Beside each tar lies Energon's file of offsets (``.tar.idx``), and in the folder of the tars ``.nv-meta`` with
Energon's description and ``members.json`` (:mod:`megatron_vl.data.source.pair_members`). A sample is the
successive members of one name. A tar that is cut short has the samples before the cut.
"""

from __future__ import annotations

import hashlib
import shutil
import tarfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from braceexpand import braceexpand
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.itar import TarIndexWriter
from megatron.energon.flavors.webdataset.prepare import IndexSample, IndexSamplePart, WebdatasetPreparator

from megatron_vl.data.source.dataset_description import METADATA_DIR
from megatron_vl.data.source.pair_members import MEMBERS_FILE, PairMembers
from megatron_vl.system import durable_files
from megatron_vl.system.errors import UserError
from megatron_vl.system.progress_bar import progress

from .convert import WorkerPool
from .shards import IndexWriter, WrittenShard

DIGEST_FILE = "tars.sha256"
"""A hash of what was indexed, and how."""


class TarIndexError(UserError, ValueError):
    """Tars that cannot be indexed. The message says why."""


@dataclass
class _TarSamples:
    """The samples of one tar."""

    rows: list[IndexSample] = field(default_factory=list)
    parts: list[IndexSamplePart] = field(default_factory=list)
    end: int = 0
    """The byte after the last sample."""
    problem: str = ""
    """Why the tar cannot be read to its end."""


def index_tars(patterns: Sequence[str], members: PairMembers, num_workers: int = 1) -> tuple[Path, list[str]]:
    """Writes the index of tars in one folder, unless it is there.

    Args:
        patterns: paths of tars, with braces (``{00000..00012}.tar``), or text files with such a path a line.

    Returns:
        The folder, and a line for each tar that is damaged.

    Raises:
        TarIndexError: there is no tar, they lie in several folders, or another index is there.
    """
    paths = _expand_paths(patterns)
    folder = paths[0].parent
    names = [path.name for path in paths]
    metadata_dir = folder / METADATA_DIR
    digest = _content_digest(paths, members)
    if metadata_dir.exists():
        if not (metadata_dir / MEMBERS_FILE).is_file() or (metadata_dir / DIGEST_FILE).read_text() != digest:
            raise TarIndexError(
                f"{metadata_dir} is an index of other tars or with other members; remove it first"
            )
        return folder, []

    try:
        return folder, _write_index(folder, names, members, digest, num_workers)
    except OSError as error:
        raise TarIndexError(
            f"{folder} cannot be read or written ({error}); fix this and start again"
        ) from error


def _write_index(
    folder: Path, names: list[str], members: PairMembers, digest: str, num_workers: int
) -> list[str]:
    """Writes the index of tars. Returns a line for each that is damaged."""
    partial_dir = folder / f"{METADATA_DIR}{durable_files.PARTIAL_SUFFIX}"
    shutil.rmtree(partial_dir, ignore_errors=True)
    problems = []
    with WorkerPool(num_workers) as pool, progress(len(names), "tars", f"indexing {folder}") as show_progress:
        writer = IndexWriter(partial_dir)
        tasks = ((folder, name, number, members) for number, name in enumerate(names))
        for shard, problem in pool.results_in_order(_index_tar, tasks):
            writer.add_shard(shard)
            problems += [f"{shard.name}: {problem}"] if problem else []
            show_progress(1)
        if not sum(shard.num_samples for shard in writer.written_shards):
            raise TarIndexError(f"the tars in {folder} have no sample")
        writer.finish({"train": names})
    (partial_dir / MEMBERS_FILE).write_text(members.as_json())
    (partial_dir / DIGEST_FILE).write_text(digest)
    durable_files.fsync_tree(partial_dir)
    durable_files.rename_path(partial_dir, folder / METADATA_DIR)
    return problems


def _expand_paths(patterns: Sequence[str]) -> list[Path]:
    paths = []
    for pattern in patterns:
        is_list = Path(pattern).suffix == ".txt"
        lines = Path(pattern).read_text().split("\n") if is_list else [pattern]
        paths += [Path(name) for line in lines if line.strip() for name in braceexpand(line.strip())]
    if not paths:
        raise TarIndexError("--input names no tar")
    for path in paths:
        if not path.is_file() or path.suffix != ".tar":
            raise TarIndexError(f"--input {path} is not a local .tar file")
    if len({path.parent.resolve() for path in paths}) > 1:
        raise TarIndexError(
            f"--input: {paths[0]} and {paths[-1]} are in different folders; index each folder, and mix them"
            " in data.path"
        )
    if repeated := [name for name, count in Counter(paths).items() if count > 1]:
        raise TarIndexError(f"--input names {repeated[0]} twice")
    return paths


def _content_digest(paths: Sequence[Path], members: PairMembers) -> str:
    """Changes with the tars' names and sizes and with the members that are read."""
    facts = [(path.name, path.stat().st_size) for path in paths]
    return hashlib.sha256(repr((facts, members)).encode()).hexdigest()


def _index_tar(folder: Path, name: str, number: int, members: PairMembers) -> tuple[WrittenShard, str]:
    """Writes the offsets of a tar's samples. Returns its rows for the index, and what is wrong with it."""
    path = folder / name
    samples = _read_samples(path, number)
    with TarIndexWriter(EPath(path)) as offsets:
        for row in samples.rows:
            offsets.append(row.byte_offset)
        offsets.append(samples.end)
    durable_files.fsync_path(path.with_suffix(".tar.idx"))
    # The id of the content changes with what is read of it.
    places = [(row.sample_key, row.byte_offset, row.byte_size) for row in samples.rows]
    digest = hashlib.sha256(repr((members, places)).encode()).hexdigest()
    rows = [*samples.rows, *samples.parts]
    return WrittenShard(name, len(samples.rows), path.stat().st_size, digest, rows), samples.problem


def _read_samples(path: Path, number: int) -> _TarSamples:
    """The samples of a tar, without one that is cut short."""
    samples, size = _TarSamples(), path.stat().st_size
    last_key, part_names = None, set[str]()
    try:
        with tarfile.open(path, "r:") as tar:
            for member, key, part_name in WebdatasetPreparator._iter_tar_sample_members(tar):
                if key != last_key or part_name in part_names:  # a second pair of one name is one of its own
                    last_key, part_names = key, set()
                    # Keys need not be unique over the tars, or in one.
                    row = IndexSample(
                        tar_file_id=number,
                        sample_key=f"{path.name}/{key}#{len(samples.rows)}",
                        sample_index=len(samples.rows),
                        byte_offset=member.offset,
                        byte_size=0,
                    )
                    samples.rows.append(row)
                samples.end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                if samples.end > size:
                    samples.end = samples.rows.pop().byte_offset
                    raise tarfile.ReadError(f"{member.name} is cut short")
                part_names.add(part_name)
                part = IndexSamplePart(
                    tar_file_id=number,
                    sample_index=len(samples.rows) - 1,
                    part_name=part_name,
                    content_byte_offset=member.offset_data,
                    content_byte_size=member.size,
                )
                samples.parts.append(part)
    except (tarfile.TarError, EOFError) as error:
        samples.problem = str(error)
    samples.parts = [part for part in samples.parts if part.sample_index < len(samples.rows)]
    ends = [*(row.byte_offset for row in samples.rows[1:]), samples.end]
    for row, end in zip(samples.rows, ends, strict=False):  # without samples, there is one end too many
        row.byte_size = end - row.byte_offset
    return samples
