"""Times full and window attention of the vision towers on one GPU: our kernels, FlashAttention-2 and cuDNN.

    python benchmarks/tower_attention.py [--dims 72,80] [--heads 16] [--lengths 4096,4096,8192]

By default there are 15 segments of 900 to 1,600 patches, 17,720 in total, and our kernels run in several tile
sizes. Windows are those of Qwen2.5-VL: 22,208 patches, heads of 80, mostly 64 patches. It prints
milliseconds, useful TFLOP/s (4 d operations per pair of query and key forward, 10 d backward; padding and
repeated work do not count), and the relative error against fp32.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import transformer_engine.pytorch as te  # before torch loads cuDNN: their libraries must be of one version
from timing import milliseconds
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

from megatron_vl.kernels.attention.tower_attention import (
    launch_key_grad,
    launch_query_grad,
    tower_attention,
)
from megatron_vl.kernels.attention.tower_forward import (
    DEFAULT_TILES,
    KernelTile,
    attention_forward,
    pack_with_rope,
)
from megatron_vl.kernels.attention.window_attention import window_attention

LENGTHS = [900, 1600, 1250, 980, 1444, 1024, 1156, 1330, 900, 1600, 1088, 1200, 1296, 1000, 952]
FORWARD = [DEFAULT_TILES.forward_tile, KernelTile(128, 64, 8, 2), KernelTile(64, 64, 4, 2)]
QUERY = [DEFAULT_TILES.query_tile, KernelTile(128, 32, 8, 3), KernelTile(64, 64, 4, 2)]
KEY = [DEFAULT_TILES.key_tile, KernelTile(64, 64, 4, 3), KernelTile(128, 32, 8, 3)]


@dataclass
class Case:
    """The heads of one size."""

    qkv: Tensor
    """bf16 [P, heads * 3 * d]"""
    angles: Tensor
    """fp32 [P, d / 2]"""
    bounds: list[int]
    heads: int
    dim: int

    def __post_init__(self) -> None:
        self.cu = torch.tensor(self.bounds, dtype=torch.int32, device="cuda")
        self.longest = max(b - a for a, b in pairwise(self.bounds))
        self.pairs = self.heads * sum((b - a) ** 2 for a, b in pairwise(self.bounds))
        self.cos = self.angles.cos()
        self.sin = self.angles.sin()
        self.full_angles = torch.cat((self.angles, self.angles), -1)[:, None, None]
        self.grad = torch.randn(self.bounds[-1], self.heads * self.dim, device="cuda", dtype=torch.bfloat16)
        self.exact = self.both(self.reference, self.qkv.float(), self.grad.float())

    def rate(self, ms: float, operations: int) -> str:
        return f"{ms:6.3f} ms {operations * self.dim * self.pairs / ms / 1e9:4.0f}"

    def both(self, function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        out = function(x)
        return out.detach(), torch.autograd.grad(out, x, grad)[0]

    def split(self, qkv: Tensor, rotated: bool, fused: bool = True) -> list[Tensor]:
        query, key, value = qkv.view(-1, self.heads, 3, self.dim).unbind(2)
        if rotated:
            turn = partial(apply_rotary_pos_emb, freqs=self.full_angles, tensor_format="sbhd", fused=fused)
            query, key = turn(query[:, None])[:, 0], turn(key[:, None])[:, 0]
        return [query, key, value]

    def reference(self, qkv: Tensor) -> Tensor:
        parts = self.split(qkv, True, fused=False)

        out = []
        for a, b in pairwise(self.bounds):
            out.append(scaled_dot_product_attention(*(t[a:b].transpose(0, 1) for t in parts)))

        return torch.cat([o.transpose(0, 1) for o in out]).flatten(1)

    def flash(self, qkv: Tensor, rotated: bool) -> Tensor:
        query, key, value = self.split(qkv, rotated)
        return varlen_attn(query, key, value, self.cu, self.cu, self.longest, self.longest).flatten(1)

    def ours(self, qkv: Tensor) -> Tensor:
        return tower_attention(qkv, self.cos, self.sin, self.cu, self.dim)

    def windows(self, qkv: Tensor) -> Tensor:
        return window_attention(qkv, self.cos, self.sin, self.cu, self.longest, self.dim)

    def report(
        self, name: str, function: Callable[[Tensor], Tensor], rotated: bool, once: bool = False
    ) -> None:
        """``once``: the graph can be traversed only once, so the backward pass is timed together with
        the forward pass."""
        x = self.qkv.detach().requires_grad_()
        out = function(x)
        forward = milliseconds(lambda: function(x))
        line = f"  {name:34s} forward {self.rate(forward, 4)}  "
        if once:
            both = milliseconds(lambda: torch.autograd.grad(function(x), x, self.grad))
            line += f"forward and backward {self.rate(both, 14)}"
        else:
            backward = milliseconds(lambda: torch.autograd.grad(out, x, self.grad, retain_graph=True))
            line += f"backward {self.rate(backward, 10)}"

        if rotated:
            pairs = zip(self.both(function, self.qkv, self.grad), self.exact, strict=True)
            line += "  error " + " / ".join(
                f"{float((a.float() - b).norm() / b.norm()):.1e}" for a, b in pairs
            )

        print(line, flush=True)


def draw_case(lengths: list[int], heads: int, dim: int) -> Case:
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    qkv = torch.randn(bounds[-1], heads * 3 * dim, device="cuda", dtype=torch.bfloat16)
    return Case(qkv, torch.rand(bounds[-1], dim // 2, device="cuda") * 10, bounds, heads, dim)


def window_lengths(patches: int = 22_208) -> list[int]:
    """Mostly whole windows, and some that are cut by the edge of an image."""
    generator = random.Random(1)
    lengths = [64] * 30
    while sum(lengths) < patches - 64:
        lengths.append(generator.choice([64] * 5 + [48, 32, 16]))
    return [*lengths, patches - sum(lengths)]


def transformer_engine(case: Case) -> Callable[[Tensor], Tensor]:
    module = te.DotProductAttention(
        case.heads, case.dim, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding"
    )

    def attend(qkv: Tensor) -> Tensor:
        return module(
            *case.split(qkv, False),
            cu_seqlens_q=case.cu,
            cu_seqlens_kv=case.cu,
            max_seqlen_q=case.longest,
            max_seqlen_kv=case.longest,
        ).flatten(1)

    return attend


def single_kernels(case: Case) -> list[tuple[str, list[KernelTile], Callable[[KernelTile], object], int]]:
    """(name, tiles, function that runs a kernel, its useful operations per pair and element of a head)."""
    angles = case.cos, case.sin
    packed = pack_with_rope(case.qkv, *angles, case.dim)
    out, lse = attention_forward(packed, case.cu, DEFAULT_TILES.forward_tile)
    dout = case.grad.view_as(out)
    delta = torch.empty_like(lse)
    dqkv = torch.empty_like(case.qkv)

    def forward(tile: KernelTile) -> object:
        return attention_forward(packed, case.cu, tile)

    def query(tile: KernelTile) -> object:
        return launch_query_grad(packed, out, dout, lse, case.cu, angles, tile, delta, dqkv)

    def key(tile: KernelTile) -> object:
        return launch_key_grad(packed, dout, lse, case.cu, angles, tile, delta, dqkv)

    return [("forward", FORWARD, forward, 4), ("dQ", QUERY, query, 6), ("dK and dV", KEY, key, 8)]


def sweep(case: Case) -> None:
    """Times each kernel alone, in all its tile sizes; operations are those of its own
    products, without padding."""
    runs = single_kernels(case)

    def compiled(job: tuple[Callable[[KernelTile], object], KernelTile]) -> str:
        try:
            job[0](job[1])
            torch.cuda.synchronize()
        except Exception as error:  # a tile size that does not fit is a result, not the end
            return repr(error)[:120]
        return ""

    jobs = [(run, tile) for _, tiles, run, _ in runs for tile in tiles]
    with ThreadPoolExecutor(8) as pool:
        failures = dict(zip(jobs, pool.map(compiled, jobs), strict=True))
    for name, tiles, run, operations in runs:
        for tile in tiles:
            label = (
                f"  {name:10s} {tile.own_rows:3d} x {tile.step_rows:3d}, "
                f"{tile.num_warps} warps, {tile.num_stages} stages"
            )
            failure = failures[run, tile]
            print(
                f"{label:52s} {failure or case.rate(milliseconds(partial(run, tile)), operations)}",
                flush=True,
            )
    packing = milliseconds(lambda: pack_with_rope(case.qkv, case.cos, case.sin, case.dim))
    print(f"  {'pack and rotate':50s} {packing:6.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dims", default="72,80", help="head sizes; tile sizes are swept for the first")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="patches of each segment")
    options = parser.parse_args()
    torch.manual_seed(0)
    lengths = [int(length) for length in options.lengths.split(",")]
    print(torch.cuda.get_device_name(), torch.__version__, f"{sum(lengths)} patches")

    for i, dim in enumerate(int(d) for d in options.dims.split(",")):
        case = draw_case(lengths, options.heads, dim)
        print(f"heads of {dim}; the last column is TFLOP/s")
        if i == 0:
            sweep(case)
        case.report("FlashAttention-2", partial(case.flash, rotated=False), False)
        case.report("FlashAttention-2 and fused RoPE", partial(case.flash, rotated=True), True)
        case.report("ours, RoPE in the kernels", case.ours, True)
        if dim % 16 == 0:
            case.report("cuDNN (Transformer Engine)", transformer_engine(case), False, once=True)

    case = draw_case(window_lengths(), 16, 80)
    print(f"windows, {case.bounds[-1]} patches, heads of {case.dim}")
    case.report("FlashAttention-2 and fused RoPE", partial(case.flash, rotated=True), True)
    case.report("ours, RoPE in the kernels", case.windows, True)


if __name__ == "__main__":
    main()
