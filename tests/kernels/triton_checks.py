"""Compares our Triton kernels in fp32 with torch in Triton's interpreter; prints the errors, and fails if one
is too large.

Run it with TRITON_INTERPRET=1, which Triton reads at import. Or run it without it and with --gpu for the
kernels that read through tensor descriptors, which the interpreter only imitates.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from megatron_vl.core_fixes.fp8_recompute import reduce_amaxes_once
from megatron_vl.core_fixes.wgrad_fusion import use_column_sums
from megatron_vl.kernels.attention import tower_forward
from megatron_vl.kernels.attention.tower_attention import tower_attention
from megatron_vl.kernels.attention.tower_forward import (
    DEFAULT_TILES,
    AttentionTiles,
    KernelTile,
    attention_forward,
    pack_with_rope,
)
from megatron_vl.kernels.attention.window_attention import window_attention
from megatron_vl.kernels.experts.grouped_gemm import (
    ROW_TILE_CONFIG,
    WEIGHT_TILE_CONFIG,
    AddressTable,
    GemmTileConfig,
    plan_tiles,
    row_product,
    weight_product,
)
from megatron_vl.kernels.experts.token_copies import make_row_ids, scatter_parts, scatter_rows, sum_rows
from megatron_vl.kernels.layers import biased_layers as sum_kernels
from megatron_vl.kernels.layers import fp8_rows
from megatron_vl.kernels.layers import residual_norm as norm_kernels
from megatron_vl.kernels.layers.biased_layers import biased_activation, biased_sum, column_sums
from megatron_vl.kernels.layers.fp8_rows import quantize_columns, quantize_rows, row_scaled_product
from megatron_vl.kernels.layers.fp8_swiglu import swiglu_in_fp8
from megatron_vl.kernels.layers.residual_norm import residual_norm
from megatron_vl.kernels.layers.swiglu import swiglu, swiglu_backward, swiglu_forward
from megatron_vl.kernels.optimizer import adam, adam_triton, master_halves
from megatron_vl.models.fp8_activation import Fp8SwiGLU, activation_quantizers
from megatron_vl.models.fp8_linear import Fp8Rows, renew_fp8_weights
from megatron_vl.models.fused_layers import ACTIVATIONS


def fix_interpreter() -> None:
    """Corrects Triton 3.6's interpreter in three places.

    A loop may end at a value of the kernel: scalars are arrays, which NumPy 2.5 does not convert. And a
    function that a kernel calls does not prepare the language once more, which takes a third of the time; nor
    does each sum of integers look for an overflow, which only a debugging interpreter would report.
    """
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: interpreter._LangPatchScope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched

    prepare = interpreter._patch_lang

    def prepared(function: Callable[..., Any]) -> interpreter._LangPatchScope:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(language.load) for language in languages):
            return prepare(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = prepared


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate-half of [P, h, d] by [P, d / 2]."""
    cos, sin = (torch.cat((t, t), -1)[:, None] for t in (angles.cos(), angles.sin()))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def windows(qkv: Tensor, angles: Tensor, bounds: list[int], heads: int) -> Tensor:
    query, key, value = qkv.view(qkv.shape[0], heads, 3, -1).unbind(2)
    rotated = rotate(query, angles), rotate(key, angles), value
    segments = ([t[a:b].transpose(0, 1) for t in rotated] for a, b in pairwise(bounds))
    attended = [F.scaled_dot_product_attention(*segment).transpose(0, 1) for segment in segments]
    return torch.cat(attended).flatten(1)


@torch.no_grad()
def largest(pairs: Iterable[tuple[Tensor, Tensor]], floor: float = 0.0) -> float:
    """The largest difference of pairs, relative to the second one's largest number (at least ``floor``)."""
    errors = [(a - b).abs().max() / b.abs().max().clamp(min=floor) for a, b in pairs if b.numel()]
    return float(torch.stack(errors).max())  # not Python's max, which passes over NaN


def worst(ours: Tensor, reference: Tensor, inputs: list[Tensor]) -> float:
    """The largest difference of values and gradients, relative to the largest reference."""
    weight = torch.randn_like(reference).to(ours.dtype)
    results = [
        # They may share the way from the inputs.
        [out, *torch.autograd.grad(out, inputs, weight.to(out.dtype), retain_graph=True)]
        for out in (ours, reference)
    ]
    return largest(zip(*results, strict=True))


SMALL = AttentionTiles(
    forward_tile=KernelTile(32, 16, 4, 1),
    query_tile=KernelTile(16, 32, 4, 1),
    key_tile=KernelTile(32, 16, 4, 1),
)
"""Tiles that the test's segments fill completely, partly and not at all."""


