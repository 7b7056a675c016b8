"""Reads and checks the description of a data set before Energon acts on it.

Energon 7.4.1 imports whatever module ``dataset.yaml`` or a metadataset names, calls what is named there, and
runs Python files beside it (``sample_loader``, ``part_filter``). Names of shards may lead anywhere. A data
set may come from anybody, and this project's loader needs only plain descriptions, so all others are refused.

The time for reading grows with the number of shards, but no shard is opened: one listing of the folder shows
which names are links. One rank of a training run reads the description (:func:`read_description`) and sends
the others what a loader needs (:class:`SplitFacts`, a few hundred bytes for each part of a mixture).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from braceexpand import braceexpand

from megatron_vl.config.run_file import yaml_error_message
from megatron_vl.data.source.blend import AMOUNT_BY_KIND, NAME_FIELD, read_blend_sources
from megatron_vl.data.source.location import (
    DataPath,
    LoaderError,
    Location,
    location_is_file,
    location_size_bytes,
    part_folders,
    read_text_file,
    resolve_location,
)
from megatron_vl.data.source.tar_list import TARS_FILE, TarList, read_tar_list

METADATA_DIR = ".nv-meta"
SIZES_DIR = "sizes"
"""Folder within it that holds the sizes of the samples (:mod:`megatron_vl.data.source.sample_sizes`)."""
MAX_SHARDS = 4_000_000
"""Largest number of shards in a data set; the converter refuses to write more. Energon 7.4.1 keeps about 740
bytes of memory for each shard on every rank that owns a loader. That is 2.8 GiB at this limit, which a data
set of a petabyte reaches in shards of 256 MB."""
MAX_DESCRIPTION_BYTES = 48 * MAX_SHARDS
"""Largest size of a description file in bytes; the converter writes at most 39 bytes per shard."""
MAX_YAML_DEPTH = 100
"""Largest depth of nested mappings and lists."""
CODE_NAMING_KEYS = ("__module__", "__class__", "__function__")
PLAIN_DATASET_FIELDS = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
METADATASET_FIELDS = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
PART_KEYS = {"path", "weight", "repetitions", "split_part", "subflavors"}
"""The keys that a part of a metadataset may have. All others (subsets, joins, other description files,
auxiliary data) change the samples, name code or lead elsewhere."""
MAX_ID_BYTES = 100


@dataclass(frozen=True)
class SplitFacts:
    """What a loader needs to know of one split. Its size does not depend on the number of shards."""

    dataset_identity: dict[str, Any]
    """Determines the order of samples, as JSON values.
    :func:`~megatron_vl.data.source.blend.blend_change_lines` compares two of them."""
    datasets: tuple[tuple[str, str], ...] = ()
    """The data sets that the split reads, in the order of a blend's sources: path, and split of it."""
    datasets_without_sizes: tuple[str, ...] = ()
    """Data sets whose samples' sizes are not stored for the run's tokenizer and chat template."""


@dataclass(frozen=True)
class DatasetDescription:
    """A folder of shards."""

    path: Location
    shards_by_split: dict[str, list[str]]
    """Names of shards by split, with braces expanded, without excluded shards."""
    excluded_names: list[str]
    samples_by_shard: dict[str, int]
    content_id: str
    """An id that the converter makes from the SHA-256 of all shards. It is empty if the data set was prepared
    without one."""
    parts: tuple[DatasetDescription, ...] = ()
    """The data sets of a folder of parts, which are read as one."""

    def split_identity(self, split_name: str) -> dict[str, Any]:
        """The identity by content. It does not contain the path, so that the folder can be moved.

        Raises:
            LoaderError: the split is empty.
        """
        if not (names := self.shards_by_split.get(split_name)):
            filled_splits = sorted(name for name, shards in self.shards_by_split.items() if shards)
            raise LoaderError(
                f"{self.path}: the split {split_name!r} is empty; splits with samples:"
                f" {', '.join(filled_splits) or 'none'}. Give another one, or convert with --val-fraction"
                " (makes val), or with more samples"
            )
        listed_text = "".join(f"{name} {self.samples_by_shard[name]}\n" for name in names)
        listed_text += "".join(f"-{name}\n" for name in self.excluded_names)
        return {
            "content": self.content_id,
            "split": split_name,
            "samples": sum(self.samples_by_shard[name] for name in names),
            "shards": len(names),
            "list": hashlib.sha256(listed_text.encode()).hexdigest()[:16],
        }

    def split_facts(self, split_name: str) -> SplitFacts:
        """The facts of a split. Raises :class:`LoaderError` if it is empty."""
        return SplitFacts(self.split_identity(split_name), ((str(self.path), split_name),))

    def split_parts(self, split_name: str) -> list[tuple[DatasetDescription, str]]:
        """Itself, as :meth:`MetadatasetDescription.split_parts`."""
        return [(self, split_name)]


