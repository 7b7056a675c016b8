"""Times the kernels between the products of a layer on one GPU, before and after they were fused.

    python benchmarks/fused_layers.py [--tune]

All times are those of kernels alone, in bf16, with cold caches. Passes are how often a tensor of the case's
size must be read or written; their sum over the time is the bandwidth. ``--tune`` also times other launches
of our norm and activations.

- Norms, and the sum with the residual connection in the backward pass: Transformer Engine's and ours.
- A residual, a product and its bias: core's sum and ours, each with the norm that reads it, and our kernel
  for sum and norm. Sums of columns: torch's and ours.
- Activations after a product that adds the bias, and ours, which add it themselves and sum its gradient; the
  weight gradient of the product with and without that sum (cuBLASLt).
- SwiGLU without a bias: Megatron-core's jitted one and ours.
- GELU: torch's, and in the epilogue of the products (cuBLASLt).
- Linears without a bias, and with one in the product's epilogue: its gradient by cuBLASLt, and by our kernel.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te  # before torch loads cuDNN: their libraries must be of one version
from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from timing import device_milliseconds
from torch import Tensor
from transformer_engine.pytorch.cpp_extensions import general_gemm

from megatron_vl.core_fixes.bias_gradients import use_column_sums
from megatron_vl.kernels.layers import biased_activation as activation_kernels
from megatron_vl.kernels.layers import biased_sum as sum_kernels
from megatron_vl.kernels.layers import residual_norm as norm_kernels
from megatron_vl.kernels.layers.biased_activation import biased_activation
from megatron_vl.kernels.layers.biased_sum import biased_sum, column_sums
from megatron_vl.kernels.layers.residual_norm import residual_norm
from megatron_vl.kernels.layers.swiglu import swiglu
from megatron_vl.models.fused_layers import gelu_tanh

PATCHES = 17_724
NORMS = ((PATCHES, 1152, True), (PATCHES, 1280, False), (8192, 3584, False), (8192, 4096, False))
"""Rows, width, and whether it is LayerNorm."""
ACTIVATIONS = ((1280, 3456, True), (1152, 4352, False))
"""Widths of the layer and of the activation, and whether that is SwiGLU; otherwise it is GELU."""
EPS = 1e-6


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def report(name: str, ms: float, elements: int = 0, passes: float = 0) -> None:
    bandwidth = f"{2 * elements * passes / ms / 1e9:5.2f} TB/s" if passes else ""
    print(f"{name:68s} {ms:7.4f} ms  {bandwidth}", flush=True)


def report_both(
    name: str,
    forward: Callable[[], tuple[Tensor, ...]],
    inputs: list[Tensor],
    grads: tuple[Tensor, ...],
    *,
    forward_passes: float = 0,
    backward_passes: float = 0,
) -> None:
    """Prints the times of both directions. Each call has its own graph: some modules free theirs."""

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), inputs, grads, allow_unused=True)

    elements = inputs[0].numel()
    forward_ms = device_milliseconds(forward)
    report(f"{name}, forward", forward_ms, elements, forward_passes)
    report(f"{name}, backward", device_milliseconds(both) - forward_ms, elements, backward_passes)


def norms(rows: int, width: int, is_layer_norm: bool) -> None:
    x = random(rows, 1, width).requires_grad_()
    grads = (random(rows, 1, width), random(rows, 1, width))
    module = (te.LayerNorm if is_layer_norm else te.RMSNorm)(width, eps=EPS, params_dtype=torch.bfloat16)
    parameters = list(module.parameters())
    bias = module.bias if is_layer_norm else None
    name = f"{type(module).__name__} {rows} x {width}"

    def run_te_norm() -> tuple[Tensor, Tensor]:
        # A view, because the module frees what it saves. With x as an output too, autograd adds its gradient.
        return module(x.view(x.shape)), x

    def run_residual_norm() -> tuple[Tensor, Tensor]:
        return residual_norm(x, module.weight, bias, EPS)

    exact_norm = F.layer_norm if is_layer_norm else F.rms_norm
    exact = exact_norm(x.float(), (width,), *(tensor.float() for tensor in parameters), eps=EPS)
    expected = torch.autograd.grad((exact, x), [x, *parameters], (grads[0].float(), grads[1]))
    for kind, function in (("Transformer Engine", run_te_norm), ("ours", run_residual_norm)):
        outputs = function()
        found = torch.autograd.grad(outputs, [x, *parameters], grads)
        pairs = zip((outputs[0], *found), (exact, *expected), strict=True)
        errors = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs]
        print(f"{name}, {kind}: errors {', '.join(f'{error:.1e}' for error in errors)}")
        inputs = [x, *parameters]
        report_both(f"{name}, {kind}", function, inputs, grads, forward_passes=2, backward_passes=4)
    added = device_milliseconds(lambda: bias_dropout_add_fused_train((grads[0], None), grads[1], 0.0))
    report(f"{name}: sum with the residual connection", added, x.numel(), 3)


def sums(rows: int, width: int, is_layer_norm: bool) -> None:
    """Of a residual, a product and its bias, alone and with the norm that reads it."""
    x, output = (random(rows, 1, width).requires_grad_() for _ in range(2))
    added_bias, weight, norm_bias = (random(width).requires_grad_() for _ in range(3))
    bias = norm_bias if is_layer_norm else None
    grads = (random(rows, 1, width), random(rows, 1, width))
    inputs = [x, output, added_bias]
    parameters = [weight, norm_bias] if is_layer_norm else [weight]
    name = f"sum {rows} x {width}"

    def core_sum() -> Tensor:
        return bias_dropout_add_fused_train((output, added_bias), x, 0.0)

    def our_sum() -> Tensor:
        return biased_sum(x, output, added_bias)

    def norm_of(total: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        return residual_norm(total(), weight, bias, EPS)

    def ours_of_sum() -> tuple[Tensor, Tensor]:
        return residual_norm(x, weight, bias, EPS, added=output, added_bias=added_bias)

    alone = {"forward_passes": 3, "backward_passes": 1}
    report_both(f"{name}, core's", lambda: (core_sum(),), inputs, grads[:1], **alone)
    report_both(f"{name}, ours", lambda: (our_sum(),), inputs, grads[:1], **alone)
    all_inputs = [*inputs, *parameters]
    for kind, total in (("core's", core_sum), ("ours", our_sum)):
        both = partial(norm_of, total)
        report_both(
            f"{name}, {kind}, then norm", both, all_inputs, grads, forward_passes=5, backward_passes=5
        )
    report_both(f"{name} and norm", ours_of_sum, all_inputs, grads, forward_passes=4, backward_passes=4)

    expected = torch.autograd.grad(residual_norm(core_sum(), weight, bias, EPS), inputs, grads)
    found = torch.autograd.grad(ours_of_sum(), inputs, grads)
    errors = [float((a - b).float().norm() / b.float().norm()) for a, b in zip(found, expected, strict=True)]
    print(f"{name} and norm: differ by {', '.join(f'{error:.1e}' for error in errors)}")


def columns(rows: int, width: int) -> None:
    """Sums of columns, with the launch in use and with others."""
    x = random(rows, width)
    expected = x.double().sum(0)
    error = float((column_sums(x) - expected).norm() / expected.norm())
    name = f"columns of {rows} x {width}"
    report(f"{name}, torch", device_milliseconds(lambda: x.sum(0)), x.numel(), 1)
    report(f"{name}, ours, error {error:.1e}", device_milliseconds(lambda: column_sums(x)), x.numel(), 1)
    launch = (sum_kernels.BLOCK_ROWS, sum_kernels.NUM_PROGRAMS, sum_kernels.NUM_STAGES)
    for choice in itertools.product((4, 8, 16), (528, 792, 1056), (1, 3, 4)) if "--tune" in sys.argv else ():
        sum_kernels.BLOCK_ROWS, sum_kernels.NUM_PROGRAMS, sum_kernels.NUM_STAGES = choice
        block_rows, programs, stages = choice
        ms = device_milliseconds(lambda: column_sums(x))
        report(f"{name}, {block_rows} rows, {programs} programs, {stages} stages", ms, x.numel(), 1)
    sum_kernels.BLOCK_ROWS, sum_kernels.NUM_PROGRAMS, sum_kernels.NUM_STAGES = launch


def tune(rows: int, width: int, is_layer_norm: bool) -> None:
    """Times our norm with other numbers of warps, programs and stages."""
    x, weight = random(rows, 1, width).requires_grad_(), random(width).requires_grad_()
    bias = random(width).requires_grad_() if is_layer_norm else None
    grads = (random(rows, 1, width), random(rows, 1, width))
    inputs = [tensor for tensor in (x, weight, bias) if tensor is not None]

    for columns in (128, 256, 512, 1024, 2048):
        norm_kernels.FORWARD_COLUMNS_PER_WARP = columns
        ms = device_milliseconds(lambda: residual_norm(x, weight, bias, EPS))
        report(f"{rows} x {width}, forward, {columns} columns a warp", ms, x.numel(), 2)

    launches = [
        *itertools.product((128, 256, 512), (528,), (1, 2, 3)),
        (256, 132, 2),
        (256, 264, 2),
        (256, 1056, 2),
    ]
    for columns, programs, stages in launches:
        norm_kernels.BACKWARD_COLUMNS_PER_WARP = columns
        norm_kernels.BACKWARD_PROGRAMS = programs
        norm_kernels.BACKWARD_STAGES = stages
        outputs = residual_norm(x, weight, bias, EPS)
        ms = device_milliseconds(
            lambda outputs=outputs: torch.autograd.grad(outputs, inputs, grads, retain_graph=True)
        )
        launch = f"{columns} columns a warp, {programs} programs, {stages} stages"
        report(f"{rows} x {width}, backward, {launch}", ms, x.numel(), 4)


def activations(width: int, ffn_width: int, is_gated: bool) -> None:
    """With the bias in the product and in the activation, and the product's weight gradient."""
    num_columns = (1 + is_gated) * ffn_width
    x, bias = random(PATCHES, num_columns).requires_grad_(), random(num_columns).requires_grad_()
    grads = (random(PATCHES, ffn_width),)
    biased = partial(
        biased_activation, activation_name="silu" if is_gated else "gelu_tanh", is_gated=is_gated
    )
    unbiased = swiglu if is_gated else gelu_tanh
    name = f"{'SwiGLU' if is_gated else 'GELU'} {PATCHES} x {ffn_width}"
    passes = {"forward_passes": 1.5, "backward_passes": 2.5}
    if not is_gated:
        passes = {"forward_passes": 2, "backward_passes": 3}

    report_both(f"{name}, no bias", lambda: (unbiased(x),), [x], grads, **passes)
    report_both(f"{name}, bias", lambda: (biased(x, bias),), [x, bias], grads, **passes)
    report_both(f"{name}, frozen bias", lambda: (biased(x, bias.detach()),), [x], grads, **passes)

    layer_input, product_grad = random(PATCHES, width), random(PATCHES, num_columns)
    main_grad = torch.zeros(num_columns, width, device="cuda")
    for kind, summed in (("alone", None), ("and bias gradient", bias.detach())):
        weight_grad = partial(
            general_gemm, layer_input, product_grad, out_dtype=torch.float32, accumulate=True, layout="NT",
            out=main_grad, bias=summed, grad=True,
        )  # fmt: skip
        report(f"weight gradient {width} to {num_columns}, {kind}", device_milliseconds(weight_grad))


