"""Reads the limits of pixels and frames, and the given chat template, with which a model was trained.

A run's checkpoint names them among the fields in ``run.json``. Weights that were split, merged or converted
from it name them in their manifest, and an exported folder in ``megatron_vl.json``. Of a run with
``data.chat_template``, they have the text of the template too; the entry of a folder names its file. The
rotary positions are those of the config in the manifest.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_vl.spec.families.hf_folder import CHAT_TEMPLATE_FILE
from megatron_vl.system.json_files import manifest_digest
from megatron_vl.weights.run_folder import EXPORT_FACTS_FILE
from megatron_vl.weights.tensor_files import WeightsError

MEDIA_KEY = "media"
MEDIA_FIELDS = ("min_pixels", "max_pixels", "video_max_pixels", "video_fps", "video_max_frames")
"""Fields of ``data``. Areas are in pixels, and the values are those that held for the model."""
TEMPLATE_KEY = "chat_template"
ARGUMENTS_KEY = "template_arguments"
TEXT_FIELDS = ("tokenizer", "chat template")
"""Digests of what a run's folder turns text into tokens with, which its step and weights alone name."""
ROPE_KEY = "rope"
"""The rotary positions of training, with the names of ``config.json``."""


def trained_facts(weights_dir: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a folder of weights, as far as they are known.

    Raises WeightsError if the ``run.json`` of their checkpoint is damaged: without it, images would silently
    be resized in another way than in training.
    """
    if weights_dir.name == "weights" and (run_json := weights_dir.parent / "run.json").exists():
        run_facts = read_json_object(run_json)
        if run_facts.get("digest") != manifest_digest(run_facts):
            raise WeightsError(
                f"{run_json} was changed after it was written (its digest differs), so the limits of pixels"
                f" and frames of training are not known; use another step, or copy {weights_dir} elsewhere"
                " and use the copy"
            )
        run_fields = run_facts.get("fields")
        if isinstance(run_fields, dict) and "data.max_pixels" in run_fields:
            values = {name.removeprefix("data."): value for name, value in run_fields.items()}
            return _known_facts({MEDIA_KEY: values, **values})
    return _known_facts(manifest.get("origin"))


def exported_media(hf_dir: Path) -> dict[str, float]:
    """The limits that an exported folder names; empty if it names none, as a released one."""
    return dict(exported_facts(hf_dir).get(MEDIA_KEY, {}))


def exported_facts(exported_dir: Path) -> dict[str, Any]:
    """The entries of an exported folder of a model or of adapters."""
    facts = _known_facts(read_export_facts(exported_dir))
    if facts.pop(TEMPLATE_KEY, ""):
        if not (template_path := exported_dir / CHAT_TEMPLATE_FILE).is_file():
            raise WeightsError(f"{exported_dir / EXPORT_FACTS_FILE} names {template_path.name}; copy it too")
        facts[TEMPLATE_KEY] = template_path.read_text(encoding="utf-8")
    return facts


def read_export_facts(exported_dir: Path) -> dict[str, Any]:
    """What ``megatron_vl.json`` of an exported folder says; empty if there is none, as in a released one.

    Raises WeightsError if it is damaged: other weights would pass for those of the training.
    """
    if not (facts_path := exported_dir / EXPORT_FACTS_FILE).exists():
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


def _known_facts(facts: Any) -> dict[str, Any]:
    if not isinstance(facts, dict):
        return {}
    limits, template, arguments, rope = map(facts.get, (MEDIA_KEY, TEMPLATE_KEY, ARGUMENTS_KEY, ROPE_KEY))
    given = {k: limits[k] for k in MEDIA_FIELDS if k in limits} if isinstance(limits, dict) else {}
    known = {
        MEDIA_KEY: given or None,
        TEMPLATE_KEY: template if isinstance(template, str) and template else None,
        # Also no arguments, which replace those of an earlier export.
        ARGUMENTS_KEY: arguments if limits and isinstance(arguments, dict) else None,
        ROPE_KEY: rope if isinstance(rope, dict) else None,
    }
    texts = {name: facts[name] for name in TEXT_FIELDS if name in facts}
    return {name: value for name, value in known.items() if value is not None} | texts


def read_json_object(json_path: Path) -> dict[str, Any]:
    """Reads a JSON object; empty if the file is missing or is not a JSON object."""
    try:
        parsed_json = json.loads(json_path.read_bytes())
    except (OSError, ValueError):
        return {}
    return parsed_json if isinstance(parsed_json, dict) else {}
