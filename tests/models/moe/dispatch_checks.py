"""Compares dispatch to experts and back with computing every expert where its tokens are; prints the largest
error and fails if that is too large.

It runs on four CPU ranks with TRITON_INTERPRET=1, as one group and each alone, with our kernels and with
torch. With --gpu it runs in bf16 on 1, 2, 4 or 8 GPUs (``torchrun --standalone --nproc-per-node N -m
tests.models.moe.dispatch_checks --gpu``). An expert here is tanh of its own scale times the row, so that only
the exchange matters.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.platform import get_platform

PLATFORM = get_platform("cuda" if "--gpu" in sys.argv else "cpu")

from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_vl.kernels.experts.token_copies import scatter_rows  # noqa: E402
from megatron_vl.models.moe.dispatch import ExpertRows, OncePerRankDispatcher, PaddingDispatcher  # noqa: E402
from megatron_vl.parallel.process_grid import init_distributed  # noqa: E402
from tests.kernels.triton_checks import fix_interpreter, largest  # noqa: E402

GPU = PLATFORM.name == "cuda"
HIDDEN, EXPERTS, TOP_K = (2048, 32, 8) if GPU else (40, 8, 3)
BOUND = 2e-2 if GPU else 1e-6
ALONE, TOGETHER = [5, 4, 6, 1], [3, 0, 5, 2]
"""Tokens of each rank: where none is without tokens, and where one is."""
if GPU:
    ALONE, TOGETHER = ([20 * tokens for tokens in each] * 2 for each in (ALONE, TOGETHER))
ROUTINGS = (
    "random",
    "one rank's experts",
    "few experts",
    "probabilities of zero",
    "padding",
    "padding alone",
)


def tokens_of(rank: int, tokens: int, routing: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x [T, H], probs [T, E], map [T, E], gradient of the output [T, H]), the same on every rank."""
    draw = torch.Generator().manual_seed(rank * 100 + tokens)
    x, dy = (torch.randn(tokens, HIDDEN, generator=draw) for _ in range(2))
    logits = torch.randn(tokens, EXPERTS, generator=draw)
    if routing == "one rank's experts":
        logits[:, : max(TOP_K, EXPERTS // 4)] += 100
    elif routing == "few experts":
        logits[:, :: EXPERTS // 4] += 4
        logits[:, 1] -= 100

    top = logits.topk(TOP_K, dim=1).indices
    chosen = torch.zeros(tokens, EXPERTS, dtype=torch.bool).scatter(1, top, True)
    if routing == "padding alone" and rank % 2:
        chosen[:] = False
    elif routing.startswith("padding"):
        chosen[2 * tokens // 3 :] = False

    probs = logits.softmax(1).masked_fill(~chosen, 0)
    if routing == "probabilities of zero":
        probs[:, ::2] = 0
    dtype = torch.bfloat16 if GPU else torch.float32
    return x.to(dtype), probs, chosen, dy.to(dtype)


def scales() -> Tensor:
    """[E, H], of all experts."""
    return torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(1))


def dense(rank: int, tokens: int, routing: str) -> tuple[list[Tensor], Tensor]:
    """Output and gradients of one rank's tokens and probabilities, and its share of those of all scales."""
    x, probs, chosen, dy = tokens_of(rank, tokens, routing)
    x, probs, scale = (tensor.float().requires_grad_() for tensor in (x, probs, scales()))
    weights = torch.where(chosen, probs, 0)
    out = (torch.tanh(x[:, None] * scale) * weights[..., None]).sum(1)
    dx, dprobs, dscale = torch.autograd.grad(out, [x, probs, scale], dy.float())
    return [out.detach(), dx, dprobs], dscale


@contextmanager
def exchanged_rows() -> Iterator[list[int]]:
    """Collects the rows of H columns that this rank passes to exchanges."""
    exchange, rows = dist.all_to_all_single, []

    def counting(output: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        if given.dim() == 2 and given.shape[1] == HIDDEN:
            rows.append(given.shape[0])
        return exchange(output, given, *args, **kwargs)

    with patch.object(dist, "all_to_all_single", counting):
        yield rows


def through(
    dispatcher: MoETokenDispatcher, x: Tensor, probs: Tensor, chosen: Tensor, scale: Tensor
) -> Tensor:
    """Goes the way of core's layer. The memory after the experts' rows may hold anything."""
    dispatcher.padded = not bool((chosen.sum(1) == TOP_K).all())
    if isinstance(dispatcher, PaddingDispatcher):  # as the router and the layer hand them on
        padding_alone = not bool(chosen.any())
        probs = probs.masked_fill(~chosen.any(1, keepdim=True), 0)
        chosen = dispatcher.with_a_row(chosen)
        assert not padding_alone or int(chosen.sum()) == 1, "padding alone hands on one row"

    first = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x[:, None], chosen, probs))
    rows, counts, weights = dispatcher.dispatch_postprocess(*first)
    exact = True
    if isinstance(counts, ExpertRows):
        exact = dispatcher.ep_size > 1
        rows, counts = scatter_rows(rows, counts.row_ids, counts.num_rows), counts.per_expert
    total = int(counts.sum())
    assert weights.shape[0] == rows.shape[0] and (total == rows.shape[0] or not exact and dispatcher.padded)
    # Of several ranks, one may receive nothing: the routing need not choose any of its experts.
    assert total or dispatcher.ep_size > 1 or isinstance(dispatcher, OncePerRankDispatcher)

    expert = torch.arange(len(scale), device=rows.device).repeat_interleave(counts.to(rows.device))
    outs = (torch.tanh(rows[:total].float() * scale[expert]) * weights[:total, None]).to(rows.dtype)
    outs = torch.cat((outs, outs.new_full((rows.shape[0] - total, HIDDEN), torch.nan)))
    return dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(outs)))[:, 0]


