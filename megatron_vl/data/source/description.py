"""Reads and checks the description of a data set before Energon acts on it.

Energon 7.4.1 imports whatever module ``dataset.yaml`` or a metadataset names, calls what is named there, and
runs Python files beside it (``sample_loader``, ``part_filter``). Names of shards may lead anywhere. A data
set may come from anybody, and this project's loader needs only plain descriptions, so all others are refused.

Reading is linear in the number of shards and opens none of them: one listing of the folder shows which names
are links. One rank of a training run reads the description (:func:`read_description`) and sends the others
what a loader needs (:class:`SplitFacts`, a few hundred bytes for each part of a mixture).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from braceexpand import braceexpand

from megatron_vl.config.parsing import yaml_fault
from megatron_vl.data.source.blend import GIVEN_NAME, WEIGHTED, named, sources_of
from megatron_vl.data.source.location import Location, is_file, read_text, size, suffix
from megatron_vl.errors import UserError

META = ".nv-meta"
SIZES = "sizes"
"""Folder within it that holds the sizes of the samples (:mod:`megatron_vl.data.source.sizes`)."""
MOST_SHARDS = 4_000_000
"""Largest number of shards in a data set; the converter refuses to write more. Energon 7.4.1 keeps about 740
bytes of memory for each shard on every rank that owns a loader. That is 2.8 GiB at this limit, which a data
set of a petabyte reaches in shards of 256 MB."""
LARGEST = 48 * MOST_SHARDS
"""Largest size of a description file in bytes; the converter writes at most 39 bytes per shard."""
DEEPEST_YAML = 100
"""Largest depth of nested mappings and lists."""
NAMING = ("__module__", "__class__", "__function__")
DATASET = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
METADATASETS = ("Metadataset", "MetadatasetV2")
METADATASET_KEYS = {
    *(
        "path",
        "blend",
        "blend_epochized",
        "datasets",
        "weight",
        "repetitions",
        "split_part",
        "subflavors",
    ),
    *("subset", "range"),
}
"""The keys that a split of a metadataset may have. All others (joins, other description files, auxiliary
data) name code or lead elsewhere."""
DEFAULTS = {"weight": 1, "repetitions": 1, "subset": None}
"""Energon's defaults for keys that a metadataset does not set."""
KINDS = {
    "content": "one data set",
    "mixture": "a metadataset",
    "data": "a data set or metadataset by its path",
    "blend": "a blend by weights",
    "blend_epochized": "a blend by repetitions",
    "datasets": "a list of datasets",
}
"""The kind of a part of an identity, by the field that marks it."""
FOR_MESSAGES = ("name", "called")
"""Fields of an identity that say nothing about content."""
DEEPEST = 8
"""Largest depth of nested metadatasets."""
LONGEST_ID = 100
"""Largest size of an id in bytes."""


class DescriptionError(UserError, ValueError):
    """A description that is refused. The message names the file and what is wrong with it."""


class LoaderError(UserError, ValueError):
    """A data set or a setting that cannot be loaded. The message says what to change."""


@dataclass(frozen=True)
class SplitFacts:
    """What a loader needs to know of one split. Its size does not depend on the number of shards."""

    identity: dict[str, Any]
    """What determines the order of samples, as JSON values. Compare identities with :func:`difference`."""
    samples: int | None
    """Number of samples over all ranks; None for a metadataset, whose parts start over at different times."""
    largest_shard: int
    """Number of samples in the largest shard."""
    without_sizes: tuple[str, ...] = ()
    """Data sets whose samples' sizes are not stored for the run's tokenizer and chat template."""


