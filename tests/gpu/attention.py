"""Outputs and gradients of the language model's attention on a GPU, for the heads of all families.

    python -m tests.gpu.attention

Each backend computes packed causal attention in bf16. The reference is torch's math kernel in float32. A row
of 8,192 tokens has eleven sequences. It prints errors (relative L2) and the time of a forward and a backward
pass, and returns exit code 1 if the backend that ``auto`` takes is wrong.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_vl.kernels.flash_attention import has_flash_attention
from megatron_vl.models.attention import choose_backend, make_backend
from megatron_vl.models.batch import Segments

LENGTHS = [1, 63, 64, 65, 700, 0, 129, 1500, 900, 2000, 1770, 1000]
HEADS = {
    "qwen2_5_vl": (28, 4, 128),
    "qwen3_vl": (32, 8, 128),
    "qwen3_5": (16, 4, 256),
    "qwen3_5_moe": (16, 2, 256),
}
"""Query heads, key heads and head_dim of each family."""
LIMIT = 2e-2
"""Largest relative error. bf16 inputs with exact sums are at about 3e-3."""


def inputs(heads: int, groups: int, width: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((heads, width), (groups, width), (groups, width))
    tensors = [torch.randn(sum(LENGTHS), *shape, device="cuda").bfloat16() for shape in shapes]
    return [tensor.requires_grad_() for tensor in tensors]


def run(name: str, tensors: list[Tensor], gradient: Tensor, segments: Segments) -> list[Tensor]:
    out = make_backend(name)(*tensors, segments, True)
    return [out, *torch.autograd.grad(out, tensors, gradient.to(out.dtype))]


def milliseconds(name: str, tensors: list[Tensor], gradient: Tensor, segments: Segments) -> float:
    attend = make_backend(name)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(13):
        if turn == 3:
            begin.record()
        out = attend(*tensors, segments, True)
        torch.autograd.grad(out, tensors, gradient)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 10


def main() -> int:
    bounds = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    segments = Segments(bounds, max(LENGTHS))
    passed = True

    for family, (heads, groups, width) in HEADS.items():
        tensors = inputs(heads, groups, width)
        gradient = torch.randn(sum(LENGTHS), heads, width, device="cuda").bfloat16()
        wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
        with sdpa_kernel(SDPBackend.MATH):
            want = run("sdpa", wide, gradient.float(), segments)

        chosen = choose_backend("auto", platform="cuda", head_dim=width, causal=True)
        names = ("te", "torch_varlen", "flash_attn")
        for name in names[: 3 if has_flash_attention() else 2]:
            got = run(name, tensors, gradient, segments)
            pairs = zip(got, want, strict=True)
            errors = [float((g.float() - w).norm() / w.norm()) for g, w in pairs]
            fine = all(error < LIMIT for error in errors)  # NaN is not
            passed = passed and (fine or name != chosen)
            listed = " ".join(f"{part} {error:.1e}" for part, error in zip("oqkv", errors, strict=True))
            took = milliseconds(name, tensors, gradient, segments)
            which = f"{family} {heads}/{groups} x {width} {name}{' (auto)' if name == chosen else ''}"
            print(f"{'ok    ' if fine else 'WRONG '} {which}: {listed}, {took:.2f} ms", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
