"""Outputs that decoder layers under full recompute keep (``recompute.keep``).

Under full recompute, Megatron-core runs a layer twice: without autograd, and again with it right before the
layer's backward pass. An operator that asks here whether its output is known does not compute it again.
Numbers stay the same.

Outputs are kept with the micro-batch's :class:`~megatron_vl.models.attention.PackedRow`, which core passes to
both runs. So they find each other in any pipeline schedule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from megatron.core.tensor_parallel.random import is_checkpointing
from torch import nn

_kinds: Collection[str] = ()
"""What the layer that runs now keeps."""
_outputs: dict[Any, Any] = {}


def is_recomputing() -> bool:
    """Whether a module runs for the second time, so that nothing reads what it returns."""
    return is_checkpointing() and torch.is_grad_enabled()


def known_output(key: Any) -> Any:
    """The output that was kept under ``key``, in the second run of a layer; otherwise None."""
    return _outputs.pop(key, None) if is_recomputing() else None


def keep_output(kind: str, key: Any, output: Any) -> None:
    """Keeps an output of the first run of a layer, if the run asks for this kind."""
    if kind in _kinds and is_checkpointing() and not torch.is_grad_enabled():
        _outputs[key] = output


def keep_layer_outputs(layers: Iterable[nn.Module], kinds: Collection[str]) -> None:
    """Makes layers keep outputs of these kinds: ``attention`` or ``experts``."""

    def begin(layer: nn.Module, args: Any, keywords: dict[str, Any]) -> None:
        global _kinds, _outputs
        _kinds, _outputs = kinds, keywords["packed_seq_params"].kept_outputs.setdefault(layer, {})

    def end(*_: Any) -> None:
        global _kinds, _outputs
        _kinds, _outputs = (), {}

    for layer in layers:
        layer.register_forward_pre_hook(begin, with_kwargs=True)
        layer.register_forward_hook(end, always_call=True)
