"""SwiGLU that writes FP8 for a linear with delayed scaling, in Triton.

Such a linear multiplies FP8 with one scale for the whole tensor, which is known before. It reads the rows,
and in the backward pass the transpose. The kernel writes both. To write bf16 and cast it would move these
bytes twice: 0.4 ms of a decoder layer of Qwen2.5-VL-7B with 8192 tokens (benchmarks/log/speed.md).

Values are rounded to bf16 first, so the FP8 numbers are those of a cast of
:func:`~megatron_vl.kernels.layers.swiglu.swiglu`, to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vl.kernels.layers.biased_layers import load_float32
from megatron_vl.kernels.layers.swiglu import gate_gradient
from megatron_vl.kernels.sizes import cdiv

BLOCK_ROWS = 64
BLOCK_COLUMNS = 128
NUM_WARPS = 16


@triton.jit
def _store_tile(y, scale, values, transposed, row, column, mask, num_rows, width):
    """Stores ``y``, a tile, in FP8. Returns its largest magnitude."""
    y = y.to(tl.bfloat16).to(tl.float32)
    largest = tl.max(tl.abs(y))
    y = (y * scale).to(values.dtype.element_ty)
    tl.store(values + row * width + column, y, mask)
    tl.store(transposed + tl.trans(column) * num_rows + tl.trans(row), tl.trans(y), tl.trans(mask))
    return largest


@triton.jit
def _swiglu_kernel(
    x, output_grad, scale_pointer, largest_pointer, values, transposed, inverse_scale, num_rows, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of the result, or with ``output_grad`` of the gradient of ``x``."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (row < num_rows) & (column < width)
    gate_pointers = x + row * 2 * width + column
    gate = load_float32(gate_pointers, mask)
    up = load_float32(gate_pointers + width, mask)
    scale, largest_before = tl.load(scale_pointer), tl.load(largest_pointer)
    tl.store(inverse_scale, tl.div_rn(1.0, scale))

    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    if output_grad is None:
        largest = _store_tile(silu * up, scale, values, transposed, row, column, mask, num_rows, width)
    else:
        grad = load_float32(output_grad + row * width + column, mask)
        gate_grad = gate_gradient(sigmoid, silu, up, grad)
        largest = _store_tile(gate_grad, scale, values, transposed, row, column, mask, num_rows, 2 * width)
        up_grad, column = grad * silu, column + width
        up_largest = _store_tile(up_grad, scale, values, transposed, row, column, mask, num_rows, 2 * width)
        largest = tl.maximum(largest, up_largest)
    # Most programs need no atomic operation, which all would wait for.
    tl.atomic_max(largest_pointer, largest, largest > largest_before, sem="relaxed")


def swiglu_in_fp8(
    x: Tensor, scale: Tensor, largest: Tensor, output_grad: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """SwiGLU of contiguous ``x`` [rows, 2 * F] in e4m3, or the gradient of ``x`` in e5m2.

    Args:
        scale: one fp32 number, which those of the result are multiplied by before they are rounded to FP8.
        largest: one fp32 number: the largest magnitude so far, raised to that of the result.
        output_grad: [rows, F]; None: the result itself.

    Returns:
        Bytes of the numbers [rows, width]; their transpose [width, rows]; the reciprocal of ``scale``.
    """
    num_rows, width = x.shape[0], x.shape[1] // 2
    shape = (num_rows, width) if output_grad is None else x.shape
    fp8 = torch.float8_e4m3fn if output_grad is None else torch.float8_e5m2
    values, transposed = x.new_empty(shape, dtype=fp8), x.new_empty(shape[::-1], dtype=fp8)
    inverse_scale = torch.empty_like(scale)
    _swiglu_kernel[cdiv(width, BLOCK_COLUMNS), cdiv(num_rows, BLOCK_ROWS)](
        x, output_grad, scale, largest, values, transposed, inverse_scale, num_rows, width,
        ROWS=BLOCK_ROWS, COLUMNS=BLOCK_COLUMNS, num_warps=NUM_WARPS,
    )  # fmt: skip
    return values.view(torch.uint8), transposed.view(torch.uint8), inverse_scale
