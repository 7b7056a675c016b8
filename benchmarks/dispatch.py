"""Times moving tokens to their experts' ranks and back: our dispatcher, Megatron-core's, and our kernels.

    torchrun --standalone --nproc-per-node N benchmarks/dispatch.py [--tokens 8192,32768] [--hidden 2048]
    python benchmarks/dispatch.py

The second form uses one GPU: it times both dispatchers without an exchange, and the kernels. All ranks share
the experts (``--experts``, 128 by default). Each rank has the given number of tokens, which go to ``top_k``
experts at random, evenly. Experts return the rows that they receive. Times are those of the slowest rank.
``exchange`` is one all-to-all of the same rows alone; forward and backward do it twice each. GB/s is what
leaves a GPU for others. ``--platform cpu`` runs everything on CPU, which only shows that it works.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.parallel.process_grid import end_distributed, init_distributed
from megatron_vl.platform import Platform, get_platform

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""x [T, 1, H], probs [T, E], map [T, E] and the gradient of the combined output [T, 1, H]."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="8192,32768", help="tokens of each rank")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--platform", default="auto", choices=("auto", "cuda", "cpu"))
    return parser.parse_args()


def milliseconds(platform: Platform, function: Callable[[], object]) -> float:
    """Milliseconds of the slowest rank."""
    if platform.name == "cuda":
        from timing import milliseconds as on_gpu

        value = on_gpu(function)
    else:
        function()
        start = time.perf_counter()
        for _ in range(3):
            function()
        value = (time.perf_counter() - start) / 3 * 1000
    slowest = torch.tensor([value], device=platform.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def draw(platform: Platform, tokens: int, options: argparse.Namespace) -> Inputs:
    dtype = torch.bfloat16 if platform.name == "cuda" else torch.float32
    x, dy = (torch.randn(tokens, 1, options.hidden, device=platform.device, dtype=dtype) for _ in range(2))
    logits = torch.randn(tokens, options.experts, device=platform.device)
    top = logits.topk(options.top_k, dim=1)
    probs = torch.zeros_like(logits).scatter(1, top.indices, top.values.softmax(1))
    return (
        x.requires_grad_(),
        probs.requires_grad_(),
        torch.zeros_like(logits, dtype=torch.bool).scatter(1, top.indices, True),
        dy,
    )


def dispatchers(platform: Platform, options: argparse.Namespace) -> dict[str, Any]:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_vl.models.moe.dispatch import OncePerRankDispatcher

    class Core(MoEAlltoAllTokenDispatcher):
        """Core's dispatcher; its split sizes are numbers on CPU too, where core 0.19.2 leaves tensors."""

        def preprocess(self, routing_map: Tensor) -> Tensor:
            counts = super().preprocess(routing_map)
            if platform.name == "cpu" and self.ep_size > 1:
                self.input_splits = self.input_splits.numpy()
                self.output_splits = self.output_splits.numpy()
            return counts

    config = TransformerConfig(
        num_layers=1,
        hidden_size=options.hidden,
        num_attention_heads=1,
        add_bias_linear=False,
        num_moe_experts=options.experts,
        moe_ffn_hidden_size=options.hidden,
        moe_router_topk=options.top_k,
        moe_token_dispatcher_type="alltoall",
        moe_permute_fusion=platform.name == "cuda",
        bf16=platform.name == "cuda",
        params_dtype=torch.bfloat16 if platform.name == "cuda" else torch.float32,
    )

    local = options.experts // dist.get_world_size()
    rank = dist.get_rank()
    alone = [dist.new_group([i]) for i in range(dist.get_world_size())]
    groups = SimpleNamespace(ep=dist.group.WORLD, expt_tp=alone[rank], tp_ep=dist.group.WORLD)
    mine = list(range(local * rank, local * (rank + 1)))
    ours = OncePerRankDispatcher(local, config, groups, experts_gather=platform.name != "cpu")

    return {"ours": ours, "core": Core(local, mine, config=config, pg_collection=groups)}


def there(dispatcher: Any, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """What experts receive: rows and probabilities."""
    x, probs, chosen, _ = inputs
    rows, _, weights = dispatcher.dispatch_postprocess(
        *dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, chosen, probs))
    )
    return rows, weights


def back(dispatcher: Any, rows: Tensor) -> Tensor:
    return dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(rows)))


def forward(dispatcher: Any, inputs: Inputs) -> Tensor:
    return back(dispatcher, there(dispatcher, inputs)[0])


def forward_backward(dispatcher: Any, inputs: Inputs) -> None:
    rows, weights = there(dispatcher, inputs)
    out = back(dispatcher, rows)
    torch.autograd.grad([out, weights], inputs[:2], [inputs[3], torch.ones_like(weights)])