@dataclass(frozen=True)
class MetadatasetDescription:
    """A file that mixes data sets."""

    path: Location
    mixtures: dict[str, tuple[str, list[dict[str, Any]]]]
    """For each split, the kind of its blend (:data:`~megatron_vl.data.source.blend.AMOUNT_BY_KIND`), empty
    for a single data set; and its parts as the file has them."""
    dataset_by_path: dict[str, DatasetDescription]
    """The data sets that the file names, by their path in it."""

    def split_identity(self, split_name: str) -> dict[str, Any]:
        """The mixture's weights, and the identity of each part.

        The fields ``name`` and ``called`` are only for messages.
        """
        kind, parts = self._mixture(split_name)
        identities = []
        for part, (dataset, part_split) in zip(parts, self.split_parts(split_name), strict=True):
            identity = {key: part[key] for key in ("weight", "repetitions") if part.get(key, 1) != 1}
            identity |= {"name": part["path"], "data": dataset.split_identity(part_split)}
            if called := (part.get("subflavors") or {}).get(NAME_FIELD):
                identity["called"] = str(called)
            identities.append(identity)
        return {"mixture": {kind: identities} if kind else identities[0]}

    def split_facts(self, split_name: str) -> SplitFacts:
        """The facts of a split.

        Raises:
            LoaderError: there is no such split, it is empty in one of the parts, or its weights or
                repetitions make no blend.
        """
        dataset_identity = self.split_identity(split_name)
        # This refuses impossible weights.
        read_blend_sources(dataset_identity, description_path=str(self.path))
        return SplitFacts(
            dataset_identity,
            tuple((str(dataset.path), split) for dataset, split in self.split_parts(split_name)),
        )

    def split_parts(self, split_name: str) -> list[tuple[DatasetDescription, str]]:
        """The data sets of a split, each with the split that is read of it, in the order of its sources."""
        _, parts = self._mixture(split_name)
        return [(self.dataset_by_path[part["path"]], part.get("split_part") or split_name) for part in parts]

    def _mixture(self, split_name: str) -> tuple[str, list[dict[str, Any]]]:
        if split_name not in self.mixtures:
            existing_splits = ", ".join(sorted(map(str, self.mixtures))) or "none"
            raise LoaderError(
                f"{self.path} has no split {split_name!r}; splits that are there: {existing_splits}. Give"
                " another one, or add it"
            )
        return self.mixtures[split_name]


Description = DatasetDescription | MetadatasetDescription


def read_description(data_path: DataPath | Location) -> Description:
    """Reads the description of a data set, or of a metadataset or list and all data sets that it names.

    Raises:
        LoaderError: ``data_path`` is not such a data set, or a description does more than list shards.
    """
    if isinstance(data_path, list):
        datasets = {part["path"]: read_dataset(resolve_location(part["path"])) for part in data_path}
        split_names = {name for dataset in datasets.values() for name in dataset.shards_by_split}
        return MetadatasetDescription(
            Path("data.path"), dict.fromkeys(split_names, ("blend", data_path)), datasets
        )
    dataset_path = resolve_location(data_path) if isinstance(data_path, str) else data_path
    return _read_metadataset(dataset_path) if location_is_file(dataset_path) else read_dataset(dataset_path)


def read_dataset(dataset_path: Location, *, checks_shards: bool = True) -> DatasetDescription:
    """The description of a data set's folder, or of a folder of its parts.

    Args:
        checks_shards: whether to look at the shards too, which one rank does for all.
    """
    if folders := part_folders(dataset_path):
        return _join_parts(dataset_path, [_read_dataset(folder, checks_shards) for folder in folders])
    if not location_is_file(dataset_path / METADATA_DIR / "split.yaml"):
        raise LoaderError(
            f"{dataset_path} is not a data set; give a folder written by `megatron-vl data convert`"
        )
    return _read_dataset(dataset_path, checks_shards)


