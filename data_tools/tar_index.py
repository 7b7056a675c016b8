"""Makes a data set of image-text pairs in WebDataset tars that are read where they lie.

Each tar is read once, in order: its pairs are found, images are measured by their headers, and captions are
tokenized. The result of each tar stays in a file of its own (``tar-index``), so that a killed index
continues, and a later one reads only tars that are new or have changed. ``.nv-meta`` is written from these
files, one after the other, so that a process holds one tar's samples in memory.
"""

import hashlib
import itertools
import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from megatron.energon.flavors.webdataset.itar import ITarFile

from megatron_vl.data.row_encoder import RawSample, RowEncoder, cook_sample
from megatron_vl.data.sample.medium import UnusableError
from megatron_vl.data.source.dataset_description import (
    MAX_SHARDS,
    METADATA_DIR,
    SIZES_DIR,
    expand_shard_names,
)
from megatron_vl.data.source.location import (
    LoaderError,
    Location,
    is_in_object_store,
    resolve_location,
    store_url,
)
from megatron_vl.data.source.pair_reader import HEAD_BYTES, iter_members, read_pair
from megatron_vl.data.source.store_reading import StoreFile
from megatron_vl.data.source.tar_list import SPANS_FILE, TARS_FILE, PairFields, tar_stamp
from megatron_vl.system import durable_files
from megatron_vl.system.partial_folder import open_partial_folder
from megatron_vl.system.progress_bar import progress

from .sample_sizes import ARRAY_DTYPES, ShardSizes, measure_samples, write_sizes
from .shards import write_description
from .worker_pool import run_tasks

RESULTS_DIR = "tar-index"
RESULT_VERSION = 4
MAX_TAIL_BYTES = 1 << 20
"""Largest number of zeros with which a writer ends a tar."""


@dataclass
class TarReport:
    read_tars: int = 0
    """How many were read; the results of the others were there."""
    pairs: int = 0
    broken: Counter[str] = field(default_factory=Counter)
    """How many samples of the tars are no usable pair, by reason. quarantine.jsonl lists them."""


@dataclass(frozen=True)
class TarIndex:
    root: Location
    names: list[str]
    """Paths of the tars below ``root``."""
    out_dir: Path
    fields: PairFields
    encoder: RowEncoder
    sizes_name: str
    """:func:`~megatron_vl.data.source.sample_sizes.compute_tokenization_id` of the encoder."""


def find_tars(inputs: list[str]) -> tuple[Location, list[str]]:
    """The common folder of tars, and their paths below it.

    Args:
        inputs: names with braces such as ``{00000..01200}``, folders, or files that list names.

    Raises:
        LoaderError: there are none, too many, or they have no common folder; or as
            :func:`~megatron_vl.data.source.location.resolve_location`.
    """
    paths: list[str] = []
    for given in inputs:
        if Path(given).is_dir():
            paths += sorted(map(str, Path(given).glob("*.tar")))
        elif given.endswith(".tar"):
            paths += expand_shard_names(Path("--input"), [given])
        else:
            paths += filter(None, Path(given).read_text().split("\n"))
    paths = [store_url(path) for path in paths]
    stores = {"/".join(path.split("/")[:3]) if is_in_object_store(path) else "" for path in paths}
    if not 0 < len(paths) <= MAX_SHARDS or len(stores) > 1 or len({*paths}) < len(paths):
        raise LoaderError(
            f"--input names {len(paths)} tars, {len({*paths})} different ones; it takes 1 to {MAX_SHARDS}"
            " different tars of one store. Index each store into a folder of its own, and mix them"
        )
    scheme = "".join(paths[0].rpartition("://")[:2])
    absolute = os.path.normpath if scheme else os.path.abspath
    paths = [absolute(path.removeprefix(scheme)) for path in paths]
    root = os.path.commonpath(map(os.path.dirname, paths))
    return resolve_location(scheme + root), [os.path.relpath(path, root) for path in paths]


