"""Layers that save time or memory compared with Megatron-core's own.

* :class:`TowerSelfAttention`: runs a tower layer's attention and RoPE, between ``linear_qkv`` and
  ``linear_proj``, in our kernels.
* :class:`FusedMLP`: runs SwiGLU as one kernel. It can recompute the activation in the backward pass instead
  of keeping it.
* :func:`with_bias`: lets the matrix product add the bias, so that it also computes the bias gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from megatron_vl.models.attention import PackedRow


class TowerSelfAttention(SelfAttention):
    """Core's SelfAttention with our kernels where they apply.

    They are :mod:`megatron_vl.kernels.window_attention` and :mod:`megatron_vl.kernels.tower_attention`.

    Args:
        fused_windows: whether layers with small windows use the window kernel. Layers with full attention use
            the other one if the backend is ``triton``.
    """

    def __init__(self, *args: Any, fused_windows: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fused_windows = fused_windows

    def forward(
        self, hidden_states: Tensor, *args: Any, packed_seq_params: PackedRow | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[P, 1, H] -> ([P, 1, H], bias to add or None)"""
        row = packed_seq_params
        kernel = None if row is None or row.cos_sin is None else self._kernel(row)
        if kernel is None:
            return super().forward(hidden_states, *args, packed_seq_params=row, **kwargs)

        qkv, _ = self.linear_qkv(hidden_states)
        return self.linear_proj(kernel(qkv[:, 0])[:, None])

    def _kernel(self, row: PackedRow) -> Callable[[Tensor], Tensor] | None:
        """The kernel for this layer, or None.

        It takes the fused QKV output [P, heads * 3 * d] and returns [P, heads * d].
        """
        from megatron_vl.kernels.tower_attention import tower_attention
        from megatron_vl.kernels.window_attention import MAX_WINDOW, window_attention

        assert row.cos_sin is not None
        (cos, sin), dim = row.cos_sin, self.hidden_size_per_attention_head
        segments = row.window if self.core_attention.windowed else row.full
        if segments is None:
            return None

        cu, longest = segments.cu_seqlens, segments.max_seqlen
        if self.core_attention.windowed and self.fused_windows and longest <= MAX_WINDOW:
            return lambda qkv: window_attention(qkv, cos, sin, cu, longest, dim)
        if self.core_attention.backend == "triton":
            return lambda qkv: tower_attention(qkv, cos, sin, cu, dim)
        return None


class FusedMLP(MLP):
    """Core's dense MLP with our SwiGLU.

    Args:
        recompute: whether to keep only ``linear_fc1``'s output and recompute the activation (half as large if
            gated) in the backward pass, which costs one elementwise kernel.
    """

    def __init__(self, *args: Any, recompute: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recompute = recompute

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[S, 1, H] -> ([S, 1, H], bias to add or None)"""
        assert per_token_scale is None, "for experts only"
        hidden, bias = self.linear_fc1(hidden_states)
        active = self._activate(hidden, bias)
        if not self.recompute or not active.requires_grad:
            return self.linear_fc2(active)
        with computed_again(active, self._activate, hidden.detach(), bias):
            return self.linear_fc2(active)

    def _activate(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None:
            hidden = hidden + bias
        if not self.config.gated_linear_unit:
            return self.activation_func(hidden)
        if hidden.is_cuda:
            from megatron_vl.kernels.swiglu import swiglu

            return swiglu(hidden)
        gate, up = hidden.chunk(2, -1)
        return self.activation_func(gate) * up


def computed_again(
    kept: Tensor, function: Callable[..., Tensor], *inputs: Any
) -> AbstractContextManager[Any]:
    """A context in which autograd does not keep ``kept``, the result of ``function(*inputs)``.

    The backward pass computes ``kept`` again. This works for every operator that saves ``kept`` (or a view of
    all of it) through ``save_for_backward``, including Transformer Engine's linears. An operator that saves a
    quantised copy keeps that copy.
    """
    address = kept.data_ptr()
    size = kept.numel()

    def pack(tensor: Tensor) -> Any:
        same = tensor.data_ptr() == address and tensor.numel() == size and tensor.dtype == kept_dtype
        return tensor.shape if same else tensor

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return function(*inputs).view(packed)

    kept_dtype = kept.dtype
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def with_bias(linear: Callable[..., Any]) -> Callable[..., Any]:
    """A constructor of a linear that always adds its bias, even if core asks for ``skip_bias_add``.

    Core leaves biases to fused elementwise kernels, whose backward pass needs one more kernel to sum ``[P,
    F]`` gradients. cuBLASLt gives the sum as a by-product of the weight gradient.
    """

    def build(*args: Any, **kwargs: Any) -> Any:
        return linear(*args, **{**kwargs, "skip_bias_add": False})

    return build
