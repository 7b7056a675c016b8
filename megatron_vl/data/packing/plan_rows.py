"""Plans which samples share a row, and which rank takes which rows of a step, from sizes alone.

All rows of a global batch are planned together, so that they have about as many patches each. Whole rows are
then dealt to the ranks so that the sums are about equal. The result depends only on the sizes, so that every
rank computes the same without a message. Rows do not depend on the number of ranks.

Each round places a sample in each of many rows at once. Everything is compared as integers, and equal ones by
number, because sums of floats and sorts that are not stable differ between processors.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

LOOKAHEAD_FACTOR = 2
"""One sample for each two that fill a step is there to choose from, beyond these."""
MOST_CHOICES = 16
"""Waiting samples for each row that are enough to choose from, however small they are."""
BUNDLE_FRACTION = 16
"""Samples of less than this fraction of a row are placed by age several at once."""
BUNDLED = 6
"""Samples that are placed at once, at most, if they are of the mean size."""
TURNS_PER_ROUND = 4
"""Number of rounds in which old samples are placed, for each one that every row gets."""
CHOICES_PER_ROW = 16
"""Number of samples among which one is chosen for a row in a round."""
SCALES = 8
"""Number of rounds in which rows look at ever larger samples of those that fit, before they begin again."""
MAX_FILL_ROUNDS = 32
"""Largest number of rounds that fill rows."""
REPLACEABLE = 3
"""Number of a row's samples that a round may replace."""
PATCHES_PER_TOKEN = 16
"""Patches away from the mean that weigh as much as a token of padding."""
ENOUGH_FRACTION = 2048
"""A row is not filled further for less than this fraction of it."""
ALIKE_FRACTION = 2048
"""Samples that differ in less than this fraction of a row are of about the same size."""
BLOCK = 512
"""Number of rows that are looked at together, so that their choices fit into the processor's cache."""
MAX_EXCHANGE_ROUNDS = 16
"""Number of rounds in which ranks exchange rows."""
UNREACHABLE_PATCHES = 1 << 30
"""More patches than any row has, and a higher cost than that of any choice."""


def plan_rows(
    token_counts: Integers, patch_counts: Integers, row_count: int, seq_len: int, max_patches: int = 0
) -> Integers:
    """Chooses the samples of the next ``row_count`` rows.

    Rows have at most ``seq_len`` tokens and ``max_patches`` patches, and otherwise about the mean number of
    patches. The oldest sample is always taken, so that none waits without end.

    Args:
        token_counts, patches: int64 [n], sizes of the waiting samples, the oldest first; none exceeds a row.
        max_patches: 0: no limit.

    Returns:
        The row of each sample, int64 [n]; -1: it waits on. A row is empty only if there are too few samples.
    """
    row_plan = _RowPlan(token_counts, patch_counts, row_count, seq_len, max_patches)
    if len(token_counts):
        row_plan.place_oldest()
        row_plan.fill_rows()
    return row_plan.row_of_sample


