"""What a data set says about itself, read before Energon acts on it.

Energon 7.4.1 imports whatever module ``dataset.yaml`` or a metadataset names, calls what it names there, and runs Python files
beside it (``sample_loader``, ``part_filter``); names of shards may lead anywhere. A data set may come from anybody, and all
that this project's loader needs of a description is that there is nothing special about it.
"""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from braceexpand import braceexpand
from megatron.energon.eyaml import load_yaml

from megatron_vl.errors import UserError

META = ".nv-meta"
LARGEST = 64 << 20
"""Bytes of a description file."""
MOST_SHARDS = 1_000_000
NAMING = ("__module__", "__class__", "__function__")
DATASET = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
METADATASETS = ("Metadataset", "MetadatasetV2")
METADATASET_KEYS = {
    *("path", "blend", "blend_epochized", "concat", "datasets", "weight", "repetitions", "split_part", "subflavors"),
    *("shuffle_over_epochs_multiplier", "subset", "range"),
}
"""What a split of a metadataset may say; the rest (joins, other description files, auxiliary data) names code or leads
elsewhere."""
DEEPEST = 8
"""Metadatasets within each other."""


class DescriptionError(UserError, ValueError):
    """A description that is refused; the message names the file and what is wrong with it."""


def check_description(path: Path, depth: int = 0) -> None:
    """Refuses a data set, or a metadataset file with all that it names, whose description does more than list shards.

    Raises:
        DescriptionError: see there.
    """
    if path.is_file():
        _check_metadataset(path, depth)
        return
    meta = path / META
    described = _read(meta / "dataset.yaml")
    rest = {key: value for key, value in described.items() if key not in DATASET and key != "subflavors"}
    if rest or {key: described.get(key) for key in DATASET} != DATASET or _names_code(described.get("subflavors")):
        raise DescriptionError(
            f"{meta / 'dataset.yaml'} is not the description of a plain CrudeWebdataset (__module__ megatron.energon, __class__ "
            f"CrudeWebdataset, at most subflavors): it could run code. Convert the data with `megatron-vl data convert`"
        )
    split = _read(meta / "split.yaml")
    parts = split.get("split_parts")
    if split.keys() - {"split_parts", "exclude"} or not isinstance(parts, dict) or _names_code(split):
        raise DescriptionError(f"{meta / 'split.yaml'}: expected only split_parts and exclude")
    counts = _read(meta / ".info.json").get("shard_counts")
    names = [name for shards in parts.values() for name in _expanded(meta / "split.yaml", shards)]
    _check_shards(path, {*names, *(counts if isinstance(counts, dict) else ())})


def _read(path: Path) -> dict[str, Any]:
    """A YAML or JSON object as Energon reads it, without tags, aliases or a size that only harm has use for."""
    if not path.is_file():
        raise DescriptionError(f"{path} is missing; convert the data with `megatron-vl data convert`")
    if path.stat().st_size > LARGEST:
        raise DescriptionError(f"{path} has {path.stat().st_size} bytes; {LARGEST} are allowed")
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".json":
            # An alias is how a few lines become billions of values, and Energon's own reader knows none.
            if any(isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) for event in yaml.parse(text)):
                raise DescriptionError(f"{path} uses YAML tags or aliases")
            yaml.safe_load(text)  # refuses what is no YAML, or more than one document of it
            content = load_yaml(text.encode())
        else:
            content = json.loads(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, DescriptionError):
            raise
        raise DescriptionError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise DescriptionError(f"{path} holds no mapping")
    return content


def _names_code(value: Any) -> bool:
    """Whether a mapping at any depth has one of the keys by which Energon finds code."""
    if isinstance(value, dict):
        return any(key in NAMING or _names_code(inner) for key, inner in value.items())
    return isinstance(value, list) and any(map(_names_code, value))


def _expanded(path: Path, patterns: Any) -> list[str]:
    """Names of shards with their braces written out."""
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise DescriptionError(f"{path}: a split is a list of shard names")
    names: list[str] = []
    for pattern in patterns:
        # Each range is made whole before the first name comes out of it.
        for first, last in re.findall(r"(\d+)\.\.(\d+)", pattern):
            if abs(int(last) - int(first)) > MOST_SHARDS:
                raise DescriptionError(f"{path}: more than {MOST_SHARDS} shards")
        names += islice(braceexpand(pattern), MOST_SHARDS + 1 - len(names))
        if len(names) > MOST_SHARDS:
            raise DescriptionError(f"{path}: more than {MOST_SHARDS} shards")
    return names


def _check_shards(folder: Path, names: set[str]) -> None:
    """Every name is that of a file inside the folder, links followed; one that is missing is the reader's business."""
    root = folder.resolve()
    for name in sorted(names):
        parts = Path(name).parts
        if not parts or "://" in name or "\0" in name or ".." in parts or not (root / name).resolve().is_relative_to(root):
            raise DescriptionError(f"{folder / META}: shard {name[:200]!r} is not inside {folder}")


def _check_metadataset(path: Path, depth: int) -> None:
    if path.suffix != ".yaml":
        raise DescriptionError(f"{path} is neither a data set's folder nor a metadataset (.yaml)")
    if depth > DEEPEST:
        raise DescriptionError(f"{path}: metadatasets are nested deeper than {DEEPEST}")
    content = _read(path)
    if content.pop("__module__", None) != "megatron.energon" or content.pop("__class__", None) not in METADATASETS:
        raise DescriptionError(f"{path} must say __module__: megatron.energon and __class__: {' or '.join(METADATASETS)}")
    if content.keys() != {"splits"} or _names_code(content):
        raise DescriptionError(f"{path} may only have splits of data sets, and none of {', '.join(NAMING)} in them")
    for found in _references(path, content["splits"], named=True):
        check_description(found, depth + 1)


def _references(path: Path, value: Any, *, named: bool = False) -> list[Path]:
    """Paths of the data sets that a part of a metadataset names; ``named``: its keys are names of splits."""
    if isinstance(value, list):
        return [found for inner in value for found in _references(path, inner)]
    if not isinstance(value, dict):
        return []
    if not named and (unknown := value.keys() - METADATASET_KEYS):
        raise DescriptionError(f"{path}: field {sorted(map(str, unknown))[0]!r} is not supported in a metadataset")
    inner = [found for key, part in value.items() if key != "subflavors" for found in _references(path, part)]
    if "path" not in value:
        return inner
    if not isinstance(value["path"], str) or "://" in value["path"]:
        raise DescriptionError(f"{path}: path {value['path']!r} is not a local path")
    return [*inner, path.parent / value["path"]]