@dataclass(frozen=True)
class DataSet:
    """A folder of shards."""

    path: Location
    splits: dict[str, list[str]]
    """Names of shards by split, with braces expanded, without excluded shards."""
    excluded: list[str]
    """Shards and samples (``shard/key``) that are left out."""
    counts: dict[str, int]
    """Samples of each shard."""
    uuid: str
    """An id that the converter makes from the SHA-256 of all shards;
    empty if the data set was prepared without one."""

    def identity(self, split: str) -> dict[str, Any]:
        """The identity by content. It does not contain the path, so that the folder can be moved."""
        names = self._shards(split)
        listed = "".join(f"{name} {self.counts.get(name)}\n" for name in names)
        listed += "".join(f"-{name}\n" for name in self.excluded)
        digest = hashlib.sha256(listed.encode()).hexdigest()[:16]
        return {
            "content": self.uuid,
            "split": split,
            "samples": self._samples(split),
            "shards": len(names),
            "list": digest,
        }

    def facts(self, split: str) -> SplitFacts:
        """The facts of a split. Raises :class:`LoaderError` if it is empty."""
        names = self._shards(split)
        identity = self.identity(split)
        largest = max(self.counts.get(name, 0) for name in names)
        return SplitFacts(identity, self._samples(split), largest)

    def _shards(self, split: str) -> list[str]:
        names = self.splits.get(split) or []
        if not names:
            filled = ", ".join(sorted(name for name, held in self.splits.items() if held)) or "none"
            raise LoaderError(
                f"{self.path}: the split {split!r} is empty; splits with samples: {filled}. Give another one,"
                " or convert with --val-fraction (makes val), or with more samples"
            )
        return names

    def _samples(self, split: str) -> int | None:
        try:
            return sum(self.counts[name] for name in self.splits[split])
        except KeyError:  # a data set prepared by hand, which Energon refuses with a message of its own
            return None


@dataclass(frozen=True)
class Metadataset:
    """A file that mixes data sets."""

    path: Location
    splits: dict[str, Any]
    """The splits as the file has them."""
    inner: dict[str, DataSet | Metadataset]
    """The data sets that the file names, by their path in it."""

    def identity(self, split: str) -> dict[str, Any]:
        """The mixture's structure and weights, and the identity of each part.
        ``name`` and ``called`` are for messages only."""
        return {"mixture": self._identity(self._split(split), split)}

    def facts(self, split: str) -> SplitFacts:
        """The facts of a split.

        Raises:
            LoaderError: there is no such split, or it is empty in one of the parts.
            BlendError: its weights or repetitions make no blend.
        """
        parts = [data.facts(part) for data, part in self.parts(split)]
        largest = max((part.largest_shard for part in parts), default=0)
        identity = self.identity(split)
        sources_of(identity, where=str(self.path))  # refuses impossible weights before Energon meets them
        return SplitFacts(identity, None, largest)

    def parts(self, split: str) -> list[tuple[DataSet | Metadataset, str]]:
        """The data sets and metadatasets that a split names, each with the split that is read of it."""
        return list(self._parts(self._split(split), split))

    def _split(self, split: str) -> Any:
        if split not in self.splits:
            there = ", ".join(sorted(map(str, self.splits))) or "none"
            raise LoaderError(
                f"{self.path} has no split {split!r}; splits that are there: {there}. Give another one, or"
                " add it"
            )
        return self.splits[split]

    def _identity(self, value: Any, split: str) -> Any:
        if isinstance(value, list):
            return [self._identity(inner, split) for inner in value]
        if not isinstance(value, dict):
            return value
        split = value.get("split_part") or split
        found = {
            key: self._identity(inner, split)
            for key, inner in value.items()
            if key not in ("path", "split_part", "subflavors")
            and not (key in DEFAULTS and inner == DEFAULTS[key])
        }

        if "path" in value:
            found |= {"name": value["path"], "data": self.inner[value["path"]].identity(split)}
            flavors = value.get("subflavors")
            if isinstance(flavors, dict) and flavors.get(GIVEN_NAME):
                found["called"] = str(flavors[GIVEN_NAME])

        return found

    def _parts(self, value: Any, split: str) -> Iterator[tuple[DataSet | Metadataset, str]]:
        if isinstance(value, list):
            for inner in value:
                yield from self._parts(inner, split)
        elif isinstance(value, dict):
            split = value.get("split_part") or split
            if "path" in value:
                yield self.inner[value["path"]], split
            for key, inner in value.items():
                if key != "subflavors":
                    yield from self._parts(inner, split)


Description = DataSet | Metadataset


def read_description(path: Location) -> Description:
    """Reads the description of a data set, or of a metadataset and all data sets that it names.

    Raises:
        LoaderError: ``path`` is not such a data set.
        DescriptionError: a description does more than list shards.
    """
    if not is_file(path) and not is_file(path / META / "split.yaml"):
        raise LoaderError(
            f"data.path {path} is not a data set; give a folder written by `megatron-vl data convert`"
        )
    return _described(path, 0, {})


