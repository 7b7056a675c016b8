"""Layers that save time or memory compared with Megatron-core's own.

* :class:`TowerSelfAttention`: runs a tower layer's attention and RoPE, between ``linear_qkv`` and
  ``linear_proj``, in our kernels.
* :class:`FusedMLP`: runs the bias of ``linear_fc1`` and the activation as one kernel. It can recompute the
  activation in the backward pass instead of keeping it.
* :class:`ResidualNorm`: a norm whose kernels also form the sum before it and add the gradient of the residual
  connection.
* :func:`add_to_residual`: adds a block's output and its bias to the residual, and sums the bias's gradient.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.activations import quick_gelu
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_vl.kernels.held_tensor import HeldTensor
from megatron_vl.kernels.where_kernels_run import runs_on_kernels
from megatron_vl.models.attention import PackedRow
from megatron_vl.models.fp8_activation import Fp8SwiGLU, activation_quantizers, takes_fp8_activation
from megatron_vl.models.fp8_linear import Fp8Rows


def gelu_tanh(x: Tensor) -> Tensor:
    return nn.functional.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "quick_gelu": quick_gelu,
    "gelu_tanh": gelu_tanh,
}


class TowerSelfAttention(SelfAttention):
    """Core's SelfAttention with our kernels where they apply.

    With ``fused_windows``, layers with small windows use
    :mod:`megatron_vl.kernels.attention.window_attention`. Layers with full attention use
    :mod:`megatron_vl.kernels.attention.tower_attention` if the backend is ``triton``.
    """

    def __init__(self, *args: Any, fused_windows: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fused_windows = fused_windows

    def forward(
        self, hidden_states: Tensor, *args: Any, packed_seq_params: PackedRow | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[P, 1, H] -> ([P, 1, H], bias to add or None)"""
        row = packed_seq_params
        attention_kernel = None if row is None or row.cos_sin is None else self._choose_kernel(row)
        if attention_kernel is None:
            return super().forward(hidden_states, *args, packed_seq_params=row, **kwargs)

        qkv, _ = self.linear_qkv(hidden_states)
        # An index would fill a gradient with zeros and copy the real one into it.
        return self.linear_proj(attention_kernel(qkv.squeeze(1))[:, None])

    def _choose_kernel(self, packed_row: PackedRow) -> Callable[[Tensor], Tensor] | None:
        """The kernel for this layer, or None.

        It takes the fused QKV output [P, heads * 3 * d] and returns [P, heads * d].
        """
        from megatron_vl.kernels.attention.tower_attention import tower_attention
        from megatron_vl.kernels.attention.window_attention import supports_windows, window_attention

        assert packed_row.cos_sin is not None
        cos, sin = packed_row.cos_sin
        head_dim = self.hidden_size_per_attention_head
        segments = packed_row.window_segments if self.core_attention.windowed else packed_row.full_segments
        if segments is None:
            return None

        cu_seqlens, max_seqlen = segments.cu_seqlens, segments.max_seqlen
        has_windows = self.core_attention.windowed and self.fused_windows
        if has_windows and supports_windows(max_seqlen, cu_seqlens.device):
            return lambda qkv: window_attention(qkv, cos, sin, cu_seqlens, max_seqlen, head_dim)
        if self.core_attention.backend == "triton":
            return lambda qkv: tower_attention(qkv, cos, sin, cu_seqlens, head_dim)
        return None


