"""Linear attention of ranks that share a row, on GPUs: errors, the time of one rank's share, and bytes.

    python benchmarks/shared_rows.py
    torchrun --nproc-per-node N benchmarks/shared_rows.py

The heads are those of Qwen3.5-9B in bf16. On one GPU, the ranks' shards are computed one after another and
compared with torch in float64, beside the kernels without shards. Then the share of one rank of a single
sequence is timed alone: it gets its own states back from the exchange. With several processes, the GPUs share
a row and exchange through NCCL.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timing import milliseconds
from torch import Tensor

from megatron_vl.kernels.linear_attention import causal_conv_triton
from megatron_vl.kernels.linear_attention.delta_rule_backward import run_backward
from megatron_vl.kernels.linear_attention.delta_rule_forward import run_forward
from megatron_vl.kernels.linear_attention.gated_delta_rule import (
    causal_conv,
    gated_delta_rule,
    make_segment_ids,
)
from megatron_vl.kernels.linear_attention.shard_exchange import ShardExchange, shard_route

ROWS = {"one sequence": [8192], "eleven": [1, 63, 64, 65, 700, 129, 1500, 900, 2000, 1770, 1000]}
"""Rows whose errors are measured, by name: lengths of their sequences."""
TOKENS = (32_768, 131_072)
"""Lengths of the rows that are timed."""


@dataclass
class Sizes:
    key_heads: int = 16
    value_heads: int = 32
    width: int = 128
    """Of keys and of values."""
    device: str = "cuda"
    kind: torch.dtype = torch.bfloat16

    @property
    def channels(self) -> list[int]:
        return [count * self.width for count in (self.key_heads, self.key_heads, self.value_heads)]

    def inputs(self, tokens: int) -> list[Tensor]:
        """qkv [S, C], g (float32) and beta [S, Vh], and the convolution's weight [C, 4]."""
        torch.manual_seed(0)
        qkv = torch.randn(tokens, sum(self.channels), device=self.device).to(self.kind)
        rate = torch.linspace(0.001, 4.0, self.value_heads, device=self.device)
        g = -rate * F.softplus(torch.randn(tokens, self.value_heads, device=self.device) + 1)
        beta = torch.randn(tokens, self.value_heads, device=self.device).sigmoid().to(self.kind)
        weight = torch.randn(sum(self.channels), 4, device=self.device).to(self.kind)
        return [qkv, g, beta, weight]

    def heads(self, qkv: Tensor) -> list[Tensor]:
        return [t.unflatten(-1, (-1, self.width)) for t in qkv.split(self.channels, dim=-1)]


class Threads:
    """The group of the threads of this process, of which one runs at a time."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sent: list[Tensor] = [torch.empty(0)] * count
        self.turn, self.barrier = threading.Lock(), threading.Barrier(count)

    def size(self) -> int:
        return self.count


class ThreadExchange(ShardExchange):
    """Exchanges between threads. Autograd has one thread for all, so backward passes are called directly."""

    def gather(self, mine: Tensor) -> Tensor:
        threads = self.group
        threads.sent[self.route.rank] = mine
        threads.turn.release()
        threads.barrier.wait(timeout=300)
        gathered = torch.stack(threads.sent)
        threads.barrier.wait(timeout=300)
        threads.turn.acquire()
        return gathered


@dataclass
class Alone:
    """A group of which only one rank runs. It counts what each rank sends."""

    count: int
    sent_bytes: list[int] = field(default_factory=list)

    def size(self) -> int:
        return self.count


class AloneExchange(ShardExchange):
    def gather(self, mine: Tensor) -> Tensor:
        self.group.sent_bytes.append(mine.nbytes)
        return mine.expand(self.group.size(), *mine.shape)


def kernel_results(
    sizes: Sizes, inputs: list[Tensor], segments: Tensor, dout: Tensor, exchange: ShardExchange | None
) -> dict[str, Tensor]:
    """The kernels' outputs and gradients, without autograd. The rule's inputs are not the convolution's."""
    qkv, g, beta, weight = inputs
    halo = None if exchange is None else exchange.halo(qkv, weight.shape[1] - 1)
    convolved = causal_conv_triton.forward(qkv, weight, segments, halo)
    dqkv, dweight, dhalo = causal_conv_triton.backward(qkv, weight, segments, qkv, halo)
    if exchange is not None:
        exchange.add_halo_gradients(dhalo, dqkv)

    q, k, v = sizes.heads(qkv)
    out, _, saved = run_forward(q, k, v, g, beta, segments, exchange=exchange)
    grads = tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    dg, dbeta, _ = run_backward(q, k, v, g, beta, segments, saved, dout, None, grads, exchange=exchange)
    names = ("conv", "conv dx", "out", "dq", "dk", "dv", "dg", "dbeta")
    return dict(zip(names, (convolved, dqkv, out, *grads, dg, dbeta), strict=True)) | {"conv dw": dweight}


