"""Canonical names of the parameters of live modules, on any platform.

Transformer Engine fuses a norm into the linear that follows it; the local modules keep the norm separate.
Both number layers within the chunk. Canonical names (see :mod:`megatron_vl.spec.tensors`) follow the fused
style, with global layer numbers.

A canonical expert tensor is a stack of all experts. In live modules, each expert is a separate parameter:
``weight3`` of a grouped linear, or ``local_experts.3`` of a list. :class:`LiveTensor` gives the parameter's
index in the stack.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from megatron_vl.models.vision_language import VisionLanguageModel
from megatron_vl.spec.tensors import EMBEDDING_TENSOR, OUTPUT_TENSOR

_LAYER_PATTERN = re.compile(r"^(\w+)\.decoder\.layers\.(\d+)\.")
_ATTENTION_NORM_NAMES = ("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
_LINEAR_ATTENTION_NORM_NAMES = ("input_layernorm.", "self_attention.in_proj.layer_norm_")
_MLP_NORM_NAMES = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
_EXPERT_PATTERN = re.compile(
    r"\.mlp\.experts\."
    r"(?:local_experts\.(?P<listed>\d+)\.(?P<linear>linear_fc[12](?:\.adapter\.lora_[AB])?)\.weight"
    r"|(?P<grouped_linear>linear_fc[12](?:\.adapter\.lora_[AB])?)\.weight(?P<grouped>\d+))$"
)


class LiveTensor(NamedTuple):
    """A live parameter: this rank's part of a canonical tensor, or one expert of a stack."""

    tensor_name: str
    parameter: nn.Parameter
    expert_index: int | None = None
    """Global index of the expert, in dim 0 of the canonical tensor; None if the tensor has no experts."""


def canonical_name(
    module_name: str,
    first_layer: int,
    is_tied: bool,
    *,
    has_router: bool = False,
    has_linear_attention: bool = False,
) -> tuple[str, int | None]:
    """The canonical name of a chunk's parameter, and its local expert index (None for a dense parameter).

    Args:
        has_router: whether the parameter's layer has experts. The norm before experts stays separate.
    """
    tensor_name, local_expert = module_name, None
    norm_names = [_LINEAR_ATTENTION_NORM_NAMES if has_linear_attention else _ATTENTION_NORM_NAMES]
    if not has_router:
        norm_names.append(_MLP_NORM_NAMES)
    for local_name, fused_name in norm_names:
        tensor_name = tensor_name.replace(local_name, fused_name)

    if match := _EXPERT_PATTERN.search(tensor_name):
        local_expert = int(match["listed"] or match["grouped"])
        linear_name = match["linear"] or match["grouped_linear"]
        tensor_name = f"{tensor_name[: match.start()]}.mlp.experts.{linear_name}.weight"

    if match := _LAYER_PATTERN.match(tensor_name):
        layer_number = int(match[2]) + (first_layer if match[1] == "language_model" else 0)
        tensor_name = f"{match[1]}.decoder.layers.{layer_number}.{tensor_name[match.end() :]}"

    return (EMBEDDING_TENSOR if is_tied and tensor_name == OUTPUT_TENSOR else tensor_name), local_expert


def named_tensors(
    chunk: VisionLanguageModel, first_layer: int, first_expert: int = 0
) -> Iterator[LiveTensor]:
    """Yields the parameters of one chunk. A tied output layer appears under the embedding's name."""
    layers_with_router, linear_attention_layers = (
        {tensor_name.split(mark)[0] for tensor_name, _ in chunk.named_parameters() if mark in tensor_name}
        for mark in (".mlp.router.", ".self_attention.in_proj.")
    )
    modules = [chunk] if chunk.decoupled is None else [chunk.decoupled.module, chunk]

    for module_name, parameter in (named for module in modules for named in module.named_parameters()):
        layer_match = _LAYER_PATTERN.match(module_name)
        layer_name = layer_match[0].rstrip(".") if layer_match else ""
        tensor_name, local_expert = canonical_name(
            module_name,
            first_layer,
            chunk.share_embeddings_and_output_weights,
            has_router=layer_name in layers_with_router,
            has_linear_attention=layer_name in linear_attention_layers,
        )
        yield LiveTensor(
            tensor_name, parameter, None if local_expert is None else first_expert + local_expert
        )
