"""Canonical tensor names of the live modules, whichever platform built them.

Transformer Engine fuses a norm into the linear that follows and numbers layers per chunk; the local modules
keep the norm apart. Canonical names (see :mod:`megatron_vl.spec.tensors`) follow the fused style with global
numbers.

A canonical expert tensor is a stack of all experts; live, each expert is a parameter of its own, ``weight3``
of a grouped linear or ``local_experts.3`` of a list. :class:`LiveTensor` says which of the stack a parameter
is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from megatron_vl.models.vision_language import VisionLanguageModel
from megatron_vl.spec.tensors import EMBEDDING, OUTPUT

_LAYER = re.compile(r"^language_model\.decoder\.layers\.(\d+)\.")
_LOCAL_NORMS = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)
_EXPERT = re.compile(
    r"\.mlp\.experts\.(?:local_experts\.(?P<listed>\d+)\.(?P<linear>linear_fc[12])\.weight|(?P<grouped_linear>linear_fc[12])\.weight(?P<grouped>\d+))$"
)


class LiveTensor(NamedTuple):
    """A live parameter: a whole canonical tensor (this rank's part of it), or one expert of a stack of
    them."""

    name: str
    parameter: nn.Parameter
    expert: int | None = None
    """Which expert of the canonical tensor's dim 0, counted over all ranks; None where that has no
    experts."""


def canonical_name(
    module_name: str, first_layer: int, tied: bool, *, router: bool = False
) -> tuple[str, int | None]:
    """The canonical name of a parameter of a chunk whose first decoder layer is ``first_layer``, and its
    expert on this rank.

    Args:
        router: whether the parameter's layer has experts; the norm before them stays apart.
    """
    name, expert = module_name, None
    for local, fused in _LOCAL_NORMS[: 1 if router else 2]:
        name = name.replace(local, fused)
    if match := _EXPERT.search(name):
        expert = int(match["listed"] or match["grouped"])
        name = f"{name[: match.start()]}.mlp.experts.{match['linear'] or match['grouped_linear']}.weight"
    if match := _LAYER.match(name):
        name = f"language_model.decoder.layers.{int(match[1]) + first_layer}.{name[match.end() :]}"
    return (EMBEDDING if tied and name == OUTPUT else name), expert


def named_tensors(
    chunk: VisionLanguageModel, first_layer: int, first_expert: int = 0
) -> Iterator[LiveTensor]:
    """The parameters of one chunk. A tied output layer yields the embedding's name a second time.

    Args:
        first_layer, first_expert: the first of this chunk, of this rank, counted over all.
    """
    routed = {name.split(".mlp.router.")[0] for name, _ in chunk.named_parameters() if ".mlp.router." in name}
    tied = chunk.share_embeddings_and_output_weights
    for module_name, parameter in chunk.named_parameters():
        layer = _LAYER.match(module_name)
        router = layer is not None and layer[0].rstrip(".") in routed
        name, expert = canonical_name(module_name, first_layer, tied, router=router)
        yield LiveTensor(name, parameter, None if expert is None else first_expert + expert)