def _described(path: Location, depth: int, read: dict[Location, Description]) -> Description:
    """The description of one folder or file.

    Args:
        depth: number of metadatasets around it.
        read: descriptions that were already read, so that each is read only once.
    """
    found = read.get(path)
    if found is None:
        found = read[path] = _metadataset(path, depth, read) if is_file(path) else _data_set(path)
    return found


def _data_set(path: Location) -> DataSet:
    meta = path / META
    described = _read(meta / "dataset.yaml")
    rest = {key: value for key, value in described.items() if key not in DATASET and key != "subflavors"}
    if (
        rest
        or {key: described.get(key) for key in DATASET} != DATASET
        or _names_code(described.get("subflavors"))
    ):
        raise DescriptionError(
            f"{meta / 'dataset.yaml'} is not the description of a plain CrudeWebdataset (__module__"
            " megatron.energon, __class__ CrudeWebdataset, at most subflavors): it could run code. Convert"
            " the data with `megatron-vl data convert`"
        )

    split_file = meta / "split.yaml"
    split = _read(meta / "split.yaml")
    parts = split.get("split_parts")
    if split.keys() - {"split_parts", "exclude"} or not isinstance(parts, dict) or _names_code(split):
        raise DescriptionError(f"{split_file}: expected only split_parts and exclude")
    splits = {name: _expanded(split_file, shards) for name, shards in parts.items()}
    excluded = _expanded(split_file, split.get("exclude") or [])

    counts = _read(meta / ".info.json").get("shard_counts")
    counts = counts if isinstance(counts, dict) else {}
    if not all(type(count) is int and count >= 0 for count in counts.values()):
        raise DescriptionError(
            f"{meta / '.info.json'}: shard_counts is not a number of samples for each shard"
        )
    _check_shards(path, {name for names in splits.values() for name in names} | counts.keys())

    left_out = set(excluded)
    kept = {part: [name for name in names if name not in left_out] for part, names in splits.items()}
    return DataSet(path, kept, excluded, counts, _uuid(meta / "index.uuid"))


def _uuid(path: Location) -> str:
    if not is_file(path) or size(path) > LONGEST_ID:
        return ""
    return read_text(path, errors="replace").strip()


def _read(path: Location) -> dict[str, Any]:
    """A YAML or JSON object as Energon reads it. Tags, aliases and huge files are refused."""
    if not is_file(path):
        raise DescriptionError(f"{path} is missing; convert the data with `megatron-vl data convert`")
    if size(path) > LARGEST:
        raise DescriptionError(f"{path} has {size(path)} bytes; {LARGEST} are allowed")
    # Only the rank that reads a description imports Energon, which takes seconds.
    from megatron.energon.eyaml import load_yaml

    text = ""
    try:
        text = read_text(path)
        if suffix(path) != ".json":
            _check_yaml(path, text)
            content = load_yaml(text.encode())
        else:
            content = json.loads(text)
    except DescriptionError:
        raise
    except yaml.MarkedYAMLError as error:
        raise DescriptionError(yaml_fault(path, text, error)) from error
    except Exception as error:  # parsers raise what they like on foreign bytes
        raise DescriptionError(f"{path} cannot be read: {error}") from error

    if not isinstance(content, dict):
        raise DescriptionError(f"{path} does not hold a mapping")
    return content


def _check_yaml(path: Location, text: str) -> None:
    """Refuses invalid YAML, more than one document, and tags and aliases.

    Energon's own parser is lenient and does not support tags or aliases. PyYAML with libyaml is fast enough.
    """
    depth = documents = 0
    for number, event in enumerate(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))):
        # With aliases, a few lines can expand to billions of values.
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None):
            raise DescriptionError(f"{path} uses YAML tags or aliases")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        documents += isinstance(event, yaml.DocumentStartEvent)
        if depth > DEEPEST_YAML or documents > 1 or number > 2 * MOST_SHARDS + 1000:
            raise DescriptionError(
                f"{path} cannot be read: it is nested deeper than {DEEPEST_YAML}, holds more than one"
                f" document, or more than {MOST_SHARDS} shards"
            )