class FusedMLP(MLP):
    """Core's dense MLP with our activations, which add the bias of ``linear_fc1`` if it has one.

    In the backward pass, they also compute that bias's gradient.

    Args:
        recompute_activation: whether to keep only ``linear_fc1``'s output and recompute the activation in the
            backward pass, which costs one elementwise kernel. A gated activation is half as large as that
            output.
    """

    def __init__(self, *args: Any, recompute_activation: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recompute_activation = recompute_activation
        self.takes_fp8_activation = takes_fp8_activation(self.config)
        names = {function: name for name, function in ACTIVATIONS.items()}
        self.activation_name = names[self.config.activation_func]

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[S, 1, H] -> ([S, 1, H], bias to add or None)"""
        assert per_token_scale is None, "for experts only"
        if self.takes_fp8_activation and torch.is_grad_enabled():
            if quantizers := activation_quantizers(self.linear_fc1, self.linear_fc2):
                return self._forward_in_fp8(hidden_states, *quantizers)

        intermediate_states, bias = self.linear_fc1(hidden_states)
        activated_states = self._apply_activation(
            intermediate_states, bias, is_quantized=isinstance(self.linear_fc2, Fp8Rows)
        )
        if not self.recompute_activation or not activated_states.requires_grad:
            return self.linear_fc2(activated_states)
        with recompute_in_backward(
            activated_states, self._apply_activation, intermediate_states.detach(), bias
        ):
            return self.linear_fc2(activated_states)

    def _forward_in_fp8(self, hidden_states: Tensor, *quantizers: Any) -> tuple[Tensor, None]:
        # Transformer Engine keeps the transpose of a matrix alone, so rows have no second axis here.
        intermediate_states, _ = self.linear_fc1(hidden_states.flatten(0, 1))
        activated_states = Fp8SwiGLU.apply(intermediate_states, *quantizers)
        output, _ = self.linear_fc2(activated_states)
        # The backward pass reads the transpose alone.
        activated_states.update_usage(rowwise_usage=False, columnwise_usage=True)
        return output[:, None], None

    def _apply_activation(
        self, intermediate_states: Tensor, bias: Tensor | None, *, is_quantized: bool = False
    ) -> Tensor:
        is_gated = self.config.gated_linear_unit
        if bias is not None:
            if runs_on_kernels(intermediate_states):
                from megatron_vl.kernels.layers.biased_layers import biased_activation

                options = {"is_gated": is_gated, "is_quantized": is_quantized}
                return biased_activation(intermediate_states, bias, self.activation_name, **options)
            intermediate_states = intermediate_states + bias

        if not is_gated:
            return self.activation_func(intermediate_states)
        if intermediate_states.is_cuda:
            from megatron_vl.kernels.layers.swiglu import swiglu

            return swiglu(intermediate_states)
        gate_states, up_states = intermediate_states.chunk(2, -1)
        return self.activation_func(gate_states) * up_states


def add_to_residual(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Stands for core's ``get_bias_dropout_add``, for layers without dropout."""

    def add(output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        assert not dropout
        output, bias = output_and_bias
        if bias is None:
            return residual + output.to(residual.dtype)

        from megatron_vl.kernels.layers.biased_layers import biased_sum

        return biased_sum(residual, output, bias)

    return add


@dataclass
class PendingSum:
    """The sum of a residual, an output and its bias, which a :class:`ResidualNorm` forms as it reads it."""

    summands: tuple[Tensor, Tensor, Tensor | None] | None

    def take(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The three tensors, once: core's layer holds this object until its end, but need not hold them."""
        assert self.summands is not None
        summands, self.summands = self.summands, None
        return summands


def postpone_addition(training: bool, fused: bool) -> Callable[..., PendingSum]:
    """Stands for core's ``get_bias_dropout_add`` before a :class:`ResidualNorm` that returns its input.

    Core's layer hands on what this returns to that norm, because layers without cross-attention have
    identities in between.
    """

    def postpone(
        output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float
    ) -> PendingSum:
        assert not dropout
        return PendingSum((residual, *output_and_bias))

    return postpone


def recomputes_norms(config: TransformerConfig) -> bool:
    """Whether core frees all that a norm returns and computes it again in the backward pass."""
    return (config.recompute_granularity == "selective") and "layernorm" in (config.recompute_modules or [])


class ResidualNorm(nn.Module):
    """The norm of ``config.normalization`` before a block, whose input is also added to the block's output.

    It returns that input too, which core then adds. So both gradients of the input reach one kernel
    (:mod:`megatron_vl.kernels.layers.residual_norm`).

    Args:
        fp8_rows: whether linears in FP8 with a scale for each row read it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        fp8_rows: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.fp8_rows = fp8_rows
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        # The input must stay if the norm is to be recomputed.
        self.returns_input = not recomputes_norms(config)

        initial_weight = torch.full(
            (hidden_size,), float(not self.is_zero_centered), dtype=config.params_dtype
        )
        self.weight = nn.Parameter(initial_weight)
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros_like(initial_weight))
        for parameter in self.parameters():
            # finalize_model_grads sums the gradients of marked parameters over the tensor-parallel group.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor | PendingSum) -> Tensor | tuple[Tensor, Tensor]:
        """[S, 1, H] -> [S, 1, H], and ``x`` (or the sum that it stands for) if it returns its input"""
        from megatron_vl.kernels.layers.residual_norm import residual_norm

        residual, added, added_bias = x.take() if isinstance(x, PendingSum) else (x, None, None)
        normalized, residual = residual_norm(
            residual,
            self.weight,
            self.bias,
            self.eps,
            is_zero_centered=self.is_zero_centered,
            is_quantized=self.fp8_rows,
            added=added,
            added_bias=added_bias,
        )
        return (normalized, residual) if self.returns_input else normalized


@contextmanager
def recompute_in_backward(
    recomputed_tensor: Tensor, forward_function: Callable[..., Tensor], *function_inputs: Any
) -> Iterator[None]:
    """A context in which autograd does not keep ``recomputed_tensor``.

    The backward pass computes it again, as ``forward_function(*function_inputs)``. This works for every
    operator that saves the tensor (or a view of all of it) through ``save_for_backward``, including
    Transformer Engine's linears. An operator that saves a quantised copy keeps that copy.
    """
    # Autograd keeps `pack_tensor` for longer than the context, so that function must not hold the tensor.
    held_tensors = [HeldTensor(recomputed_tensor)]

    def pack_tensor(saved_tensor: Tensor) -> Any:
        # Views that order its elements differently are kept, and values that were written in place.
        [held_tensor] = held_tensors
        return saved_tensor.shape if held_tensor.has_values_of(saved_tensor) else saved_tensor

    def unpack_tensor(packed_tensor: Any) -> Tensor:
        if isinstance(packed_tensor, Tensor):
            return packed_tensor
        with torch.no_grad():
            return forward_function(*function_inputs).view(packed_tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack_tensor, unpack_tensor):
        yield
    held_tensors.clear()