def tune_activation(width: int, ffn_width: int, is_gated: bool) -> None:
    """Times our activations with other numbers of rows, programs and stages."""
    num_columns = (1 + is_gated) * ffn_width
    x, bias = random(PATCHES, num_columns).requires_grad_(), random(num_columns).requires_grad_()
    grad = random(PATCHES, ffn_width)
    biased = partial(
        biased_activation, activation_name="silu" if is_gated else "gelu_tanh", is_gated=is_gated
    )
    for rows, programs, stages in itertools.product((4, 8), (528, 792, 1056, 2112), (1, 2, 3)):
        activation_kernels.FORWARD_ROWS = activation_kernels.BACKWARD_ROWS = rows
        sum_kernels.NUM_PROGRAMS = programs
        activation_kernels.NUM_STAGES = stages
        report_both(
            f"{PATCHES} x {ffn_width}, {rows} rows, {programs} programs, {stages} stages",
            lambda: (biased(x, bias),), [x, bias], (grad,),
            forward_passes=1.5 if is_gated else 2, backward_passes=2.5 if is_gated else 3,
        )  # fmt: skip


def epilogues(width: int, ffn_width: int) -> None:
    """The first product of an MLP with GELU, and the input gradient of the second with GELU's."""
    x, grad = random(PATCHES, width), random(PATCHES, width)
    first, second = random(ffn_width, width) / width**0.5, random(width, ffn_width) / ffn_width**0.5
    bias = random(ffn_width)
    common = {"out_dtype": torch.bfloat16}

    def separate() -> Tensor:
        return gelu_tanh(general_gemm(first, x, bias=bias, **common)[0])

    def fused() -> tuple[Tensor, Tensor]:
        activated, _, before, _ = general_gemm(first, x, bias=bias, gelu=True, **common)
        return activated, before

    activated, before = fused()
    error = (activated.float() - separate().float()).norm() / activated.float().norm()
    before = before.detach().requires_grad_()
    activation = gelu_tanh(before)

    def separate_grad() -> Tensor:
        activated_grad = general_gemm(second, grad, layout="NN", grad=True, **common)[0]
        return torch.autograd.grad(activation, before, activated_grad, retain_graph=True)[0]

    def fused_grad() -> Tensor:
        return general_gemm(
            second, grad, layout="NN", grad=True, gelu=True, gelu_in=before.detach(), **common
        )[0]

    print(f"GELU in the epilogue differs by {error:.1e}")
    name = f"{width} to {ffn_width}"
    report(f"product {name} alone", device_milliseconds(lambda: general_gemm(first, x, bias=bias, **common)))
    report(f"product {name}, then GELU", device_milliseconds(separate))
    report(f"product {name} with GELU in the epilogue", device_milliseconds(fused))
    report(f"gradient {name}, then GELU's", device_milliseconds(separate_grad))
    report(f"gradient {name} with GELU's in the epilogue", device_milliseconds(fused_grad))


