"""Linear attention of ranks that share a row, beside that of one rank with the whole row."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_vl.kernels.linear_attention.gated_delta_rule import (
    causal_conv,
    gated_delta_rule,
    make_segment_ids,
)
from megatron_vl.kernels.linear_attention.shard_exchange import ShardExchange, shard_route
from tests.kernels.relative import relative
from tests.kernels.triton_checks import fix_interpreter

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 1, 2, 16, 32
CHANNELS = (KEY_HEADS * KEY_DIM, KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM)
NAMES = ("out", "qkv", "g", "beta", "weight")

ROWS: dict[str, list[int]] = {
    "one sequence": [320],
    "shards of every kind": [70, 3, 88, 81, 78],
    "sequences of 1 to 3 tokens": [1, 2, 3, 32, 1, 1, 3, 2, 34, 1, 2, 77, 1, 1, 1, 1, 2, 3, 92, 60],
    "bounds on edges": [40, 40, 80, 120, 40],
    "a long sequence within others": [30, 255, 35],
    "one token on a side": [41, 38, 80, 2, 78, 81],
    "shards of padding": [33, 50, 237],
    "shards of two tokens": [1, 3, 8, 1, 3],
    "shards of one token": [3, 4, 1],
}
"""Lengths of the sequences of rows that 2, 4 and 8 ranks can share. 8 shards of long rows have 40 tokens."""


def row_inputs(tokens: int, kind: torch.dtype) -> list[Tensor]:
    """qkv [S, C], g, beta [S, Vh] and the convolution's weight [C, 4], which every rank draws alike."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rate = torch.linspace(0.001, 0.1, VALUE_HEADS, dtype=torch.float64)  # slow, so that states matter
    g = -rate * F.softplus(draw(tokens, VALUE_HEADS) + 1)
    tensors = [draw(tokens, sum(CHANNELS)), g, draw(tokens, VALUE_HEADS).sigmoid(), draw(sum(CHANNELS), 4)]
    return [tensor.to(kind) for tensor in tensors]


def mixed(inputs: list[Tensor], segments: Tensor, exchange: ShardExchange | None) -> Tensor:
    """Convolution and rule: the part of a layer that sees other tokens. Returns [S, Vh, V]."""
    qkv, g, beta, weight = inputs
    convolved = causal_conv(qkv, weight, segments, exchange=exchange)
    q, k, v = convolved.split(CHANNELS, dim=-1)
    heads = [t.unflatten(-1, (n, -1)) for t, n in ((q, KEY_HEADS), (k, KEY_HEADS), (v, VALUE_HEADS))]
    return gated_delta_rule(*heads, g, beta, segments, exchange=exchange)


def results(
    inputs: list[Tensor], segments: Tensor, dout: Tensor, exchange: ShardExchange | None = None
) -> list[Tensor]:
    """The outputs and the gradients of all inputs, in the order of :data:`NAMES`."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = mixed(leaves, segments, exchange)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def sharded(
    inputs: list[Tensor], bounds: list[int], dout: Tensor, group: dist.ProcessGroup, *, connected: bool = True
) -> list[Tensor]:
    """The results of all ranks together, each of which computes its shard."""
    route = shard_route(bounds, group.size(), group.rank())
    tokens = slice(route.rank * route.length, (route.rank + 1) * route.length)
    segments = make_segment_ids(torch.tensor(bounds, dtype=torch.int32), bounds[-1])[tokens]
    exchange = ShardExchange(route, group) if route.any_cut and connected else None
    mine = results([*(t[tokens] for t in inputs[:3]), inputs[3]], segments, dout[tokens], exchange)

    gathered = []
    for tensor in mine[:-1]:
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        gathered.append(torch.cat(parts))
    dist.all_reduce(mine[-1], group=group)
    return [*gathered, mine[-1]]


def start() -> dist.ProcessGroup:
    if os.environ.get("TRITON_INTERPRET") == "1":
        fix_interpreter()
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def errors_of_ranks(kind: str, rows: list[str]) -> dict[str, dict[str, float]]:
    """The relative error (L2) of each result, for each row.

    Args:
        kind: name of the type of the computation. One rank computes the row that it is compared with in
            float64 and in torch.
    """
    group = start()
    errors = {}
    for name in rows:
        bounds = [0, *torch.tensor(ROWS[name]).cumsum(0).tolist()]
        inputs = row_inputs(bounds[-1], getattr(torch, kind))
        dout = inputs[0][:, : VALUE_HEADS * VALUE_DIM].sin().unflatten(1, (VALUE_HEADS, VALUE_DIM))
        ours = sharded(inputs, bounds, dout, group)
        segments = make_segment_ids(torch.tensor(bounds, dtype=torch.int32), bounds[-1])
        exact = results([tensor.double() for tensor in inputs], segments, dout.double())
        errors[name] = {n: relative(a, b) for n, a, b in zip(NAMES, ours, exact, strict=True)}

        if name == "one sequence":
            apart = sharded(inputs, bounds, dout, group, connected=False)
            pairs = zip(NAMES, apart, exact, strict=True)
            errors["without exchange"] = {n: relative(a, b) for n, a, b in pairs}
    return errors
