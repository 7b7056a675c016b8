"""Times the products of many experts on one GPU: our kernels, Transformer Engine's and torch's.

    python benchmarks/experts.py [--seconds 80] [--shapes 128x2048x768,16x2048x768,16x4096x1536]

For each shape (experts on the GPU x hidden size x FFN size; 65,536 unevenly routed rows) it times the two
linears of an expert: forward, gradient of the input (dgrad), and gradient of the weight added to fp32
(wgrad). It prints TFLOP/s of GPU time, host milliseconds per call, and the relative error against fp32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te  # before torch loads cuDNN: their libraries must be of one version
from torch import Tensor

from megatron_vl.kernels.experts.grouped_gemm import AddressTable, plan_tiles, row_product, weight_product

ROWS = 65_536


def timed(function: Callable[[], object], runs: int = 10) -> tuple[float, float]:
    """GPU milliseconds and host milliseconds per call."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    before = time.perf_counter()
    for _ in range(runs):
        function()
    host = time.perf_counter() - before
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / runs, host / runs * 1e3


@dataclass
class Case:
    """One linear of all experts."""

    counts: Tensor
    x: Tensor
    dy: Tensor
    weights: Tensor
    """bf16 [experts, out, in]."""
    exact: tuple[Tensor, Tensor, Tensor]
    """fp32: output, input gradient, and weight gradients of the first and the last four experts."""

    @property
    def flop(self) -> float:
        return 2.0 * self.x.shape[0] * self.x.shape[1] * self.dy.shape[1]


