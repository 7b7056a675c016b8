"""Reads the rule for videos under which a model was trained.

``data.video_positions`` (Qwen2-VL, Qwen2.5-VL) and ``data.video_prompt`` (Qwen3-VL) decide how a video is
presented to the model. A run's checkpoint names its rule in ``run.json``. Weights that were split or merged
from the checkpoint, or converted from its export, name it in their manifest. An exported Hugging Face folder
names it in ``megatron_vl.json``, which ``transformers`` ignores.

A rule is a dict with one entry: the name of the field of :class:`DataConfig`, and its value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_vl.config import DataConfig, video_rule
from megatron_vl.spec.families import ModelSpec
from megatron_vl.weights.run_folder import EXPORT_FACTS_FILE, CheckpointError, manifest_digest

_RULE_FIELD = "video_rule"


def trained_video_rule(step_dir: Path, spec: ModelSpec) -> dict[str, str]:
    """Reads the rule of a step folder; empty if the program that saved it names none.

    If ``run.json`` is damaged, the rule is read from the first loader's state.

    Raises:
        CheckpointError: ``run.json`` is damaged, and the loader's state does not name the rule either.
    """
    run_facts = read_json_object(step_dir / "run.json")
    if run_facts.get("digest") == manifest_digest(run_facts):
        return _rule_from_facts(run_facts, spec)

    loader_identity = read_json_object(step_dir / "loader" / "dp_00000.json").get("identity")
    if isinstance(loader_identity, dict) and (rule_name := _rule_field_name(spec)) in loader_identity:
        return {rule_name: str(loader_identity[rule_name])}
    raise CheckpointError(
        f"{step_dir / 'run.json'} is damaged (its digest differs), and loader/dp_00000.json names no rule:"
        " it is not known under which rule for videos the weights were trained"
    )


def weights_video_rule(weights_dir: Path, manifest: Mapping[str, Any], spec: ModelSpec) -> dict[str, str]:
    """Reads the rule of a folder of weights; empty if it is not known.

    The ``origin`` in their manifest names the rule of weights that are not in a step of a run.
    """
    step = weights_dir.parent
    # A step of a run whose run.json is missing has its loader states still.
    is_step = (step / "run.json").is_file() or (step / "loader").is_dir()
    if is_step and (trained_rule := trained_video_rule(step, spec)):
        return trained_rule
    return _rule_from_facts(manifest.get("origin"), spec)


def exported_video_rule(hf_dir: Path, spec: ModelSpec) -> dict[str, str]:
    """Reads the rule of an exported Hugging Face folder.

    It is empty if no ``megatron_vl.json`` names a rule, as in a released model's folder.
    """
    return _rule_from_facts(read_json_object(hf_dir / EXPORT_FACTS_FILE), spec)


def video_rule_entry(trained_rule: dict[str, str]) -> dict[str, Any]:
    """The entry for ``megatron_vl.json``, or for a manifest's origin; empty if no rule is known."""
    return {_RULE_FIELD: trained_rule} if trained_rule else {}


def _rule_field_name(spec: ModelSpec) -> str:
    """The one field that applies to the model's family."""
    return next(iter(video_rule(DataConfig(), spec.vision.video_timestamps)))


def _rule_from_facts(stored_facts: Any, spec: ModelSpec) -> dict[str, str]:
    stored_rule = stored_facts.get(_RULE_FIELD) if isinstance(stored_facts, dict) else None
    name = _rule_field_name(spec)
    return {name: str(stored_rule[name])} if isinstance(stored_rule, dict) and name in stored_rule else {}


def read_json_object(json_path: Path) -> dict[str, Any]:
    """Reads a JSON object; empty if the file is missing or is not a JSON object."""
    try:
        parsed_json = json.loads(json_path.read_bytes())
    except (OSError, ValueError):
        return {}
    return parsed_json if isinstance(parsed_json, dict) else {}
