"""Names the locations of a model in forward order, and groups them into components.

A location is a point of the forward pass at which outputs are compared, such as "vision layer 3". The
parameters of the module that computes this output belong to the location.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.tensors import EMBEDDING_TENSOR

COMPONENTS = ("patch embedding", "vision layers", "mergers", "embeddings", "decoder layers", "head")
PATCH_EMBEDDING = "patch embedding"
VISION_MERGER = "merger"
TOKEN_EMBEDDINGS = "embeddings"
FINAL_NORM = "final norm"
LOGITS = "logits"
_LAYER_PATTERNS = (
    (re.compile(r"vision_model\.decoder\.layers\.(\d+)\."), "vision layer"),
    (re.compile(r"vision_model\.deepstack_mergers\.(\d+)\."), "DeepStack merger"),
    (re.compile(r"language_model\.decoder\.layers\.(\d+)\."), "decoder layer"),
)


def tensor_location(tensor_name: str) -> str:
    """Returns the location of a canonical tensor; layers count from 0."""
    for layer_pattern, location in _LAYER_PATTERNS:
        if layer_match := layer_pattern.match(tensor_name):
            return f"{location} {layer_match[1]}"
    if tensor_name.startswith("vision_model.merger."):
        return VISION_MERGER
    if tensor_name.startswith("vision_model."):
        return PATCH_EMBEDDING
    if tensor_name == EMBEDDING_TENSOR:
        return TOKEN_EMBEDDINGS
    return FINAL_NORM if "final_layernorm" in tensor_name else LOGITS


def location_component(location: str) -> str:
    """Returns the entry of :data:`COMPONENTS` for a location."""
    if location in (PATCH_EMBEDDING, TOKEN_EMBEDDINGS):
        return location
    if location in (FINAL_NORM, LOGITS):
        return "head"
    return {"vision layer": "vision layers", "decoder layer": "decoder layers"}.get(
        location.rpartition(" ")[0], "mergers"
    )


def worst_errors(errors_by_name: dict[str, float], group_of: Callable[[str], str]) -> dict[str, float]:
    """Maps each group of tensors or locations to its largest error."""
    worst_by_group: dict[str, float] = {}
    for name, error in errors_by_name.items():
        group = group_of(name)
        worst_by_group[group] = max(worst_by_group.get(group, 0.0), error)
    return worst_by_group


def forward_order(spec: ModelSpec) -> list[str]:
    """Lists all locations of a model in the order of a forward pass."""
    locations = [PATCH_EMBEDDING]
    for layer_number in range(spec.vision.num_layers):
        locations.append(f"vision layer {layer_number}")
        if layer_number in spec.vision.deepstack_layers:
            locations.append(f"DeepStack merger {spec.vision.deepstack_layers.index(layer_number)}")
    locations += [
        VISION_MERGER,
        TOKEN_EMBEDDINGS,
        *(f"decoder layer {i}" for i in range(spec.language.num_layers)),
        FINAL_NORM,
        LOGITS,
    ]
    return locations
