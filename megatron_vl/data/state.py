"""Converts Energon's loader state to JSON values and back, so that a checkpoint contains no pickle.

Only the types that occur in a state are written and read. Any other type is refused by name.
"""

from __future__ import annotations

import base64
import dataclasses
from functools import cache
from typing import Any

import numpy as np
import torch

from megatron_vl.errors import UserError


class StateError(UserError, ValueError):
    """A loader state that cannot be written or read, or that does not belong to this loader."""


@cache
def _classes() -> dict[str, type]:
    from megatron.energon.flavors.webdataset.sample_loader import SliceState
    from megatron.energon.rng import SystemRngState
    from megatron.energon.savable_loader import (
        SavableDataLoaderState,
        SavableDatasetCheckpoint,
        SavableDatasetState,
    )

    known = (
        SliceState,
        SystemRngState,
        SavableDataLoaderState,
        SavableDatasetCheckpoint,
        SavableDatasetState,
    )
    return {cls.__name__: cls for cls in known}


def to_json(value: Any) -> Any:
    """JSON values that :func:`from_json` turns back into an equal object. Raises :class:`StateError`."""
    from megatron.energon.state import FlexState

    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return to_json(value.item())
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        return {"tensor": to_json(value.numpy())}
    if isinstance(value, np.ndarray):
        return {
            "array": base64.b64encode(value.tobytes()).decode(),
            "dtype": value.dtype.str,
            "shape": list(value.shape),
        }

    if isinstance(value, (list, tuple)):
        items = [to_json(item) for item in value]
        return items if isinstance(value, list) else {"tuple": items}

    if isinstance(value, dict):
        return {
            "flex" if isinstance(value, FlexState) else "dict": [
                [to_json(k), to_json(v)] for k, v in value.items()
            ]
        }

    name = type(value).__name__
    if _classes().get(name) is type(value) and dataclasses.is_dataclass(value):
        return {
            "object": name,
            "fields": {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)},
        }

    raise StateError(
        f"the loader state holds a {type(value).__module__}.{name}, which this version cannot write"
    )


def from_json(value: Any) -> Any:
    """The inverse of :func:`to_json`. Raises :class:`StateError` on anything it did not write."""
    from megatron.energon.state import FlexState

    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "bytes" in value:
        return base64.b64decode(value["bytes"])
    if "tensor" in value:
        return torch.from_numpy(from_json(value["tensor"]))

    if "array" in value:
        flat = np.frombuffer(base64.b64decode(value["array"]), dtype=np.dtype(value["dtype"]))
        return flat.reshape(value["shape"]).copy()

    if "tuple" in value:
        return tuple(from_json(item) for item in value["tuple"])
    for name, cls in (("flex", FlexState), ("dict", dict)):
        if name in value:
            return cls((from_json(k), from_json(v)) for k, v in value[name])

    if value.get("object") in _classes():
        return _classes()[value["object"]](
            **{name: from_json(item) for name, item in value["fields"].items()}
        )

    raise StateError(f"the loader state is damaged or of another version: {sorted(value)[:5]}")
