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
from megatron_vl.weights.run_folder import EXPORTED, CheckpointError, manifest_digest

_ENTRY = "video_rule"


def trained_video_rule(step: Path, spec: ModelSpec) -> dict[str, str]:
    """Reads the rule of the step folder ``step``; empty if the program that saved it names none.

    If ``run.json`` is damaged, the first loader's state tells it.

    Raises:
        CheckpointError: ``run.json`` is damaged, and the loader's state does not name the rule either.
    """
    facts = _read_dict(step / "run.json")
    if facts.get("digest") == manifest_digest(facts):
        return _rule_in(facts, spec)

    identity = _read_dict(step / "loader" / "dp_00000.json").get("identity")
    if isinstance(identity, dict) and (name := _field(spec)) in identity:
        return {name: str(identity[name])}
    raise CheckpointError(
        f"{step / 'run.json'} is damaged (its digest differs), and loader/dp_00000.json names no rule:"
        " it is not known under which rule for videos the weights were trained"
    )


def weights_video_rule(folder: Path, manifest: Mapping[str, Any], spec: ModelSpec) -> dict[str, str]:
    """Reads the rule of a folder of weights; empty if it is not known.

    Args:
        folder: the weights of a run's step, or stand-alone weights.
        manifest: their manifest. Its ``origin`` names the rule of stand-alone weights.
    """
    step = folder.parent
    if (step / "run.json").is_file() and (rule := trained_video_rule(step, spec)):
        return rule
    return _rule_in(manifest.get("origin"), spec)


def exported_video_rule(folder: Path, spec: ModelSpec) -> dict[str, str]:
    """Reads the rule of an exported Hugging Face folder.

    It is empty if no ``megatron_vl.json`` names a rule, as in a released model's folder.
    """
    return _read_rule(folder / EXPORTED, spec)


def rule_facts(rule: dict[str, str]) -> dict[str, Any]:
    """The entry for ``megatron_vl.json``, or for a manifest's origin; empty if no rule is known."""
    return {_ENTRY: rule} if rule else {}


def _field(spec: ModelSpec) -> str:
    """The one field that applies to the model's family."""
    return next(iter(video_rule(DataConfig(), spec.vision.video_timestamps)))


def _read_rule(path: Path, spec: ModelSpec) -> dict[str, str]:
    return _rule_in(_read_dict(path), spec)


def _rule_in(facts: Any, spec: ModelSpec) -> dict[str, str]:
    rule = facts.get(_ENTRY) if isinstance(facts, dict) else None
    name = _field(spec)
    return {name: str(rule[name])} if isinstance(rule, dict) and name in rule else {}


def _read_dict(path: Path) -> dict[str, Any]:
    """Reads a JSON object; empty if the file is missing or is not a JSON object."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
