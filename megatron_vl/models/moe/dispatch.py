"""Sends tokens to the ranks of their experts and back, each token at most once to a rank.

Megatron-core's ``alltoall`` sends a token once for each of its experts. Here, a rank that holds several of
these experts gets the token once, with its probabilities over all the rank's experts. The rank copies it for
each of them and sends one sum of their outputs back. With uniform routing to 8 of 128 experts, this sends 3.6
rows per token over 4 ranks and 5.3 over 8 ranks, instead of 8.

A token without experts, such as padding, is not sent, and its result is zero.

Before rows are sent, a rank needs one small exchange of counts and one copy of them to the host. It waits for
these once, after launching everything that does not depend on them. While rows are sent, the received
probabilities are turned into positions. Gradients take the same paths back, without such a wait.
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
"""The value that is sent as the probability of an expert to which the token does not go. Zero would not do,
because the probability of a chosen expert can be zero."""


class Splits(NamedTuple):
    """The numbers of rows that ranks exchange."""

    sent: list[int]
    """Rows sent, by the rank that receives them."""
    received: list[int]
    """Rows received, by the rank that sent them."""
    expert_rows: int
    """Rows of the local experts: each received row counts once for each of its local experts."""


class Counts:
    """Exchanges the numbers of rows to and from each rank and copies them to the host, both asynchronously.

    Args:
        to_rank: bool [T, ranks], the ranks to which a token goes.
        to_expert: bool [T, experts], the experts to which a token goes.
    """

    _copies: torch.cuda.Stream | None = None

    def __init__(self, to_rank: Tensor, to_expert: Tensor, group: dist.ProcessGroup) -> None:
        ranks = to_rank.shape[1]
        experts = to_expert.sum(0).view(ranks, -1)
        # The table is [sent or received, rank, 1 + local experts]. The last dim holds the number of rows,
        # then that for each expert: for sent rows, an expert of that rank; for received rows, of this rank.
        self._table = experts.new_empty(2, ranks, 1 + experts.shape[1])
        self._table[0, :, 0] = to_rank.sum(0)
        self._table[0, :, 1:] = experts
        self._exchange = dist.all_to_all_single(self._table[1], self._table[0], group=group, async_op=True)
        self._host = self._table
        self._copied = None
        if self._table.is_cuda:
            self._start_copy()

    def _start_copy(self) -> None:
        """Copies to pinned memory on a separate stream, which the compute stream does not wait for."""
        if Counts._copies is None:
            Counts._copies = torch.cuda.Stream()
        with torch.cuda.stream(Counts._copies):
            self._exchange.wait()
            self._host = self._table.to("cpu", non_blocking=True)
            self._copied = Counts._copies.record_event()

    def splits(self) -> Splits:
        """Waits for the copy and returns the numbers of rows."""
        self._exchange.wait()  # on a GPU, only work that is launched later waits
        if self._copied is not None:
            self._copied.synchronize()
        out, into = self._host.tolist()
        return Splits([row[0] for row in out], [row[0] for row in into], sum(sum(row[1:]) for row in into))

    def of_experts(self) -> Tensor:
        """Rows of each local expert, int64 [local experts] on the device. Call it after :meth:`splits`."""
        return self._table[1, :, 1:].sum(0)


class _Exchange(torch.autograd.Function):
    """Sends rows [sent, H] and probabilities [sent, local experts] to their ranks, and gradients back.

    Both are one autograd node, so that gradients are sent in the same order on all ranks. Buffers may be
    longer than the sent part. The results of forward are ready after waiting for the two transfers that it
    appends to ``transfers``: probabilities, then rows.
    """

    @staticmethod
    def forward(
        ctx, rows: Tensor, probs: Tensor, splits: Splits, group: dist.ProcessGroup, transfers: list[dist.Work]
    ):
        ctx.splits = splits
        ctx.group = group
        ctx.lengths = (rows.shape[0], probs.shape[0])
        total = sum(splits.received)
        received = [t.new_empty(total, t.shape[1]) for t in (rows, probs)]
        for out, sent in zip(reversed(received), (probs, rows), strict=True):
            part = sent[: sum(splits.sent)]
            transfers.append(
                dist.all_to_all_single(out, part, splits.received, splits.sent, group=group, async_op=True)
            )
        return tuple(received)

    @staticmethod
    def backward(ctx, drows: Tensor, dprobs: Tensor):
        splits = ctx.splits
        transfers = []
        grads: list[Tensor | None] = [None, None]
        for i, grad in ((1, dprobs), (0, drows)):
            if not ctx.needs_input_grad[i]:
                continue
            full = grad.new_empty(ctx.lengths[i], grad.shape[1])  # rows after the sent ones are never read
            part = full[: sum(splits.sent)]
            grad = grad.contiguous()
            transfers.append(
                dist.all_to_all_single(
                    part, grad, splits.sent, splits.received, group=ctx.group, async_op=True
                )
            )
            grads[i] = full

        for transfer in transfers:
            transfer.wait()
        return *grads, None, None, None


class OncePerRankDispatcher(MoETokenDispatcher):
    """A dispatcher with Megatron-core's interface, for experts whose matrices are not cut.

    The dispatcher keeps its buffers between its methods, and drops each one once it has been read. The layer
    would keep every tensor that it gets until its forward pass ends. So :meth:`dispatch_preprocess` and
    :meth:`token_dispatch` return only tensors that the layer already holds.

    Args:
        exact_rows: whether experts need exactly as many rows as their counts say. If so, the host waits for
            the number of rows. If not, experts ignore rows after the last counted one, and the host does not
            wait.
    """

    def __init__(
        self, num_local_experts: int, config: Any, pg_collection: Any, *, exact_rows: bool = True
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        assert self.tp_size == 1, self.tp_size
        self.num_local_experts = num_local_experts
        self.top_k = config.moe_router_topk
        self.exact_rows = exact_rows

        # The following belong to the current micro-batch.
        self._shape: torch.Size
        self._counts: Counts
        self._splits: Splits
        self._expert_counts: Tensor
        self._to_ranks: Tensor
        """Positions [T, ranks] of this rank's tokens among the rows that it sends."""
        self._to_experts: Tensor
        """Positions [received rows, local experts] among the experts' rows."""
        self._rows: Tensor
        self._probs: Tensor
        self._transfers: list[dist.Work] = []

    def _take(self) -> tuple[Tensor, Tensor]:
        """Returns the buffers and drops them here."""
        taken = self._rows, self._probs
        del self._rows, self._probs
        return taken

    def dispatch_preprocess(
        self, hidden: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Starts the exchange of counts and fills the buffers to send.

        Args:
            hidden: [..., H], T tokens.
            routing_map: bool [T, experts], with ``top_k`` experts for each token, or none.
            probs: [T, experts].

        Returns:
            ``hidden`` and ``probs``.
        """
        self._shape = hidden.shape
        flat = hidden.reshape(-1, hidden.shape[-1])

        if self.ep_size == 1:
            self._to_experts = positions(routing_map)
            self._expert_counts = routing_map.sum(0)
            # Without exact_rows this is an upper bound: padding has no experts.
            total = int(self._expert_counts.sum()) if self.exact_rows else flat.shape[0] * self.top_k
            self._rows, self._probs = self._for_experts(flat, probs, total)
            return hidden, probs

        to_rank = routing_map.view(-1, self.ep_size, self.num_local_experts).any(-1)
        self._counts = Counts(to_rank, routing_map, self.ep_group)
        self._to_ranks = positions(to_rank)

        most = flat.shape[0] * min(self.ep_size, self.top_k)  # an upper bound, as the number is not known yet
        self._rows = scatter_rows(flat, self._to_ranks, most)
        self._probs = scatter_parts(torch.where(routing_map, probs, NOT_CHOSEN), self._to_ranks, most)
        return hidden, probs

    def _for_experts(self, rows: Tensor, probs: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """Rows [total, H] and their probabilities [total], sorted by expert."""
        expert_rows = scatter_rows(rows, self._to_experts, total)
        weights = scatter_parts(probs, self._to_experts, total)
        return expert_rows, weights.flatten()

    def token_dispatch(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Waits for the counts and starts to send. Returns its arguments."""
        if self.ep_size > 1:
            self._splits = self._counts.splits()
            self._transfers = []
            self._expert_counts = self._counts.of_experts()
            del self._counts
            self._rows, self._probs = _Exchange.apply(
                *self._take(), self._splits, self.ep_group, self._transfers
            )
        return hidden, probs

    def dispatch_postprocess(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the inputs of the experts.

        Returns:
            Rows [rows, H] sorted by expert, the number of rows of each expert (int64 [local experts]), and
            probabilities [rows]. Without ``exact_rows``, there may be more rows than the sum of the counts.
            The additional rows are undefined.
        """
        if self.ep_size > 1:
            rows, received = self._take()
            probs_transfer, rows_transfer = self._transfers
            probs_transfer.wait()
            self._to_experts = positions(received != NOT_CHOSEN)  # a NaN also belongs to a chosen expert
            rows_transfer.wait()
            self._rows, self._probs = self._for_experts(rows, received, self._splits.expert_rows)
            self._transfers = []
        rows, weights = self._take()
        return rows, self._expert_counts, weights

    def combine_preprocess(self, hidden: Tensor) -> Tensor:
        """Sums the experts' weighted outputs [rows, H] for each received row -> [received rows, H]."""
        return sum_rows(hidden, self._to_experts)

    def token_combine(self, hidden: Tensor) -> Tensor:
        """Sends [received rows, H] back to the ranks where they came from -> [sent rows, H]."""
        if self.ep_size == 1:
            return hidden
        return all_to_all(self.ep_group, hidden, self._splits.sent, self._splits.received)

    def combine_postprocess(self, hidden: Tensor) -> Tensor:
        """Sums [sent rows, H] over the ranks of each token -> the shape of the layer's input."""
        out = hidden if self.ep_size == 1 else sum_rows(hidden, self._to_ranks)
        self._to_ranks = self._to_experts = self._expert_counts = hidden.new_empty(0)
        return out.view(self._shape)


class PaddingDispatcher(MoEAlltoAllTokenDispatcher):
    """Core's dispatcher, except that some tokens may have no expert."""

    padded = False
    """Whether the current row has padding."""

    @staticmethod
    def with_a_row(routing_map: Tensor) -> Tensor:
        """A copy of the map [T, experts] in which at least one token has an expert.

        If no token has one, the first token goes to the first expert. Its probability is zero, so it adds
        nothing. Transformer Engine's fused permutation and its grouped linears fail on empty tensors
        (Megatron-LM pull requests 3626 and 4851). Under sequence parallelism, a rank may hold only padding.
        """
        routing_map = routing_map.clone()
        routing_map[0, 0] |= ~routing_map.any()
        return routing_map

    def preprocess(self, routing_map: Tensor) -> Tensor:
        counts = super().preprocess(routing_map)
        if self.padded:
            # Core 0.19.2 assumes that every token has top_k experts. With padding, the host must wait for the
            # number of rows, as it does when core drops tokens.
            self.num_out_tokens = routing_map.sum()
            self._maybe_update_cuda_sync_point("before_permutation_1")
        return counts


class DeviceCountsDispatcher(PaddingDispatcher):
    """Core's dispatcher, except that the experts' token counts stay on the device."""

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: Tensor | None = None
    ) -> Tensor | None:
        super()._maybe_dtoh_and_synchronize(point)
        return tokens_per_expert


class ExpertsLayer(MoELayer):
    """Core's mixture-of-experts layer, with the dispatcher that fits its experts.

    With :class:`OncePerRankDispatcher`, a token goes to each rank at most once. Core's dispatcher remains for
    experts whose matrices are cut (expert tensor parallelism), and for experts that Transformer Engine
    computes (FP8, float32). Padding is not sent.
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
        """Core's routing. It also tells the dispatcher, which gets no mask, whether there is padding."""
        self.token_dispatcher.padded = padding_mask is not None
        probs, routing_map = super().route(hidden_states, padding_mask)
        if padding_mask is not None and isinstance(self.token_dispatcher, PaddingDispatcher):
            routing_map = self.token_dispatcher.with_a_row(routing_map)
        return probs, routing_map
