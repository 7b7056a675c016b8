"""RMSNorm of each head times the SiLU of its gate, in Triton; see
:func:`megatron_vl.kernels.linear_attention.gated_delta_rule.gated_norm`.

The gradient of the weight is summed over a program's rows, then over the programs, in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vl.kernels.sizes import cdiv

_BLOCK_ROWS = 16
"""Rows of a block. A row is one head of one token."""
_BLOCKS_PER_PROGRAM = 8


@triton.jit
def _forward_kernel(
    x, gate, weight, output_pointer, num_rows, gate_stride,
    EPS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row_index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, WIDTH)
    row_mask = (row_index < num_rows)[:, None]
    row_offsets = row_index[:, None] * WIDTH + n[None, :]
    x_fp32 = tl.load(x + row_offsets, mask=row_mask, other=0.0).to(tl.float32)
    gate_offsets = (
        (row_index // HEADS)[:, None] * gate_stride + (row_index % HEADS)[:, None] * WIDTH + n[None, :]
    )
    gate_fp32 = tl.load(gate + gate_offsets, mask=row_mask, other=0.0).to(tl.float32)

    inverse_rms = tl.rsqrt(tl.sum(x_fp32 * x_fp32, 1) / WIDTH + EPS)
    # Rounded here, as in transformers.
    normalized_rows = (x_fp32 * inverse_rms[:, None]).to(x.dtype.element_ty).to(tl.float32)
    y = tl.load(weight + n).to(tl.float32)[None, :] * normalized_rows * (gate_fp32 * tl.sigmoid(gate_fp32))
    tl.store(output_pointer + row_offsets, y, mask=row_mask)


@triton.jit
def _backward_kernel(
    x, gate, weight, output_grad_pointer, x_grad_pointer, gate_grad_pointer, weight_grads, num_rows,
    gate_stride,
    EPS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, WIDTH)
    w = tl.load(weight + n).to(tl.float32)[None, :]
    weight_grad = tl.zeros((ROWS, WIDTH), tl.float32)

    for block_index in tl.range(0, STEPS, num_stages=1):
        row_index = (tl.program_id(0).to(tl.int64) * STEPS + block_index) * ROWS + tl.arange(0, ROWS)
        row_mask = (row_index < num_rows)[:, None]
        row_offsets = row_index[:, None] * WIDTH + n[None, :]
        x_fp32 = tl.load(x + row_offsets, mask=row_mask, other=0.0).to(tl.float32)
        gate_offsets = (
            (row_index // HEADS)[:, None] * gate_stride + (row_index % HEADS)[:, None] * WIDTH + n[None, :]
        )
        gate_fp32 = tl.load(gate + gate_offsets, mask=row_mask, other=0.0).to(tl.float32)
        output_grad = tl.load(output_grad_pointer + row_offsets, mask=row_mask, other=0.0).to(tl.float32)

        inverse_rms = tl.rsqrt(tl.sum(x_fp32 * x_fp32, 1) / WIDTH + EPS)[:, None]
        normalized_fp32 = x_fp32 * inverse_rms
        normalized_rows = normalized_fp32.to(x.dtype.element_ty).to(tl.float32)
        sigmoid = tl.sigmoid(gate_fp32)
        silu = gate_fp32 * sigmoid
        weight_grad += output_grad * normalized_rows * silu

        gate_grad = output_grad * w * normalized_rows * sigmoid * (1 + gate_fp32 * (1 - sigmoid))
        tl.store(gate_grad_pointer + row_offsets, gate_grad, mask=row_mask)

        normalized_grad = output_grad * w * silu
        radial_grad = tl.sum(normalized_grad * normalized_fp32, 1)[:, None] / WIDTH
        tl.store(
            x_grad_pointer + row_offsets,
            inverse_rms * (normalized_grad - normalized_fp32 * radial_grad),
            mask=row_mask,
        )

    tl.store(weight_grads + tl.program_id(0).to(tl.int64) * WIDTH + n, tl.sum(weight_grad, 0))


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        norm_output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows = x.shape[0] * x.shape[1]
        _forward_kernel[cdiv(rows, _BLOCK_ROWS),](
            x, gate, weight, norm_output, rows, gate.stride(0),
            EPS=eps, HEADS=x.shape[1], WIDTH=x.shape[2], ROWS=_BLOCK_ROWS, num_warps=4,
        )  # fmt: skip
        return norm_output

    @staticmethod
    def backward(ctx, output_grad: Tensor):
        x, gate, weight = ctx.saved_tensors
        output_grad = output_grad.contiguous()
        x_grad, gate_grad = (
            torch.empty(x.shape, dtype=input_tensor.dtype, device=x.device) for input_tensor in (x, gate)
        )
        rows = x.shape[0] * x.shape[1]
        num_programs = cdiv(rows, _BLOCK_ROWS * _BLOCKS_PER_PROGRAM)
        weight_grads = torch.empty(num_programs, x.shape[2], dtype=torch.float32, device=x.device)
        _backward_kernel[num_programs,](
            x, gate, weight, output_grad, x_grad, gate_grad, weight_grads, rows, gate.stride(0),
            EPS=ctx.eps, HEADS=x.shape[1], WIDTH=x.shape[2], ROWS=_BLOCK_ROWS, STEPS=_BLOCKS_PER_PROGRAM,
            num_warps=4,
        )  # fmt: skip
        return x_grad, gate_grad, weight_grads.sum(0).to(weight.dtype), None


def is_supported(x: Tensor) -> bool:
    """Whether the kernels support x [S, heads, V]: V is a power of two from 16 to 256, and S is not 0."""
    width = x.shape[2]
    return 16 <= width <= 256 and width & (width - 1) == 0 and x.shape[0] > 0


def contiguous_heads(head_tensor: Tensor) -> Tensor:
    """``head_tensor`` [S, heads, d] with contiguous heads. It is copied only if they are not contiguous."""
    is_contiguous = head_tensor.stride(2) == 1 and head_tensor.stride(1) == head_tensor.shape[2]
    return head_tensor if is_contiguous else head_tensor.contiguous()


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x, gate [S, heads, V], weight [V] -> [S, heads, V]. The gate may have any stride between tokens."""
    return _GatedNorm.apply(x.contiguous(), contiguous_heads(gate), weight.contiguous(), eps)
