"""JSON files that survive a crash whole, and the digest that tells whether one is as it was written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_vl import durable


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of everything in a manifest but its digest, as JSON without spaces and with sorted keys.

    It finds damage and edits by hand, not forgery: who can write the folder can write a digest.
    """
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_json(path: Path, value: Any) -> dict[str, Any]:
    """Atomic and synced: the name appears with the whole content. Returns size and hash."""
    data = json.dumps(value).encode()
    durable.write(path, data)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
