"""Converts a loader's state to JSON values and back, so that a checkpoint contains no pickle.

Only the types that occur in a state are written and read.
"""

import base64
from typing import Any

import numpy as np

from megatron_vl.system.errors import UserError


class LoaderStateError(UserError, ValueError):
    """A loader state that cannot be written or read, or that does not belong to this loader."""


def state_to_json(state_value: Any) -> Any:
    """Converts a state to JSON values, from which :func:`state_from_json` makes an equal object."""
    if isinstance(state_value, np.ndarray):
        return {
            "array": base64.b64encode(state_value.tobytes()).decode(),
            "dtype": state_value.dtype.str,
            "shape": list(state_value.shape),
        }
    if isinstance(state_value, list):
        return [state_to_json(item) for item in state_value]
    if isinstance(state_value, dict):
        return {"dict": [[state_to_json(k), state_to_json(v)] for k, v in state_value.items()]}
    return state_value


def state_from_json(json_value: Any) -> Any:
    """The inverse of :func:`state_to_json`. Raises :class:`LoaderStateError` on anything it did not write."""
    if isinstance(json_value, list):
        return [state_from_json(item) for item in json_value]
    if not isinstance(json_value, dict):
        return json_value
    if "array" in json_value:
        flat_array = np.frombuffer(base64.b64decode(json_value["array"]), dtype=np.dtype(json_value["dtype"]))
        return flat_array.reshape(json_value["shape"]).copy()
    if "dict" in json_value:
        return {state_from_json(k): state_from_json(v) for k, v in json_value["dict"]}
    raise LoaderStateError(f"the loader state is damaged or of another version: {sorted(json_value)[:5]}")
