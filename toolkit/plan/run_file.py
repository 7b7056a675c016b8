"""Writes the run with a planned layout as YAML."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from megatron_vl.config import TrainConfig
from megatron_vl.estimate.rows import ASSUMED_ROWS_TEXT
from megatron_vl.estimate.search import describe_layout
from megatron_vl.estimate.split import with_split
from megatron_vl.estimate.step import RunPrediction


def write_run_yaml(yaml_path: Path, prediction: RunPrediction) -> None:
    """Writes the fields that differ from the defaults."""
    run_fields = _changed_fields(with_split(prediction.config, prediction.layout), TrainConfig())
    layout_text = describe_layout(prediction.config, prediction.layout, prediction.data_parallel_size)
    header_comment = (
        f"# GPUs: {prediction.world_size} x {prediction.gpu.name}, "
        f"{prediction.peak_gib:.0f} GiB estimated on the fullest, when a row is all images\n"
        f"# Layout of megatron-vl plan: {layout_text}. Predicted: {prediction.step_seconds:.2f} s a step,\n"
        f"# {prediction.tokens_per_second:,.0f} tokens/s at {prediction.mfu:.1%} MFU\n"
        f"# Rows: {ASSUMED_ROWS_TEXT}\n"
    )
    yaml_path.parent.mkdir(parents=True, exist_ok=True)
    yaml_path.write_text(
        header_comment + yaml.safe_dump(run_fields, sort_keys=False, default_flow_style=None)
    )


def _changed_fields(given_config: Any, default_config: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from another's, nested ones as mappings."""
    changed_fields: dict[str, Any] = {}
    for item in dataclasses.fields(given_config):
        given_value, default_value = getattr(given_config, item.name), getattr(default_config, item.name)
        if dataclasses.is_dataclass(given_value):
            nested_changes = _changed_fields(given_value, default_value)
            if nested_changes:
                changed_fields[item.name] = nested_changes
        elif given_value != default_value:
            changed_fields[item.name] = given_value
    return changed_fields
