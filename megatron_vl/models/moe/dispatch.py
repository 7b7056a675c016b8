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

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoETokenDispatcher
from megatron.core.utils import get_pg_size
from torch import Tensor

from megatron_vl.kernels.experts.token_copies import make_row_ids, scatter_parts, scatter_rows, sum_rows

NOT_CHOSEN = -1.0
"""The value that is sent as the probability of an expert to which the token does not go. Zero would not do,
because the probability of a chosen expert can be zero."""


class RowSplits(NamedTuple):
    """The numbers of rows that ranks exchange."""

    rows_sent: list[int]
    rows_received: list[int]
    num_expert_rows: int
    """Rows of the local experts: each received row counts once for each of its local experts."""


class ExpertRows(NamedTuple):
    """How tokens become the rows of experts that gather them."""

    per_expert: Tensor
    """int64 [local experts], number of rows of each expert."""
    row_ids: Tensor
    """int32 [tokens, local experts], the rows of each token, or -1."""
    num_rows: int
    """At least the sum of ``per_expert``."""


class RowCountExchange:
    """Exchanges the numbers of rows to and from each rank and copies them to the host, both asynchronously.

    Args:
        to_rank: bool [T, ranks], the ranks to which a token goes.
        to_expert: bool [T, experts], the experts to which a token goes.
    """

    _copy_stream: torch.cuda.Stream | None = None

    def __init__(self, to_rank: Tensor, to_expert: Tensor, process_group: dist.ProcessGroup) -> None:
        experts = to_expert.sum(0).view(to_rank.shape[1], -1)
        # The table is [sent or received, rank, 1 + local experts]. The last dim holds the number of rows,
        # then that for each expert: for sent rows, an expert of that rank; for received rows, of this rank.
        self._count_table = experts.new_empty(2, len(experts), 1 + experts.shape[1])
        self._count_table[0, :, 0] = to_rank.sum(0)
        self._count_table[0, :, 1:] = experts
        # Asynchronous: the host needs the numbers only when it allocates what rows are received into.
        self._count_exchange = dist.all_to_all_single(
            self._count_table[1], self._count_table[0], group=process_group, async_op=True
        )
        self._host_table = self._count_table
        self._copy_event = None
        if self._count_table.is_cuda:
            # To pinned memory on a separate stream, which the compute stream does not wait for.
            if RowCountExchange._copy_stream is None:
                RowCountExchange._copy_stream = torch.cuda.Stream()
            with torch.cuda.stream(RowCountExchange._copy_stream):
                self._count_exchange.wait()
                self._host_table = self._count_table.to("cpu", non_blocking=True)
                self._copy_event = RowCountExchange._copy_stream.record_event()

    def wait_for_splits(self) -> RowSplits:
        """Waits for the copy and returns the numbers of rows."""
        self._count_exchange.wait()  # on a GPU, only work that is launched later waits
        if self._copy_event is not None:
            self._copy_event.synchronize()  # the layer's one sync: splits of an exchange are host numbers
        sent_table, received_table = self._host_table.tolist()
        return RowSplits(
            [row[0] for row in sent_table],
            [row[0] for row in received_table],
            sum(sum(row[1:]) for row in received_table),
        )

    def rows_per_expert(self) -> Tensor:
        """Number of rows of each local expert, int64 [local experts] on the device.

        Call it after :meth:`wait_for_splits`.
        """
        return self._count_table[1, :, 1:].sum(0)


class _ExchangeRows(torch.autograd.Function):
    """Sends rows [sent, H] and probabilities [sent, local experts] to their ranks, and gradients back.

    Both are one autograd node, so that gradients are sent in the same order on all ranks. Buffers may be
    longer than the sent part. The results of forward are ready after waiting for the two transfers that it
    appends to ``transfers``: probabilities, then rows.
    """

    @staticmethod
    def forward(
        ctx,
        row_buffer: Tensor,
        prob_buffer: Tensor,
        splits: RowSplits,
        process_group: dist.ProcessGroup,
        transfers: list[dist.Work],
    ):
        ctx.splits = splits
        ctx.group = process_group
        ctx.lengths = (row_buffer.shape[0], prob_buffer.shape[0])
        num_received_rows = sum(splits.rows_received)
        received_rows = row_buffer.new_empty(num_received_rows, row_buffer.shape[1])
        received_probs = prob_buffer.new_empty(num_received_rows, prob_buffer.shape[1])

        # Probabilities go first, so that positions can be computed from them while rows are sent.
        for received_tensor, sent_buffer in ((received_probs, prob_buffer), (received_rows, row_buffer)):
            transfers.append(
                dist.all_to_all_single(
                    received_tensor,
                    sent_buffer[: sum(splits.rows_sent)],
                    splits.rows_received,
                    splits.rows_sent,
                    group=process_group,
                    async_op=True,
                )
            )
        return received_rows, received_probs

    @staticmethod
    def backward(ctx, row_grads: Tensor, prob_grads: Tensor):
        transfers = []
        input_grads: list[Tensor | None] = [None, None]
        for i, received_grad in ((1, prob_grads), (0, row_grads)):
            if not ctx.needs_input_grad[i]:
                continue
            # Rows after the sent ones are never read.
            full_grad = received_grad.new_empty(ctx.lengths[i], received_grad.shape[1])
            received_grad = received_grad.contiguous()
            transfers.append(
                dist.all_to_all_single(
                    full_grad[: sum(ctx.splits.rows_sent)],
                    received_grad,
                    ctx.splits.rows_sent,
                    ctx.splits.rows_received,
                    group=ctx.group,
                    async_op=True,
                )
            )
            input_grads[i] = full_grad

        for transfer in transfers:
            transfer.wait()
        return *input_grads, None, None, None