class _RowPlan:
    """The rows of a step while samples are placed."""

    def __init__(
        self, token_counts: Integers, patch_counts: Integers, row_count: int, seq_len: int, max_patches: int
    ) -> None:
        self.sizes = np.stack([token_counts, patch_counts]).astype(np.int32)
        self.seq_len, self.patch_budget = seq_len, max_patches or UNREACHABLE_PATCHES
        self.patches_per_token = int(patch_counts.sum()) / max(int(token_counts.sum()), 1)
        """Patches per token of all waiting samples."""
        self.row_of_sample = np.full(len(token_counts), -1, np.int64)
        self.used_by_row = np.zeros((2, row_count), np.int64)
        """Tokens and patches of each row."""

    def place_oldest(self) -> None:
        """Spreads old samples over the rows, the largest first. One sample or bundle of each row is left out,
        to be chosen later.

        Each round gives the emptiest rows a sample each: those with the most patches for their tokens to the
        rows with the fewest.
        """
        row_count, total = self.used_by_row.shape[1], np.cumsum(self.sizes[0], dtype=np.int64)
        mean = int(total[-1]) // len(total)
        least = max(min(self.seq_len // BUNDLE_FRACTION, BUNDLED * mean), 1)
        chosen_later = min(max(mean, least), self.seq_len // 2)
        old_count = int(np.searchsorted(total, row_count * (self.seq_len - chosen_later)))
        bundle_of_sample, bundle_sizes = self._bundle_small_samples(max(old_count, 1), least)
        # A row in which patches grow with the tokens has the mean of both at its end.
        excess_patches = bundle_sizes[1] - np.rint(self.patches_per_token * bundle_sizes[0]).astype(np.int64)
        placement_order = np.concatenate([[0], 1 + stable_argsort(-bundle_sizes[0][1:])])
        row_of_bundle = np.full(len(excess_patches), -1, np.int64)
        row_excess = np.zeros(row_count, np.int64)

        for first_placed in range(
            0, len(placement_order), bundles_per_turn := -(-row_count // TURNS_PER_ROUND)
        ):
            chosen_bundles = placement_order[first_placed : first_placed + bundles_per_turn]
            chosen_bundles = chosen_bundles[stable_argsort(excess_patches[chosen_bundles])]
            emptiest_rows = stable_argsort(self.used_by_row[0])[: len(chosen_bundles)]
            emptiest_rows = emptiest_rows[stable_argsort(-row_excess[emptiest_rows])]
            used_after = self.used_by_row[:, emptiest_rows] + bundle_sizes[:, chosen_bundles]
            fits_row = (used_after[0] <= self.seq_len) & (used_after[1] <= self.patch_budget)
            chosen_bundles, emptiest_rows = chosen_bundles[fits_row], emptiest_rows[fits_row]
            row_of_bundle[chosen_bundles] = emptiest_rows
            self.used_by_row[:, emptiest_rows] = used_after[:, fits_row]
            row_excess[emptiest_rows] += excess_patches[chosen_bundles]
        self.row_of_sample[: len(bundle_of_sample)] = row_of_bundle[bundle_of_sample]

    def _bundle_small_samples(self, old_count: int, least_tokens: int) -> tuple[Integers, Integers]:
        """Bundles those of the first samples that are smaller than ``least_tokens`` tokens.

        The oldest one is alone, and the first bundle.

        Returns:
            The bundle of each sample, int64 [old]; tokens and patches of each bundle, int64 [2, m].
        """
        token_counts = self.sizes[0, :old_count]
        is_small = token_counts < least_tokens
        is_small[0] = False

        bundle_of_sample = np.empty(old_count, np.int64)
        bundle_of_sample[~is_small] = np.arange(old_count - np.count_nonzero(is_small))
        # A bundle of small samples ends where their tokens pass the next multiple of the least size.
        start_tokens = np.cumsum(token_counts[is_small], dtype=np.int64) - token_counts[is_small]
        number = start_tokens // least_tokens
        bundle_of_sample[is_small] = old_count - len(start_tokens) + np.cumsum(np.diff(number, prepend=0) > 0)
        return bundle_of_sample, np.array(
            [np.bincount(bundle_of_sample, each[:old_count]) for each in self.sizes]
        ).astype(np.int64)

    def fill_rows(self) -> None:
        """Fills the rest of the rows from all samples that wait.

        In each round, every row adds a sample, or exchanges one of its replaceable samples. If several rows
        choose the same sample, it goes to the one that it suits best. A row stops once nothing improves it
        much.
        """
        unfinished = np.arange(self.used_by_row.shape[1])
        least_gain = PATCHES_PER_TOKEN * self.seq_len // ENOUGH_FRACTION
        replaceable = self._replaceable()
        waiting = np.flatnonzero(self.row_of_sample < 0)[: MOST_CHOICES * len(unfinished)]
        pool = np.concatenate([waiting, replaceable[replaceable >= 0]])
        pool = pool[stable_argsort(self.sizes[0, pool])]
        sizes = np.take(self.sizes, pool, axis=1)
        taker = np.empty(len(self.row_of_sample), np.int64)

        for round_index in range(MAX_FILL_ROUNDS):
            is_free = self.row_of_sample[pool] < 0
            if not is_free.any() or not len(unfinished):
                return
            free_samples = np.compress(is_free, sizes, axis=1)
            exchange_gain, place, replaced_column = self._best_exchanges(
                unfinished, free_samples, replaceable, round_index
            )
            chosen_sample = pool[is_free][place]
            better = exchange_gain > least_gain
            unfinished, exchange_gain, chosen_sample, replaced_column = (
                values[better] for values in (unfinished, exchange_gain, chosen_sample, replaced_column)
            )

            rising_gain_order = stable_argsort(exchange_gain)
            taker[chosen_sample[rising_gain_order]] = unfinished[rising_gain_order]
            has_won = taker[chosen_sample] == unfinished
            self._exchange_samples(
                unfinished[has_won],
                replaceable,
                replaced_column[has_won],
                chosen_sample[has_won],
                round_index,
            )

    def _replaceable(self) -> Integers:
        """The youngest placed samples of each row, int64 [rows, 1 + REPLACEABLE]; -1 if there are fewer.

        Those of the older half stay, so that none waits too long. The first column stands for no sample.
        """
        rows = self.used_by_row.shape[1]
        placed = np.flatnonzero(self.row_of_sample >= 0)
        young = placed[max(len(placed) // 2 + 1, len(placed) - 2 * REPLACEABLE * rows) :][::-1]
        row = self.row_of_sample[young]
        by_row = stable_argsort(row)
        counts = np.bincount(row, minlength=rows)
        number = np.arange(len(young)) - np.repeat(np.cumsum(counts) - counts, counts)

        replaceable = np.full((rows, 1 + REPLACEABLE), -1, np.int64)
        first = number < REPLACEABLE
        replaceable[row[by_row][first], 1 + number[first]] = young[by_row][first]
        return replaceable

    def _exchange_samples(
        self,
        row_indices: Integers,
        replaceable: Integers,
        replaced_column: Integers,
        new_samples: Integers,
        round_index: int,
    ) -> None:
        """Puts a sample into each of these rows, in the place of another one of it if that is not -1."""
        removed_samples = replaceable[row_indices, replaced_column]
        leaves = removed_samples >= 0
        self.row_of_sample[removed_samples[leaves]] = -1
        self.used_by_row[:, row_indices[leaves]] -= self.sizes[:, removed_samples[leaves]]
        self.row_of_sample[new_samples] = row_indices
        self.used_by_row[:, row_indices] += self.sizes[:, new_samples]
        replaceable[
            row_indices, np.where(replaced_column > 0, replaced_column, 1 + round_index % REPLACEABLE)
        ] = new_samples

    def _best_exchanges(
        self, row_indices: Integers, free_samples: NDArray[np.int32], replaceable: Integers, round_index: int
    ) -> tuple[Integers, Integers, Integers]:
        """The best exchange for each row.

        Args:
            free_samples: int32 [2, n], tokens and patches of the samples to take, ascending by tokens.

        Returns:
            How much better the row becomes, the place in ``free_samples`` of the sample that comes, and the column of
            the one that leaves.
        """
        blocks = [row_indices[first : first + BLOCK] for first in range(0, len(row_indices), BLOCK)]
        best_choice = [
            self._best_of_block(block, free_samples, replaceable[block], round_index) for block in blocks
        ]
        exchange_gain, place, column = np.concatenate(best_choice, axis=1)
        return exchange_gain, place, column

    def _best_of_block(
        self, rows: Integers, free: NDArray[np.int32], replaceable: Integers, turn: int
    ) -> Integers:
        """:meth:`_best_exchanges` of some rows, int64 [3, n]."""
        mean = int(self.patches_per_token * self.seq_len)
        room, lack = self.seq_len - self.used_by_row[0, rows], mean - self.used_by_row[1, rows]
        leaving = np.where(replaceable >= 0, np.take(self.sizes, replaceable, axis=1), 0)
        left = (leaving[0] + room[:, None]).astype(np.int32)
        needed = (leaving[1] + lack[:, None]).astype(np.int32)

        ends = np.searchsorted(free[0], left, side="right")
        # Rows with the same need look at different samples: at first down to half of what fits.
        near = (
            free[0, np.maximum(ends - 1, 0)] - self.seq_len // ALIKE_FRACTION - (left >> (1 + turn % SCALES))
        )
        alike = ends - np.searchsorted(free[0], near) - CHOICES_PER_ROW
        ends -= (rows[:, None] * (7919 * (2 * turn + 1))) % np.maximum(alike, 1)
        places = ends[:, :, None] - 1 - np.arange(CHOICES_PER_ROW)
        tokens, patches = np.take(free, np.maximum(places, 0), axis=1)
        cost = PATCHES_PER_TOKEN * (left[:, :, None] - tokens) + np.abs(needed[:, :, None] - patches)
        cost[places < 0] = UNREACHABLE_PATCHES
        if self.patch_budget < UNREACHABLE_PATCHES:
            cost[patches > needed[:, :, None] + (self.patch_budget - mean)] = UNREACHABLE_PATCHES
        cost[:, 1:][replaceable[:, 1:] < 0] = UNREACHABLE_PATCHES

        cost = cost.reshape(len(rows), -1)
        best = cost.argmin(axis=1)
        at = np.arange(len(rows))
        gain = PATCHES_PER_TOKEN * room + np.abs(lack) - cost[at, best]
        return np.stack([gain, places.reshape(len(rows), -1)[at, best], best // CHOICES_PER_ROW])


def stable_argsort(sort_values: Integers) -> Integers:
    """The places of values in ascending order, equal ones as they come: a stable argsort that is faster."""
    count = max(len(sort_values), 1)
    return np.sort(sort_values * np.int64(count) + np.arange(len(sort_values))) % count


def assign_rows_to_ranks(
    row_of_sample: Integers, patches: Integers, row_count: int, rank_count: int
) -> Integers:
    """Deals rows to ranks, equally many to each, with about equal sums of patches.

    Args:
        row_of_sample: int64 [n], the row of each sample.
        patches: int64 [n], of each sample.
        row_count: a multiple of ``rank_count``.

    Returns:
        The new row of each sample, int64 [n]. Rank ``r`` has the rows from ``r * rows // ranks`` on.
    """
    rows_by_rank = rank_of_rows(np.bincount(row_of_sample, patches, row_count).astype(np.int64), rank_count)
    new_row = np.empty(row_count, np.int64)
    new_row[rows_by_rank.ravel()] = np.arange(row_count)
    return new_row[row_of_sample]


def rank_of_rows(patch_counts: Integers, rank_count: int) -> Integers:
    """The rows of each rank, int64 [ranks, rows // ranks], so that the ranks have about equal sums.

    Args:
        patch_counts: int64 [rows] of each row; their number is a multiple of ``rank_count``.
    """
    rows_by_size = stable_argsort(-patch_counts).reshape(-1, rank_count)
    patches_by_rank, dealt = (
        np.zeros(rank_count, np.int64),
        np.empty((rank_count, len(rows_by_size)), np.int64),
    )
    for place, next_rows in enumerate(rows_by_size):
        # The ranks with the least get the largest of the next rows.
        receivers = stable_argsort(patches_by_rank)
        dealt[receivers, place] = next_rows
        patches_by_rank[receivers] += patch_counts[next_rows]

    for turn in range(MAX_EXCHANGE_ROUNDS):
        _exchange_rows(dealt, patch_counts, turn)
    return dealt


def _exchange_rows(dealt: Integers, patches: Integers, turn: int) -> None:
    """Lets each rank of the fuller half exchange a row with one of the emptier half, if both come nearer.

    Args:
        dealt: as :func:`rank_of_rows` returns it; changed here.
    """
    sums = patches[dealt].sum(axis=1)
    order, half = stable_argsort(sums), len(dealt) // 2
    # The fullest meets the emptiest first, and others later.
    emptier, fuller = np.roll(order[:half], turn), order[::-1][:half]
    gap = sums[fuller] - sums[emptier]

    moved = patches[dealt[fuller]][:, :, None] - patches[dealt[emptier]][:, None, :]
    gap_after = np.abs(gap[:, None, None] - 2 * moved).reshape(half, dealt.shape[1] ** 2)
    best = gap_after.argmin(axis=1)
    better = gap_after[np.arange(half), best] < gap
    fuller, emptier = fuller[better], emptier[better]
    given, taken = np.divmod(best[better], dealt.shape[1])
    dealt[fuller, given], dealt[emptier, taken] = dealt[emptier, taken], dealt[fuller, given]
