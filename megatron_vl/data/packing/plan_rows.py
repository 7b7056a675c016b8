"""Plans which samples share a row, and which rank takes which rows of a step, from sizes alone.

All rows of a global batch are planned together, so that each has about the same number of patches. Whole rows
are then dealt to the ranks so that the ranks have about equal sums of patches. The result depends only on the
sizes, so every rank computes the same plan without a message. Rows do not depend on the number of ranks.

Each round gives many rows one sample each, in one vectorised operation. Only integers are compared, and equal
ones keep their order, because sums of floats and unstable sorts differ between processors.
"""

from functools import cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

LOOKAHEAD_FACTOR = 2
"""One extra sample waits per LOOKAHEAD_FACTOR samples of a step, so that there is a choice."""
BUNDLE_FRACTION = 16
"""Old samples smaller than 1 / BUNDLE_FRACTION of a row are bundled, and a bundle is placed at once."""
BUNDLED = 6
"""Largest number of samples in a bundle, if they have the mean size."""
TURNS_PER_ROUND = 4
"""Number of turns in which each row gets one bundle of old samples."""
CHOICES_PER_ROW = 16
"""Number of samples that a row compares in a round, and of waiting samples per row that are considered."""
SCALES = 8
"""The range of sizes among which rows search repeats after this many rounds
(:meth:`_RowPlan._best_of_block`)."""
MAX_FILL_ROUNDS = 32
REPLACEABLE = 3
"""Number of a row's samples that a round may replace."""
PATCHES_PER_TOKEN = 16
"""Cost of a token of padding. A patch more or less than the mean costs 1."""
ENOUGH_FRACTION = 2048
"""A row is finished once no exchange gains more than 1 / ENOUGH_FRACTION of it. Samples whose sizes differ by
less than that count as equally large."""
BLOCK = 512
"""Number of rows that choose together, so that their choices fit into the processor's cache."""
MAX_EXCHANGE_ROUNDS = 16
SWAP_POOL = 4
"""Rows of each of two ranks that are re-split between them (35 ways to halve eight rows)."""
UNREACHABLE_PATCHES = 1 << 30
"""More patches than any row has, and a higher cost than that of any choice."""


def plan_rows(
    token_counts: Integers, patch_counts: Integers, num_rows: int, seq_len: int, max_patches: int = 0
) -> Integers:
    """Chooses the samples of the next ``num_rows`` rows.

    Rows have at most ``seq_len`` tokens and ``max_patches`` patches. Each gets about the mean number of
    patches. The oldest sample is always taken, so that no sample waits forever.

    Args:
        token_counts, patch_counts: int64 [n], sizes of the waiting samples, the oldest first. Each sample
            fits into a row.
        num_rows: number of rows of the step, on all ranks.
        seq_len: largest number of tokens in a row.
        max_patches: largest number of patches in a row; 0: no limit.

    Returns:
        The row of each sample, int64 [n]; -1 if it goes on waiting. A row is empty only if there are too few
        samples.
    """
    row_plan = _RowPlan(token_counts, patch_counts, num_rows, seq_len, max_patches)
    if len(token_counts):
        # Old samples are placed first. Then the rest of the rows is filled as well as possible.
        row_plan.place_oldest()
        row_plan.fill_rows()
    return row_plan.row_of_sample