def attention_error(
    lengths: list[int],
    heads: int,
    head_dim: int,
    device: str = "cpu",
    tiles: AttentionTiles | None = None,
    spread: float = 1.0,
) -> float:
    """Of the fused QKV output with RoPE: by the kernels of windows, or with ``tiles`` by those of a tower.

    On a GPU in bf16, because the kernels multiply only half precision there.
    """
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    qkv = spread * torch.randn(bounds[-1], heads * 3 * head_dim, device=device)
    qkv = qkv.to(dtype).requires_grad_()
    angles = torch.rand(bounds[-1], head_dim // 2, device=device) * 10
    rotation = angles.cos(), angles.sin(), torch.tensor(bounds, dtype=torch.int32, device=device)
    if tiles is None:
        ours = window_attention(qkv, *rotation, max(lengths), head_dim)
    else:
        ours = tower_attention(qkv, *rotation, head_dim, tiles)
    return worst(ours, windows(qkv.float(), angles, bounds, heads), [qkv])


tower_error = partial(attention_error, tiles=SMALL)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills new memory with NaN, so that reading it before writing shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(8).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def unaligned_error(device: str = "cpu", tiles: AttentionTiles = SMALL) -> float:
    """Patches that 4 does not divide, but rows of statistics; memory after the last must not be written."""
    with poisoned_memory():
        errors = [attention_error([7, rest], 2, 72, device, tiles) for rest in (30, 31, 32)]
    # Not Python's max, which passes over NaN.
    return float(torch.tensor(errors).max())


def many_segments_error() -> float:
    with patch.object(tower_forward, "SEARCH_BLOCK", tl.constexpr(4)):
        return tower_error([1, 20, 0, 2, 17, 1, 3, 1, 5], 1, 24)


def on_gpu() -> dict[str, float]:
    """Uses bf16 and the real tiles."""
    bf16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    lengths = [129, 1, 0, 700, 64, 1000]
    tiles = ROW_TILE_CONFIG, WEIGHT_TILE_CONFIG
    return {
        **{
            f"tower, {d} a head": attention_error(lengths, 4, d, "cuda", DEFAULT_TILES)
            for d in (16, 40, 64, 72, 80, 96, 128)
        },
        "tower, patches that 4 does not divide": unaligned_error("cuda", DEFAULT_TILES),
        "windows of 64": attention_error([64] * 20 + [32, 0, 16, 7, 1], 16, 80, "cuda"),
        "windows of 100": attention_error([100, 70, 3], 16, 80, "cuda"),
        "windows, programs of 2 heads": attention_error([64, 40, 64], 6, 64, "cuda"),
        "experts": experts_error([0, 700, 129, 0, 1, 1000, 128], 2048, 768, *tiles, **bf16),
        "experts, blocks that do not divide": experts_error([3, 0, 130, 300], 712, 200, *tiles, **bf16),
        "experts, no rows": experts_error([0, 0], 256, 256, *tiles, **bf16),
        "adapters of experts": adapters_error([0, 700, 129, 1], 2048, 768, 16, **bf16),
        "each row to 4 others": rows_error([0.9, 0.5, 0.0, 1.0], 3000, 2048, **bf16),
        "rows wider than a block, to 32 others": rows_error([0.06] * 31 + [0.0], 3000, 4096, **bf16),
        "each row to 128 others": rows_error([0.06] * 128, 1000, 2560, **bf16),
        "halves of master weights": halves_error(5_000_001, "cuda"),
        "update with moments in bf16": adam_error(5_000_001, "cuda"),
        "LayerNorm": norm_error(17_724, 1152, is_layer_norm=True, **bf16),
        "RMSNorm": norm_error(17_724, 1280, **bf16),
        "RMSNorm, wide": norm_error(1000, 4096, is_zero_centered=True, **bf16),
        "LayerNorm of a sum": norm_error(17_724, 1152, is_layer_norm=True, num_added=2, **bf16),
        "RMSNorm of a sum": norm_error(17_724, 1280, num_added=2, **bf16),
        "RMSNorm of a sum without a bias": norm_error(1000, 4096, num_added=1, **bf16),
        "sum with a bias": sum_error(17_724, 1280, **bf16),
        "linear in FP8, exact": exact_fp8_error(272, 1280, 432, "cuda"),
        "linear in FP8": fp8_error(17_724, 1280, 3840),
        "linear in FP8, narrow": fp8_error(1001, 6912, 144),
        "rows in FP8 beside bf16": kept_rows_error(17_724, 1024, **bf16),
        "wide rows in FP8 beside bf16": kept_rows_error(1001, 3456, **bf16),
        "SwiGLU in FP8": fp8_swiglu_error(*(torch.randn(1008, n * 1000, **bf16) for n in (2, 1))),
        "SwiGLU beyond FP8": fp8_swiglu_error(*(torch.randn(64, n * 128, **bf16) for n in (2, 1)), 65536.0),
        "SwiGLU in FP8 between linears": fp8_mlp_error(1024, 512, 1376),
        "linear of Transformer Engine": linear_error(17_724, 1280, 3840),
        "reductions of amaxes, two linears recomputed": repeated_reductions(),
        "SwiGLU with a bias": activation_error("silu", 17_724, 3456, is_gated=True, **bf16),
        "GELU with a bias": activation_error("gelu_tanh", 17_724, 4352, **bf16),
        "QuickGELU with a bias": activation_error("quick_gelu", 1001, 2565, **bf16),
        "attention in another thread or again": changed_attention(),
        "sums in another order": changed_sums("cuda", 3000),
    }


def changed_attention() -> float:
    """Elements that differ between two gradients, and between the outputs of two threads."""
    qkv = torch.randn(2000, 3 * 4 * 72, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    cu = torch.tensor([0, 1900, 2000], dtype=torch.int32, device="cuda")
    angles = torch.rand(2000, 36, device="cuda")
    rotation = angles.cos(), angles.sin()
    out = tower_attention(qkv, *rotation, cu, 72)
    one, other = (torch.autograd.grad(out, qkv, torch.ones_like(out), retain_graph=True)[0] for _ in range(2))
    packed = pack_with_rope(qkv.detach(), *rotation, 72)
    with ThreadPoolExecutor(1) as pool:  # a loaded kernel is the first thing that this thread runs
        apart = pool.submit(attention_forward, packed, cu, DEFAULT_TILES.forward_tile).result()[0]
    return float((one != other).sum() + (apart.flatten(1) != out).sum())


def changed_sums(device: str, num_rows: int) -> float:
    """Elements that differ between two runs: gradients of a norm, a bias, and an embedding's rows."""
    from megatron_vl.models.embedding import add_to_rows

    shapes = ((num_rows, 1152), (1152,), (1152,))
    inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    grads = torch.randn(2, num_rows, 1152, device=device, dtype=torch.bfloat16)
    token_ids = torch.randint(500, (num_rows,), device=device)

    def run_once() -> list[Tensor]:
        norm_grads = torch.autograd.grad(residual_norm(*inputs, 1e-6), inputs, tuple(grads))
        activated = biased_activation(*inputs[:2], "gelu_tanh", is_gated=False)
        activation_grads = torch.autograd.grad(activated, inputs[:2], grads[0])
        sum_grads = torch.autograd.grad(biased_sum(grads[1], *inputs[:2]), inputs[1], grads[0])
        normalized = residual_norm(grads[0], *inputs[1:], 1e-6, added=inputs[0], added_bias=inputs[1])
        added_grads = torch.autograd.grad(normalized, inputs, tuple(grads))
        main_grad = torch.zeros(1000, 1152, device=device)
        add_to_rows(main_grad, token_ids, grads[0])
        return [*norm_grads, *activation_grads, *sum_grads, *added_grads, main_grad]

    return float(sum((one != other).sum() for one, other in zip(run_once(), run_once(), strict=True)))


def swiglu_error(rows: int, width: int, weighted: bool) -> float:
    x = torch.randn(rows, 1, 2 * width, requires_grad=True)
    weight = torch.rand(rows, requires_grad=True) if weighted else None
    gate, up = x.chunk(2, -1)
    reference = F.silu(gate) * up
    if weight is not None:
        reference = reference * weight.view(-1, 1, 1)
    return worst(swiglu(x, weight), reference, [x] if weight is None else [x, weight])


def fp8_swiglu_error(gate_and_up: Tensor, output_grad: Tensor, factor: float = 0.5) -> float:
    """FP8 numbers of SwiGLU and of its gradient, and of their transposes, that a cast would not give."""
    scale, wrong = gate_and_up.new_full((1,), factor, dtype=torch.float32), 0
    result = swiglu_forward(gate_and_up, None)
    x_grad = swiglu_backward(gate_and_up, None, output_grad, with_output=False)[0]
    for grad, fp8, plain in ((None, torch.float8_e4m3fn, result), (output_grad, torch.float8_e5m2, x_grad)):
        largest_number = torch.full_like(scale, 1e-3)
        values, transposed, inverse = swiglu_in_fp8(gate_and_up, scale, largest_number, grad)
        bound = torch.finfo(fp8).max  # as Transformer Engine's casts, not as torch's
        expected = (plain.float() * scale).clamp(-bound, bound).to(fp8)
        wrong += int((values.view(fp8).float() != expected.float()).sum() + (values.t() != transposed).sum())
        assert (largest_number, inverse) == (plain.abs().max(), 1 / factor)
    return float(wrong)


def exact_swiglu_inputs(rows: int, width: int) -> list[Tensor]:
    """For which FP8 has all results: Triton's interpreter does not round as a GPU does."""
    gate, up, output_grad = (torch.randint(n, n + 3, (rows, width)).bfloat16() for n in (0, -1, -1))
    return [torch.cat((32 * gate, up), 1), output_grad]


def fp8_mlp_error(rows: int, width: int, inner_width: int) -> float:
    """Elements that differ if SwiGLU hands FP8 to linears of Transformer Engine, from casts of their own."""
    from transformer_engine.common.recipe import DelayedScaling
    from transformer_engine.pytorch import Linear, autocast

    inputs = [torch.randn(rows, width, device="cuda").bfloat16().requires_grad_() for _ in range(4)]
    results = []
    for hands_on_fp8 in (False, True):
        torch.manual_seed(1)
        shapes = (width, 2 * inner_width), (inner_width, width)
        linears = [Linear(*shape, bias=False, params_dtype=torch.bfloat16) for shape in shapes]
        results.append([])
        for x in inputs:
            with autocast(enabled=True, recipe=DelayedScaling()):
                quantizers = activation_quantizers(*linears)
                inner = linears[0](x)
                takes_fp8 = hands_on_fp8 and quantizers
                output = linears[1](Fp8SwiGLU.apply(inner, *quantizers) if takes_fp8 else swiglu(inner))
            results[-1] += [output, *torch.autograd.grad(output.sum(), [x, *(y.weight for y in linears)])]
        assert quantizers
    return float(sum((one != other).sum() for one, other in zip(*results, strict=True)))


def activation_error(name: str, rows: int, width: int, *, is_gated: bool = False, **kind: Any) -> float:
    """Of an activation with a bias against float64, also with a frozen bias. ``kind``: device and dtype."""
    num_columns = (1 + is_gated) * width
    x, bias = (torch.randn(shape, **kind).requires_grad_() for shape in ((rows, 1, num_columns), num_columns))
    activate = partial(biased_activation, activation_name=name, is_gated=is_gated)
    gate, *up = (x.double() + bias.double()).split(width, -1)
    expected = ACTIVATIONS[name](gate) * (up[0] if is_gated else 1)
    errors = [worst(activate(x, bias), expected, [x, bias]), worst(activate(x, bias.detach()), expected, [x])]
    return float(torch.tensor(errors).max())


def sum_error(rows: int, width: int, **kind: Any) -> float:
    """Of a residual, a product and its bias against float64, also with a frozen bias (``kind`` as above)."""
    shapes = ((rows, 1, width), (rows, 1, width), (width,))
    inputs = [torch.randn(shape, **kind).requires_grad_() for shape in shapes]
    expected = sum(tensor.double() for tensor in inputs)
    frozen_error = worst(biased_sum(*inputs[:2], inputs[2].detach()), expected, inputs[:2])
    return float(torch.tensor([frozen_error, worst(biased_sum(*inputs), expected, inputs)]).max())


def linear_error(rows: int, width_in: int, width_out: int) -> float:
    """Of the bias gradient of Transformer Engine's linear against float64. It must be our kernel's."""
    from transformer_engine.pytorch import Linear

    use_column_sums()
    x, grad = (torch.randn(rows, width, device="cuda").bfloat16() for width in (width_in, width_out))
    linear = Linear(width_in, width_out, params_dtype=torch.bfloat16)
    linear(x).backward(grad)
    assert linear.bias.grad is not None and linear.bias.grad.equal(column_sums(grad))
    expected = grad.double().sum(0)
    return float((linear.bias.grad - expected).abs().max() / expected.abs().max())


def repeated_reductions() -> float:
    """Of amaxes, with two recomputed linears and a norm: those beyond one forward and one backward."""
    from transformer_engine.common.recipe import DelayedScaling
    from transformer_engine.pytorch import Linear, RMSNorm, checkpoint, fp8_autocast
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

    reduce_amaxes_once()
    norm, *linears = RMSNorm(64), Linear(64, 64), Linear(64, 64)
    reduced = Mock(side_effect=Manager.reduce_and_update_fp8_tensors)
    with patch.object(Manager, "reduce_and_update_fp8_tensors", reduced):
        for _ in range(2):
            states = norm(torch.randn(32, 64, device="cuda"))
            with fp8_autocast(enabled=True, fp8_recipe=DelayedScaling()):
                for linear in linears:
                    states = checkpoint(linear, states)
            states.sum().backward()
    return reduced.call_count - 4.0


def multiply_scaled(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, out_dtype: torch.dtype, **options: Any
) -> Tensor:
    """``torch._scaled_mm``, which takes no scales of rows on CPU."""
    total = (a.double() * scale_a) @ (b.double() * scale_b)
    return (total if options.get("bias") is None else total + options["bias"]).to(out_dtype)


class Fp8Linear(Fp8Rows, torch.nn.Linear):
    """Stands for a linear of Transformer Engine on one rank."""

    use_bias, te_return_bias, tp_size, parallel_mode = True, False, 1, "column"
    fuse_wgrad_accumulation, is_first_microbatch = False, True


def exact_fp8_error(rows: int, width_in: int, width_out: int, device: str = "cpu") -> float:
    """Of a linear in FP8 against float64, where e4m3 has all numbers: small integers times powers of two.

    Also of adding to ``main_grad``, of a changed weight, and of no rows. Results are rounded to bf16.
    """

    def made(rows: int, width: int) -> Tensor:
        powers = torch.randint(-2, 3, (rows, 1), device=device).exp2()
        return (torch.randint(-3, 4, (rows, width), device=device) * powers).bfloat16()

    linear = Fp8Linear(width_in, width_out, device=device, dtype=torch.bfloat16)
    weight: Any = linear.weight
    errors = []
    for adds_to_main_grad in (False, True):
        x, grad = made(rows, width_in)[:, None].requires_grad_(), made(rows, width_out)[:, None]
        with torch.no_grad():
            weight.copy_(made(width_out, width_in))
            linear.bias.copy_(made(1, width_out)[0])
        renew_fp8_weights(torch.nn.Sequential(linear))
        weight.grad = linear.bias.grad = None
        weight.main_grad = torch.zeros((width_out, width_in), device=device)
        linear.fuse_wgrad_accumulation = adds_to_main_grad
        with patch("torch._scaled_mm", multiply_scaled) if device == "cpu" else nullcontext():
            output = linear(x)[0]
            output.backward(grad)
            assert linear(x[:0])[0].shape == (0, 1, width_out)
        wide_x, wide_weight, wide_grad = (tensor.double().squeeze(1) for tensor in (x, weight, grad))
        weight_grad = weight.main_grad.bfloat16() if adds_to_main_grad else weight.grad
        ours = [output[:, 0], x.grad[:, 0], weight_grad, linear.bias.grad]
        products = [wide_x @ wide_weight.t() + linear.bias, wide_grad @ wide_weight, wide_grad.t() @ wide_x]
        exact = [tensor.bfloat16() for tensor in (*products, wide_grad.sum(0))]
        errors.append(largest(zip(ours, exact, strict=True)))
    return max(errors)


def fp8_error(rows: int, width_in: int, width_out: int) -> float:
    """Of a product in FP8 on the GPU against float64 of the same FP8 numbers."""
    x, weight = (torch.randn(n, width_in, device="cuda").bfloat16() for n in (rows, width_out))
    x, weight = quantize_rows(x), quantize_columns(weight)
    expected = (x.values.double() * x.scale) @ (weight.values.double() * weight.scale)
    return largest([(row_scaled_product(x, weight), expected)])


def kept_rows_error(rows: int, width: int, **kind: Any) -> float:
    """FP8 numbers that kernels wrote beside bf16 and a cast would not. ``kind``: device and dtype."""
    x, gated = (torch.randn(rows, n * width, **kind).requires_grad_() for n in (1, 2))
    weight, bias, gated_bias = (torch.randn(n * width, **kind).requires_grad_() for n in (1, 1, 2))
    sums, rows_of_x = sum_kernels.column_sums_and_rows(x.detach())
    assert largest([(sums, x.double().sum(0))]) < 1e-2
    pairs = [(rows_of_x, quantize_rows(x.detach()))]

    def take_rows(tensor: Tensor, is_kept: bool = True) -> Tensor:
        [(_, kept)] = fp8_rows._kept
        pairs.append((fp8_rows.rows_of(tensor), quantize_rows(tensor)))
        assert (pairs[-1][0] is kept) == is_kept
        return tensor

    for change in (None, torch.clone, Tensor.neg_):  # of another tensor, or of one that was written since
        y = residual_norm(x, weight, bias, 1e-6, is_quantized=True)[0].detach()
        take_rows(change(y) if change else y, not change)
    for tensor, its_bias, name in ((x, bias, "gelu_tanh"), (gated, gated_bias, "silu")):
        y = biased_activation(tensor, its_bias, name, is_gated=tensor is gated, is_quantized=True)
        take_rows(*torch.autograd.grad(take_rows(y), tensor, torch.randn_like(y)))
    tensors = [(ours, cast) for pair in pairs for ours, cast in zip(*pair, strict=True)]
    return float(sum((ours.view(torch.uint8) != cast.view(torch.uint8)).sum() for ours, cast in tensors))


def norm_error(
    rows: int,
    width: int,
    *,
    is_layer_norm: bool = False,
    is_zero_centered: bool = False,
    num_added: int = 0,
    **kind: Any,
) -> float:
    """Of a norm and the sum of its input with what follows, against float64: also with one of the two
    gradients, and with frozen parameters.

    Args:
        num_added: 0, 1: the input is a sum of two tensors, 2: and of a bias.
        kind: device and dtype.
    """
    # Rows far from zero: the mean must be subtracted before the squares are summed.
    rows_shape = (rows, 1, width)
    shapes = (rows_shape, rows_shape, (width,), (width,), (width,))
    tensors = [(torch.randn(shape, **kind) + 1).requires_grad_() for shape in shapes]
    inputs, parameters = tensors[: 1 + num_added], tensors[3 : 4 + is_layer_norm]
    wide_x = sum((tensor.double() for tensor in inputs[1:]), inputs[0].double())
    wide = [tensor.double() for tensor in parameters]
    if is_layer_norm:
        expected = F.layer_norm(wide_x, (width,), *wide, eps=1e-6)
    else:
        expected = F.rms_norm(wide_x, (width,), wide[0] + is_zero_centered, eps=1e-6)

    def norm(x: Tensor, *added: Tensor, trained: list[Tensor]) -> tuple[Tensor, Tensor]:
        weight, bias = (*trained, None)[:2]
        sums = dict(zip(("added", "added_bias"), added, strict=False))
        return residual_norm(x, weight, bias, 1e-6, is_zero_centered=is_zero_centered, **sums)

    normalized, residual = norm(*inputs, trained=parameters)
    assert (residual.data_ptr() == inputs[0].data_ptr()) == (not num_added)
    # Slow enough for a sum that is rounded to bf16.
    tail, wide_tail = (residual / 8).sin(), (wide_x / 8).sin()
    frozen, _ = norm(*inputs, trained=[tensor.detach() for tensor in parameters])
    beside_frozen, _ = norm(inputs[0], *(tensor.detach() for tensor in inputs[1:]), trained=parameters)
    errors = [
        worst(normalized * 2 + tail, expected * 2 + wide_tail, [*inputs, *parameters]),
        worst(normalized, expected, [*inputs, *parameters]),
        worst(tail, wide_tail, inputs),
        worst(frozen, expected, inputs),
        worst(beside_frozen, expected, [inputs[0], *parameters]),
    ]
    return float(torch.tensor(errors).max())


def empty_errors() -> float:
    """Largest gradient of the parameters of norms, sums and activations of no rows."""
    x, added = (torch.randn(0, 1, 64, requires_grad=True) for _ in range(2))
    parameters = [torch.randn(64, requires_grad=True) for _ in range(5)]
    weight, bias, added_bias, sum_bias, activation_bias = parameters
    normalized, residual = residual_norm(x, weight, bias, 1e-6)
    outputs = [normalized, *residual_norm(residual, weight, bias, 1e-6, added=added, added_bias=added_bias)]
    outputs += [biased_sum(x, added, sum_bias), biased_activation(x, activation_bias, "silu", is_gated=True)]
    gradients = torch.autograd.grad(sum(output.sum() for output in outputs), [x, added, *parameters])
    return float(torch.stack(gradients[2:]).abs().max())


def norm_rounding_errors() -> float:
    """Elements in which outputs and gradients in bf16 differ by more than one unit in the last place from
    those in fp32, rounded. Triton's interpreter cuts off where a GPU rounds."""
    half = [torch.randn(shape).bfloat16() for shape in ((20, 96), (96,), (96,), (20, 96), (20, 96))]

    def results(dtype: torch.dtype) -> list[Tensor]:
        *inputs, output_grad, residual_grad = (tensor.to(dtype) for tensor in half)
        inputs = [tensor.requires_grad_() for tensor in inputs]
        outputs = residual_norm(*inputs, 1e-6)
        return [outputs[0], *torch.autograd.grad(outputs, inputs, (output_grad, residual_grad))]

    pairs = zip(results(torch.bfloat16), results(torch.float32), strict=True)
    distances = [ours.view(torch.int16) - fp32.bfloat16().view(torch.int16) for ours, fp32 in pairs]
    return float(sum((distance.abs() > 1).sum() for distance in distances))


def experts_error(
    counts: list[int], features_in: int, features_out: int, *configs: GemmTileConfig, **kind: Any
) -> float:
    """Largest error of the products of experts with ``counts`` rows: forward, dgrad, wgrad added and wgrad
    written.

    Args:
        configs: of rows and of weight gradients; none: small ones for both.
        kind: device and dtype of rows and weights. Weight gradients are added in float32.
    """
    rows_config, weight_config = configs or (GemmTileConfig(128, 64, 32, 4, 2),) * 2
    x, dy = (torch.randn(sum(counts), features, **kind) for features in (features_in, features_out))
    weights = torch.randn(len(counts), features_out, features_in, **kind)
    where = plan_tiles(torch.tensor(counts, device=x.device), len(x))
    added, written = torch.randn_like(weights, dtype=torch.float32), torch.full_like(weights, torch.nan)

    parts = list(zip(x.float().split(counts), dy.float().split(counts), weights.float(), strict=True))
    wgrad = torch.stack([b.T @ a for a, b, _ in parts])
    outputs, input_grads = ([a @ w.T for a, _, w in parts], [b @ w for _, b, w in parts])
    reference = [torch.cat(outputs), torch.cat(input_grads), added + wgrad, wgrad]

    table = AddressTable().device_addresses(list(weights))
    for grads, add in ((added, True), (written, False)):
        addresses = AddressTable().device_addresses(list(grads))
        weight_product(dy, x, addresses, where, grads, accumulate=add, tile_config=weight_config)
    y = row_product(x, table, where, features_out, is_transposed=True, tile_config=rows_config)
    dx = row_product(dy, table, where, features_in, is_transposed=False, tile_config=rows_config)
    return largest(zip([y, dx, added, written], reference, strict=True), floor=1.0)


def adapters_error(counts: list[int], features_in: int, features_out: int, rank: int, **kind: Any) -> float:
    """Largest error of the adapters of experts: output, and gradients of the input and both factors."""
    from megatron_vl.models.moe.experts import GroupedAdapter

    widths = features_in, features_out, features_out
    x, output, output_grad = (torch.randn(sum(counts), features, **kind) for features in widths)
    factors_a = [torch.randn(rank, features_in, **kind) / features_in**0.5 for _ in counts]
    factors_b = [torch.randn(features_out, rank, **kind) / rank**0.5 for _ in counts]
    adapter = GroupedAdapter(factors_a, factors_b, 1.5, is_expert_parallel=False)
    x.requires_grad_()
    tile_plan = plan_tiles(torch.tensor(counts, device=x.device), len(x))
    factors = [*adapter.lora_A.parameters(), *adapter.lora_B.parameters()]
    ours = adapter(x, output, tile_plan)
    ours_grads = torch.autograd.grad(ours, [x, *factors], output_grad)

    wide_x, *wide = (tensor.detach().float().requires_grad_() for tensor in (x, *factors))
    parts = zip(wide_x.split(counts), wide[: len(counts)], wide[len(counts) :], strict=True)
    added = [1.5 * rows @ a.T @ b.T for rows, a, b in parts]
    expected = output.float() + torch.cat(added)
    expected_grads = torch.autograd.grad(expected, [wide_x, *wide], output_grad.float())

    # Frozen experts keep no input, and compute its gradient.
    adapter.lora_A.requires_grad_(False)
    frozen_output, _ = adapter.lora_A(x, tile_plan)
    assert frozen_output.grad_fn is not None and frozen_output.grad_fn.saved_tensors[0] is None
    frozen_grad = torch.randn_like(frozen_output)
    ours_grads += torch.autograd.grad(frozen_output, x, frozen_grad)
    parts = zip(frozen_grad.float().split(counts), wide, strict=False)
    expected_grads += (torch.cat([grad @ a.detach() for grad, a in parts]),)

    ours_all = (tensor.float() for tensor in (ours, *ours_grads))
    return largest(zip(ours_all, (expected, *expected_grads), strict=True), floor=1.0)


def rows_error(shares: list[float], rows: int, width: int, **kind: Any) -> float:
    """Of rows copied to others, a share by each column, summed from them, and of parts of rows copied."""
    device = kind.get("device")
    chosen = torch.rand(rows, len(shares), device=device) < torch.tensor(shares, device=device)
    row_ids = make_row_ids(chosen)
    total = int(chosen.sum())
    column, row = chosen.T.nonzero(as_tuple=True)  # in the order of their row_ids
    x, y = (torch.randn(size, width, **kind).requires_grad_() for size in (rows, total))
    parts = torch.randn(rows, len(shares), device=x.device, requires_grad=True)
    summed = torch.zeros(rows, width, device=x.device).index_add(0, row, y.float())
    pairs = [
        (scatter_rows(x, row_ids, total), x[row].float(), [x]),
        (sum_rows(y, row_ids), summed, [y]),
        (scatter_parts(parts, row_ids, total), parts[row, column][:, None], [parts]),
    ]
    return float(torch.tensor([worst(*pair) for pair in pairs]).max())


def halves_error(count: int, device: str = "cpu") -> float:
    """Numbers in which our kernels for master weights differ from torch: all sizes, ties both ways."""
    master = torch.randn(count) * torch.logspace(-42, 37, count)
    bits = master.view(torch.int32)
    bits[::3] = bits[::3] & ~0xFFFF | 0x8000
    second = torch.rand(count) * (torch.rand(count) < 0.9)

    def made(on: str, split: Callable[..., None], join: Callable[..., None]) -> list[Tensor]:
        # Weights of the model begin anywhere; the others are aligned.
        weight = torch.zeros(count + 1, dtype=torch.bfloat16, device=on)[1:]
        low, kept = torch.zeros(count, dtype=torch.int16, device=on), second.to(on, copy=True)
        split(master.to(on), weight, low, kept)
        again, moment = torch.zeros(count, device=on), kept.clone()
        join(weight, low, moment, again)
        found = weight.view(torch.int16), low, *(tensor.view(torch.int32) for tensor in (kept, again, moment))
        return [tensor.cpu() for tensor in found]

    with_torch = torch_only(partial(made, "cpu", master_halves.split_master, master_halves.join_master))
    ours = made(device, adam_triton.split_master, adam_triton.join_master)
    assert torch.equal(ours[3], bits)
    return float(sum((a != b).sum() for a, b in zip(ours, with_torch(), strict=True)))


def adam_error(count: int, device: str = "cpu") -> float:
    """Numbers that our update with moments in bf16 gives otherwise than torch on a CPU, in three steps.

    Weights of all sizes, in bf16 with ties and in fp32, in two parameters with rates of their own, one of
    which is 0, cut into stretches; with addresses and sizes of any alignment.
    """
    gradients = torch.randn(3, count) * torch.logspace(-30, 18, count)[torch.randperm(count)]
    start = torch.randn(count) * torch.logspace(-42, 37, count)
    start.view(torch.int32)[::3] &= ~0xFFFF
    start.view(torch.int32)[::3] |= 0x8000
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    cut = count // 24 * 8
    second = -(-cut // 64) * 64

    def made(on: str, function: Callable[..., None], halves: bool, shift: int) -> list[Tensor]:
        place = torch.device(on)
        avg, square = (torch.zeros(second + count, dtype=torch.bfloat16, device=place) for _ in range(2))
        low = torch.zeros(second + count if halves else 0, dtype=torch.int16, device=place)
        weight = torch.zeros(count + shift, dtype=torch.bfloat16 if halves else torch.float32, device=place)
        weight = weight[shift:]
        if halves:
            half, ties = torch.zeros(count, dtype=torch.int16, device=place), torch.zeros(count, device=place)
            master_halves.split_master(start.to(place), weight, half, ties)
            for kept, values in ((low, half), (square, ties)):
                kept[:cut], kept[second : second + count - cut] = values[:cut], values[cut:]
        else:
            weight.copy_(start)

        launch = adam.LaunchTables()
        for step, gradient in enumerate(gradients, 1):
            values = torch.zeros(count + shift, device=place)[shift:].copy_(gradient)
            still = group | {"lr": 0.0, "betas": (0.9, 0.999)}
            rates = {
                "one": adam.AdamCoefficients.from_param_group(group, step, 0.3),
                "still": adam.AdamCoefficients.from_param_group(still, step + 1000),
            }
            stretches = [
                adam.ParameterSlice(weight, values, 0, cut, 0, 0),
                adam.ParameterSlice(weight, values, cut, count - cut, second, 1),
            ]
            function(stretches, adam.StepCoefficients(rates, place), avg, square, low, launch)
        as_bits = torch.int16 if halves else torch.int32
        return [t.cpu() for t in (weight.view(as_bits), avg.view(torch.int16), square.view(torch.int16), low)]

    def differing(halves: bool, shift: int) -> int:
        ours = made(device, adam.adam_step, halves, shift)
        theirs = torch_only(partial(made, "cpu", adam.adam_step, halves, shift))()
        return sum(int((a != b).sum()) for a, b in zip(ours, theirs, strict=True))

    return float(sum(differing(halves, shift) for halves in (True, False) for shift in (0, 1)))


def torch_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` without its kernel, also in Triton's interpreter."""

    def run(*arguments: Any) -> Any:
        with patch.dict(os.environ, TRITON_INTERPRET="0"):
            return function(*arguments)

    return run


def check(errors: dict[str, float], bound: float) -> None:
    print(errors)
    wrong = {name: error for name, error in errors.items() if not error < bound}
    assert not wrong, wrong


def main() -> None:
    torch.manual_seed(0)
    if "--gpu" in sys.argv:
        import transformer_engine  # noqa: F401  # before torch loads its cuDNN, which is of another version

        check(on_gpu(), 2e-2)
        return

    fix_interpreter()
    # Each interpreted row takes milliseconds. These are still more programs than the rows of a final block.
    sum_kernels.NUM_PROGRAMS = norm_kernels.BACKWARD_PROGRAMS = 10
    sum_kernels.FINAL_ROWS = 8
    for name in ("WHOLE_ROWS_SUMS", "WHOLE_ROWS_FORWARD", "WHOLE_ROWS_BACKWARD"):
        setattr(sum_kernels, name, sum_kernels.WholeRows(512, num_programs=2, num_warps=4, num_stages=1))
    cases = {
        "windows of 64, 80 a head": attention_error([64, 64, 32, 16, 7, 1], 2, 80),
        "windows of 100, 32 a head": attention_error([100, 12], 1, 32),
        "tower, 72 a head": tower_error([33, 1, 0, 32, 47], 2, 72),
        "tower, 64 a head": tower_error([20, 1], 1, 64),
        "tower, 72 a head, sharp": tower_error([1, 19, 16], 1, 72, spread=3.0),
        "tower, 24 a head, more segments than are searched at once": many_segments_error(),
        "LayerNorm, one row": norm_error(1, 300, is_layer_norm=True),
        "LayerNorm, more rows than programs": norm_error(23, 36, is_layer_norm=True),
        "RMSNorm": norm_error(3, 1280),
        "RMSNorm, zero-centred": norm_error(12, 64, is_zero_centered=True),
        "LayerNorm of a sum": norm_error(23, 36, is_layer_norm=True, num_added=2),
        "RMSNorm of a sum without a bias": norm_error(12, 64, is_zero_centered=True, num_added=1),
        "norms, sums and activations of no rows": empty_errors(),
        "sum with a bias": sum_error(37, 300),
        "sum with a bias, more rows than programs": sum_error(100, 5),
        "LayerNorm in bf16": norm_rounding_errors(),
        "swiglu": swiglu_error(3, 3000, weighted=False),
        "SwiGLU with a bias": activation_error("silu", 37, 300, is_gated=True),
        "GELU with a bias, more rows than programs": activation_error("gelu_tanh", 100, 5),
        "QuickGELU with a bias, one row": activation_error("quick_gelu", 1, 24),
        "linear in FP8": exact_fp8_error(37, 150, 48),
        "rows in FP8 beside others": kept_rows_error(9, 200, dtype=torch.bfloat16),
        "SwiGLU in FP8": fp8_swiglu_error(*exact_swiglu_inputs(70, 150)),
        "swiglu, weighted": swiglu_error(5, 96, weighted=True),
        "experts, blocks that do not divide": experts_error([3, 0, 130, 64, 0, 300], 96, 72),
        "experts, blocks that divide": experts_error([128, 0, 1], 64, 128),
        "experts, the first without rows": experts_error([0, 0, 5], 40, 24),
        "experts, no rows": experts_error([0, 0], 40, 24),
        "adapters of experts": adapters_error([3, 0, 130], 48, 80, 8),
        "each row to 4 others": rows_error([0.9, 0.5, 0.0, 1.0], 20, 40),
        "rows wider than a block, to 3 others": rows_error([0.9, 0.5, 0.1], 6, 2100),
        "each row to 40 others": rows_error([0.2] * 39 + [0.0], 8, 16),
        "tower, patches that 4 does not divide": unaligned_error(),
        "halves of master weights": halves_error(5000),
        "update with moments in bf16": adam_error(5001),
        "windows, programs of 4 heads": attention_error([9, 16], 8, 16),
    }
    check(cases, 5e-6)


if __name__ == "__main__":
    main()
