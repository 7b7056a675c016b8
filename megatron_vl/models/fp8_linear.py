"""Linears of the vision tower in FP8, with a scale for each row.

Transformer Engine's linears in FP8 keep the host busy for 0.3 to 0.4 ms each, longer than the GPU needs for
the tower's (benchmarks/log/speed.md). These launch two kernels forward and three backward. The gradient of
the weight is in bf16: its operands would have to be transposed, which takes most of what FP8 would gain.
"""

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from megatron_vl.core_fixes.wgrad_fusion import WeightGradientProducts

if TYPE_CHECKING:
    from megatron_vl.kernels.layers.fp8_rows import ScaledRows


class Fp8Weight:
    """A weight [out, in] in FP8, for the products of a step."""

    def __init__(self, weight: Tensor) -> None:
        from megatron_vl.kernels.layers.fp8_rows import quantize_rows

        self.weight = weight
        self.rows = quantize_rows(weight.detach())

    @cached_property
    def columns(self) -> "ScaledRows":
        """The weight transposed, [in, out], with a scale for each input."""
        from megatron_vl.kernels.layers.fp8_rows import quantize_rows

        return quantize_rows(self.weight.detach().t().contiguous())


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, fp8_weight: Fp8Weight, adds_to_main_grad: bool
    ) -> Tensor:
        from megatron_vl.kernels.layers.fp8_rows import row_scaled_product, rows_of

        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.fp8_weight, ctx.adds_to_main_grad = fp8_weight, adds_to_main_grad
        return row_scaled_product(rows_of(x), fp8_weight.rows, bias)

    @staticmethod
    def backward(ctx, output_grad: Tensor):
        from megatron_vl.kernels.layers.biased_layers import column_sums
        from megatron_vl.kernels.layers.fp8_rows import row_scaled_product, rows_of

        output_grad = output_grad.contiguous()
        weight, x_grad, weight_grad, bias_grad = ctx.fp8_weight.weight, None, None, None
        if ctx.needs_input_grad[0]:
            x_grad = row_scaled_product(rows_of(output_grad), ctx.fp8_weight.columns)
        if ctx.needs_input_grad[1] and ctx.adds_to_main_grad:
            [x] = ctx.saved_tensors
            WeightGradientProducts.wgrad_gemm_accum_fp32(x, output_grad, weight.main_grad)
            weight.grad_added_to_main_grad = True
            weight_grad = torch.empty_like(weight)  # for DDP's hook, which does not read it
        elif ctx.needs_input_grad[1]:
            weight_grad = output_grad.t() @ ctx.saved_tensors[0]
        if ctx.needs_input_grad[2]:
            bias_grad = column_sums(output_grad)
        return x_grad, weight_grad, bias_grad, None, None


class Fp8Rows:
    """Stands before a linear of Transformer Engine among base classes: its parameters, and our products."""

    weight: Tensor
    bias: Tensor
    use_bias: bool
    te_return_bias: bool
    tp_size: int
    parallel_mode: str
    fuse_wgrad_accumulation: bool
    is_first_microbatch: bool
    _tp_group: torch.distributed.ProcessGroup
    _fp8_weight: Fp8Weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[P, 1, in] -> ([P, 1, out], bias to add or None)"""
        # Core's schedules set the flag before a step's first row: the optimizer has changed the weight.
        if self.is_first_microbatch:
            self._fp8_weight = Fp8Weight(self.weight)
            self.is_first_microbatch = False
        is_row = self.parallel_mode == "row"
        bias = self.bias if self.use_bias else None
        product_bias = None if is_row or self.te_return_bias else bias

        if self.tp_size > 1 and not is_row:
            x = copy_to_tensor_model_parallel_region(x, self._tp_group)
        rows = x.flatten(0, 1).contiguous()
        if rows.numel():
            main_grad = self.fuse_wgrad_accumulation
            output = _Fp8Linear.apply(rows, self.weight, product_bias, self._fp8_weight, main_grad)
        else:
            output = torch.nn.functional.linear(rows, self.weight, product_bias)
        output = output[:, None]
        if self.tp_size > 1 and is_row:
            output = reduce_from_tensor_model_parallel_region(output, self._tp_group)

        if self.te_return_bias:
            return output, bias
        return (output if bias is product_bias else output + bias), None


def renew_fp8_weights(model: torch.nn.Module) -> None:
    """Makes the linears of ``model`` that are in FP8 read their weights again, which were changed."""
    for module in model.modules():
        if isinstance(module, Fp8Rows):
            module.is_first_microbatch = True
