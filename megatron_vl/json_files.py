"""JSON files that a crash cannot truncate, and a digest that shows whether a file was changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_vl import durable
from megatron_vl.errors import UserError


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its digest, as JSON without spaces and with sorted keys.

    It detects damage and manual edits but not forgery: whoever can write to the folder can write a digest.
    """
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_json(path: Path, value: Any) -> dict[str, Any]:
    """Writes a JSON file atomically and flushes it to the disk. Returns its size in bytes and its hash."""
    data = json.dumps(value).encode()
    durable.write(path, data)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def check_version(what: object, version: object, read: int, advice: str, error: type[UserError]) -> None:
    """Raises ``error`` unless ``version`` is the one version of its format that this program reads."""
    if version != read:
        raise error(f"{what} has version {version!r} of its format, and this program reads {read}; {advice}")
