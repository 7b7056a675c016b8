"""Makes a data set of image-text pairs in WebDataset tars that are read where they lie.

Each tar is read once, in order: its pairs are found, images are measured by their headers, and captions are
tokenized. What a tar gave is kept in a file of its own (``tar-index``), so that a killed index continues, and
another one reads only tars that are new or have changed. Then ``.nv-meta`` is written from these files, one
tar after the other. Memory holds the samples of one tar in each process.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from braceexpand import braceexpand
from megatron.energon import __version__ as energon_version
from megatron.energon.flavors.webdataset.itar import ITarFile

from megatron_vl.data.row_encoder import RawSample, RowEncoder, cook_sample
from megatron_vl.data.sample.medium import UnusableError
from megatron_vl.data.source.dataset_description import (
    MAX_SHARDS,
    METADATA_DIR,
    PLAIN_DATASET_FIELDS,
    SIZES_DIR,
)
from megatron_vl.data.source.location import (
    STORE_PREFIX,
    Location,
    is_in_object_store,
    resolve_location,
)
from megatron_vl.data.source.pair_reader import TarMember, iter_members, read_pair
from megatron_vl.data.source.store_reading import StoreFile
from megatron_vl.data.source.tar_list import OFFSETS_FILE, TARS_FILE, PairFields, TarList, tar_stamp
from megatron_vl.system import durable_files
from megatron_vl.system.errors import UserError, is_machine_fault
from megatron_vl.system.partial_folder import open_partial_folder
from megatron_vl.system.progress_bar import progress

from .sample_sizes import ShardSizes, measure_samples, run_tasks, write_sizes

RESULTS_DIR = "tar-index"
RESULT_VERSION = 1
WINDOW_BYTES = 1 << 20
"""Bytes of an object that are read together. What lies between them is skipped."""
MAX_TAIL_BYTES = 1 << 20
"""Largest end of a tar that its writer fills with zeros."""


class TarIndexError(UserError, ValueError):
    """Tars that cannot be indexed. The message says what to do."""


@dataclass
class TarReport:
    """The result of an index."""

    tars: int
    read_tars: int
    """How many were read; the others were known."""
    pairs: int = 0
    broken: Counter[str] = field(default_factory=Counter)
    """How many samples of the tars are no usable pair, by reason. quarantine.jsonl lists them."""
    first_broken: str = ""


def find_tars(inputs: list[str]) -> tuple[Location, list[str]]:
    """The common folder of tars, and their names in it.

    Args:
        inputs: names with braces such as ``{00000..01200}``, folders, or files that list names.

    Raises:
        TarIndexError: there are none, too many, or they have no common folder.
    """
    paths: list[str] = []
    for given in inputs:
        if Path(given).is_dir():
            paths += sorted(map(str, Path(given).glob("*.tar")))
        elif not given.endswith(".tar"):
            paths += Path(given).read_text().split("\n")
        else:
            paths += itertools.islice(braceexpand(given), MAX_SHARDS + 1)
    paths = [path for path in paths if path]
    if not 0 < len(paths) <= MAX_SHARDS:
        raise TarIndexError(f"--input names {len(paths)} tars; 1 to {MAX_SHARDS} are possible")
    stores = {"/".join(path.split("/")[:3]) if is_in_object_store(path) else "" for path in paths}
    if len(stores) > 1 or len({*paths}) < len(paths):
        raise TarIndexError(
            "--input names a tar twice, or tars of several stores; index each store into a folder of its own,"
            " and give data.path as a list"
        )
    scheme = STORE_PREFIX if stores != {""} else ""
    paths = [
        os.path.normpath(path.removeprefix(scheme)) if scheme else os.path.abspath(path) for path in paths
    ]
    root = os.path.commonpath(map(os.path.dirname, paths))
    return resolve_location(scheme + root), [os.path.relpath(path, root) for path in paths]


def index_tars(
    inputs: list[str],
    out_dir: Path,
    fields: PairFields,
    encoder: RowEncoder,
    sizes_name: str,
    num_workers: int,
) -> TarReport:
    """Writes the data set ``out_dir`` of the pairs in tars.

    Args:
        sizes_name: :func:`~megatron_vl.data.source.sample_sizes.compute_tokenization_id` of the encoder.

    Raises:
        TarIndexError: a tar cannot be read, no pair can be used, or the folder cannot be written.
    """
    root, names = find_tars(inputs)
    metadata_dir, results_dir = out_dir / METADATA_DIR, out_dir / RESULTS_DIR
    if (metadata_dir / "dataset.yaml").exists() and not (metadata_dir / TARS_FILE).exists():
        raise TarIndexError(f"--out {out_dir} is a data set that was converted; give another folder")
    try:
        durable_files.make_dirs(results_dir)
        with open_partial_folder(metadata_dir, lambda _: None) as new_dir:
            task = _TarTask(root, names, fields, encoder, sizes_name, results_dir)
            report, result_paths = _read_tars(task, num_workers)
            _write_metadata(task, result_paths, report, new_dir, out_dir)
            if not report.pairs:
                raise TarIndexError(
                    f"none of {report.broken.total()} samples in {len(names)} tars is a usable pair (the"
                    f" first: {report.first_broken}); see {out_dir / 'quarantine.jsonl'}, and give --members"
                )
            for stale_path in {*results_dir.iterdir()} - {*result_paths}:
                stale_path.unlink()
    except OSError as error:
        raise TarIndexError(
            f"{error}. If {out_dir} cannot be written, give another --out; start again: it continues"
        ) from error
    return report


# --- One tar after the other --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TarTask:
    root: Location
    names: list[str]
    fields: PairFields
    encoder: RowEncoder
    sizes_name: str
    results_dir: Path


_current_task: list[_TarTask] = []
"""What is indexed now. Set before the worker processes are forked."""


def _read_tars(task: _TarTask, num_workers: int) -> tuple[TarReport, list[Path]]:
    """Reads the tars of which there is no result yet. Returns the files of the results, in order."""
    _current_task[:] = [task]
    report, result_paths = TarReport(len(task.names), 0), []
    try:
        with progress(len(task.names), "tars", f"indexing the tars of {task.root}") as show_progress:
            for result_path, was_read in run_tasks(_read_tar_once, len(task.names), num_workers):
                result_paths.append(result_path)
                report.read_tars += was_read
                show_progress(1)
    finally:
        _current_task.clear()
    return report, result_paths


def _read_tar_once(number: int) -> tuple[Path, bool]:
    """The file with the result of a tar, and whether the tar was read for it."""
    task = _current_task[0]
    name = task.names[number]
    # A new client: two processes with one connection to a store would read each other's answers.
    tar_path = resolve_location(str(task.root / name))
    try:
        stamp = tar_stamp(tar_path)
        if not stamp:
            raise TarIndexError(f"{tar_path} does not exist; correct --input")
        identity = json.dumps([RESULT_VERSION, name, stamp, vars(task.fields), task.sizes_name])
        result_path = task.results_dir / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.npz"
        if result_path.exists():
            return result_path, False
        pairs = _TarPairs(tar_path, name, task.fields)
        sizes = measure_samples(task.encoder, pairs)
        if tar_stamp(tar_path) != stamp:
            raise TarIndexError(f"{tar_path} changed while it was read; start again when it is complete")
    except OSError as error:
        if not is_machine_fault(error) and not isinstance(error, PermissionError):
            raise
        raise TarIndexError(f"{tar_path} cannot be read ({error}); start again: it continues") from error
    facts = {"stamp": stamp, "digest": pairs.digest.hexdigest(), "refused": pairs.refused}
    with durable_files.open_new_file(result_path) as result_file:
        np.savez_compressed(
            result_file,
            samples=sizes.samples,
            media=sizes.media,
            offsets=np.array(pairs.offsets, "<u8"),
            facts=np.frombuffer(json.dumps([sizes.facts, facts]).encode(), np.uint8),
        )
    return result_path, True


class _TarPairs:
    """Iterates over the usable pairs of a tar as samples without pixels, and notes what else lies there."""

    def __init__(self, tar_path: Location, name: str, fields: PairFields) -> None:
        self.tar_path, self.name, self.fields = tar_path, name, fields
        self.offsets: list[int] = []
        self.refused: list[dict[str, str]] = []
        self.digest = hashlib.sha256()
        self._last_end = 0

    def __iter__(self) -> Iterator[RawSample]:
        tar_bytes = int(tar_stamp(self.tar_path).split()[0])
        with self._open() as raw_file:
            if raw_file.read(2) == b"\x1f\x8b":
                self._refuse("", "compressed tar", "decompress it, so that pairs in it can be read alone")
            else:
                raw_file.seek(0)
                with ITarFile.open(fileobj=raw_file, mode="r:") as tar_file:
                    yield from self._pairs(tar_file, tar_bytes)
        self.offsets.append(self._last_end)

    def _open(self) -> Any:
        if isinstance(self.tar_path, Path):
            return self.tar_path.open("rb")
        return io.BufferedReader(StoreFile(self.tar_path), WINDOW_BYTES)

    def _pairs(self, tar_file: ITarFile, tar_bytes: int) -> Iterator[RawSample]:
        seen_keys: set[int] = set()
        for key, group in itertools.groupby(self._members(tar_file, tar_bytes), lambda member: member.key):
            members = list(group)
            try:
                if hash(key) in seen_keys:
                    raise UnusableError(
                        "key occurs again", f"{members[0].name}: an earlier sample has its key"
                    )
                seen_keys.add(hash(key))
                origin = {"file": self.name, "record": key}
                pair = read_pair(tar_file, members, self.fields, origin)
            except UnusableError as error:
                self._refuse(key, error.reason, str(error))
                continue
            last = members[-1].info
            self.offsets.append(members[0].info.offset)
            self._last_end = last.offset_data + -(-last.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            self.digest.update(pair["json"])
            self.digest.update(str([member.info.size for member in members]).encode())
            yield cook_sample({**pair, "__key__": f"{self.name}[{len(self.offsets) - 1}]"})

    def _members(self, tar_file: ITarFile, tar_bytes: int) -> Iterator[TarMember]:
        """All members. Notes where a tar ends too early: no error says so."""
        name = ""
        try:
            for member in iter_members(tar_file, tar_bytes, self.fields, reads_pixels=False):
                name = member.name
                yield member
            tar_file.fileobj.seek(tar_file.offset)
            problem = "" if not tar_file.fileobj.read(tarfile.BLOCKSIZE).strip(b"\0") else "no header"
            if not problem and tar_bytes - tar_file.offset > MAX_TAIL_BYTES:
                problem = "its end, and more"
        except Exception as error:  # tarfile raises all kinds of errors on a damaged tar
            if is_machine_fault(error) or isinstance(error, OSError):
                raise
            problem = f"{type(error).__name__}: {error}"
        if problem:
            place = f"at byte {tar_file.offset} of {tar_bytes}, after {name or 'the beginning'}"
            self._refuse("", "tar damaged", f"{place}: {problem}; the rest is not read")

    def _refuse(self, key: str, reason: str, detail: str) -> None:
        self.refused.append({"file": self.name, "record": key, "reason": reason, "detail": detail})


# --- All together -------------------------------------------------------------------------------------------


def _write_metadata(
    task: _TarTask, result_paths: list[Path], report: TarReport, new_dir: Path, out_dir: Path
) -> None:
    """Writes ``.nv-meta`` and quarantine.jsonl from the results of all tars."""
    counts: dict[str, int] = {}
    stamps: dict[str, str] = {}
    content_hasher = hashlib.sha256()
    sizes_dir = new_dir / SIZES_DIR / task.sizes_name
    sizes_dir.mkdir(parents=True)
    with (
        durable_files.open_new_file(out_dir / "quarantine.jsonl") as quarantine_file,
        durable_files.open_new_file(new_dir / OFFSETS_FILE) as offsets_file,
    ):

        def sizes_by_tar() -> Iterator[tuple[str, ShardSizes]]:
            for name, result_path in zip(task.names, result_paths, strict=True):
                with np.load(result_path, allow_pickle=False) as result:
                    size_facts, facts = json.loads(bytes(result["facts"]))
                    sizes = ShardSizes(result["samples"], result["media"], size_facts)
                    offsets_file.write(result["offsets"].tobytes())
                for refusal in facts["refused"]:
                    report.broken[refusal["reason"]] += 1
                    report.first_broken = report.first_broken or f"{refusal['reason']}: {refusal['detail']}"
                    quarantine_file.write(json.dumps(refusal).encode() + b"\n")
                content_hasher.update(f"{name} {facts['digest']}\n".encode())
                counts[name], stamps[name] = len(sizes.samples), facts["stamp"]
                report.pairs += len(sizes.samples)
                yield name, sizes

        write_sizes(sizes_dir, sizes_by_tar(), lambda: content_hasher.hexdigest()[:32], lambda _: None)

    (new_dir / "index.uuid").write_text(content_hasher.hexdigest()[:32])
    info = {"energon_version": energon_version, "shard_counts": counts}
    (new_dir / ".info.json").write_text(json.dumps(info, indent=1))
    (new_dir / "split.yaml").write_text(yaml.safe_dump(_splits(counts, out_dir), sort_keys=False))
    (new_dir / "dataset.yaml").write_text(yaml.safe_dump(PLAIN_DATASET_FIELDS, sort_keys=False))
    root = "." if task.root == out_dir.absolute() else task.root
    (new_dir / TARS_FILE).write_text(TarList(root, task.fields, counts, stamps).as_json())


def _splits(counts: dict[str, int], out_dir: Path) -> dict[str, Any]:
    """The splits of an earlier index, with new tars in ``train``. Tars without pairs are left out."""
    try:
        splits = yaml.safe_load((out_dir / METADATA_DIR / "split.yaml").read_text())
    except FileNotFoundError:
        splits = {"split_parts": {"train": []}, "exclude": []}
    parts = splits["split_parts"]
    known = {name for names in parts.values() for name in names}
    parts["train"] = [*parts["train"], *(name for name in counts if name not in known)]
    splits["split_parts"] = {
        split: [name for name in names if counts.get(name)] for split, names in parts.items()
    }
    return splits
