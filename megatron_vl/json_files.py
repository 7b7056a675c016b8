"""JSON files that survive a crash whole, and the digest that tells whether one is as it was written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of everything in a manifest but its digest, as JSON without spaces and with sorted keys.

    It finds damage and edits by hand, not forgery: who can write the folder can write a digest.
    """
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_json(path: Path, value: Any) -> dict[str, Any]:
    """Atomic and synced: the name appears with the whole content. Returns size and hash."""
    data = json.dumps(value).encode()
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def sync_folder(folder: Path) -> None:
    """Makes renames inside a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