def _names_code(value: Any) -> bool:
    """Whether a mapping at any depth has one of the keys that tell Energon to load code."""
    if isinstance(value, dict):
        return any(key in NAMING or _names_code(inner) for key, inner in value.items())
    return isinstance(value, list) and any(map(_names_code, value))


def _expanded(path: Location, patterns: Any) -> list[str]:
    """The names of shards, with braces expanded."""
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise DescriptionError(f"{path}: a split is a list of shard names")

    names: list[str] = []
    for pattern in patterns:
        if not re.search(r"[{}\\]", pattern):
            names.append(pattern)
            continue
        # braceexpand builds each whole range before it returns the first name.
        for first, last in re.findall(r"(\d+)\.\.(\d+)", pattern):
            if abs(int(last) - int(first)) > MOST_SHARDS:
                raise DescriptionError(f"{path}: more than {MOST_SHARDS} shards")
        names += islice(braceexpand(pattern), MOST_SHARDS + 1 - len(names))
        if len(names) > MOST_SHARDS:
            break
    if len(names) > MOST_SHARDS:
        raise DescriptionError(f"{path}: more than {MOST_SHARDS} shards")
    return names


def _check_shards(folder: Location, names: set[str]) -> None:
    """Refuses names that do not lie inside the folder, with links resolved. Files need not exist.

    Each folder of shards is listed once to find its links. Only links are resolved one by one.
    """

    def refuse(name: str) -> DescriptionError:
        return DescriptionError(f"{folder / META}: shard {name[:200]!r} is not inside {folder}")

    folders: dict[str, list[str]] = {}
    for name in names:
        parent, _, last = name.rpartition("/")
        if "://" in name or "\0" in name or last in ("", ".", "..") or ".." in parent.split("/"):
            raise refuse(name)
        folders.setdefault("/" if name.startswith("/") and not parent else parent, []).append(last)

    if not isinstance(folder, Path):  # an object store has no links
        if escaping := next((parent for parent in folders if parent.startswith("/")), None):
            raise refuse(f"{escaping}/{folders[escaping][0]}")
        return

    root = folder.resolve()
    for parent, held in folders.items():
        inside = root / parent
        if not inside.resolve().is_relative_to(root):
            raise refuse(f"{parent}/{held[0]}")
        for last in _links(inside, held):
            if not (inside / last).resolve().is_relative_to(root):
                raise refuse(f"{parent}/{last}" if parent else last)


def _links(folder: Path, names: list[str]) -> list[str]:
    """The ``names`` that are links in ``folder``."""
    try:
        with os.scandir(folder) as entries:
            links = {entry.name for entry in entries if entry.is_symlink()}
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError:  # a folder that can be entered but not listed
        return [name for name in names if os.path.islink(folder / name)]
    return [name for name in names if name in links]


def _metadataset(path: Location, depth: int, read: dict[Location, Description]) -> Metadataset:
    if suffix(path) != ".yaml":
        raise DescriptionError(f"{path} is neither a data set's folder nor a metadataset (.yaml)")
    if depth > DEEPEST:
        raise DescriptionError(f"{path}: metadatasets are nested deeper than {DEEPEST}")

    content = _read(path)
    if (
        content.pop("__module__", None) != "megatron.energon"
        or content.pop("__class__", None) not in METADATASETS
    ):
        raise DescriptionError(
            f"{path} must say __module__: megatron.energon and __class__: {' or '.join(METADATASETS)}"
        )

    splits = content.get("splits")
    if content.keys() != {"splits"} or not isinstance(splits, dict) or _names_code(content):
        raise DescriptionError(
            f"{path} may only have splits of data sets, and none of {', '.join(NAMING)} in them"
        )

    named = dict.fromkeys(_references(path, splits, named=True))
    return Metadataset(
        path, splits, {name: _described(path.parent / name, depth + 1, read) for name in named}
    )


