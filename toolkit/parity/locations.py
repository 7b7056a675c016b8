"""Names the locations of a model in forward order, and groups them into components.

A location is a point of the forward pass at which outputs are compared, such as "vision layer 3". The
parameters of the module that computes this output belong to the location.
"""

from __future__ import annotations

import re

from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.tensors import EMBEDDING

COMPONENTS = ("patch embedding", "vision layers", "mergers", "embeddings", "decoder layers", "head")
PATCH = "patch embedding"
MERGER = "merger"
EMBEDDED = "embeddings"
NORM = "final norm"
LOGITS = "logits"
_LAYERS = (
    (re.compile(r"vision_model\.decoder\.layers\.(\d+)\."), "vision layer"),
    (re.compile(r"vision_model\.deepstack_mergers\.(\d+)\."), "DeepStack merger"),
    (re.compile(r"language_model\.decoder\.layers\.(\d+)\."), "decoder layer"),
)


def location_of(tensor: str) -> str:
    """Returns the location of a canonical tensor; layers count from 0."""
    for pattern, location in _LAYERS:
        if match := pattern.match(tensor):
            return f"{location} {match[1]}"
    if tensor.startswith("vision_model.merger."):
        return MERGER
    if tensor.startswith("vision_model."):
        return PATCH
    if tensor == EMBEDDING:
        return EMBEDDED
    return NORM if "final_layernorm" in tensor else LOGITS


def component_of(location: str) -> str:
    """Returns the entry of :data:`COMPONENTS` for a location."""
    if location in (PATCH, EMBEDDED):
        return location
    if location in (NORM, LOGITS):
        return "head"
    return {"vision layer": "vision layers", "decoder layer": "decoder layers"}.get(
        location.rpartition(" ")[0], "mergers"
    )


def forward_order(spec: ModelSpec) -> list[str]:
    """Lists all locations of a model in the order of a forward pass."""
    locations = [PATCH]
    for layer in range(spec.vision.num_layers):
        locations.append(f"vision layer {layer}")
        if layer in spec.vision.deepstack_layers:
            locations.append(f"DeepStack merger {spec.vision.deepstack_layers.index(layer)}")
    locations += [
        MERGER,
        EMBEDDED,
        *(f"decoder layer {i}" for i in range(spec.language.num_layers)),
        NORM,
        LOGITS,
    ]
    return locations
