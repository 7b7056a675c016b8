"""Canonical names of the parameters of live modules, on any platform.

Transformer Engine fuses a norm into the linear that follows it; the local modules keep the norm separate.
Both number layers within the chunk. Canonical names (see :mod:`megatron_vl.spec.tensors`) follow the fused
style, with global layer numbers.

A canonical expert tensor is a stack of all experts. In live modules, each expert is a separate parameter:
``weight3`` of a grouped linear, or ``local_experts.3`` of a list. :class:`LiveTensor` gives the parameter's
index in the stack.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from megatron_vl.models.vision_language import VisionLanguageModel
from megatron_vl.spec.tensors import EMBEDDING, OUTPUT

_LAYER = re.compile(r"^language_model\.decoder\.layers\.(\d+)\.")
_ATTENTION_NORM = ("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
_LINEAR_ATTENTION_NORM = ("input_layernorm.", "self_attention.in_proj.layer_norm_")
_MLP_NORM = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
_EXPERT = re.compile(
    r"\.mlp\.experts\.(?:local_experts\.(?P<listed>\d+)\.(?P<linear>linear_fc[12])\.weight|(?P<grouped_linear>linear_fc[12])\.weight(?P<grouped>\d+))$"
)


class LiveTensor(NamedTuple):
    """A live parameter: this rank's part of a canonical tensor, or one expert of a stack."""

    name: str
    parameter: nn.Parameter
    expert: int | None = None
    """Global index of the expert, in dim 0 of the canonical tensor; None if the tensor has no experts."""


def canonical_name(
    module_name: str, first_layer: int, tied: bool, *, router: bool = False, linear: bool = False
) -> tuple[str, int | None]:
    """The canonical name of a chunk's parameter, and its local expert index (None for a dense parameter).

    Args:
        module_name: the parameter's name in the chunk.
        first_layer: global number of the chunk's first decoder layer.
        tied: whether the output layer shares the embedding's weight.
        router: whether the parameter's layer has experts. The norm before experts stays separate.
        linear: whether the parameter's layer has linear attention.
    """
    name = module_name
    expert = None
    norms = [_LINEAR_ATTENTION_NORM if linear else _ATTENTION_NORM, *([] if router else [_MLP_NORM])]
    for local, fused in norms:
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
    """Yields the parameters of one chunk. A tied output layer appears under the embedding's name.

    Args:
        first_layer: global number of the chunk's first decoder layer.
        first_expert: global index of this rank's first expert.
    """
    routed, linear = (
        {name.split(mark)[0] for name, _ in chunk.named_parameters() if mark in name}
        for mark in (".mlp.router.", ".self_attention.in_proj.")
    )
    tied = chunk.share_embeddings_and_output_weights
    modules = [chunk] if chunk.decoupled is None else [chunk.decoupled.module, chunk]

    for module_name, parameter in (named for module in modules for named in module.named_parameters()):
        layer = _LAYER.match(module_name)
        owner = layer[0].rstrip(".") if layer else ""
        name, expert = canonical_name(
            module_name, first_layer, tied, router=owner in routed, linear=owner in linear
        )
        yield LiveTensor(name, parameter, None if expert is None else first_expert + expert)