def sharded_results(
    sizes: Sizes, inputs: list[Tensor], bounds: list[int], dout: Tensor, ranks: int
) -> dict[str, Tensor]:
    """The results of ``ranks`` threads, put together."""
    threads = Threads(ranks)
    results: list[dict[str, Tensor]] = [{}] * ranks
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=dout.device)

    def be_rank(rank: int) -> None:
        with threads.turn:
            route = shard_route(bounds, ranks, rank)
            tokens = slice(rank * route.length, (rank + 1) * route.length)
            segments = make_segment_ids(cu_seqlens, route.length, tokens.start)
            mine = [*(t[tokens] for t in inputs[:3]), inputs[3]]
            exchange = ThreadExchange(route, threads) if route.any_cut else None
            results[rank] = kernel_results(sizes, mine, segments, dout[tokens], exchange)

    workers = [threading.Thread(target=be_rank, args=(rank,), daemon=True) for rank in range(ranks)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    joined = {name: torch.cat([result[name] for result in results]) for name in results[0]}
    joined["conv dw"] = torch.stack([result["conv dw"].double() for result in results]).sum(0)
    return joined


def exact_results(sizes: Sizes, inputs: list[Tensor], segments: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """The same in torch and in float64."""
    qkv, g, beta, weight = (tensor.double().requires_grad_() for tensor in inputs)
    convolved = causal_conv(qkv, weight, segments)
    dqkv, dweight = torch.autograd.grad(convolved, (qkv, weight), qkv.detach())
    leaves = [t.detach().requires_grad_() for t in (*sizes.heads(qkv), g, beta)]
    out, _ = gated_delta_rule(*leaves, segments)
    grads = torch.autograd.grad(out, leaves, dout.double())
    named = dict(zip(("dq", "dk", "dv", "dg", "dbeta"), grads, strict=True))
    return {"conv": convolved.detach(), "conv dx": dqkv, "conv dw": dweight, "out": out.detach(), **named}


def print_errors(sizes: Sizes, name: str, lengths: list[int], ranks: tuple[int, ...]) -> None:
    """Prints the relative errors (L2) of one shard and of several, against float64."""
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    inputs = sizes.inputs(bounds[-1])
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=sizes.device)
    segments = make_segment_ids(cu_seqlens, bounds[-1])
    dout = torch.randn(bounds[-1], sizes.value_heads, sizes.width, device=sizes.device).to(sizes.kind)
    exact = exact_results(sizes, inputs, segments, dout)
    for count in ranks:
        if count == 1:
            ours = kernel_results(sizes, inputs, segments, dout, None)
        else:
            ours = sharded_results(sizes, inputs, bounds, dout, count)
            again = sharded_results(sizes, inputs, bounds, dout, count)
            assert all(torch.equal(ours[part], again[part]) for part in ours), "not the same bits twice"
        errors = {part: (ours[part].double() - want).norm() / want.norm() for part, want in exact.items()}
        listed = " ".join(f"{part} {float(error):.1e}" for part, error in errors.items())
        print(f"{name:12s} {count} shards: {listed}", flush=True)


def timed(sizes: Sizes, length: int, segments: Tensor, exchange: ShardExchange | None) -> tuple[float, float]:
    """Milliseconds of convolution and rule, forward, and forward and backward."""
    leaves = [tensor.requires_grad_() for tensor in sizes.inputs(length)]
    dout = torch.randn(length, sizes.value_heads, sizes.width, device=sizes.device).to(sizes.kind)

    def forward() -> Tensor:
        qkv, g, beta, weight = leaves
        heads = sizes.heads(causal_conv(qkv, weight, segments, exchange=exchange))
        return gated_delta_rule(*heads, g, beta, segments, exchange=exchange)[0]

    def both() -> None:
        torch.autograd.grad(forward(), leaves, dout)

    return milliseconds(forward), milliseconds(both)


def print_times(
    sizes: Sizes, tokens: int, ranks: int, rank: int, make: Callable[..., ShardExchange], group: object
) -> None:
    """Times one rank's shard of a row with one sequence."""
    route = shard_route([0, tokens], ranks, rank)
    segments = torch.zeros(route.length, dtype=torch.int32, device=sizes.device)
    forward, both = timed(sizes, route.length, segments, make(route, group) if ranks > 1 else None)
    times = f"forward {forward:.2f} ms, with backward {both:.2f} ms"
    print(f"{tokens:7d} tokens, rank {rank} of {ranks}: {times}", flush=True)


def on_one_gpu() -> None:
    sizes = Sizes()
    for name, lengths in ROWS.items():
        print_errors(sizes, name, lengths, (1, 2, 4, 8))
    for tokens in TOKENS:
        print_times(sizes, tokens, 1, 0, AloneExchange, None)
        for ranks, rank in ((2, 0), (2, 1), (4, 0), (4, 1), (4, 3), (8, 0), (8, 1), (8, 7)):
            group = Alone(ranks)
            print_times(sizes, tokens, ranks, rank, AloneExchange, group)
            if rank == 0:
                calls = sorted(set(group.sent_bytes))
                print(f"    each rank sends, in bytes, in an exchange: {calls}")


def on_several_gpus() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    group = dist.group.WORLD
    for tokens in TOKENS:
        print_times(Sizes(), tokens, dist.get_world_size(), dist.get_rank(), ShardExchange, group)
    dist.destroy_process_group()


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), torch.__version__)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        on_several_gpus()
    else:
        on_one_gpu()
