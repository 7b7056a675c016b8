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

AHEAD = 2
"""One sample for each two that fill a step is there to choose from, beyond these."""
MOST_CHOICES = 16
"""Waiting samples for each row that are enough to choose from, however small they are."""
BUNDLE = 16
"""Samples of less than this fraction of a row are placed by age several at once."""
BUNDLED = 6
"""Samples that are placed at once, at most, if they are of the mean size."""
TURNS = 4
"""Number of rounds in which old samples are placed, for each one that every row gets."""
CHOICES = 16
"""Number of samples among which one is chosen for a row in a round."""
SCALES = 8
"""Number of rounds in which rows look at ever larger samples of those that fit, before they begin again."""
ROUNDS = 32
"""Largest number of rounds that fill rows."""
REPLACEABLE = 3
"""Number of a row's samples that a round may replace."""
PATCH = 16
"""Patches away from the mean that weigh as much as a token of padding."""
ENOUGH = 2048
"""A row is not filled further for less than this fraction of it."""
ALIKE = 2048
"""Samples that differ in less than this fraction of a row are of about the same size."""
BLOCK = 512
"""Number of rows that are looked at together, so that their choices fit into the processor's cache."""
EXCHANGES = 16
"""Number of rounds in which ranks exchange rows."""
MANY = 1 << 30
"""More patches than any row has, and a higher cost than that of any choice."""


def plan_rows(tokens: Integers, patches: Integers, rows: int, seq_len: int, max_patches: int = 0) -> Integers:
    """Chooses the samples of the next ``rows`` rows.

    Rows have at most ``seq_len`` tokens and ``max_patches`` patches, and otherwise about the mean number of
    patches. The oldest sample is always taken, so that none waits without end.

    Args:
        tokens, patches: int64 [n], sizes of the waiting samples, the oldest first; none exceeds a row.
        max_patches: 0: no limit.

    Returns:
        The row of each sample, int64 [n]; -1: it waits on. A row is empty only if there are too few samples.
    """
    plan = _Plan(tokens, patches, rows, seq_len, max_patches)
    if len(tokens):
        plan.place_old()
        plan.fill()
    return plan.row_of