def values(dispatcher: Any, inputs: Inputs) -> list[Tensor]:
    """Output and gradients if experts weight rows by their probabilities."""
    rows, weights = there(dispatcher, inputs)
    out = back(dispatcher, (rows * weights[:, None]).to(rows.dtype))
    return [out.detach(), *torch.autograd.grad(out, inputs[:2], inputs[3])]


def difference(ours: list[Tensor], others: list[Tensor]) -> float:
    return float(
        torch.stack(
            [(a.float() - b.float()).norm() / b.float().norm() for a, b in zip(ours, others, strict=True)]
        ).max()
    )


def copies(name: str, chosen: Tensor) -> list[int]:
    """Number of rows that this rank sends to each rank."""
    by_rank = chosen.view(chosen.shape[0], dist.get_world_size(), -1)
    return (by_rank.any(-1) if name == "ours" else by_rank.sum(-1)).sum(0).tolist()


def exchange(platform: Platform, inputs: Inputs, sent: list[int]) -> tuple[float, float]:
    """Milliseconds of an all-to-all of the rows alone, and the GB that it sends from this GPU."""
    got = torch.empty(len(sent), dtype=torch.int64, device=platform.device)
    dist.all_to_all_single(got, torch.tensor(sent, device=platform.device))
    received = got.tolist()
    width = inputs[0].shape[-1]
    out = inputs[0].detach().new_zeros(sum(received), width)
    rows = inputs[0].detach().new_zeros(sum(sent), width)
    value = milliseconds(platform, partial(dist.all_to_all_single, out, rows, received, sent))
    return value, (sum(sent) - sent[dist.get_rank()]) * width * rows.element_size() / 1e9


def compare(platform: Platform, tokens: int, options: argparse.Namespace) -> None:
    inputs = draw(platform, tokens, options)
    both = dispatchers(platform, options)
    results = {name: values(dispatcher, inputs) for name, dispatcher in both.items()}
    say(
        f"{tokens} tokens per rank; ours differs from core's by "
        f"{difference(results['ours'], results['core']):.1e}"
    )
    del results

    for name, dispatcher in both.items():
        one_way = milliseconds(platform, partial(forward, dispatcher, inputs))
        two_ways = milliseconds(platform, partial(forward_backward, dispatcher, inputs))
        line = f"  {name}: forward {one_way:.3f} ms, forward and backward {two_ways:.3f} ms"
        if dist.get_world_size() > 1:
            sent = copies(name, inputs[2])
            alone, size = exchange(platform, inputs, sent)
            line += (
                f", {sum(sent) / tokens:.2f} rows per token, exchange {alone:.3f} ms "
                f"({size / alone * 1000:.0f} GB/s)"
            )
        say(line)


def kernels(platform: Platform, tokens: int, options: argparse.Namespace) -> None:
    """Times one rank's copies: tokens to ranks, received rows to experts, and tokens to experts if one rank
    has all of them."""
    from megatron_vl.kernels.experts.token_copies import make_row_ids, scatter_rows, sum_rows

    x, _, chosen, _ = draw(platform, tokens, options)
    x = x.detach()[:, 0]
    plain = x.new_empty(2, 4 * tokens, options.hidden)
    moved = plain.numel() * x.element_size()
    say(
        f"{tokens} tokens, plain copy: "
        f"{moved / milliseconds(platform, lambda: plain[0].copy_(plain[1])) / 1e6:.0f} GB/s"
    )
    maps = {f"to {ranks} ranks": chosen.view(tokens, ranks, -1).any(-1) for ranks in (2, 4, 8)}

    for ranks in (2, 4, 8):
        here = chosen[:, : options.experts // ranks]
        maps[f"received by one of {ranks}, to its experts"] = here[here.any(-1)].repeat(ranks, 1)

    for name, table in (maps | {"to all experts": chosen}).items():
        rows = x[torch.arange(table.shape[0], device=x.device) % tokens]
        row_ids = make_row_ids(table)
        total = int(table.sum())
        wide = scatter_rows(rows, row_ids, total)
        moved = (table.shape[0] + total) * options.hidden * x.element_size() + row_ids.numel() * 4

        times = []
        for function in (
            partial(scatter_rows, rows, row_ids, total),
            partial(sum_rows, wide, row_ids),
            partial(make_row_ids, table),
        ):
            times.append(milliseconds(platform, function))

        say(
            f"  {name} ({table.shape[0]} -> {total}): scatter {times[0]:.3f} ms "
            f"({moved / times[0] / 1e6:.0f} GB/s), sum {times[1]:.3f} ms "
            f"({moved / times[1] / 1e6:.0f} GB/s), positions {times[2]:.3f} ms"
        )


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    options = parse()
    platform = get_platform(options.platform)
    init_distributed(platform)
    torch.manual_seed(dist.get_rank())
    for tokens in map(int, options.tokens.split(",")):
        compare(platform, tokens, options)
        if dist.get_world_size() == 1:
            kernels(platform, tokens, options)
    end_distributed()


if __name__ == "__main__":
    main()
