"""JSON files that a crash cannot truncate, and a digest that shows whether a file was changed."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_vl.system import durable_files
from megatron_vl.system.errors import UserError


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its digest, as JSON without spaces and with sorted keys.

    It detects damage and manual edits but not forgery: whoever can write to the folder can write a digest.
    """
    hashed_fields = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(
        json.dumps(hashed_fields, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def file_sha256(file_path: Path) -> str:
    with file_path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(file_path: Path, json_value: Any) -> dict[str, Any]:
    """Writes a JSON file atomically and flushes it to the disk. Returns its size in bytes and its hash."""
    data = json.dumps(json_value).encode()
    durable_files.write_file(file_path, data)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def check_format_version(
    checked_file: object,
    format_version: object,
    readable_version: int,
    remedy_text: str,
    error_type: type[UserError],
) -> None:
    """Raises ``error_type`` unless ``format_version`` is the version that this program reads."""
    if format_version != readable_version:
        raise error_type(
            f"{checked_file} has version {format_version!r} of its format, and this program reads"
            f" {readable_version}; {remedy_text}"
        )