def place_of(dispatcher: MoETokenDispatcher) -> tuple[int, list[int], slice]:
    """This rank, the ranks of its group, and its experts."""
    first = dispatcher.num_local_experts * dispatcher.ep_group.rank()
    own = slice(first, first + dispatcher.num_local_experts)
    return dist.get_rank(), dist.get_process_group_ranks(dispatcher.ep_group), own


def error(dispatcher: MoETokenDispatcher, tokens: list[int], routing: str) -> float:
    """Largest relative error of output and gradients; also checks that as few rows as possible travel."""
    rank, members, own = place_of(dispatcher)
    x, probs, chosen, dy = (t.to(PLATFORM.device) for t in tokens_of(rank, tokens[rank], routing))
    inputs = [x, probs, scales()[own].to(PLATFORM.device)]
    x, probs, scale = (tensor.requires_grad_() for tensor in inputs)

    with exchanged_rows() as rows:
        out = through(dispatcher, x, probs, chosen, scale)
    pairs = int(chosen.view(-1, len(members), len(scale)).any(-1).sum())
    received = sum(int(tokens_of(r, tokens[r], routing)[2][:, own].any(-1).sum()) for r in members)
    # These come back once.
    assert not isinstance(dispatcher, OncePerRankDispatcher) or rows == (
        [pairs, received] if len(members) > 1 else []
    ), (rows, pairs, received)
    ours = [out.detach(), *torch.autograd.grad(out, [x, probs, scale], dy)]
    wanted, dscale = dense(rank, tokens[rank], routing)
    dscale = sum((dense(r, tokens[r], routing)[1] for r in members if r != rank), dscale)
    ours = [tensor.float().cpu() for tensor in ours]
    return largest(zip(ours, [*wanted, dscale[own]], strict=True), floor=1e-3)


def without_harm(dispatcher: OncePerRankDispatcher) -> float:
    """NaN in one rank's tokens and probabilities: no rank hangs, and the others compute what they would."""
    rank, members, own = place_of(dispatcher)
    x, probs, chosen, _ = (t.to(PLATFORM.device) for t in tokens_of(rank, ALONE[rank], "random"))
    if rank == members[0]:
        x, probs = x * torch.nan, probs * torch.nan
    out = through(dispatcher, x, probs, chosen, scales()[own].to(PLATFORM.device))
    if rank == members[0]:
        return 0.0 if out.isnan().all() else 1.0
    wanted = dense(rank, ALONE[rank], "random")[0][0]
    return float((out.float().cpu() - wanted).abs().max() / wanted.abs().max())


def core_dispatcher(ranks: int, groups: SimpleNamespace) -> PaddingDispatcher:
    """Core's, which serves experts of Transformer Engine and experts that are cut themselves."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
    )
    local = EXPERTS // ranks
    numbers = [groups.ep.rank() * local + i for i in range(local)]
    return PaddingDispatcher(local, numbers, config=config, pg_collection=groups)


def main() -> None:
    if not GPU:
        fix_interpreter()
    init_distributed(PLATFORM)
    torch.manual_seed(0)
    world = dist.get_world_size()
    errors = {}
    for ranks in (1, 2, 4, 8) if GPU else (1, 4):
        if world % ranks:
            continue
        groups = [dist.new_group(list(range(i, i + ranks))) for i in range(0, world, ranks)]
        alone = [dist.new_group([i]) for i in range(world)]
        group = groups[dist.get_rank() // ranks]
        mine = SimpleNamespace(ep=group, expt_tp=alone[dist.get_rank()], tp_ep=group)
        if GPU or ranks == 1:  # core's does not exchange over gloo
            core = core_dispatcher(ranks, mine)
            errors |= {f"core's, EP{ranks}, {routing}": error(core, ALONE, routing) for routing in ROUTINGS}

        for interpreted in (True,) if GPU else (True, False):
            settings = SimpleNamespace(moe_router_topk=TOP_K)
            dispatcher = OncePerRankDispatcher(EXPERTS // ranks, settings, mine, experts_gather=interpreted)
            os.environ["TRITON_INTERPRET"] = str(int(interpreted and not GPU))
            how = f"EP{ranks}, {'kernels' if interpreted else 'torch'}"
            for routing in ROUTINGS:
                errors[f"{how}, {routing}"] = error(dispatcher, ALONE if ranks == 1 else TOGETHER, routing)
            errors[f"{how}, NaN"] = without_harm(dispatcher)

    assert all(value < BOUND for value in errors.values()), errors  # NaN is not
    print(max(errors.values()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
