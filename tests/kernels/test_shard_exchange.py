"""Ranks that share a row compute what one rank computes, and exchange what the route says."""

import os

import pytest
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
from tests.kernels.delta_rule_checks import relative
from tests.support.ranks import call

EDGES = [
    # One sequence over all ranks; the middle one has neither its start nor its end.
    ([0, 12], [(0, 0, 8, 2, 4, 0), (4, 1, 4, 1, 4, 0), (8, 2, 0, 0, 4, 0)], [1]),
    # A bound on an edge cuts no sequence.
    ([0, 1, 4, 8], [(0, 0, 0, 0, 1, 1), (0, 0, 0, 0, 4, 0)], []),
    # One token on a side of an edge. The middle rank has two sequences, one each way.
    ([0, 5, 7, 9, 12], [(0, 0, 1, 1, 4, 0), (4, 1, 1, 1, 1, 3), (1, 1, 0, 0, 1, 1)], []),
    # A sequence that ends on an edge does not go on.
    ([0, 2, 8, 12], [(0, 0, 4, 1, 2, 2), (2, 1, 0, 0, 4, 0), (0, 0, 0, 0, 4, 0)], []),
    # Shards of one token, and empty sequences.
    ([0, 3, 4], [(0, 0, 2, 2, 1, 0), (1, 1, 1, 1, 1, 0), (2, 2, 0, 0, 1, 0), (0, 0, 0, 0, 1, 0)], [1]),
    ([0, 2, 2, 2, 6], [(0, 0, 3, 1, 2, 2), (1, 1, 0, 0, 3, 0)], []),
    ([0, 3, 3, 6], [(0, 0, 0, 0, 3, 0)] * 2, []),
]
"""Bounds of sequences; for each rank tokens and ranks before, tokens and ranks after, end of the first
sequence and start of the last; the ranks that are between."""


@pytest.mark.parametrize(("cu_seqlens", "expected", "between"), EDGES, ids=[str(each[0]) for each in EDGES])
def test_route_worked_out_by_hand(cu_seqlens: list, expected: list, between: list) -> None:
    ranks = range(len(expected))
    routes = [shard_route(cu_seqlens, len(expected), rank) for rank in ranks]
    for r, numbers in zip(routes, expected, strict=True):
        around = r.tokens_before, r.ranks_before, r.tokens_after, r.ranks_after
        assert (*around, r.first_end, r.last_start) == numbers
    assert routes[0].any_cut == any(numbers[0] for numbers in expected)
    assert [rank for rank in ranks if routes[rank].is_spanned] == between
    assert routes[0].any_spanned == bool(between)


HEADS, WIDTHS = (1, 1, 2), (16, 16, 32)
"""Of query, key and value."""
CHANNELS = [heads * width for heads, width in zip(HEADS, WIDTHS, strict=True)]
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


def row_inputs(tokens: int) -> list[Tensor]:
    """qkv [S, C], g, beta [S, Vh] and the convolution's weight [C, 4], which every rank draws alike."""
    generator = torch.Generator().manual_seed(0)
    widths = [(tokens, sum(CHANNELS)), (tokens, HEADS[2]), (tokens, HEADS[2]), (sum(CHANNELS), 4)]
    qkv, g, beta, weight = (torch.randn(*w, generator=generator, dtype=torch.float64) for w in widths)
    rate = torch.linspace(0.001, 0.1, HEADS[2], dtype=torch.float64)  # slow, so that states matter
    return [qkv, -rate * F.softplus(g + 1), beta.sigmoid(), weight]


def results(
    inputs: list[Tensor], segments: Tensor, dout: Tensor, exchange: ShardExchange | None = None
) -> list[Tensor]:
    """Output [S, Vh, V] of convolution and rule, which see other tokens, and the gradients of all inputs."""
    qkv, g, beta, weight = leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    convolved = causal_conv(qkv, weight, segments, exchange=exchange).split(CHANNELS, dim=-1)
    heads = [part.unflatten(-1, (number, -1)) for part, number in zip(convolved, HEADS, strict=True)]
    out = gated_delta_rule(*heads, g, beta, segments, exchange=exchange)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def sharded(inputs: list[Tensor], bounds: list[int], dout: Tensor, connected: bool = True) -> list[Tensor]:
    """The results of all ranks together, each of which computes its shard."""
    group = dist.group.WORLD
    route = shard_route(bounds, group.size(), group.rank())
    tokens = slice(route.rank * route.length, (route.rank + 1) * route.length)
    segments = make_segment_ids(torch.tensor(bounds, dtype=torch.int32), bounds[-1])[tokens]
    exchange = ShardExchange(route, group) if route.any_cut and connected else None
    mine = results([*(t[tokens] for t in inputs[:3]), inputs[3]], segments, dout[tokens], exchange)
    gathered = []
    for tensor in mine[:-1]:
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous())
        gathered.append(torch.cat(parts))
    dist.all_reduce(mine[-1])
    return [*gathered, mine[-1]]


def check_rows(kind: str, rows: list[str], output_bound: float, gradient_bound: float) -> None:
    """Compares with one rank that computes the whole row in float64 and in torch. A body of ranks."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.kernels.triton_checks import fix_interpreter

        fix_interpreter()
    dist.init_process_group("gloo")
    bounds_of_errors = [output_bound, *[gradient_bound] * 4]
    for name in rows:
        bounds = [0, *torch.tensor(ROWS[name]).cumsum(0).tolist()]
        inputs = [tensor.to(getattr(torch, kind)) for tensor in row_inputs(bounds[-1])]
        dout = inputs[0][:, -CHANNELS[2] :].sin().unflatten(1, (HEADS[2], -1))
        segments = make_segment_ids(torch.tensor(bounds, dtype=torch.int32), bounds[-1])
        exact = results([tensor.double() for tensor in inputs], segments, dout.double())
        errors = [relative(*pair) for pair in zip(sharded(inputs, bounds, dout), exact, strict=True)]
        assert all(e < bound for e, bound in zip(errors, bounds_of_errors, strict=True)), (name, errors)
        if name == "one sequence":
            apart = sharded(inputs, bounds, dout, connected=False)
            assert all(relative(*pair) > 0.02 for pair in zip(apart, exact, strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [*(pytest.param(ranks, marks=pytest.mark.full) for ranks in (2, 4)), 8])
def test_shards_compute_what_the_whole_row_does(ranks: int) -> None:
    call(check_rows, ranks, kind="float64", rows=list(ROWS), output_bound=1e-13, gradient_bound=1e-12)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "rows"),
    [
        (4, ["shards of every kind"]),
        *(pytest.param(ranks, list(ROWS), marks=pytest.mark.full) for ranks in (2, 4, 8)),
    ],
)
def test_kernels_compute_what_the_whole_row_does(ranks: int, rows: list[str]) -> None:
    interpreted = {"environment": {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}, "timeout_s": 1200}
    call(check_rows, ranks, kind="float32", rows=rows, output_bound=3e-6, gradient_bound=3e-6, **interpreted)
