"""Reads the limits of pixels and frames under which a model was trained.

A run's checkpoint names them among the fields in ``run.json``. Weights that were split, merged or converted
from it name them in their manifest, and an exported Hugging Face folder in ``megatron_vl.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_vl.system.json_files import manifest_digest
from megatron_vl.weights.run_folder import EXPORT_FACTS_FILE
from megatron_vl.weights.tensor_files import WeightsError

MEDIA_KEY = "media"
MEDIA_FIELDS = ("min_pixels", "max_pixels", "video_max_pixels", "video_fps", "video_max_frames")
"""Fields of ``data``. Areas are in pixels, and the values are those that held for the model."""


def trained_media(weights_dir: Path, manifest: Mapping[str, Any]) -> dict[str, float]:
    """The limits of a folder of weights by field of ``data``; empty if they are not known.

    Raises WeightsError if the ``run.json`` of their checkpoint is damaged: without it, images would silently
    be resized in another way than in training.
    """
    run_json = weights_dir.parent / "run.json"
    if weights_dir.name == "weights" and run_json.exists():
        run_facts = read_json_object(run_json)
        if run_facts.get("digest") != manifest_digest(run_facts):
            raise WeightsError(
                f"{run_json} was changed after it was written (its digest differs), so the limits of pixels"
                f" and frames of training are not known; use another step, or copy {weights_dir} elsewhere"
                " and use the copy"
            )
        run_fields = run_facts.get("fields")
        if isinstance(run_fields, dict) and "data.max_pixels" in run_fields:
            return {name: run_fields[f"data.{name}"] for name in MEDIA_FIELDS if f"data.{name}" in run_fields}
    return _media_of(manifest.get("origin"))


def exported_media(hf_dir: Path) -> dict[str, float]:
    """The limits that an exported folder names; empty if it names none, as a released one."""
    return _media_of(read_export_facts(hf_dir))


def read_export_facts(export_dir: Path) -> dict[str, Any]:
    """What ``megatron_vl.json`` of an exported folder says; empty if there is none, as in a released one.

    Raises WeightsError if it is damaged: other weights would pass for those of the training.
    """
    facts_path = export_dir / EXPORT_FACTS_FILE
    if not facts_path.exists():
        return {}
    try:
        facts = json.loads(facts_path.read_bytes())
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or facts.get("digest", digest := manifest_digest(facts)) != digest:
        raise WeightsError(
            f"{facts_path} is damaged or was changed after it was written, so the weights and the limits of"
            " pixels and frames of the training are not known; export the folder again"
        )
    return facts


def media_entry(media_limits: dict[str, float]) -> dict[str, Any]:
    """The entry for ``megatron_vl.json``, or for a manifest's origin; empty if no limits are known."""
    return {MEDIA_KEY: media_limits} if media_limits else {}


def _media_of(facts: Any) -> dict[str, float]:
    limits = facts.get(MEDIA_KEY) if isinstance(facts, dict) else None
    return {k: limits[k] for k in MEDIA_FIELDS if k in limits} if isinstance(limits, dict) else {}


def read_json_object(json_path: Path) -> dict[str, Any]:
    """Reads a JSON object; empty if the file is missing or is not a JSON object."""
    try:
        parsed_json = json.loads(json_path.read_bytes())
    except (OSError, ValueError):
        return {}
    return parsed_json if isinstance(parsed_json, dict) else {}