def _join_parts(dataset_path: Location, parts: list[DatasetDescription]) -> DatasetDescription:
    """Parts as one data set. The name of a shard begins with its part's."""
    shards_by_split: dict[str, list[str]] = {}
    excluded_names: list[str] = []
    samples_by_shard: dict[str, int] = {}
    for part in parts:
        for split_name, shard_names in part.shards_by_split.items():
            shards_by_split.setdefault(split_name, []).extend(f"{part.path.name}/{n}" for n in shard_names)
        excluded_names += (f"{part.path.name}/{name}" for name in part.excluded_names)
        samples_by_shard |= {f"{part.path.name}/{name}": n for name, n in part.samples_by_shard.items()}
    return DatasetDescription(
        *(dataset_path, shards_by_split, excluded_names, samples_by_shard),
        join_content_ids([part.content_id for part in parts]),
        tuple(parts),
    )


def join_content_ids(content_ids: list[str]) -> str:
    """The id of the content of several parts; empty if one has none."""
    if len(content_ids) == 1 or not all(content_ids):
        return content_ids[0] if all(content_ids) else ""
    return hashlib.sha256("\n".join(content_ids).encode()).hexdigest()[:32]


def _read_dataset(dataset_path: Location, checks_shards: bool) -> DatasetDescription:
    metadata_dir = dataset_path / METADATA_DIR
    dataset_fields = _read_description_file(metadata_dir / "dataset.yaml")
    unknown_fields = dataset_fields.keys() - PLAIN_DATASET_FIELDS.keys() - {"subflavors"}
    is_plain = all(dataset_fields.get(key) == value for key, value in PLAIN_DATASET_FIELDS.items())
    if unknown_fields or not is_plain or _names_code(dataset_fields.get("subflavors")):
        raise LoaderError(
            f"{metadata_dir / 'dataset.yaml'} is not the description of a plain CrudeWebdataset (__module__"
            " megatron.energon, __class__ CrudeWebdataset, at most subflavors): it could run code. Convert"
            " the data with `megatron-vl data convert`"
        )

    shards_by_split, excluded_names = _read_splits(metadata_dir / "split.yaml")
    samples_by_shard = _read_description_file(metadata_dir / ".info.json").get("shard_counts")
    samples_by_shard = samples_by_shard if isinstance(samples_by_shard, dict) else {}
    if not all(type(count) is int and count >= 0 for count in samples_by_shard.values()):
        raise LoaderError(
            f"{metadata_dir / '.info.json'}: shard_counts is not a number of samples for each shard"
        )
    if checks_shards:
        shard_names = samples_by_shard.keys() | set().union(*shards_by_split.values())
        if samples := set(excluded_names) - shard_names:
            raise LoaderError(
                f"{metadata_dir / 'split.yaml'} excludes {min(samples)}; only whole shards can be left out"
            )
        if tar_list := read_tar_list(metadata_dir):
            _check_tars(dataset_path, tar_list, shard_names)
        else:
            _check_shard_names(dataset_path, shard_names)

    excluded_set = set(excluded_names)
    kept_shards = {
        split_name: [name for name in shard_names if name not in excluded_set]
        for split_name, shard_names in shards_by_split.items()
    }
    if uncounted := set().union(*kept_shards.values()) - samples_by_shard.keys():
        raise LoaderError(
            f"{metadata_dir / '.info.json'} does not count the samples of {min(uncounted)}; convert the data"
            " again"
        )
    content_id, id_path = "", metadata_dir / "index.uuid"
    if location_is_file(id_path) and location_size_bytes(id_path) <= MAX_ID_BYTES:
        content_id = id_path.read_bytes().decode(errors="replace").strip()
    return DatasetDescription(dataset_path, kept_shards, excluded_names, samples_by_shard, content_id)


def _check_tars(dataset_path: Location, tar_list: TarList, shard_names: set[str]) -> None:
    """Refuses a list of tars that are not those of the splits, or that have changed."""
    # Their folder may hold links to tars elsewhere, so only the names are checked.
    _check_shard_names(dataset_path / METADATA_DIR / TARS_FILE, shard_names)
    if unknown_names := shard_names - tar_list.stamps.keys():
        raise LoaderError(f"{dataset_path / METADATA_DIR / TARS_FILE} does not list {min(unknown_names)}")
    if changed := tar_list.changed_tars():
        names = ", ".join(changed[:5]) + (", ..." if len(changed) > 5 else "")
        raise LoaderError(
            f"{dataset_path}: {len(changed)} of {len(tar_list.stamps)} tars in {tar_list.root} changed or"
            f" went since they were indexed: {names}. Run the same `megatron-vl data index --input` again,"
            " which reads only these"
        )