class _RowPlan:
    """The rows of a step while samples are placed."""

    def __init__(
        self, token_counts: Integers, patch_counts: Integers, num_rows: int, seq_len: int, max_patches: int
    ) -> None:
        self.sizes = np.stack([token_counts, patch_counts]).astype(np.int32)
        self.seq_len, self.patch_budget = seq_len, max_patches or UNREACHABLE_PATCHES
        self.patches_per_token = int(patch_counts.sum()) / max(int(token_counts.sum()), 1)
        self.row_of_sample = np.full(len(token_counts), -1, np.int64)
        self.used_by_row = np.zeros((2, num_rows), np.int64)
        """Tokens and patches of each row."""

    def place_oldest(self) -> None:
        """Spreads old samples over the rows, the largest first.

        Room for one more sample or bundle is left in each row, for :meth:`fill_rows`. Each turn gives one
        bundle to each of the emptiest rows. Among these, the row with the fewest patches for its tokens gets
        the bundle with the most patches for its tokens.
        """
        # How many of the oldest samples fill the rows, except for the room that is left.
        num_rows = self.used_by_row.shape[1]
        cumulative_tokens = np.cumsum(self.sizes[0], dtype=np.int64)
        mean_tokens = int(cumulative_tokens[-1]) // len(cumulative_tokens)
        least_tokens = max(min(self.seq_len // BUNDLE_FRACTION, BUNDLED * mean_tokens), 1)
        room_per_row = min(max(mean_tokens, least_tokens), self.seq_len // 2)
        old_count = int(np.searchsorted(cumulative_tokens, num_rows * (self.seq_len - room_per_row)))
        bundle_of_sample, bundle_sizes = self._bundle_small_samples(max(old_count, 1), least_tokens)

        # The patches of a bundle beyond those that its tokens have on average. If the excess of a row stays
        # near zero, the full row has about the mean number of patches.
        excess_patches = bundle_sizes[1] - np.rint(self.patches_per_token * bundle_sizes[0]).astype(np.int64)
        placement_order = np.concatenate([[0], 1 + stable_argsort(-bundle_sizes[0][1:])])
        row_of_bundle = np.full(len(excess_patches), -1, np.int64)
        row_excess = np.zeros(num_rows, np.int64)

        bundles_per_turn = -(-num_rows // TURNS_PER_ROUND)
        for first_placed in range(0, len(placement_order), bundles_per_turn):
            chosen_bundles = placement_order[first_placed : first_placed + bundles_per_turn]
            chosen_bundles = chosen_bundles[stable_argsort(excess_patches[chosen_bundles])]
            emptiest_rows = stable_argsort(self.used_by_row[0])[: len(chosen_bundles)]
            emptiest_rows = emptiest_rows[stable_argsort(-row_excess[emptiest_rows])]

            # A bundle that does not fit waits on: its samples may still be chosen for another row.
            used_after = self.used_by_row[:, emptiest_rows] + bundle_sizes[:, chosen_bundles]
            fits_row = (used_after[0] <= self.seq_len) & (used_after[1] <= self.patch_budget)
            chosen_bundles = chosen_bundles[fits_row]
            emptiest_rows = emptiest_rows[fits_row]
            row_of_bundle[chosen_bundles] = emptiest_rows
            self.used_by_row[:, emptiest_rows] = used_after[:, fits_row]
            row_excess[emptiest_rows] += excess_patches[chosen_bundles]
        self.row_of_sample[: len(bundle_of_sample)] = row_of_bundle[bundle_of_sample]

    def _bundle_small_samples(self, old_count: int, least_tokens: int) -> tuple[Integers, Integers]:
        """Bundles those of the first ``old_count`` samples that have fewer than ``least_tokens`` tokens.

        The oldest sample is the first bundle, alone. Each sample that is not small is a bundle of its own.

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
        small_bundles = np.cumsum(np.diff(start_tokens // least_tokens, prepend=0) > 0)
        bundle_of_sample[is_small] = old_count - len(start_tokens) + small_bundles

        bundle_sizes = np.array([np.bincount(bundle_of_sample, sizes[:old_count]) for sizes in self.sizes])
        return bundle_of_sample, bundle_sizes.astype(np.int64)

    def fill_rows(self) -> None:
        """Fills the rest of the rows from all samples that wait.

        In each round, every row adds a sample, or exchanges one of its replaceable samples. If several rows
        choose the same sample, the row that gains the most gets it. A row is finished once no sample improves
        it much.
        """
        unfinished_rows = np.arange(self.used_by_row.shape[1])
        least_gain = PATCHES_PER_TOKEN * self.seq_len // ENOUGH_FRACTION
        replaceable = self._replaceable_samples()

        # The pool is sorted by tokens, so that a row finds the samples that fit by bisection.
        waiting_samples = np.flatnonzero(self.row_of_sample < 0)[: CHOICES_PER_ROW * len(unfinished_rows)]
        pool = np.concatenate([waiting_samples, replaceable[replaceable >= 0]])
        pool = pool[stable_argsort(self.sizes[0, pool])]
        pool_sizes = np.take(self.sizes, pool, axis=1)
        winning_row = np.empty(len(self.row_of_sample), np.int64)

        for round_index in range(MAX_FILL_ROUNDS):
            is_free = self.row_of_sample[pool] < 0
            if not is_free.any() or not len(unfinished_rows):
                return

            free_sizes = np.compress(is_free, pool_sizes, axis=1)
            exchanges = self._best_exchanges(unfinished_rows, free_sizes, replaceable, round_index)
            is_better = exchanges[0] > least_gain
            unfinished_rows = unfinished_rows[is_better]
            exchange_gain, free_index, replaced_column = exchanges[:, is_better]
            chosen_sample = pool[is_free][free_index]

            # The row with the largest gain is written last, so it wins the sample.
            rising_gain_order = stable_argsort(exchange_gain)
            winning_row[chosen_sample[rising_gain_order]] = unfinished_rows[rising_gain_order]
            has_won = winning_row[chosen_sample] == unfinished_rows
            self._exchange_samples(
                unfinished_rows[has_won],
                replaceable,
                replaced_column[has_won],
                chosen_sample[has_won],
                round_index,
            )

    def _replaceable_samples(self) -> Integers:
        """The youngest placed samples of each row, int64 [rows, 1 + REPLACEABLE]; -1 if there are fewer.

        The older half of the samples stays in its rows, so that none waits too long. The first column is -1:
        it stands for adding a sample without replacing one.
        """
        num_rows = self.used_by_row.shape[1]
        placed = np.flatnonzero(self.row_of_sample >= 0)
        young = placed[max(len(placed) // 2 + 1, len(placed) - 2 * REPLACEABLE * num_rows) :][::-1]
        row_of_young = self.row_of_sample[young]
        row_order = stable_argsort(row_of_young)
        young_per_row = np.bincount(row_of_young, minlength=num_rows)
        first_in_row = np.repeat(np.cumsum(young_per_row) - young_per_row, young_per_row)
        number_in_row = np.arange(len(young)) - first_in_row

        replaceable = np.full((num_rows, 1 + REPLACEABLE), -1, np.int64)
        is_kept = number_in_row < REPLACEABLE
        replaceable[row_of_young[row_order][is_kept], 1 + number_in_row[is_kept]] = young[row_order][is_kept]
        return replaceable

    def _exchange_samples(
        self,
        row_indices: Integers,
        replaceable: Integers,
        replaced_column: Integers,
        new_samples: Integers,
        round_index: int,
    ) -> None:
        """Puts a sample into each of these rows, and takes out the sample of ``replaced_column`` if there is
        one."""
        removed_samples = replaceable[row_indices, replaced_column]
        is_removed = removed_samples >= 0
        self.row_of_sample[removed_samples[is_removed]] = -1
        self.used_by_row[:, row_indices[is_removed]] -= self.sizes[:, removed_samples[is_removed]]

        self.row_of_sample[new_samples] = row_indices
        self.used_by_row[:, row_indices] += self.sizes[:, new_samples]
        replaceable[
            row_indices, np.where(replaced_column > 0, replaced_column, 1 + round_index % REPLACEABLE)
        ] = new_samples

    def _best_exchanges(
        self, row_indices: Integers, free_sizes: NDArray[np.int32], replaceable: Integers, round_index: int
    ) -> Integers:
        """The best exchange for each row.

        Args:
            free_sizes: int32 [2, n], tokens and patches of the samples to take, ascending by tokens.

        Returns:
            int64 [3, rows]: how much the cost of the row falls, the index in ``free_sizes`` of the sample to
            add, and the column of ``replaceable`` of the sample to remove.
        """
        blocks = (row_indices[first : first + BLOCK] for first in range(0, len(row_indices), BLOCK))
        return np.concatenate(
            [self._best_of_block(rows, free_sizes, replaceable[rows], round_index) for rows in blocks], axis=1
        )

    def _best_of_block(
        self, row_indices: Integers, free_sizes: NDArray[np.int32], replaceable: Integers, round_index: int
    ) -> Integers:
        """The results of :meth:`_best_exchanges` for some rows, int64 [3, rows]."""
        mean_patches = int(self.patches_per_token * self.seq_len)
        free_tokens = self.seq_len - self.used_by_row[0, row_indices]
        missing_patches = mean_patches - self.used_by_row[1, row_indices]

        # What a row has room for if it removes the sample of each column, [rows, 1 + REPLACEABLE].
        removed_sizes = np.where(replaceable >= 0, np.take(self.sizes, replaceable, axis=1), 0)
        token_room = (removed_sizes[0] + free_tokens[:, None]).astype(np.int32)
        patch_room = (removed_sizes[1] + missing_patches[:, None]).astype(np.int32)

        # Rows with the same room compare different samples, because only one of them can get a sample. They
        # start anywhere among those that fit down to half of the room at first, and to less in later rounds.
        end_index = np.searchsorted(free_sizes[0], token_room, side="right")
        largest_tokens = free_sizes[0, np.maximum(end_index - 1, 0)]
        smallest_tokens = (
            largest_tokens - self.seq_len // ENOUGH_FRACTION - (token_room >> (1 + round_index % SCALES))
        )
        num_alike = end_index - np.searchsorted(free_sizes[0], smallest_tokens) - CHOICES_PER_ROW
        end_index -= (row_indices[:, None] * (7919 * (2 * round_index + 1))) % np.maximum(num_alike, 1)

        # The cost of each choice, [rows, 1 + REPLACEABLE, CHOICES_PER_ROW].
        choices = end_index[:, :, None] - 1 - np.arange(CHOICES_PER_ROW)
        tokens, patches = np.take(free_sizes, np.maximum(choices, 0), axis=1)
        cost = PATCHES_PER_TOKEN * (token_room[:, :, None] - tokens)
        cost = cost + np.abs(patch_room[:, :, None] - patches)
        cost[choices < 0] = UNREACHABLE_PATCHES
        if self.patch_budget < UNREACHABLE_PATCHES:
            cost[patches > patch_room[:, :, None] + (self.patch_budget - mean_patches)] = UNREACHABLE_PATCHES
        cost[:, 1:][replaceable[:, 1:] < 0] = UNREACHABLE_PATCHES

        cost = cost.reshape(len(row_indices), -1)
        best_choice = cost.argmin(axis=1)
        row_numbers = np.arange(len(row_indices))
        present_cost = PATCHES_PER_TOKEN * free_tokens + np.abs(missing_patches)
        return np.stack(
            [
                present_cost - cost[row_numbers, best_choice],
                choices.reshape(len(row_indices), -1)[row_numbers, best_choice],
                best_choice // CHOICES_PER_ROW,
            ]
        )


def stable_argsort(sort_values: Integers) -> Integers:
    """The indices that sort values in ascending order. Equal values keep their order.

    It is faster than NumPy's stable argsort.
    """
    count = max(len(sort_values), 1)
    return np.sort(sort_values * np.int64(count) + np.arange(len(sort_values))) % count


def rank_of_rows(patch_counts: Integers, rank_count: int) -> Integers:
    """The rows of each rank, int64 [ranks, rows // ranks], chosen so that the ranks have about equal sums.

    Args:
        patch_counts: int64 [rows], number of patches of each row. The number of rows is a multiple of
            ``rank_count``.
    """
    rows_by_size = stable_argsort(-patch_counts).reshape(-1, rank_count)
    patches_by_rank = np.zeros(rank_count, np.int64)
    rows_by_rank = np.empty((rank_count, len(rows_by_size)), np.int64)
    for column, next_rows in enumerate(rows_by_size):
        # The ranks with the fewest patches get the largest of the next rows.
        receiving_ranks = stable_argsort(patches_by_rank)
        rows_by_rank[receiving_ranks, column] = next_rows
        patches_by_rank[receiving_ranks] += patch_counts[next_rows]

    for round_index in range(MAX_EXCHANGE_ROUNDS):
        _exchange_rows(rows_by_rank, patch_counts, round_index)
    return rows_by_rank


def _exchange_rows(rows_by_rank: Integers, patch_counts: Integers, round_index: int) -> None:
    """Deals rows of pairs of ranks again if their sums come nearer to each other by that.

    Each pair has a rank of the fuller half and one of the emptier half. ``rows_by_rank`` is changed.
    """
    patches_by_rank = patch_counts[rows_by_rank].sum(axis=1)
    rank_order = stable_argsort(patches_by_rank)
    half_count = len(rows_by_rank) // 2
    # In the first round, the fullest rank is paired with the emptiest. Later rounds pair others.
    emptier_ranks = np.roll(rank_order[:half_count], round_index)
    fuller_ranks = rank_order[::-1][:half_count]
    gap = patches_by_rank[fuller_ranks] - patches_by_rank[emptier_ranks]

    # Ranks with many rows deal some of them, which other rounds follow with others.
    rows_per_rank = rows_by_rank.shape[1]
    dealt_count = min(SWAP_POOL, rows_per_rank)
    columns = (round_index + np.arange(dealt_count)) % rows_per_rank
    rank_pairs = np.stack([fuller_ranks, emptier_ranks], axis=1)
    pair_rows = rows_by_rank[rank_pairs[:, :, None], columns].reshape(half_count, 2 * dealt_count)

    # The first way to deal leaves all rows where they are.
    row_orders = _ways_to_halve(2 * dealt_count)
    stays_fuller = np.zeros_like(row_orders)
    np.put_along_axis(stays_fuller, row_orders[:, :dealt_count], 1, axis=1)
    patches_of_fuller = patch_counts[pair_rows] @ stays_fuller.T
    gap_after = np.abs(gap[:, None] - 2 * (patches_of_fuller[:, :1] - patches_of_fuller))
    new_rows = np.take_along_axis(pair_rows, row_orders[gap_after.argmin(axis=1)], axis=1)
    rows_by_rank[rank_pairs[:, :, None], columns] = new_rows.reshape(half_count, 2, dealt_count)


@cache
def _ways_to_halve(count: int) -> Integers:
    """All orders of ``count`` things, int64 [ways, count], that differ in which half a thing is in.

    The first thing is always in the first half, because two halves may change places.
    """
    ways = []
    for others in combinations(range(1, count), count // 2 - 1):
        first_half = (0, *others)
        ways.append([*first_half, *(i for i in range(count) if i not in first_half)])
    return np.array(ways, np.int64)
