"""Errors of linear attention's Triton kernels beside torch in float64.

    python -m tests.kernels.delta_rule_checks gpu

This prints those of a GPU in bfloat16. In Triton's interpreter, kernels compute in float32: it does not
multiply bfloat16.
"""

import json
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_vl.kernels.linear_attention.gated_delta_rule import causal_conv, gated_delta_rule, gated_norm

RATES = {"as initialised": (0.01, 16.0), "slow": (0.001, 0.02), "mixed": (0.001, 4.0)}
"""The lowest and the highest rate of the heads' decays."""
NAMES = ("out", "dq", "dk", "dv", "dg", "dbeta")
LENGTHS = [1, 63, 64, 3, 83, 66]
LONG = [1, 63, 64, 65, 700, 129, 1500, 900, 2000, 1770, 1000]
CASES: dict[str, dict[str, tuple]] = {
    "quick": {
        "four sequences, a row that no chunk divides": ([1, 63, 3, 40], (2, 4), (32, 16), "as initialised"),
        "less than a chunk, three value heads a key": ([5, 2], (1, 3), (16, 32), "mixed"),
        "keys alike": ([130], (1, 1), (32, 32), "slow", True),
        "around": ([1, 2, 1, 33, 3], 96, 2, 32),
        "around, one token": ([1], 8, 1, 16),
    },
    "full": {
        **{
            f"{heads}, {rates}, {'alike' if alike else 'random'}": (LENGTHS, heads, (32, 32), rates, alike)
            for heads in ((2, 2), (1, 3), (2, 4))
            for rates in RATES
            for alike in (False, True)
        },
        "heads of 128": ([1, 63, 3, 83, 50], (1, 2), (128, 128), "mixed"),
        "whole chunks": ([64, 128], (1, 1), (16, 16), "mixed"),
        "one token": ([1], (1, 2), (16, 16), "mixed"),
        "around": ([1, 63, 3, 83, 50], 300, 3, 128),
    },
    "gpu": {
        "as initialised": (LONG, (16, 32), (128, 128), "as initialised"),
        "one sequence": ([8192], (16, 32), (128, 128), "as initialised"),
        "three value heads a key": (LONG, (16, 48), (128, 128), "mixed"),
        "as many value heads": (LONG, (16, 16), (128, 128), "slow"),
        "one token": ([1], (4, 8), (128, 128), "mixed"),
        "smaller heads": (LONG, (2, 4), (64, 64), "mixed"),
        "around": (LONG, 8192, 32, 128),
    },
}
"""The arguments of :func:`rule_errors`, or of :func:`around_errors`."""


def relative(a: Tensor, b: Tensor) -> float:
    """The relative error (L2) of ``a``. A first token's gradient of its decay is exactly 0."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def segments_of(lengths: list[int], device: str = "cpu") -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).int().to(device)


def rule_inputs(
    lengths: list[int],
    heads: tuple[int, int],
    widths: tuple[int, int],
    rates: str,
    alike: bool = False,
    device: str = "cpu",
) -> list[Tensor]:
    """query, key, value (views of one tensor), g, beta.

    Args:
        heads: of keys, of values. widths: of keys, of values.
        alike: all keys of a head point to almost the same direction, so the triangular system is far from 1.
    """
    tokens, (key_heads, value_heads), (key_dim, value_dim) = sum(lengths), heads, widths
    kind = torch.float32 if device == "cpu" else torch.bfloat16
    cuts = (key_heads * key_dim, key_heads * key_dim, value_heads * value_dim)
    q, k, v = torch.randn(tokens, sum(cuts), device=device).split(cuts, dim=-1)
    if alike:
        k = 0.2 * k + torch.randn(cuts[1], device=device)
    rate = torch.linspace(*RATES[rates], value_heads, device=device)
    g = -rate * F.softplus(torch.randn(tokens, value_heads, device=device) + 1)
    beta = torch.randn(tokens, value_heads, device=device).sigmoid().to(kind)
    parts = torch.cat((q, k, v), dim=-1).to(kind).split(cuts, -1)
    numbers = (key_heads, key_heads, value_heads)
    qkv = [part.unflatten(-1, (number, -1)) for part, number in zip(parts, numbers, strict=True)]
    return [t.detach().requires_grad_() for t in (*qkv, g, beta)]


def run(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    out = function(*inputs)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


def errors_of(
    ours: Callable[..., Tensor], exact: Callable[..., Tensor], inputs: list[Tensor], twice: bool = False
) -> list[float]:
    found = run(ours, inputs)
    if twice:
        assert all(map(torch.equal, found, run(ours, inputs))), "not the same bits twice"
    wide = [t.detach().double().requires_grad_() for t in inputs]
    return [relative(*pair) for pair in zip(found, run(exact, wide), strict=True)]


def rule_errors(lengths: list[int], *shape, device: str = "cpu") -> dict[str, float]:
    def rule(*inputs: Tensor) -> Tensor:
        return gated_delta_rule(*inputs, segments_of(lengths, device))

    inputs = rule_inputs(lengths, *shape, device=device)
    return dict(zip(NAMES, errors_of(rule, rule, inputs, twice=device != "cpu"), strict=True))


def around_errors(
    lengths: list[int], channels: int, heads: int, width: int, device: str = "cpu"
) -> dict[str, float]:
    """The convolution and the norm, whose inputs are parts of one projection."""
    kind = torch.float32 if device == "cpu" else torch.bfloat16
    projected = torch.randn(sum(lengths), channels + heads * width, device=device).to(kind)
    x, gate = (t.detach().requires_grad_() for t in projected.split((channels, heads * width), dim=-1))
    weight = torch.randn(channels, 4, device=device).to(kind).requires_grad_()
    y = torch.randn(sum(lengths), heads, width, device=device).to(kind).requires_grad_()
    norm = (torch.rand(width, device=device) + 0.5).requires_grad_()

    def convolved(x: Tensor, weight: Tensor) -> Tensor:
        return causal_conv(x, weight, segments_of(lengths, device))

    def normed(y: Tensor, gate: Tensor, norm: Tensor) -> Tensor:
        return gated_norm(y, gate.unflatten(-1, (heads, -1)), norm, 1e-6)

    def exactly_normed(y: Tensor, gate: Tensor, norm: Tensor) -> Tensor:
        scale = torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return norm * y * scale * F.silu(gate.unflatten(-1, (heads, -1)))

    errors = [
        *errors_of(convolved, convolved, [x, weight]),
        *errors_of(normed, exactly_normed, [y, gate, norm]),
    ]
    return dict(zip(("convolution", "dx", "dweight", "norm", "dy", "dgate", "dnorm"), errors, strict=True))


def errors(which: str) -> dict[str, dict[str, float]]:
    """Of the cases ``quick`` and ``full`` in Triton's interpreter (TRITON_INTERPRET=1), or ``gpu``."""
    torch.manual_seed(0)
    if which != "gpu":
        from tests.kernels.triton_checks import fix_interpreter

        fix_interpreter()
    device = "cuda" if which == "gpu" else "cpu"
    return {
        name: (around_errors if "around" in name else rule_errors)(*case, device=device)
        for name, case in CASES[which].items()
    }


if __name__ == "__main__":
    print(json.dumps(errors(sys.argv[1])))
