"""RMSNorm and LayerNorm before a block of a residual layer, in Triton.

The input of such a norm is also added to the output of the block. So its gradient has two parts, which
autograd would add in a kernel of its own. Here the backward kernel of the norm reads both, which takes 4
passes over memory instead of 6. Statistics and sums are in fp32, and results are rounded once.

That input may still be a sum to be formed, of a residual, the output of the block before, and that output's
bias. Then the forward kernel forms it too, and the norm is that of the rounded sum. The gradient of that bias
is summed in a kernel of its own: a third sum in the registers of the backward kernel would cost more time.

A program of the backward pass takes every n-th row and sums the gradients of parameters in registers.
The sums of the programs are added in a fixed order, so that gradients are deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vl.kernels.layers.biased_layers import add_programs, column_sums
from megatron_vl.kernels.layers.fp8_rows import keep_empty_rows, store_in_fp8
from megatron_vl.kernels.sizes import next_power_of_2
from megatron_vl.kernels.where_kernels_run import has_large_shared_memory

FORWARD_COLUMNS_PER_WARP = 512
BACKWARD_COLUMNS_PER_WARP = 256
BACKWARD_PROGRAMS = 528
"""Number of programs of the backward pass: four for each of the 132 processors of an H100 or H200."""
BACKWARD_STAGES = 3
"""How many rows of a program are read at a time, with the one in work; two without large shared memory."""


@triton.jit
def _forward_kernel(
    x, added, added_bias, sum_pointer, weight, bias, output_pointer, means, inverse_stds, values, scales,
    EPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, IS_CENTERED: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr, HAS_ADDED: tl.constexpr, HAS_ADDED_BIAS: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
):  # fmt: skip
    """One program for each row. ``IS_CENTERED``: LayerNorm, which subtracts the mean and adds a bias.

    ``IS_QUANTIZED``: writes the norm in FP8 too, as ``values`` and ``scales``.
    """
    row_index = tl.program_id(0).to(tl.int64)
    column_index = tl.arange(0, BLOCK)
    column_mask = column_index < WIDTH
    row_offsets = row_index * WIDTH + column_index
    normalized = tl.load(x + row_offsets, mask=column_mask, other=0.0).to(tl.float32)
    if HAS_ADDED:
        total = tl.load(added + row_offsets, mask=column_mask, other=0.0).to(tl.float32)
        if HAS_ADDED_BIAS:
            total += tl.load(added_bias + column_index, mask=column_mask, other=0.0).to(tl.float32)
        # The backward pass reads the rounded sum.
        rounded = (normalized + total).to(sum_pointer.dtype.element_ty)
        tl.store(sum_pointer + row_offsets, rounded, mask=column_mask)
        normalized = rounded.to(tl.float32)
    if IS_CENTERED:
        mean = tl.sum(normalized, 0) / WIDTH
        tl.store(means + row_index, mean)
        normalized = tl.where(column_mask, normalized - mean, 0.0)
    inverse_std = tl.rsqrt(tl.sum(normalized * normalized, 0) / WIDTH + EPS)
    tl.store(inverse_stds + row_index, inverse_std)

    w = tl.load(weight + column_index, mask=column_mask, other=0.0).to(tl.float32) + WEIGHT_OFFSET
    y = normalized * inverse_std * w
    if IS_CENTERED:
        y += tl.load(bias + column_index, mask=column_mask, other=0.0).to(tl.float32)
    tl.store(output_pointer + row_offsets, y, mask=column_mask)
    if IS_QUANTIZED:
        y = y.to(output_pointer.dtype.element_ty).to(tl.float32)
        store_in_fp8(y, tl.max(tl.abs(y), 0), column_mask, values + row_offsets, scales + row_index)


@triton.jit
def _backward_kernel(
    x, weight, means, inverse_stds, output_grad_pointer, residual_grad_pointer, x_grad_pointer,
    parameter_grads, num_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, IS_CENTERED: tl.constexpr, WEIGHT_OFFSET: tl.constexpr,
    HAS_RESIDUAL_GRAD: tl.constexpr, IS_TRAINED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``parameter_grads``, fp32 [programs, 1 or 2, WIDTH]: of weight and bias, from each program's rows."""
    first_row = tl.program_id(0).to(tl.int64)
    num_programs = tl.num_programs(0)
    column_index = tl.arange(0, BLOCK)
    column_mask = column_index < WIDTH
    w = tl.load(weight + column_index, mask=column_mask, other=0.0).to(tl.float32) + WEIGHT_OFFSET
    weight_grad = tl.zeros((BLOCK,), tl.float32)
    bias_grad = tl.zeros((BLOCK,), tl.float32)

    for row_index in tl.range(first_row, num_rows, num_programs, num_stages=STAGES):
        row_offsets = row_index * WIDTH + column_index
        normalized = tl.load(x + row_offsets, mask=column_mask, other=0.0).to(tl.float32)
        output_grad = tl.load(output_grad_pointer + row_offsets, mask=column_mask, other=0.0).to(tl.float32)
        # Read before the sums, which wait for all threads of the program.
        residual_grad = tl.zeros((BLOCK,), tl.float32)
        if HAS_RESIDUAL_GRAD:
            residual_grad = tl.load(residual_grad_pointer + row_offsets, mask=column_mask, other=0.0).to(
                tl.float32
            )
        inverse_std = tl.load(inverse_stds + row_index)
        normalized_grad = output_grad * w
        if IS_CENTERED:
            # Columns beyond the width are not zero here, but all that they are multiplied by is.
            normalized -= tl.load(means + row_index)
        normalized *= inverse_std
        if IS_TRAINED:
            weight_grad += output_grad * normalized
            bias_grad += output_grad

        radial_grad = tl.sum(normalized_grad * normalized, 0) / WIDTH
        x_grad = normalized_grad - normalized * radial_grad
        if IS_CENTERED:
            x_grad -= tl.sum(normalized_grad, 0) / WIDTH
        x_grad = x_grad * inverse_std + residual_grad
        tl.store(x_grad_pointer + row_offsets, x_grad, mask=column_mask)

    if IS_TRAINED:
        grad_pointers = parameter_grads + first_row * (1 + IS_CENTERED) * WIDTH + column_index
        tl.store(grad_pointers, weight_grad, mask=column_mask)
        if IS_CENTERED:
            tl.store(grad_pointers + WIDTH, bias_grad, mask=column_mask)


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        added: Tensor | None,
        added_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        norm_options: tuple[float, bool, bool],
    ) -> tuple[Tensor, Tensor]:
        eps, is_zero_centered, is_quantized = norm_options
        # Here rows need no view of their own, which autograd would record.
        x, added = x.contiguous(), None if added is None else added.contiguous()
        width = x.shape[-1]
        num_rows = x.numel() // width
        normalized = torch.empty_like(x)
        residual = x if added is None else torch.empty_like(x)
        inverse_stds = x.new_empty(num_rows, dtype=torch.float32)
        means = None if bias is None else torch.empty_like(inverse_stds)
        ctx.options = {
            "WIDTH": width,
            "BLOCK": next_power_of_2(width),
            "IS_CENTERED": bias is not None,
            "WEIGHT_OFFSET": float(is_zero_centered),
        }
        fp8_rows = keep_empty_rows(normalized) if is_quantized else None
        if num_rows:
            _forward_kernel[num_rows,](
                x, added, added_bias, residual, weight, bias, normalized, means, inverse_stds,
                *(fp8_rows or (None, None)), EPS=eps, **ctx.options,
                HAS_ADDED=added is not None, HAS_ADDED_BIAS=added_bias is not None,
                IS_QUANTIZED=fp8_rows is not None, num_warps=_num_warps(width, FORWARD_COLUMNS_PER_WARP),
            )  # fmt: skip
        ctx.save_for_backward(residual, weight, means, inverse_stds)
        ctx.set_materialize_grads(False)
        return normalized, residual

    @staticmethod
    def backward(ctx, output_grad: Tensor | None, residual_grad: Tensor | None):
        _, needs_added_grad, needs_added_bias_grad, is_trained, *_ = ctx.needs_input_grad
        weight_grads: list[Tensor | None] = [None, None]
        if output_grad is None:
            assert residual_grad is not None
            x_grad = residual_grad
        else:
            x_grad, parameter_grads = _ResidualNorm._norm_gradients(
                ctx, output_grad.contiguous(), residual_grad, is_trained
            )
            if is_trained:
                weight_grads[: parameter_grads.shape[1]] = add_programs(
                    parameter_grads, ctx.saved_tensors[1].dtype
                )
        added_grad = x_grad if needs_added_grad else None
        added_bias_grad = column_sums(x_grad) if needs_added_bias_grad else None
        return x_grad, added_grad, added_bias_grad, *weight_grads, None

    @staticmethod
    def _norm_gradients(
        ctx, output_grad: Tensor, residual_grad: Tensor | None, is_trained: bool
    ) -> tuple[Tensor, Tensor]:
        """The gradient of the norm's input, and those of weight and bias for each program."""
        x, weight, means, inverse_stds = ctx.saved_tensors
        residual_grad = None if residual_grad is None else residual_grad.contiguous()
        x_grad = torch.empty_like(x)
        num_rows, width = inverse_stds.numel(), x.shape[-1]
        num_programs = min(num_rows, BACKWARD_PROGRAMS)
        parameter_grads = x.new_empty(
            num_programs if is_trained else 0, 1 + (means is not None), width, dtype=torch.float32
        )
        if num_programs:
            _backward_kernel[num_programs,](
                x, weight, means, inverse_stds, output_grad, residual_grad, x_grad, parameter_grads,
                num_rows, **ctx.options, HAS_RESIDUAL_GRAD=residual_grad is not None,
                IS_TRAINED=is_trained,
                STAGES=BACKWARD_STAGES if has_large_shared_memory(x.device) else 2,
                num_warps=_num_warps(width, BACKWARD_COLUMNS_PER_WARP),
            )  # fmt: skip
        return x_grad, parameter_grads


def _num_warps(width: int, columns_per_warp: int) -> int:
    return min(max(next_power_of_2(width) // columns_per_warp, 1), 16)


def residual_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    is_zero_centered: bool = False,
    is_quantized: bool = False,
    added: Tensor | None = None,
    added_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The norm of ``x`` over its last dimension, and ``x`` itself, which is to be added later.

    The gradient of both arrives in one kernel. Reference: ``torch.nn.functional.rms_norm`` and
    ``layer_norm``.

    Args:
        x: [..., H].
        weight: [H].
        bias: [H] for LayerNorm; None for RMSNorm. It is trained if ``weight`` is.
        is_zero_centered: whether one is added to the weight.
        is_quantized: whether linears in FP8 read the norm. The kernel then writes it in FP8 too.
        added: of the shape of ``x``, to add to it before both.
        added_bias: [H] to add together with ``added``.

    Returns:
        Two tensors of the shape and type of ``x``. The second shares its memory, unless something is added.
    """
    # Autograd's functions take a microsecond for each argument.
    norm_options = eps, is_zero_centered, is_quantized
    return _ResidualNorm.apply(x, added, added_bias, weight, bias, norm_options)