class _Plan:
    """The rows of a step while samples are placed."""

    def __init__(
        self, tokens: Integers, patches: Integers, rows: int, seq_len: int, max_patches: int
    ) -> None:
        self.sizes = np.stack([tokens, patches]).astype(np.int32)
        self.seq_len, self.budget = seq_len, max_patches or MANY
        self.density = int(patches.sum()) / max(int(tokens.sum()), 1)
        """Patches per token of all waiting samples."""
        self.row_of = np.full(len(tokens), -1, np.int64)
        self.used = np.zeros((2, rows), np.int64)
        """Tokens and patches of each row."""

    def place_old(self) -> None:
        """Spreads old samples over the rows, the largest first. One sample or bundle of each row is left out,
        to be chosen later.

        Each round gives the emptiest rows a sample each: those with the most patches for their tokens to the
        rows with the fewest.
        """
        rows, total = self.used.shape[1], np.cumsum(self.sizes[0], dtype=np.int64)
        mean = int(total[-1]) // len(total)
        least = max(min(self.seq_len // BUNDLE, BUNDLED * mean), 1)
        chosen_later = min(max(mean, least), self.seq_len // 2)
        old = int(np.searchsorted(total, rows * (self.seq_len - chosen_later)))
        bundle, sizes = self._bundles(max(old, 1), least)
        # A row in which patches grow with the tokens has the mean of both at its end.
        excess = sizes[1] - np.rint(self.density * sizes[0]).astype(np.int64)
        order = np.concatenate([[0], 1 + sorted_by(-sizes[0][1:])])
        row_of = np.full(len(excess), -1, np.int64)
        row_excess = np.zeros(rows, np.int64)

        for first in range(0, len(order), at_once := -(-rows // TURNS)):
            chosen = order[first : first + at_once]
            chosen = chosen[sorted_by(excess[chosen])]
            emptiest = sorted_by(self.used[0])[: len(chosen)]
            emptiest = emptiest[sorted_by(-row_excess[emptiest])]
            after = self.used[:, emptiest] + sizes[:, chosen]
            fits = (after[0] <= self.seq_len) & (after[1] <= self.budget)
            chosen, emptiest = chosen[fits], emptiest[fits]
            row_of[chosen] = emptiest
            self.used[:, emptiest] = after[:, fits]
            row_excess[emptiest] += excess[chosen]
        self.row_of[: len(bundle)] = row_of[bundle]

    def _bundles(self, old: int, least: int) -> tuple[Integers, Integers]:
        """Bundles those of the first samples that are smaller than ``least`` tokens.

        The oldest one is alone, and the first bundle.

        Returns:
            The bundle of each sample, int64 [old]; tokens and patches of each bundle, int64 [2, m].
        """
        tokens = self.sizes[0, :old]
        small = tokens < least
        small[0] = False

        bundle = np.empty(old, np.int64)
        bundle[~small] = np.arange(old - np.count_nonzero(small))
        # A bundle of small samples ends where their tokens pass the next multiple of the least size.
        starts = np.cumsum(tokens[small], dtype=np.int64) - tokens[small]
        number = starts // least
        bundle[small] = old - len(starts) + np.cumsum(np.diff(number, prepend=0) > 0)
        return bundle, np.array([np.bincount(bundle, each[:old]) for each in self.sizes]).astype(np.int64)

    def fill(self) -> None:
        """Fills the rest of the rows from all samples that wait.

        In each round, every row adds a sample, or exchanges one of its replaceable samples. If several rows
        choose the same sample, it goes to the one that it suits best. A row stops once nothing improves it
        much.
        """
        unfinished = np.arange(self.used.shape[1])
        least = PATCH * self.seq_len // ENOUGH
        replaceable = self._replaceable()
        waiting = np.flatnonzero(self.row_of < 0)[: MOST_CHOICES * len(unfinished)]
        pool = np.concatenate([waiting, replaceable[replaceable >= 0]])
        pool = pool[sorted_by(self.sizes[0, pool])]
        sizes = np.take(self.sizes, pool, axis=1)
        taker = np.empty(len(self.row_of), np.int64)

        for turn in range(ROUNDS):
            is_free = self.row_of[pool] < 0
            if not is_free.any() or not len(unfinished):
                return
            free = np.compress(is_free, sizes, axis=1)
            gain, place, column = self._best(unfinished, free, replaceable, turn)
            sample = pool[is_free][place]
            better = gain > least
            unfinished, gain, sample, column = (
                values[better] for values in (unfinished, gain, sample, column)
            )

            best_last = sorted_by(gain)
            taker[sample[best_last]] = unfinished[best_last]
            won = taker[sample] == unfinished
            self._exchange(unfinished[won], replaceable, column[won], sample[won], turn)

    def _replaceable(self) -> Integers:
        """The youngest placed samples of each row, int64 [rows, 1 + REPLACEABLE]; -1 if there are fewer.

        Those of the older half stay, so that none waits too long. The first column stands for no sample.
        """
        rows = self.used.shape[1]
        placed = np.flatnonzero(self.row_of >= 0)
        young = placed[max(len(placed) // 2 + 1, len(placed) - 2 * REPLACEABLE * rows) :][::-1]
        row = self.row_of[young]
        by_row = sorted_by(row)
        counts = np.bincount(row, minlength=rows)
        number = np.arange(len(young)) - np.repeat(np.cumsum(counts) - counts, counts)

        replaceable = np.full((rows, 1 + REPLACEABLE), -1, np.int64)
        first = number < REPLACEABLE
        replaceable[row[by_row][first], 1 + number[first]] = young[by_row][first]
        return replaceable

    def _exchange(
        self, rows: Integers, replaceable: Integers, column: Integers, sample: Integers, turn: int
    ) -> None:
        """Puts a sample into each of these rows, in the place of another one of it if that is not -1."""
        removed = replaceable[rows, column]
        leaves = removed >= 0
        self.row_of[removed[leaves]] = -1
        self.used[:, rows[leaves]] -= self.sizes[:, removed[leaves]]
        self.row_of[sample] = rows
        self.used[:, rows] += self.sizes[:, sample]
        replaceable[rows, np.where(column > 0, column, 1 + turn % REPLACEABLE)] = sample

    def _best(
        self, rows: Integers, free: NDArray[np.int32], replaceable: Integers, turn: int
    ) -> tuple[Integers, Integers, Integers]:
        """The best exchange for each row.

        Args:
            free: int32 [2, n], tokens and patches of the samples to take, ascending by tokens.

        Returns:
            How much better the row becomes, the place in ``free`` of the sample that comes, and the column of
            the one that leaves.
        """
        blocks = [rows[first : first + BLOCK] for first in range(0, len(rows), BLOCK)]
        best = [self._best_of_block(block, free, replaceable[block], turn) for block in blocks]
        gain, place, column = np.concatenate(best, axis=1)
        return gain, place, column

    def _best_of_block(
        self, rows: Integers, free: NDArray[np.int32], replaceable: Integers, turn: int
    ) -> Integers:
        """:meth:`_best` of some rows, int64 [3, n]."""
        mean = int(self.density * self.seq_len)
        room, lack = self.seq_len - self.used[0, rows], mean - self.used[1, rows]
        leaving = np.where(replaceable >= 0, np.take(self.sizes, replaceable, axis=1), 0)
        left = (leaving[0] + room[:, None]).astype(np.int32)
        needed = (leaving[1] + lack[:, None]).astype(np.int32)

        ends = np.searchsorted(free[0], left, side="right")
        # Rows with the same need look at different samples: at first down to half of what fits.
        near = free[0, np.maximum(ends - 1, 0)] - self.seq_len // ALIKE - (left >> (1 + turn % SCALES))
        alike = ends - np.searchsorted(free[0], near) - CHOICES
        ends -= (rows[:, None] * (7919 * (2 * turn + 1))) % np.maximum(alike, 1)
        places = ends[:, :, None] - 1 - np.arange(CHOICES)
        tokens, patches = np.take(free, np.maximum(places, 0), axis=1)
        cost = PATCH * (left[:, :, None] - tokens) + np.abs(needed[:, :, None] - patches)
        cost[places < 0] = MANY
        if self.budget < MANY:
            cost[patches > needed[:, :, None] + (self.budget - mean)] = MANY
        cost[:, 1:][replaceable[:, 1:] < 0] = MANY

        cost = cost.reshape(len(rows), -1)
        best = cost.argmin(axis=1)
        at = np.arange(len(rows))
        gain = PATCH * room + np.abs(lack) - cost[at, best]
        return np.stack([gain, places.reshape(len(rows), -1)[at, best], best // CHOICES])


def sorted_by(values: Integers) -> Integers:
    """The places of values in ascending order, equal ones as they come: a stable argsort that is faster."""
    count = max(len(values), 1)
    return np.sort(values * np.int64(count) + np.arange(len(values))) % count


def deal(row_of: Integers, patches: Integers, rows: int, ranks: int) -> Integers:
    """Deals rows to ranks, equally many to each, with about equal sums of patches.

    Args:
        row_of: int64 [n], the row of each sample.
        patches: int64 [n], of each sample.
        rows: a multiple of ``ranks``.

    Returns:
        The new row of each sample, int64 [n]. Rank ``r`` has the rows from ``r * rows // ranks`` on.
    """
    dealt = deal_rows(np.bincount(row_of, patches, rows).astype(np.int64), ranks)
    new_row = np.empty(rows, np.int64)
    new_row[dealt.ravel()] = np.arange(rows)
    return new_row[row_of]


def deal_rows(patches: Integers, ranks: int) -> Integers:
    """The rows of each rank, int64 [ranks, rows // ranks], so that the ranks have about equal sums.

    Args:
        patches: int64 [rows] of each row; their number is a multiple of ``ranks``.
    """
    largest = sorted_by(-patches).reshape(-1, ranks)
    sums, dealt = np.zeros(ranks, np.int64), np.empty((ranks, len(largest)), np.int64)
    for place, rows in enumerate(largest):
        # The ranks with the least get the largest of the next rows.
        receivers = sorted_by(sums)
        dealt[receivers, place] = rows
        sums[receivers] += patches[rows]

    for turn in range(EXCHANGES):
        _exchange_rows(dealt, patches, turn)
    return dealt


def _exchange_rows(dealt: Integers, patches: Integers, turn: int) -> None:
    """Lets each rank of the fuller half exchange a row with one of the emptier half, if both come nearer.

    Args:
        dealt: as :func:`deal_rows` returns it; changed here.
    """
    sums = patches[dealt].sum(axis=1)
    order, half = sorted_by(sums), len(dealt) // 2
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
