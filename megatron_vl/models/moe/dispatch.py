"""Tokens to the ranks of their experts and back, each once to a rank.

Megatron-core's ``alltoall`` sends a token once for each of its experts. Here a rank that has several of them
gets it once, with its probabilities over all the rank's experts, copies it for each of them, and sends one
sum of their outputs back: with uniform routing to 8 of 128 experts, 3.6 rows a token instead of 8 over 4
ranks, 5.3 over 8.

A token may have no expert, as padding has none: it is sent nowhere, and what comes back for it is zero.

What a rank needs to know before rows travel is one small exchange of counts and one copy to the host, for
which it waits once, behind everything that can be launched without them. Rows travel while the received
probabilities become places. Gradients go the same ways back, without waiting.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoETokenDispatcher
from megatron.core.utils import get_pg_size
from torch import Tensor

from megatron_vl.kernels.token_copies import positions, scatter_parts, scatter_rows, sum_rows

NOT_CHOSEN = -1.0
"""Sent in place of the probability of an expert that the token does not go to; a chosen one's can be zero."""


class Splits(NamedTuple):
    """Rows that are exchanged."""

    sent: list[int]
    """By rank they go to."""
    received: list[int]
    """By rank they come from."""
    expert_rows: int
    """What the received ones become: one for each of their experts here."""


class Counts:
    """How many rows go where: one exchange and one copy to the host, neither of which is waited for at first.

    Args:
        to_rank: bool [T, ranks], which ranks a token goes to.
        to_expert: bool [T, experts], which experts.
    """

    _copies: torch.cuda.Stream | None = None

    def __init__(self, to_rank: Tensor, to_expert: Tensor, group: dist.ProcessGroup) -> None:
        ranks = to_rank.shape[1]
        experts = to_expert.sum(0).view(ranks, -1)
        # [out or in, rank, rows and then rows of each of its experts (out) or ours (in)]
        self._table = experts.new_empty(2, ranks, 1 + experts.shape[1])
        self._table[0, :, 0], self._table[0, :, 1:] = to_rank.sum(0), experts
        self._exchange = dist.all_to_all_single(self._table[1], self._table[0], group=group, async_op=True)
        self._host, self._copied = self._table, None
        if self._table.is_cuda:
            self._start_copy()

    def _start_copy(self) -> None:
        """Copies to pinned memory on a stream of its own, which the compute stream does not wait for."""
        if Counts._copies is None:
            Counts._copies = torch.cuda.Stream()
        with torch.cuda.stream(Counts._copies):
            self._exchange.wait()
            self._host = self._table.to("cpu", non_blocking=True)
            self._copied = Counts._copies.record_event()

    def splits(self) -> Splits:
        """Waits for the copy."""
        self._exchange.wait()  # on a GPU: work launched from here on waits
        if self._copied is not None:
            self._copied.synchronize()
        out, into = self._host.tolist()
        return Splits([row[0] for row in out], [row[0] for row in into], sum(sum(row[1:]) for row in into))

    def of_experts(self) -> Tensor:
        """int64 [local experts] on the device: rows of each; after :meth:`splits`."""
        return self._table[1, :, 1:].sum(0)


class _Exchange(torch.autograd.Function):
    """Rows [sent, H] and probabilities [sent, local experts] to their ranks, and gradients back.

    Both are one node, so that gradients travel in one order on all ranks. Buffers may be longer than what is
    sent. What forward returns is there once the two of ``travels`` have been waited for: probabilities, then
    rows.
    """

    @staticmethod
    def forward(
        ctx, rows: Tensor, probs: Tensor, splits: Splits, group: dist.ProcessGroup, travels: list[dist.Work]
    ):
        ctx.splits, ctx.group, ctx.lengths = splits, group, (rows.shape[0], probs.shape[0])
        total = sum(splits.received)
        received = [t.new_empty(total, t.shape[1]) for t in (rows, probs)]
        for out, sent in zip(reversed(received), (probs, rows), strict=True):
            part = sent[: sum(splits.sent)]
            travels.append(
                dist.all_to_all_single(out, part, splits.received, splits.sent, group=group, async_op=True)
            )
        return tuple(received)

    @staticmethod
    def backward(ctx, drows: Tensor, dprobs: Tensor):
        splits, travels = ctx.splits, []
        grads: list[Tensor | None] = [None, None]
        for i, grad in ((1, dprobs), (0, drows)):
            if not ctx.needs_input_grad[i]:
                continue
            full = grad.new_empty(ctx.lengths[i], grad.shape[1])  # what is past the sent rows is never read
            part, grad = full[: sum(splits.sent)], grad.contiguous()
            travels.append(
                dist.all_to_all_single(
                    part, grad, splits.sent, splits.received, group=ctx.group, async_op=True
                )
            )
            grads[i] = full
        for travel in travels:
            travel.wait()
        return *grads, None, None, None


