"""The exchange of linear attention between context-parallel ranks.

The ranks of a group share a packed row. Each holds a shard: an equal, contiguous part of the row's tokens. If
a sequence crosses an edge between shards, its state and the last inputs of the convolution cross it too.

A shard maps the state S of a sequence that enters it to ``transition @ S + local_state`` at the shard's end.
So no rank waits for the computation of another. Each computes its ``local_state``, and ``transition`` if one
sequence enters and leaves the shard. One all-gather gives every rank the state before its first token. The
gradient of a state takes the opposite way. Its map has the transpose of ``transition``.

The host computes from the bounds of the whole row which ranks hold tokens of a sequence, so that no rank
reads a number from its device.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ShardRoute:
    """How sequences cross the edges of one rank's shard. All numbers are known on the host."""

    rank: int
    length: int
    tokens_before: int
    """Number of tokens of the shard's first sequence that lie on earlier ranks; 0: it begins here."""
    tokens_after: int
    """Number of tokens of the shard's last sequence that lie on later ranks; 0: it ends here."""
    first_end: int
    """Number of this shard's tokens that belong to its first sequence."""
    last_start: int
    """Offset within the shard of the first token that belongs to its last sequence."""
    any_cut: bool
    """Whether any sequence of the row crosses an edge. If not, no rank exchanges anything."""
    any_spanned: bool
    """Whether the row has a shard that one sequence enters and leaves, so that ranks exchange matrices."""

    @property
    def ranks_before(self) -> int:
        """Number of earlier ranks that the shard's first sequence lies on."""
        return -(-self.tokens_before // self.length)

    @property
    def ranks_after(self) -> int:
        """Number of later ranks that the shard's last sequence lies on."""
        return -(-self.tokens_after // self.length)

    @property
    def is_spanned(self) -> bool:
        """Whether one sequence enters and leaves this shard."""
        return self.tokens_before > 0 and self.tokens_after > 0 and self.first_end == self.length


def shard_route(cu_seqlens: Sequence[int], cp_size: int, rank: int) -> ShardRoute:
    """The route of the shard that ``rank`` holds of a row.

    Args:
        cu_seqlens: bounds of the sequences in the whole row, ascending from 0 to S, on the host.
    """
    row_length = cu_seqlens[-1]
    length = row_length // cp_size

    # The first and the last sequence that have tokens in this shard.
    shard_start, shard_end = rank * length, (rank + 1) * length
    first_sequence = bisect_right(cu_seqlens, shard_start) - 1
    last_sequence = bisect_right(cu_seqlens, shard_end - 1) - 1

    # A shard lies within one sequence if no bound is in it, its edges included.
    any_spanned = any(
        bisect_left(cu_seqlens, other_start) == bisect_right(cu_seqlens, other_start + length)
        for other_start in range(0, row_length, length)
    )

    return ShardRoute(
        rank=rank,
        length=length,
        tokens_before=shard_start - cu_seqlens[first_sequence],
        tokens_after=max(cu_seqlens[last_sequence + 1] - shard_end, 0),
        first_end=min(cu_seqlens[first_sequence + 1], shard_end) - shard_start,
        last_start=max(cu_seqlens[last_sequence] - shard_start, 0),
        any_cut=not set(range(length, row_length, length)).issubset(cu_seqlens),
        any_spanned=any_spanned,
    )


class ShardExchange:
    """The exchanges of one rank's shard. Every method is collective over the group.

    Args:
        route: the route of this rank's shard. ``route.any_cut`` must be true, because otherwise there is
            nothing to exchange.
        group: the context-parallel group, whose ranks hold the shards in order.
    """

    def __init__(self, route: ShardRoute, group: dist.ProcessGroup) -> None:
        self.route, self.group = route, group

    def initial_state(self, local_state: Tensor, transition: Tensor | None) -> Tensor | None:
        """The state before the shard's first token, [heads, K, V]; None if its first sequence begins there.

        Args:
            local_state: [heads, K, V], the state after the shard if the state before it is zero.
            transition: [heads, K, K], the shard's matrix, if ``route.is_spanned``.
        """
        states, matrices = self._gather_maps(local_state, transition)
        rank = self.route.rank
        first_rank = rank - self.route.ranks_before
        if first_rank == rank:
            return None

        state = states[first_rank]
        for i in range(first_rank + 1, rank):
            state = torch.baddbmm(states[i], matrices[i], state)
        return state.contiguous()

    def final_gradient(self, gradient: Tensor, transition: Tensor | None) -> Tensor | None:
        """The gradient of the state after the shard's last token; None if its last sequence ends there.

        Args:
            gradient: [heads, K, V], the gradient of the state before the shard if that of the state after it
                is zero.
            transition: as in :meth:`initial_state`.
        """
        gradients, matrices = self._gather_maps(gradient, transition)
        rank = self.route.rank
        last_rank = rank + self.route.ranks_after
        if last_rank == rank:
            return None

        state_gradient = gradients[last_rank]
        for i in range(last_rank - 1, rank, -1):
            state_gradient = torch.baddbmm(gradients[i], matrices[i].mT, state_gradient)
        return state_gradient.contiguous()

    def _gather_maps(
        self, local_state: Tensor, transition: Tensor | None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The states (or their gradients) and the matrices of all ranks.

        A rank without a matrix sends zeros, which no rank reads.
        """
        if not self.route.any_spanned:
            return self.gather(local_state).unbind(), ()
        heads, width, columns = local_state.shape
        if transition is None:
            transition = local_state.new_zeros(heads, width, width)
        maps = self.gather(torch.cat((local_state, transition), dim=-1))
        states, matrices = maps.split((columns, width), dim=-1)
        return states.unbind(), matrices.unbind()

    def halo(self, x: Tensor, halo_length: int) -> Tensor:
        """The inputs [halo_length, C] of the tokens before the shard; zero for those of other sequences.

        Args:
            x: the shard's inputs, [length, C]. If shards are shorter than ``halo_length``, the tokens come
                from several ranks.
        """
        tail_length = min(halo_length, len(x))
        all_tails = self.gather(x[-tail_length:].contiguous()).flatten(0, 1)
        end = self.route.rank * tail_length
        halo_tokens = min(halo_length, self.route.tokens_before)
        halo = x.new_zeros(halo_length, x.shape[1])
        halo[halo_length - halo_tokens :] = all_tails[end - halo_tokens : end]
        return halo

    def add_halo_gradients(self, halo_gradient: Tensor, x_gradient: Tensor) -> None:
        """Adds later ranks' gradients of this shard's last tokens to the gradient of the shard's inputs.

        Args:
            halo_gradient: the gradient of this rank's halo, [halo_length, C].
            x_gradient: the gradient of the shard's inputs, [length, C]. It is changed in place.
        """
        halo_length, length = len(halo_gradient), len(x_gradient)
        tail_length = min(halo_length, length)
        halo_gradient[: halo_length - min(halo_length, self.route.tokens_before)] = 0
        all_gradients = self.gather(halo_gradient.contiguous())

        # The halo of rank i ends where the shard of the rank before it ends.
        rank = self.route.rank
        for i in range(rank + 1, min(rank + -(-halo_length // tail_length), self.group.size() - 1) + 1):
            distance = (i - rank - 1) * tail_length  # from the end of this shard to the end of the halo
            num_tokens = min(tail_length, halo_length - distance)
            token_gradients = all_gradients[i, halo_length - distance - num_tokens : halo_length - distance]
            x_gradient[length - num_tokens :] += token_gradients

    def gather(self, local_tensor: Tensor) -> Tensor:
        """[n, ...] -> [ranks, n, ...], in the order of the ranks."""
        num_ranks, local_length = self.group.size(), len(local_tensor)
        gathered = local_tensor.new_empty(num_ranks * local_length, *local_tensor.shape[1:])
        # Of all ranks, although few are read: one exchange with a fixed size needs no host numbers.
        dist.all_gather_into_tensor(gathered, local_tensor, group=self.group)
        return gathered.unflatten(0, (num_ranks, local_length))
