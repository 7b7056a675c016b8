"""Writes the run with a planned layout as YAML."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from megatron_vl.config import TrainConfig
from megatron_vl.planning.predict import Prediction
from megatron_vl.planning.search import describe, with_split


def write_run(path: Path, prediction: Prediction, given: dict[str, Any]) -> None:
    """Writes what differs from the defaults, the layout in full.

    Args:
        given: fields by dotted name that are written whatever they are.
    """
    config = with_split(prediction.config, prediction.layout)
    fields = _differences(config, TrainConfig())
    parallel = fields.setdefault("parallel", {})
    for name in ("tp", *(["cp"] if config.parallel.cp > 1 else []), "pp", "vpp", "ep", "etp"):
        parallel[name] = getattr(config.parallel, name)
    for name, value in given.items():
        section, _, leaf = name.rpartition(".")
        (fields.setdefault(section, {}) if section else fields)[leaf] = value

    p = prediction
    head = (
        f"# GPUs: {p.world} x {p.calibration.gpu}, {p.peak_gib:.0f} GiB estimated on the fullest, when a row"
        f" is all pictures\n# Layout of megatron-vl plan: {describe(p.config, p.layout, p.dp)}. Predicted:"
        f" {p.step:.2f} s a step,\n# {p.tokens_per_second:,.0f} tokens/s at {p.mfu:.1%} MFU\n"
        f"# Rows: {p.rows.source}\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + yaml.safe_dump(fields, sort_keys=False, default_flow_style=None))


def _differences(value: Any, default: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from another's, nested ones as mappings."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(value):
        ours, theirs = getattr(value, item.name), getattr(default, item.name)
        if dataclasses.is_dataclass(ours):
            inner = _differences(ours, theirs)
            if inner:
                found[item.name] = inner
        elif ours != theirs:
            found[item.name] = ours
    return found
