"""Canonical tensor names of the live modules, whichever platform built them.

Transformer Engine fuses a norm into the linear that follows and numbers layers per chunk; the local modules keep the
norm apart. Canonical names (see :mod:`megatron_vl.models.tensors`) follow the fused style with global numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from .tensors import EMBEDDING, OUTPUT
from .vlm import VisionLanguageModel

_LAYER = re.compile(r"^language_model\.decoder\.layers\.(\d+)\.")
_LOCAL_NORMS = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)


def canonical_name(module_name: str, first_layer: int, tied: bool) -> str:
    """The canonical name of a parameter of a chunk whose first decoder layer is ``first_layer``."""
    name = module_name
    for local, fused in _LOCAL_NORMS:
        name = name.replace(local, fused)
    match = _LAYER.match(name)
    if match:
        name = f"language_model.decoder.layers.{int(match[1]) + first_layer}.{name[match.end() :]}"
    return EMBEDDING if tied and name == OUTPUT else name


def named_tensors(chunk: VisionLanguageModel, first_layer: int) -> Iterator[tuple[str, nn.Parameter]]:
    """(canonical name, parameter) of one chunk. A tied output layer yields the embedding's name a second time."""
    for name, parameter in chunk.named_parameters():
        yield canonical_name(name, first_layer, chunk.share_embeddings_and_output_weights), parameter