class OncePerRankDispatcher(MoETokenDispatcher):
    """Megatron-core's interface of a dispatcher, for experts that are not cut themselves.

    Buffers stay here between the steps, each until it has been read. What the layer is handed it would keep
    until its forward pass ends, so :meth:`dispatch_preprocess` and :meth:`token_dispatch` hand it back what
    it has anyway.

    Args:
        exact_rows: experts take exactly as many rows as their counts say, so the host has to know how many
            that are. Off: they leave alone what lies after the last row, and nothing waits for a number.
    """

    def __init__(
        self, num_local_experts: int, config: Any, pg_collection: Any, *, exact_rows: bool = True
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        assert self.tp_size == 1, self.tp_size
        self.num_local_experts, self.top_k, self.exact_rows = (
            num_local_experts,
            config.moe_router_topk,
            exact_rows,
        )
        self._shape: torch.Size
        self._counts: Counts
        self._splits: Splits
        self._expert_counts: Tensor
        self._to_ranks: Tensor
        """Places [T, ranks] of this rank's tokens among the rows it sends."""
        self._to_experts: Tensor
        """Places [received rows, local experts] among the experts' rows."""
        self._rows: Tensor
        self._probs: Tensor
        self._travels: list[dist.Work] = []

    def _take(self) -> tuple[Tensor, Tensor]:
        """The buffers, which are no longer kept."""
        taken = self._rows, self._probs
        del self._rows, self._probs
        return taken

    def dispatch_preprocess(
        self, hidden: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Starts the exchange of counts and fills what will be sent.

        Args:
            hidden: [..., H], T tokens.
            routing_map: bool [T, experts], ``top_k`` a token, or none.
            probs: [T, experts].

        Returns:
            ``hidden`` and ``probs``.
        """
        self._shape, flat = hidden.shape, hidden.reshape(-1, hidden.shape[-1])
        if self.ep_size == 1:
            self._to_experts, self._expert_counts = positions(routing_map), routing_map.sum(0)
            # Without padding that many; with it, fewer.
            total = int(self._expert_counts.sum()) if self.exact_rows else flat.shape[0] * self.top_k
            self._rows, self._probs = self._for_experts(flat, probs, total)
            return hidden, probs
        to_rank = routing_map.view(-1, self.ep_size, self.num_local_experts).any(-1)
        self._counts = Counts(to_rank, routing_map, self.ep_group)
        self._to_ranks = positions(to_rank)
        most = flat.shape[0] * min(self.ep_size, self.top_k)  # how many there are is not known yet
        self._rows = scatter_rows(flat, self._to_ranks, most)
        self._probs = scatter_parts(torch.where(routing_map, probs, NOT_CHOSEN), self._to_ranks, most)
        return hidden, probs

    def _for_experts(self, rows: Tensor, probs: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """Rows [total, H] and their probabilities [total], sorted by expert."""
        return scatter_rows(rows, self._to_experts, total), scatter_parts(
            probs, self._to_experts, total
        ).flatten()

    def token_dispatch(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Waits for the counts and sends; returns what it gets."""
        if self.ep_size > 1:
            self._splits, self._travels = self._counts.splits(), []
            self._expert_counts = self._counts.of_experts()
            del self._counts
            self._rows, self._probs = _Exchange.apply(
                *self._take(), self._splits, self.ep_group, self._travels
            )
        return hidden, probs

    def dispatch_postprocess(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the experts take.

        Rows [rows, H] sorted by expert, int64 [local experts] rows of each, probabilities [rows].

        Without ``exact_rows`` there may be more rows than the counts add up to: the rest holds anything.
        """
        if self.ep_size > 1:
            rows, received = self._take()
            probs_travel, rows_travel = self._travels
            probs_travel.wait()
            self._to_experts = positions(received != NOT_CHOSEN)  # NaN too is a chosen one's
            rows_travel.wait()
            self._rows, self._probs = self._for_experts(rows, received, self._splits.expert_rows)
            self._travels = []
        rows, weights = self._take()
        return rows, self._expert_counts, weights

    def combine_preprocess(self, hidden: Tensor) -> Tensor:
        """Experts' outputs [rows, H], times their probabilities -> one sum for each row that came, [received
        rows, H]."""
        return sum_rows(hidden, self._to_experts)

    def token_combine(self, hidden: Tensor) -> Tensor:
        """[received rows, H] -> [sent rows, H], back where they came from."""
        if self.ep_size == 1:
            return hidden
        return all_to_all(self.ep_group, hidden, self._splits.sent, self._splits.received)

    def combine_postprocess(self, hidden: Tensor) -> Tensor:
        """[sent rows, H] -> the sum over ranks for each token, shaped as the layer's input."""
        out = hidden if self.ep_size == 1 else sum_rows(hidden, self._to_ranks)
        self._to_ranks = self._to_experts = self._expert_counts = hidden.new_empty(0)
        return out.view(self._shape)


class PaddingDispatcher(MoEAlltoAllTokenDispatcher):
    """Core's dispatcher, for tokens some of which have no expert."""

    padded = False
    """Whether the present row has padding."""

    @staticmethod
    def with_a_row(routing_map: Tensor) -> Tensor:
        """The same map [T, experts]; where no token has an expert, the first token goes to the first one.

        Its probability is zero, so it adds nothing. Transformer Engine's fused permutation and its grouped
        linears fail on empty tensors (Megatron-LM pull requests 3626 and 4851), and under sequence
        parallelism a rank may hold padding alone.
        """
        routing_map = routing_map.clone()
        routing_map[0, 0] |= ~routing_map.any()
        return routing_map

    def preprocess(self, routing_map: Tensor) -> Tensor:
        counts = super().preprocess(routing_map)
        if self.padded:
            # Core 0.19.2 takes it that every token has its experts. The host waits for the number as it does
            # where core drops tokens; without padding it is known.
            self.num_out_tokens = routing_map.sum()
            self._maybe_update_cuda_sync_point("before_permutation_1")
        return counts


class DeviceCountsDispatcher(PaddingDispatcher):
    """Core's dispatcher, which leaves the experts' token counts on the device."""

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: Tensor | None = None
    ) -> Tensor | None:
        super()._maybe_dtoh_and_synchronize(point)
        return tokens_per_expert


class ExpertsLayer(MoELayer):
    """Core's layer, with the dispatcher its experts can work with.

    Each token goes once to a rank, unless experts are cut themselves (expert tensor parallelism) or
    Transformer Engine computes them (FP8, float32), which takes core's. Padding goes nowhere.
    """

    def __init__(self, config: Any, *args: Any, pg_collection: Any = None, **kwargs: Any) -> None:
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        planned = getattr(self.experts, "planned", False)
        if get_pg_size(pg_collection.expt_tp) == 1 and (planned or isinstance(self.experts, SequentialMLP)):
            self.token_dispatcher = OncePerRankDispatcher(
                self.num_local_experts, config, pg_collection, exact_rows=not planned
            )
        elif isinstance(self.token_dispatcher, MoEAlltoAllTokenDispatcher):
            dispatcher = DeviceCountsDispatcher if planned else PaddingDispatcher
            self.token_dispatcher = dispatcher(
                self.num_local_experts, self.local_expert_indices, config=config, pg_collection=pg_collection
            )

    def route(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Core's routing; the dispatcher, which gets no mask, learns just before it works whether there is
        one."""
        self.token_dispatcher.padded = padding_mask is not None
        probs, routing_map = super().route(hidden_states, padding_mask)
        if padding_mask is not None and isinstance(self.token_dispatcher, PaddingDispatcher):
            routing_map = self.token_dispatcher.with_a_row(routing_map)
        return probs, routing_map