def uneven(experts: int) -> Tensor:
    """Number of rows of each expert, like a trained router's, with one expert that has none."""
    share = torch.softmax(0.5 * torch.randn(experts), 0)
    share[experts // 2] = 0
    return torch.bincount(torch.multinomial(share, ROWS, replacement=True), minlength=experts).cuda()


def products(counts: Tensor, x: Tensor, dy: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the three products in fp32, expert by expert."""
    parts = counts.tolist()
    each = list(zip(x.split(parts), dy.split(parts), weights, strict=True))
    chosen = [*each[:4], *each[-4:]]
    wgrad = torch.stack([b.float().T @ a.float() for a, b, _ in chosen])
    return (
        torch.cat([a.float() @ w.float().T for a, _, w in each]),
        torch.cat([b.float() @ w.float() for _, b, w in each]),
        wgrad,
    )


def make_case(counts: Tensor, features_in: int, features_out: int) -> Case:
    x, dy = (
        torch.randn(ROWS, width, device="cuda", dtype=torch.bfloat16) for width in (features_in, features_out)
    )
    weights = (
        torch.randn(counts.numel(), features_out, features_in, device="cuda", dtype=torch.bfloat16) * 0.02
    )
    return Case(counts, x, dy, weights, products(counts, x, dy, weights))


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.float() - exact).norm() / exact.norm())


def ends_only(grads: Tensor) -> Tensor:
    return torch.cat((grads[:4], grads[-4:]))


class Ours:
    """Our kernels on a case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.plan = plan_tiles(case.counts, ROWS)
        self.grads = torch.zeros(case.weights.shape, device="cuda")
        self.addresses = AddressTable().device_addresses(list(case.weights))
        self.grad_addresses = AddressTable().device_addresses(list(self.grads))

    def forward(self) -> Tensor:
        width = self.case.dy.shape[1]
        return row_product(self.case.x, self.addresses, self.plan, width, is_transposed=True)

    def dgrad(self) -> Tensor:
        width = self.case.x.shape[1]
        return row_product(self.case.dy, self.addresses, self.plan, width, is_transposed=False)

    def wgrad(self) -> Tensor:
        case = self.case
        weight_product(case.dy, case.x, self.grad_addresses, self.plan, self.grads, accumulate=True)
        return self.grads


def line(
    case: Case, function: Callable[[], Tensor], exact: Tensor, *, times: float = 1, pick=lambda t: t
) -> str:
    """Formats TFLOP/s, host milliseconds and error of one product, or its failure."""
    try:
        wrong = error(pick(function()), exact)
        gpu, host = timed(function)
    except Exception as failure:  # a tile size that does not fit is a result too
        return f"{type(failure).__name__}: {str(failure).splitlines()[0][:40]:40s}"
    return f"{times * case.flop / gpu / 1e9:5.0f} TF {gpu:6.3f} ms host {host:5.3f} err {wrong:.0e}"


def our_ones(cases: list[Case]) -> None:
    ours = [Ours(case) for case in cases]
    for index, name in enumerate(("forward", "dgrad", "wgrad")):
        pick = ends_only if name == "wgrad" else lambda t: t
        parts = []
        for o in ours:
            o.grads.zero_()
            parts.append(line(o.case, getattr(o, name), o.case.exact[index], pick=pick))
        print(f"  ours, {name:49s} fc1 {parts[0]} | fc2 {parts[1]}", flush=True)


def torch_ones(cases: list[Case]) -> None:
    """Times torch's grouped_mm; its weight gradients are bf16 and are not accumulated."""
    if not hasattr(F, "grouped_mm"):
        return
    for name, index in (("forward", 0), ("dgrad", 1), ("wgrad", 2)):
        parts = []
        for case in cases:
            ends = case.counts.cumsum(0).int()
            run = [
                lambda c=case, e=ends: F.grouped_mm(c.x, c.weights.transpose(1, 2), offs=e),
                lambda c=case, e=ends: F.grouped_mm(c.dy, c.weights, offs=e),
                lambda c=case, e=ends: F.grouped_mm(c.dy.T, c.x, offs=e),
            ][index]
            parts.append(line(case, run, case.exact[index], pick=ends_only if index == 2 else lambda t: t))
        print(f"  torch.nn.functional.grouped_mm, {name:24s} fc1 {parts[0]} | fc2 {parts[1]}", flush=True)


def transformer_engine_ones(cases: list[Case]) -> None:
    """Times Transformer Engine's GroupedLinear with weight gradients added to fp32; backward is
    dgrad and wgrad."""
    forward, backward = [], []
    for case in cases:
        experts, features_out, features_in = case.weights.shape
        kind = dict(bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
        module = te.GroupedLinear(experts, features_in, features_out, **kind)
        grads = torch.zeros(case.weights.shape, device="cuda")
        for i, weight in enumerate(module.parameters()):
            weight.data.copy_(case.weights[i])
            weight.main_grad = grads[i]
        splits = case.counts.tolist()
        x = case.x.detach().requires_grad_()
        forward.append(line(case, lambda m=module, x=x, s=splits: m(x, s).detach(), case.exact[0]))

        def both(module=module, x=x, splits=splits, dy=case.dy) -> Tensor:
            x.grad = None
            module(x, splits).backward(dy)
            return x.grad

        backward.append(line(case, both, case.exact[1], times=3))
    print(f"  {'Transformer Engine, forward':55s} fc1 {forward[0]} | fc2 {forward[1]}", flush=True)
    print(
        f"  {'Transformer Engine, forward and backward':55s} fc1 {backward[0]} | fc2 {backward[1]}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=80, help="start nothing new after this many seconds")
    parser.add_argument("--shapes", default="128x2048x768,16x2048x768,16x4096x1536")
    args = parser.parse_args()
    begin = time.monotonic()

    def late() -> bool:
        return time.monotonic() - begin > args.seconds

    print(torch.cuda.get_device_name(), torch.__version__, "TFLOP/s; (m, n, k, warps, stages)")
    for number, shape in enumerate(args.shapes.split(",")):
        if late():
            break
        torch.manual_seed(0)
        experts, hidden, ffn = map(int, shape.split("x"))
        counts = uneven(experts)
        cases = [make_case(counts, hidden, 2 * ffn), make_case(counts, ffn, hidden)]
        print(
            f"{shape}: {ROWS} rows, {int(counts.min())} to {int(counts.max())} per expert; "
            f"{time.monotonic() - begin:.0f} s"
        )
        gpu, host = timed(lambda c=counts: plan_tiles(c, ROWS))
        print(f"  plan {gpu:.4f} ms, host {host:.4f}")
        if number < 2:
            torch_ones(cases)
            transformer_engine_ones(cases)

        our_ones(cases)
        del cases
        torch.cuda.empty_cache()

    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