def _read_splits(split_file: Location) -> tuple[dict[str, list[str]], list[str]]:
    """The shards of each split, and the names of excluded shards."""
    split_fields = _read_description_file(split_file)
    patterns_by_split = split_fields.get("split_parts")
    if (
        split_fields.keys() - {"split_parts", "exclude"}
        or not isinstance(patterns_by_split, dict)
        or _names_code(split_fields)
    ):
        raise LoaderError(f"{split_file}: expected only split_parts and exclude")

    shards_by_split = {
        split_name: expand_shard_names(split_file, patterns)
        for split_name, patterns in patterns_by_split.items()
    }
    return shards_by_split, expand_shard_names(split_file, split_fields.get("exclude") or [])


def _read_description_file(file_path: Location) -> dict[str, Any]:
    """A YAML or JSON object as Energon reads it. Tags, aliases and huge files are refused."""
    if not location_is_file(file_path):
        raise LoaderError(f"{file_path} is missing; convert the data with `megatron-vl data convert`")
    if location_size_bytes(file_path) > MAX_DESCRIPTION_BYTES:
        raise LoaderError(
            f"{file_path} has {location_size_bytes(file_path)} bytes; {MAX_DESCRIPTION_BYTES} are allowed"
        )
    # Only the rank that reads a description imports Energon, which takes seconds.
    from megatron.energon.eyaml import load_yaml

    file_text = ""
    try:
        file_text = read_text_file(file_path)
        if not file_path.name.endswith(".json"):
            _check_yaml(file_path, file_text)
            parsed_fields = load_yaml(file_text.encode())
        else:
            parsed_fields = json.loads(file_text)
    except LoaderError:
        raise
    except yaml.MarkedYAMLError as error:
        raise LoaderError(yaml_error_message(file_path, file_text, error)) from error
    except Exception as error:  # parsers raise all kinds of errors on foreign bytes
        raise LoaderError(f"{file_path} cannot be read: {error}") from error

    if not isinstance(parsed_fields, dict):
        raise LoaderError(f"{file_path} does not hold a mapping")
    return parsed_fields