def index_tars(index: TarIndex, num_workers: int) -> TarReport:
    """Writes the data set of the pairs in tars.

    Raises:
        LoaderError: a tar is missing, or no pair can be used.
        OSError: a tar cannot be read, or the folder cannot be written. The next call continues.
    """
    metadata_dir, results_dir = index.out_dir / METADATA_DIR, index.out_dir / RESULTS_DIR
    if (metadata_dir / "dataset.yaml").exists() and not (metadata_dir / TARS_FILE).exists():
        raise LoaderError(f"--out {index.out_dir} is a data set that was converted; give another folder")
    report, result_paths = TarReport(), []
    read_tar = partial(_read_tar_once, index)
    durable_files.make_dirs(results_dir)
    with open_partial_folder(metadata_dir, lambda _: None) as new_dir:
        with progress(len(index.names), "tars", f"indexing the tars of {index.root}") as show_progress:
            for result_path, was_read in run_tasks(read_tar, len(index.names), num_workers):
                result_paths.append(result_path)
                report.read_tars += was_read
                show_progress(1)
        _write_metadata(index, result_paths, report, new_dir)
        for stale_path in {*results_dir.iterdir()} - {*result_paths}:
            stale_path.unlink()
        if not report.pairs:
            raise LoaderError(
                f"none of {report.broken.total()} samples in {len(index.names)} tars is a usable pair"
                f" ({dict(report.broken)}); see {index.out_dir / 'quarantine.jsonl'}, and give --members"
            )
    return report


# --- One tar ------------------------------------------------------------------------------------------------


