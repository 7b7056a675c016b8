"""Converts a loader's state to JSON values and back, so that a checkpoint contains no pickle.

Only the types that occur in a state are written and read. Any other type is refused by name.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from megatron_vl.errors import UserError


class StateError(UserError, ValueError):
    """A loader state that cannot be written or read, or that does not belong to this loader."""


def to_json(value: Any) -> Any:
    """JSON values that :func:`from_json` turns back into an equal object. Raises :class:`StateError`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.ndarray):
        return {
            "array": base64.b64encode(value.tobytes()).decode(),
            "dtype": value.dtype.str,
            "shape": list(value.shape),
        }
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[to_json(k), to_json(v)] for k, v in value.items()]}

    raise StateError(
        f"the loader state holds a {type(value).__module__}.{type(value).__name__}, which this version cannot"
        " write"
    )


def from_json(value: Any) -> Any:
    """The inverse of :func:`to_json`. Raises :class:`StateError` on anything it did not write."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        flat = np.frombuffer(base64.b64decode(value["array"]), dtype=np.dtype(value["dtype"]))
        return flat.reshape(value["shape"]).copy()
    if "dict" in value:
        return {from_json(k): from_json(v) for k, v in value["dict"]}

    raise StateError(f"the loader state is damaged or of another version: {sorted(value)[:5]}")
