"""Outputs and gradients of the language model's attention on a GPU, for the heads of all families.

    python -m tests.gpu.attention

Each backend computes packed causal attention in bf16. The reference is torch's math kernel in float32. A row
of 8,192 tokens has eleven sequences. It prints errors (relative L2) and the time of a forward and a backward
pass, and returns exit code 1 if the backend that ``auto`` takes is wrong.
"""

import itertools
import sys

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_vl.kernels.attention.flash_attention import has_flash_attention, packed_causal_attention
from megatron_vl.models.attention import choose_backend, make_backend
from megatron_vl.models.batch import KeySegments, Segments

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


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def row_segments(gathers_keys: bool) -> Segments:
    """With gathered keys, the queries are the second half of each sequence."""
    if not gathers_keys:
        return Segments(bounds(LENGTHS), max(LENGTHS))
    query_lengths = [-(-length // 2) for length in LENGTHS]
    keys = KeySegments(bounds(LENGTHS), max(LENGTHS), slice(0, sum(LENGTHS)))
    return Segments(bounds(query_lengths), max(query_lengths), keys)


def inputs(heads: int, groups: int, width: int, num_queries: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((num_queries, heads, width), *((sum(LENGTHS), groups, width),) * 2)
    return [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes]


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


def known_result_changes_nothing(tensors: list[Tensor], gradient: Tensor, segments: Segments) -> bool:
    """Whether gradients are equal to the bit if the result is given, as ``recompute.keep`` does."""
    torch.use_deterministic_algorithms(True)
    arguments = (*tensors, *segments.varlen_arguments)
    output, log_sum_exp = packed_causal_attention(*arguments)
    known = output.detach(), log_sum_exp.detach()
    again, _ = packed_causal_attention(*arguments, known_result=known)
    pairs = zip(*(torch.autograd.grad(out, tensors, gradient) for out in (output, again)), strict=True)
    equal = torch.equal(output, again) and all(torch.equal(a, b) for a, b in pairs)
    torch.use_deterministic_algorithms(False)
    return equal


def main() -> int:
    passed = True
    for (family, (heads, groups, width)), gathers_keys in itertools.product(HEADS.items(), (False, True)):
        segments = row_segments(gathers_keys)
        tensors = inputs(heads, groups, width, int(segments.cu_seqlens[-1]))
        gradient = torch.randn_like(tensors[0])
        wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
        with sdpa_kernel(SDPBackend.MATH):
            want = run("sdpa", wide, gradient.float(), segments)

        heads_of = {"head_dim": width, "causal": True, "gathers_keys": gathers_keys}
        chosen = choose_backend("auto", platform="cuda", **heads_of)
        names = ["torch_varlen"] + ["te"] * (not gathers_keys) + ["flash_attn"] * has_flash_attention()
        for name in names:
            got = run(name, tensors, gradient, segments)
            pairs = zip(got, want, strict=True)
            errors = [float((g.float() - w).norm() / w.norm()) for g, w in pairs]
            fine = all(error < LIMIT for error in errors)  # NaN is not
            passed = passed and (fine or name != chosen)
            listed = " ".join(f"{part} {error:.1e}" for part, error in zip("oqkv", errors, strict=True))
            took = milliseconds(name, tensors, gradient, segments)
            which = f"{family} {heads}/{groups} x {width} {name}{' (auto)' if name == chosen else ''}"
            which += ", gathered keys" * gathers_keys
            print(f"{'ok    ' if fine else 'WRONG '} {which}: {listed}, {took:.2f} ms", flush=True)
        if chosen == "flash_attn":
            fine = known_result_changes_nothing(tensors, gradient, segments)
            passed = passed and fine
            print(f"{'ok    ' if fine else 'WRONG '} {family}: gradients of a known result", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