def _read_tar_once(index: TarIndex, number: int) -> tuple[Path, bool]:
    """The file with the result of a tar, and whether the tar was read for it."""
    name = index.names[number]
    # A new client: two processes with one connection to a store would read each other's answers.
    tar_path = resolve_location(str(index.root / name))
    if not (stamp := tar_stamp(tar_path)):
        raise LoaderError(f"{tar_path} does not exist; correct --input")
    identity = json.dumps([RESULT_VERSION, name, stamp, vars(index.fields), index.sizes_name])
    result_path = index.out_dir / RESULTS_DIR / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.npz"
    if result_path.exists():
        return result_path, False
    pairs = _TarPairs(tar_path, name, index.fields, int(stamp.split()[0]))
    sizes = measure_samples(index.encoder, pairs)
    digest = pairs.digest.hexdigest()
    facts = {"sizes": sizes.facts, "stamp": stamp, "refused": pairs.refused, "digest": digest}
    arrays: dict[str, Any] = {**sizes.arrays, "spans": np.array(pairs.spans, "<u8")}
    arrays["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    with durable_files.open_new_file(result_path) as result_file:
        np.savez_compressed(result_file, **arrays)
    return result_path, True


@dataclass
class _TarPairs:
    """Iterates over the usable pairs of a tar as samples without pixels, and notes what else lies there."""

    tar_path: Location
    name: str
    fields: PairFields
    tar_bytes: int
    spans: list[tuple[int, int]] = field(default_factory=list)
    refused: list[dict[str, str]] = field(default_factory=list)
    digest: Any = field(default_factory=hashlib.sha256)

    def __iter__(self) -> Iterator[RawSample]:
        raw_file: Any = (
            self.tar_path.open("rb") if isinstance(self.tar_path, Path) else StoreFile(self.tar_path)
        )
        seen_keys, last_name = set[str](), "the beginning"
        with raw_file, ITarFile.open(fileobj=raw_file, mode="r:") as tar_file:
            found = iter_members(tar_file, self.tar_bytes, self.fields, HEAD_BYTES)
            for key, group in itertools.groupby(found, lambda member: member.key):
                members = list(group)
                last_name = members[-1].name
                try:
                    if key in seen_keys:
                        raise UnusableError("key occurs again", members[0].name)
                    seen_keys.add(key)
                    pair = read_pair(members, self.fields, {"file": self.name, "record": key})
                except UnusableError as error:
                    self._refuse(key, error.reason, str(error))
                    continue
                self.digest.update(pair["json"] + str([member.info.size for member in members]).encode())
                last = members[-1].info
                self.spans.append((members[0].info.offset, min(last.offset_data + last.size, self.tar_bytes)))
                yield cook_sample({**pair, "__key__": f"{self.name}[{len(self.spans) - 1}]"})

            # Where a tar ends too early, tarfile raises no error.
            raw_file.seek(tar_file.offset)
            is_damaged = bool(raw_file.read(tarfile.BLOCKSIZE).strip(b"\0"))
            if is_damaged or self.tar_bytes - tar_file.offset > MAX_TAIL_BYTES:
                problem = "no header of a file" if is_damaged else "more than one tar"
                place = f"at byte {tar_file.offset:,} of {self.tar_bytes:,}, after {last_name}"
                self._refuse("", "tar damaged", f"{place}: {problem}; what follows is not read")

    def _refuse(self, key: str, reason: str, detail: str) -> None:
        self.refused.append({"file": self.name, "record": key, "reason": reason, "detail": detail})


# --- All tars -----------------------------------------------------------------------------------------------


def _write_metadata(index: TarIndex, result_paths: list[Path], report: TarReport, new_dir: Path) -> None:
    """Writes ``.nv-meta`` and quarantine.jsonl from the results of all tars."""
    counts: dict[str, int] = {}
    stamps: dict[str, str] = {}
    content_hasher = hashlib.sha256()

    def sizes_by_tar() -> Iterator[tuple[str, ShardSizes]]:
        for name, result_path in zip(index.names, result_paths, strict=True):
            with np.load(result_path, allow_pickle=False) as result:
                facts = json.loads(result["facts"].tobytes())
                spans_file.write(result["spans"].tobytes())
                arrays = {key: result[key] for key in ARRAY_DTYPES}
            for refusal in facts["refused"]:
                report.broken[refusal["reason"]] += 1
                quarantine_file.write(json.dumps(refusal).encode() + b"\n")
            content_hasher.update(f"{name} {facts['digest']}\n".encode())
            counts[name], stamps[name] = len(arrays["samples"]), facts["stamp"]
            report.pairs += counts[name]
            yield name, ShardSizes(arrays, facts["sizes"])

    sizes_dir = new_dir / SIZES_DIR / index.sizes_name
    sizes_dir.mkdir(parents=True)
    with (
        durable_files.open_new_file(index.out_dir / "quarantine.jsonl") as quarantine_file,
        (new_dir / SPANS_FILE).open("wb") as spans_file,
    ):
        write_sizes(sizes_dir, sizes_by_tar(), lambda: content_hasher.hexdigest()[:32], lambda _: None)
    root = "." if index.root == index.out_dir.absolute() else index.root
    write_description(new_dir, content_hasher.hexdigest()[:32], counts, _splits(index.out_dir, counts))
    tar_list = {"root": str(root), "fields": vars(index.fields), "stamps": stamps}
    (new_dir / TARS_FILE).write_text(json.dumps(tar_list, indent=1))


def _splits(out_dir: Path, counts: dict[str, int]) -> dict[str, Any]:
    """The splits of an earlier index, and new tars in ``train``. Tars in none, or without pairs, stay out."""
    split_path = out_dir / METADATA_DIR / "split.yaml"
    splits = yaml.safe_load(split_path.read_text()) if split_path.exists() else {"split_parts": {}}
    info_path = split_path.with_name(".info.json")
    known = json.loads(info_path.read_text())["shard_counts"] if info_path.exists() else {}
    parts: dict[str, list[str]] = {"train": []} | {
        split: expand_shard_names(split_path, names or []) for split, names in splits["split_parts"].items()
    }
    parts["train"] += counts.keys() - {*itertools.chain(*parts.values()), *filter(known.get, known)}
    parts = {split: sorted(name for name in names if counts.get(name)) for split, names in parts.items()}
    return {"exclude": [], **splits, "split_parts": parts}
