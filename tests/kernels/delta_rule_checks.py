"""Errors of the Triton kernels for linear attention beside torch in float64, printed as JSON.

    python -m tests.kernels.delta_rule_checks quick|full|gpu

``quick`` and ``full`` run in Triton's interpreter (TRITON_INTERPRET=1) in float32, ``gpu`` in bfloat16. The
interpreter does not multiply bfloat16.
"""

import json
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_vl.kernels.linear_attention.gated_delta_rule import causal_conv, gated_delta_rule, gated_norm
from tests.kernels.relative import RATES, relative
from tests.kernels.triton_checks import fix_interpreter

NAMES = ("out", "dq", "dk", "dv", "dg", "dbeta")


def numbers(lengths: list[int], device: str) -> Tensor:
    lengths_ = torch.tensor(lengths)
    return torch.arange(len(lengths)).repeat_interleave(lengths_).int().to(device)


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
    lowest, highest = RATES[rates]
    rate = torch.linspace(lowest, highest, value_heads, device=device)
    g = -rate * F.softplus(torch.randn(tokens, value_heads, device=device) + 1)
    beta = torch.randn(tokens, value_heads, device=device).sigmoid().to(kind)
    mixed = torch.cat((q, k, v), dim=-1).to(kind)
    q, k, v = (
        t.unflatten(-1, (n, -1))
        for t, n in zip(mixed.split(cuts, -1), (*heads[:1] * 2, heads[1]), strict=True)
    )
    return [t.detach().requires_grad_() for t in (q, k, v, g, beta)]


def run(rule: Callable[..., Tensor], inputs: list[Tensor], segments: Tensor) -> list[Tensor]:
    """out and all gradients."""
    out = rule(*inputs, segments)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator).to(out.device).to(inputs[2].dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


def rule_errors(lengths: list[int], *shape, device: str = "cpu", **kind) -> dict[str, float]:
    """The relative error of each result (L2)."""
    inputs = rule_inputs(lengths, *shape, device=device, **kind)
    segments = numbers(lengths, device)
    ours = run(gated_delta_rule, inputs, segments)
    if device != "cpu":
        again = run(gated_delta_rule, inputs, segments)
        assert all((a == b).all() for a, b in zip(ours, again, strict=True)), "not the same bits twice"
    wide = [t.detach().double().requires_grad_() for t in inputs]
    exact = run(gated_delta_rule, wide, segments)
    return {name: relative(a, b) for name, a, b in zip(NAMES, ours, exact, strict=True)}


def around_errors(
    lengths: list[int], channels: int, heads: int, width: int, device: str = "cpu"
) -> dict[str, float]:
    """The convolution and the norm, whose inputs are parts of one projection."""
    kind = torch.float32 if device == "cpu" else torch.bfloat16
    segments = numbers(lengths, device)
    projected = torch.randn(sum(lengths), channels + heads * width, device=device).to(kind)
    x, gate = (t.detach().requires_grad_() for t in projected.split((channels, heads * width), dim=-1))
    weight = torch.randn(channels, 4, device=device).to(kind).requires_grad_()
    y = torch.randn(sum(lengths), heads, width, device=device).to(kind).requires_grad_()
    norm = (torch.rand(width, device=device) + 0.5).requires_grad_()

    def convolution(x: Tensor, weight: Tensor) -> Tensor:
        return causal_conv(x, weight, segments)

    def normed(y: Tensor, gate: Tensor, norm: Tensor) -> Tensor:
        return gated_norm(y, gate.unflatten(-1, (heads, -1)), norm, 1e-6)

    def exactly_normed(y: Tensor, gate: Tensor, norm: Tensor) -> Tensor:
        scale = torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return norm * y * scale * F.silu(gate.unflatten(-1, (heads, -1)))

    errors = {}
    for name, ours, exact, inputs in (
        ("convolution", convolution, convolution, [x, weight]),
        ("norm", normed, exactly_normed, [y, gate, norm]),
    ):
        wide = [t.detach().double().requires_grad_() for t in inputs]
        results = []
        for function, given in ((ours, inputs), (exact, wide)):
            out = function(*given)
            dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(device).to(kind)
            results.append([out.detach(), *torch.autograd.grad(out, given, dout.to(out.dtype))])
        for i, (a, b) in enumerate(zip(*results, strict=True)):
            errors[f"{name}, {'out' if i == 0 else f'gradient {i}'}"] = relative(a, b)
    return errors


def quick() -> dict[str, dict[str, float]]:
    return {
        "four sequences, a row that no chunk divides": rule_errors(
            [1, 63, 3, 40], (2, 4), (32, 16), "as initialised"
        ),
        "less than a chunk, three value heads a key": rule_errors([5, 2], (1, 3), (16, 32), "mixed"),
        "keys alike": rule_errors([130], (1, 1), (32, 32), "slow", alike=True),
        "around": around_errors([1, 2, 1, 33, 3], 96, 2, 32),
        "around, one token": around_errors([1], 8, 1, 16),
    }


def full() -> dict[str, dict[str, float]]:
    lengths = [1, 63, 64, 3, 83, 66]
    errors = {
        f"{heads}, {rates}, {'alike' if alike else 'random'}": rule_errors(
            lengths, heads, (32, 32), rates, alike=alike
        )
        for heads in ((2, 2), (1, 3), (2, 4))
        for rates in RATES
        for alike in (False, True)
    }
    errors["heads of 128"] = rule_errors([1, 63, 3, 83, 50], (1, 2), (128, 128), "mixed")
    errors["whole chunks"] = rule_errors([64, 128], (1, 1), (16, 16), "mixed")
    errors["one token"] = rule_errors([1], (1, 2), (16, 16), "mixed")
    errors["around"] = around_errors([1, 63, 3, 83, 50], 300, 3, 128)
    return errors


def gpu() -> dict[str, dict[str, float]]:
    lengths = [1, 63, 64, 65, 700, 129, 1500, 900, 2000, 1770, 1000]
    errors = {
        f"{heads}, {rates}, {len(row)} sequences": rule_errors(row, heads, (128, 128), rates, device="cuda")
        for heads, rates, row in (
            ((16, 32), "as initialised", lengths),
            ((16, 32), "as initialised", [8192]),
            ((16, 48), "mixed", lengths),
            ((16, 16), "slow", lengths),
            ((4, 8), "mixed", [1]),
        )
    }
    errors["smaller heads"] = rule_errors(lengths, (2, 4), (64, 64), "mixed", device="cuda")
    errors["around"] = around_errors(lengths, 8192, 32, 128, "cuda")
    return errors


if __name__ == "__main__":
    torch.manual_seed(0)
    if sys.argv[1] != "gpu":
        fix_interpreter()
    print(json.dumps({"quick": quick, "full": full, "gpu": gpu}[sys.argv[1]]()))
