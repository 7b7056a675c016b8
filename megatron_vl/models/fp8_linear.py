"""Linears of the vision tower in FP8, with a scale for each row.

Transformer Engine's linears in FP8 keep the host busy for 0.3 to 0.4 ms each, longer than the GPU needs for
the tower's (benchmarks/log/speed.md). These launch a product forward and two backward; kernels before them
write most inputs and output gradients in FP8, and the rest is cast, with the sums of a bias's gradient. The
gradient of the weight is in bf16: its operands would have to be transposed, which takes most of what FP8
would gain.
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
        from megatron_vl.kernels.layers.fp8_rows import quantize_columns

        self.weight = weight
        self.forward_factor = quantize_columns(weight.detach())

    @cached_property
    def backward_factor(self) -> "ScaledRows":
        """The weight with a scale for each input."""
        from megatron_vl.kernels.layers.fp8_rows import quantize_columns

        return quantize_columns(self.weight.detach().t().contiguous())


class _Fp8Linear(torch.autograd.Function):
    """[P, 1, in] -> [P, 1, out]"""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, fp8_weight: Fp8Weight, adds_to_main_grad: bool
    ) -> Tensor:
        from megatron_vl.kernels.layers.fp8_rows import row_scaled_product, rows_of

        x = x.contiguous()
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.fp8_weight, ctx.adds_to_main_grad = fp8_weight, adds_to_main_grad
        return row_scaled_product(rows_of(x.flatten(0, 1)), fp8_weight.forward_factor, bias)[:, None]

    @staticmethod
    def backward(ctx, output_grad: Tensor):
        from megatron_vl.kernels.layers.biased_layers import column_sums_and_rows
        from megatron_vl.kernels.layers.fp8_rows import row_scaled_product, rows_of

        output_grad = output_grad.contiguous().flatten(0, 1)
        weight, x_grad, weight_grad, bias_grad = ctx.fp8_weight.weight, None, None, None
        grad_rows = None
        if ctx.needs_input_grad[2]:
            bias_grad, grad_rows = column_sums_and_rows(output_grad)
        if ctx.needs_input_grad[0]:
            grad_rows = grad_rows or rows_of(output_grad)
            x_grad = row_scaled_product(grad_rows, ctx.fp8_weight.backward_factor)[:, None]
        if ctx.needs_input_grad[1]:
            x = ctx.saved_tensors[0].flatten(0, 1)
            if ctx.adds_to_main_grad:
                WeightGradientProducts.wgrad_gemm_accum_fp32(x, output_grad, weight.main_grad)
                weight.grad_added_to_main_grad = True
                weight_grad = torch.empty_like(weight)  # for DDP's hook, which does not read it
            else:
                weight_grad = output_grad.t() @ x
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
        bias = self.bias if self.use_bias else None
        is_row, is_sharded = self.parallel_mode == "row", self.tp_size > 1
        # A bias's gradient costs least beside the cast of the output's. fc1's comes with the activation's.
        adds_bias = not is_sharded if is_row else not self.te_return_bias
        product_bias = bias if adds_bias else None

        if is_sharded and not is_row:
            x = copy_to_tensor_model_parallel_region(x, self._tp_group)
        if x.numel():
            main_grad = self.fuse_wgrad_accumulation
            output = _Fp8Linear.apply(x, self.weight, product_bias, self._fp8_weight, main_grad)
        else:
            output = torch.nn.functional.linear(x, self.weight, product_bias)
        if is_sharded and is_row:
            output = reduce_from_tensor_model_parallel_region(output, self._tp_group)

        if adds_bias or self.te_return_bias:
            return output, None if adds_bias else bias
        return (output if bias is None else output + bias), None


def renew_fp8_weights(model: torch.nn.Module) -> None:
    """Makes the linears of ``model`` that are in FP8 read their weights again, which were changed."""
    for module in model.modules():
        if isinstance(module, Fp8Rows):
            module.is_first_microbatch = True
