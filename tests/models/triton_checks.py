"""Our Triton kernels against torch, in fp32 in Triton's interpreter; prints the largest errors as JSON.

Run with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

from __future__ import annotations

import json
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_vl.models.swiglu import swiglu
from megatron_vl.models.window_attention import window_attention


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate-half of [P, h, d] by [P, d / 2]."""
    cos, sin = (torch.cat((t, t), -1)[:, None] for t in (angles.cos(), angles.sin()))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def windows(qkv: Tensor, angles: Tensor, bounds: list[int], heads: int) -> Tensor:
    """Torch's attention, window by window."""
    query, key, value = qkv.view(qkv.shape[0], heads, 3, -1).unbind(2)
    query, key = rotate(query, angles), rotate(key, angles)
    out = [
        F.scaled_dot_product_attention(*(t[a:b].transpose(0, 1) for t in (query, key, value))).transpose(0, 1).flatten(1)
        for a, b in pairwise(bounds)
    ]
    return torch.cat(out)


def worst(ours: Tensor, reference: Tensor, inputs: list[Tensor]) -> float:
    """The largest difference of values and gradients, relative to the largest reference."""
    weight = torch.randn_like(reference)
    pairs = [(ours, reference)]
    pairs += list(zip(torch.autograd.grad(ours, inputs, weight), torch.autograd.grad(reference, inputs, weight), strict=True))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def attention_error(lengths: list[int], heads: int, head_dim: int) -> float:
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    qkv = torch.randn(bounds[-1], heads * 3 * head_dim, requires_grad=True)
    angles = torch.rand(bounds[-1], head_dim // 2) * 10
    ours = window_attention(qkv, angles.cos(), angles.sin(), torch.tensor(bounds, dtype=torch.int32), max(lengths), head_dim)
    return worst(ours, windows(qkv, angles, bounds, heads), [qkv])


def swiglu_error(rows: int, width: int, weighted: bool) -> float:
    x = torch.randn(rows, 1, 2 * width, requires_grad=True)
    weight = torch.rand(rows, requires_grad=True) if weighted else None
    gate, up = x.chunk(2, -1)
    reference = F.silu(gate) * up
    if weight is not None:
        reference = reference * weight.view(-1, 1, 1)
    return worst(swiglu(x, weight), reference, [x] if weight is None else [x, weight])


def main() -> None:
    torch.manual_seed(0)
    errors = {
        "windows of 64, 80 a head": attention_error([64, 64, 32, 16, 7, 1], 2, 80),
        "windows of 100, 32 a head": attention_error([100, 12], 1, 32),
        "swiglu": swiglu_error(3, 3000, weighted=False),
        "swiglu, weighted": swiglu_error(5, 96, weighted=True),
    }
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