class OncePerRankDispatcher(MoETokenDispatcher):
    """A dispatcher with Megatron-core's interface, for experts whose matrices are not cut.

    The dispatcher keeps its buffers between its methods, and drops each one once it has been read. The layer
    would keep every tensor that it gets until its forward pass ends. So :meth:`dispatch_preprocess` and
    :meth:`token_dispatch` return only tensors that the layer already holds.

    Args:
        experts_gather: whether experts take tokens with :class:`ExpertRows`,
            and copy them themselves. If not, they get sorted copies and counts, exactly as many rows as these
            say, for which the host waits.
    """

    def __init__(
        self, num_local_experts: int, config: Any, pg_collection: Any, *, experts_gather: bool = False
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        assert self.tp_size == 1, self.tp_size
        self.num_local_experts = num_local_experts
        self.top_k = config.moe_router_topk
        self.experts_gather = experts_gather

        # The following belong to the current micro-batch.
        self._input_shape: torch.Size
        self._count_exchange: RowCountExchange
        self._row_splits: RowSplits
        self._tokens_per_expert: Tensor
        self._num_expert_rows: int
        """Rows of the local experts, or an upper bound."""
        self._row_ids_by_rank: Tensor
        """Positions [T, ranks] of this rank's tokens among the rows that it sends."""
        self._row_ids_by_expert: Tensor
        """Positions [received rows, local experts] among the experts' rows."""
        self._row_buffer: Tensor
        self._prob_buffer: Tensor
        self._transfers: list[dist.Work] = []

    def _take_buffers(self) -> tuple[Tensor, Tensor]:
        buffers = self._row_buffer, self._prob_buffer
        del self._row_buffer, self._prob_buffer
        return buffers

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Starts the exchange of counts and fills the buffers to send.

        Args:
            hidden_states: [..., H], T tokens.
            routing_map: bool [T, experts], with ``top_k`` experts for each token, or none.
            probs: [T, experts].

        Returns:
            ``hidden_states`` and ``probs``.
        """
        self._input_shape = hidden_states.shape
        flat_states = hidden_states.reshape(-1, hidden_states.shape[-1])

        # Without other ranks, tokens can be sorted by expert at once.
        if self.ep_size == 1:
            self._row_ids_by_expert = make_row_ids(routing_map)
            self._tokens_per_expert = routing_map.sum(0)
            self._num_expert_rows = (
                # An upper bound, because padding has no experts. The exact number makes the host wait.
                flat_states.shape[0] * self.top_k
                if self.experts_gather
                else int(self._tokens_per_expert.sum())
            )
            self._row_buffer, self._prob_buffer = self._sort_by_expert(flat_states, probs)
            return hidden_states, probs

        # The counts travel while the buffers are filled.
        rank_map = routing_map.view(-1, self.ep_size, self.num_local_experts).any(-1)
        self._count_exchange = RowCountExchange(rank_map, routing_map, self.ep_group)
        self._row_ids_by_rank = make_row_ids(rank_map)

        # The host does not know yet how many rows are sent. A token goes to each rank at most once.
        max_sent_rows = flat_states.shape[0] * min(self.ep_size, self.top_k)
        self._row_buffer = scatter_rows(flat_states, self._row_ids_by_rank, max_sent_rows)
        chosen_probs = torch.where(routing_map, probs, NOT_CHOSEN)
        self._prob_buffer = scatter_parts(chosen_probs, self._row_ids_by_rank, max_sent_rows)
        return hidden_states, probs

    def _sort_by_expert(self, received_rows: Tensor, received_probs: Tensor) -> tuple[Tensor, Tensor]:
        """The experts' input, and the probabilities of their rows [expert rows]; both sorted by expert, but
        for tokens that experts gather."""
        row_probs = scatter_parts(received_probs, self._row_ids_by_expert, self._num_expert_rows).flatten()
        if self.experts_gather:
            return received_rows, row_probs
        return scatter_rows(received_rows, self._row_ids_by_expert, self._num_expert_rows), row_probs

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Waits for the counts and starts to send. Returns its arguments."""
        if self.ep_size > 1:
            self._row_splits = self._count_exchange.wait_for_splits()
            self._num_expert_rows = self._row_splits.num_expert_rows
            self._transfers = []
            self._tokens_per_expert = self._count_exchange.rows_per_expert()
            del self._count_exchange  # its table is no longer needed
            self._row_buffer, self._prob_buffer = _ExchangeRows.apply(
                *self._take_buffers(), self._row_splits, self.ep_group, self._transfers
            )
        return hidden_states, probs

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor | ExpertRows, Tensor]:
        """Returns the inputs of the experts.

        Returns:
            With ``experts_gather``, tokens [tokens, H], where they go, and probabilities [rows]; those after
            the last expert's row are undefined. Otherwise rows [rows, H] sorted by expert, the number of rows
            of each expert (int64 [local experts]), and probabilities [rows].
        """
        if self.ep_size > 1:
            expert_rows, received_probs = self._take_buffers()
            probs_transfer, rows_transfer = self._transfers

            # Positions need only the probabilities. The rows arrive meanwhile.
            probs_transfer.wait()
            # The comparison is true for a NaN, which belongs to a chosen expert.
            self._row_ids_by_expert = make_row_ids(received_probs != NOT_CHOSEN)

            rows_transfer.wait()
            self._row_buffer, self._prob_buffer = self._sort_by_expert(expert_rows, received_probs)
            self._transfers = []

        expert_input, row_probs = self._take_buffers()
        if self.experts_gather:
            rows = ExpertRows(self._tokens_per_expert, self._row_ids_by_expert, self._num_expert_rows)
            return expert_input, rows, row_probs
        return expert_input, self._tokens_per_expert, row_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Sums the experts' weighted outputs [rows, H] for each received row -> [received rows, H]."""
        return sum_rows(hidden_states, self._row_ids_by_expert)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Sends [received rows, H] back to the ranks where they came from -> [sent rows, H]."""
        if self.ep_size == 1:
            return hidden_states
        return all_to_all(
            self.ep_group, hidden_states, self._row_splits.rows_sent, self._row_splits.rows_received
        )

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Sums [sent rows, H] over the ranks of each token -> the shape of the layer's input."""
        token_outputs = hidden_states if self.ep_size == 1 else sum_rows(hidden_states, self._row_ids_by_rank)
        # Empty tensors release the memory of this micro-batch.
        self._row_ids_by_rank = self._row_ids_by_expert = self._tokens_per_expert = hidden_states.new_empty(0)
        return token_outputs.view(self._input_shape)