def swiglus(rows: int, ffn_width: int) -> None:
    """Megatron-core's and ours."""
    x, grads = random(rows, 1, 2 * ffn_width).requires_grad_(), (random(rows, 1, ffn_width),)
    for kind, function in (
        ("Megatron-core", lambda: (bias_swiglu_impl(x, None),)),
        ("ours", lambda: (swiglu(x),)),
    ):
        report_both(
            f"SwiGLU {rows} x {ffn_width}, {kind}",
            function,
            [x],
            grads,
            forward_passes=1.5,
            backward_passes=2.5,
        )


def linears(rows: int, width_in: int, width_out: int, gradients: str) -> None:
    """With a bias, whose gradient ``gradients`` computes, or without one."""
    x, grad = random(rows, 1, width_in).requires_grad_(), random(rows, 1, width_out)
    linear = te.Linear(
        width_in,
        width_out,
        bias=bool(gradients),
        parallel_mode="column",
        fuse_wgrad_accumulation=True,
        params_dtype=torch.bfloat16,
    )
    linear.weight.main_grad = torch.zeros(width_out, width_in, device="cuda")
    name = f"linear {rows} x {width_in} to {width_out}, bias gradient: {gradients or 'none'}"
    report_both(name, lambda: (linear(x),), [x, *linear.parameters()], (grad,))


if __name__ == "__main__":
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    for case in NORMS:
        norms(*case)
    for case in ACTIVATIONS:
        activations(*case)
    for shape in ((8192, 18_944), (PATCHES, 3456)):
        swiglus(*shape)
    for case in (*NORMS[:2], (8192, 3584, False)):
        sums(*case)
    for case in ((PATCHES, 1280), (PATCHES, 3840), (PATCHES, 1152), (PATCHES, 3456), (8192, 4608)):
        columns(*case)
    for gradients in ("", "cuBLASLt", "ours"):
        if gradients == "ours":
            use_column_sums()
        for widths in ((1152, 3456), (1280, 3840)):
            linears(PATCHES, *widths, gradients)
        linears(8192, 3584, 4608, gradients)
    epilogues(1152, 4304)
    if "--tune" in sys.argv:
        for case in NORMS:
            tune(*case)
        for case in ACTIVATIONS[1:]:
            tune_activation(*case)