def _check_yaml(file_path: Location, file_text: str) -> None:
    """Refuses invalid YAML, more than one document, and tags and aliases.

    Energon's own parser is lenient and does not support tags or aliases. PyYAML with libyaml is fast enough.
    """
    nesting_depth = document_count = 0
    for event_number, yaml_event in enumerate(
        yaml.parse(file_text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    ):
        # With aliases, a few lines can expand to billions of values.
        if isinstance(yaml_event, yaml.AliasEvent) or getattr(yaml_event, "tag", None):
            raise LoaderError(f"{file_path} uses YAML tags or aliases")
        nesting_depth += isinstance(yaml_event, yaml.CollectionStartEvent)
        nesting_depth -= isinstance(yaml_event, yaml.CollectionEndEvent)
        document_count += isinstance(yaml_event, yaml.DocumentStartEvent)
        if nesting_depth > MAX_YAML_DEPTH or document_count > 1 or event_number > 2 * MAX_SHARDS + 1000:
            raise LoaderError(
                f"{file_path} cannot be read: it is nested deeper than {MAX_YAML_DEPTH}, holds more than one"
                f" document, or more than {MAX_SHARDS} shards"
            )


def _names_code(field_value: Any) -> bool:
    """Whether a mapping at any depth has one of the keys that tell Energon to load code."""
    if isinstance(field_value, dict):
        return any(key in CODE_NAMING_KEYS or _names_code(inner) for key, inner in field_value.items())
    return isinstance(field_value, list) and any(map(_names_code, field_value))


def expand_shard_names(file_path: Location, shard_patterns: Any) -> list[str]:
    """The names of shards, with braces expanded."""
    if not isinstance(shard_patterns, list) or not all(isinstance(item, str) for item in shard_patterns):
        raise LoaderError(f"{file_path}: a split is a list of shard names")

    shard_names: list[str] = []
    for shard_pattern in shard_patterns:
        if not re.search(r"[{}\\]", shard_pattern):
            shard_names.append(shard_pattern)
            continue
        # braceexpand builds each whole range before it returns the first name.
        for range_start, range_end in re.findall(r"(\d+)\.\.(\d+)", shard_pattern):
            if abs(int(range_end) - int(range_start)) > MAX_SHARDS:
                raise LoaderError(f"{file_path}: more than {MAX_SHARDS} shards")
        shard_names += islice(braceexpand(shard_pattern), max(MAX_SHARDS + 1 - len(shard_names), 0))
    if len(shard_names) > MAX_SHARDS:
        raise LoaderError(f"{file_path}: more than {MAX_SHARDS} shards")
    return shard_names


def _check_shard_names(dataset_dir: Location, shard_names: set[str]) -> None:
    """Refuses names that do not lie inside the folder, with links resolved. Files need not exist.

    Each folder of shards is listed once to find its links. Only links are resolved one by one.
    """

    def refuse(refused_name: str) -> LoaderError:
        return LoaderError(
            f"{dataset_dir / METADATA_DIR}: shard {refused_name[:200]!r} is not inside {dataset_dir}"
        )

    names_by_folder: dict[str, list[str]] = {}
    for shard_name in shard_names:
        parent_path, _, file_name = shard_name.rpartition("/")
        leads_outside = file_name in ("", ".", "..") or ".." in parent_path.split("/")
        if leads_outside or "://" in shard_name or "\0" in shard_name:
            raise refuse(shard_name)
        if shard_name.startswith("/") and not parent_path:
            parent_path = "/"
        names_by_folder.setdefault(parent_path, []).append(file_name)

    if not isinstance(dataset_dir, Path):  # an object store has no links
        for parent_path, folder_names in names_by_folder.items():
            if parent_path.startswith("/"):
                raise refuse(f"{parent_path}/{folder_names[0]}")
        return

    resolved_root = dataset_dir.resolve()
    for parent_path, folder_names in names_by_folder.items():
        shard_folder = resolved_root / parent_path
        if not shard_folder.resolve().is_relative_to(resolved_root):
            raise refuse(f"{parent_path}/{folder_names[0]}")
        link_names: set[str] = set()
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(shard_folder) as entries:
            link_names = {entry.name for entry in entries if entry.is_symlink()}
        for file_name in link_names.intersection(folder_names):
            if not (shard_folder / file_name).resolve().is_relative_to(resolved_root):
                raise refuse(f"{parent_path}/{file_name}" if parent_path else file_name)


def _read_metadataset(metadataset_path: Location) -> MetadatasetDescription:
    if not metadataset_path.name.endswith(".yaml"):
        raise LoaderError(f"{metadataset_path} is neither a data set's folder nor a metadataset (.yaml)")
    fields = _read_description_file(metadataset_path)
    splits = fields.pop("splits", None)
    if fields != METADATASET_FIELDS or not isinstance(splits, dict) or _names_code(splits):
        raise LoaderError(
            f"{metadataset_path} must have __module__: megatron.energon, __class__: MetadatasetV2 and splits,"
            f" without {', '.join(CODE_NAMING_KEYS)} in them, and nothing else"
        )

    mixtures: dict[str, tuple[str, list[dict[str, Any]]]] = {}
    dataset_by_path: dict[str, DatasetDescription] = {}
    for split_name, mixture in splits.items():
        kind = next((kind for kind in AMOUNT_BY_KIND if isinstance(mixture, dict) and kind in mixture), "")
        parts = mixture[kind] if kind else [mixture]
        if kind and len(mixture) > 1 or not isinstance(parts, list) or not all(map(_is_part, parts)):
            raise LoaderError(
                f"{metadataset_path}: the split {split_name!r} is neither a data set nor a"
                f" {' or '.join(AMOUNT_BY_KIND)} of data sets, with at most {', '.join(sorted(PART_KEYS))}"
            )
        mixtures[split_name] = kind, parts
        for path in [part["path"] for part in parts if part["path"] not in dataset_by_path]:
            dataset_by_path[path] = read_dataset(metadataset_path.parent / path)
    return MetadatasetDescription(metadataset_path, mixtures, dataset_by_path)


def _is_part(fields: Any) -> bool:
    """Whether something in a metadataset names a data set by a local path."""
    if not isinstance(fields, dict) or fields.keys() - PART_KEYS:
        return False
    path = fields.get("path")
    return isinstance(path, str) and "://" not in path and isinstance(fields.get("subflavors") or {}, dict)