class PaddingDispatcher(MoEAlltoAllTokenDispatcher):
    """Core's dispatcher, except that some tokens may have no expert."""

    padded = False

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
        tokens_per_expert = super().preprocess(routing_map)
        if self.padded:
            # Core 0.19.2 assumes that every token has top_k experts. With padding, the host must wait for the
            # number of rows, as it does when core drops tokens.
            self.num_out_tokens = routing_map.sum()
            self._maybe_update_cuda_sync_point("before_permutation_1")
        return tokens_per_expert


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
    computes (float32). Padding is not sent.
    """

    def __init__(self, config: Any, *args: Any, pg_collection: Any = None, **kwargs: Any) -> None:
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        uses_planned_kernels = getattr(self.experts, "planned", False)
        if get_pg_size(pg_collection.expt_tp) == 1 and (
            uses_planned_kernels or isinstance(self.experts, SequentialMLP)
        ):
            self.token_dispatcher = OncePerRankDispatcher(
                self.num_local_experts, config, pg_collection, experts_gather=uses_planned_kernels
            )
        elif isinstance(self.token_dispatcher, MoEAlltoAllTokenDispatcher):
            self.token_dispatcher = (DeviceCountsDispatcher if uses_planned_kernels else PaddingDispatcher)(
                self.num_local_experts, self.local_expert_indices, config=config, pg_collection=pg_collection
            )

    def route(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Core's routing. It also tells the dispatcher, which gets no mask, whether there is padding."""
        self.token_dispatcher.padded = padding_mask is not None
        probs, routing_map = super().route(hidden_states, padding_mask)
        if padding_mask is not None and isinstance(self.token_dispatcher, PaddingDispatcher):
            routing_map = self.token_dispatcher.with_a_row(routing_map)
        return probs, routing_map