def _references(path: Location, value: Any, *, named: bool = False) -> list[str]:
    """Paths of the data sets that a part of a metadataset names.

    Args:
        named: whether the keys of ``value`` are names of splits.
    """
    if isinstance(value, list):
        return [found for inner in value for found in _references(path, inner)]
    if not isinstance(value, dict):
        return []
    if not named and (unknown := value.keys() - METADATASET_KEYS):
        raise DescriptionError(
            f"{path}: field {sorted(map(str, unknown))[0]!r} is not supported in a metadataset; leave it out"
        )

    parts = [part for key, part in value.items() if key != "subflavors"]
    inner = [found for part in parts for found in _references(path, part)]
    if named or "path" not in value:
        return inner
    if not isinstance(value["path"], str) or "://" in value["path"]:
        raise DescriptionError(f"{path}: path {value['path']!r} is not a local path")
    return [*inner, value["path"]]


# --- Comparing identities


def difference(saved: Any, now: Any, name: str = "the data set") -> str:
    """The difference between two identities of :class:`SplitFacts`, as a clause for a message; empty if they
    are equal. Weights count by their ratios: 1 and 1 are the same blend as 2 and 2.

    Args:
        name: name of the compared part.
    """
    if isinstance(saved, dict) and isinstance(now, dict):
        return _fields_differ(saved, now, str(now.get("name", name)))
    if isinstance(saved, list) and isinstance(now, list):
        return _lists_differ(saved, now, name)
    return "" if saved == now else f"{name} was {saved!r}, is {now!r}"


def _fields_differ(saved: dict[str, Any], now: dict[str, Any], name: str) -> str:
    before, after = (next((kind for kind in KINDS if kind in side), "") for side in (saved, now))
    if before != after:
        return f"{name} was {KINDS.get(before, 'unknown')}, is {KINDS.get(after, 'unknown')}"
    if after == "content":
        return _data_sets_differ(saved, now, name)
    if after in WEIGHTED and _shares(saved[after]) == _shares(now[after]) is not None:
        saved, now = ({**side, after: _without_weights(side[after])} for side in (saved, now))

    for key in [*now, *(key for key in saved if key not in now)]:
        old = saved.get(key, DEFAULTS.get(key))
        new = now.get(key, DEFAULTS.get(key))
        inner = f"the {key} of {name}" if key in DEFAULTS else name
        if key not in FOR_MESSAGES and (found := difference(old, new, inner)):
            return found
    return ""


def _shares(parts: Any) -> list[Fraction] | None:
    """The part that each data set of a blend has in it, exact; None where that cannot be said.

    Energon 7.4.1 divides weights by their sum too, so weights 1 and 1 make the same order as 2 and 2.
    """
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return None
    written = [part.get("weight", DEFAULTS["weight"]) for part in parts]
    if not all(type(weight) in (int, float) and 0 <= weight < math.inf for weight in written):
        return None
    if not any(written):
        return None

    # By its digits: Fraction(0.1) is not a tenth.
    weights = [Fraction(str(weight)) for weight in written]
    total = sum(weights)
    return [weight / total for weight in weights]


def _without_weights(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in part.items() if key != "weight"} for part in parts]


def _data_sets_differ(saved: dict[str, Any], now: dict[str, Any], name: str) -> str:
    if saved.get("split") != now["split"]:
        return f"the split of {name} was {saved.get('split')!r}, is {now['split']!r}"
    amounts = (
        f"{saved.get('samples')} samples in {saved.get('shards')} shards, is {now['samples']} in"
        f" {now['shards']}"
    )
    if saved["content"] != now["content"]:
        return f"{name} was converted or prepared again (its {now['split']} was {amounts})"
    if saved.get("list") != now["list"]:
        return f"{name} lists other shards or counts for {now['split']} (was {amounts})"
    return ""


def _lists_differ(saved: list[Any], now: list[Any], name: str) -> str:
    before, after = _names(saved), _names(now)
    mixes = f"{name} mixed {named(before)}, mixes {named(after)}"
    if len(saved) != len(now):
        return mixes
    pairs = enumerate(zip(saved, now, strict=True))
    clauses = (difference(old, new, f"part {number + 1} of {name}") for number, (old, new) in pairs)
    found = next(filter(None, clauses), "")
    return mixes if found and before != after and sorted(before) == sorted(after) else found


def _names(parts: list[Any]) -> list[str]:
    return [str(part.get("name", "a mixture")) if isinstance(part, dict) else str(part) for part in parts]
