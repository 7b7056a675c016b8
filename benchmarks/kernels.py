"""Compares our Triton kernels with what they replace, on one GPU: error against fp32 and time.

    python benchmarks/kernels.py

Window attention runs on 22,208 patches of Qwen2.5-VL's tower (16 heads of 80, windows of at most 64 patches),
against torch's FlashAttention-2, which also needs RoPE (Transformer Engine's fused one) and copies for it.
SwiGLU runs with the widths of the 7B language model and of the tower, against Megatron-core's jitted one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import torch
import transformer_engine.pytorch  # noqa: F401  (before torch loads cuDNN: their libraries must be of one version)
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from timing import milliseconds
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

from megatron_vl.kernels.swiglu import swiglu
from megatron_vl.kernels.window_attention import window_attention

PATCHES, HEADS, DIM = 22_208, 16, 80


def window_lengths() -> list[int]:
    """Mostly whole windows, and some that are cut by the edge of a picture."""
    rng = random.Random(1)
    lengths = [64] * 30
    while sum(lengths) < PATCHES - 64:
        lengths.append(rng.choice([64] * 5 + [48, 32, 16]))
    return [*lengths, PATCHES - sum(lengths)]


def report(
    name: str, function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor, exact: tuple[Tensor, Tensor]
) -> None:
    """Prints the errors of value and gradient against fp32, and the forward and backward times."""
    x = x.detach().requires_grad_()
    out = function(x)
    (dx,) = torch.autograd.grad(out, x, grad, retain_graph=True)
    errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip((out, dx), exact, strict=True)]
    forward = milliseconds(lambda: function(x))
    backward = milliseconds(lambda: torch.autograd.grad(out, x, grad, retain_graph=True))
    print(
        f"{name:42s} forward {forward:6.3f} ms  backward {backward:6.3f} ms  "
        f"error {errors[0]:.1e} / {errors[1]:.1e}"
    )


def exactly(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().float().requires_grad_()
    out = function(x)
    return out.detach(), torch.autograd.grad(out, x, grad.float())[0]


def windows() -> None:
    lengths = window_lengths()
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    qkv = torch.randn(PATCHES, HEADS * 3 * DIM, device="cuda", dtype=torch.bfloat16)
    half = torch.rand(PATCHES, DIM // 2, device="cuda") * 10
    cos = half.cos()
    sin = half.sin()
    angles = torch.cat((half, half), -1)[:, None, None]
    grad = torch.randn(PATCHES, HEADS * DIM, device="cuda", dtype=torch.bfloat16)

    def parts(x: Tensor) -> list[Tensor]:
        return list(x.view(PATCHES, HEADS, 3, DIM).unbind(2))

    def flash(x: Tensor) -> Tensor:
        query, key, value = parts(x)
        query, key = (
            apply_rotary_pos_emb(t[:, None], angles, tensor_format="sbhd", fused=True)[:, 0]
            for t in (query, key)
        )
        return varlen_attn(query, key, value, cu, cu, 64, 64).reshape(PATCHES, -1)

    def reference(x: Tensor) -> Tensor:
        query, key, value = parts(x)
        query, key = (
            apply_rotary_pos_emb(t[:, None], angles, tensor_format="sbhd", fused=False)[:, 0]
            for t in (query, key)
        )

        out = []
        for a, b in pairwise(bounds):
            out.append(scaled_dot_product_attention(*(t[a:b].transpose(0, 1) for t in (query, key, value))))

        return torch.cat([o.transpose(0, 1) for o in out]).reshape(PATCHES, -1)

    exact = exactly(reference, qkv, grad)
    report("windows, FlashAttention-2 and RoPE", flash, qkv, grad, exact)
    report("windows, fused", lambda x: window_attention(x, cos, sin, cu, 64, DIM), qkv, grad, exact)


def activations(rows: int, width: int) -> None:
    x = torch.randn(rows, 1, 2 * width, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(rows, 1, width, device="cuda", dtype=torch.bfloat16)

    def reference(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    exact = exactly(reference, x, grad)
    report(f"SwiGLU {rows} x {width}, core's", lambda x: bias_swiglu_impl(x, None), x, grad, exact)
    report(f"SwiGLU {rows} x {width}, ours", swiglu, x, grad, exact)


if __name__ == "__main__":
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    windows()
    activations(8192, 18_944)
    activations(PATCHES, 3_456)
