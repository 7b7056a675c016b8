"""Plans which samples share a row, and which rank takes which rows of a step, from sizes alone.

All rows of a global batch are planned together, so that they have about as many patches each, and then dealt
to the ranks so that the sums are equal. The result depends only on the sizes, so that every rank computes the
same without a message. Rows do not depend on the number of ranks.

Each round places a sample in each of many rows at once. Everything is compared as integers, and equal ones by
number, because sums of floats and sorts that are not stable differ between processors.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

AHEAD = 1.5
"""Tokens of the samples to choose from, as a multiple of those that a step takes."""
SPREAD = 0.92
"""Share of a step's tokens that is placed by age. The others are chosen to fill the rows."""
BUNDLE = 64
"""Samples of less than this fraction of a row are placed by age several at once."""
TURNS = 4
"""Number of rounds in which old samples are placed, for each one that every row gets."""
CHOICES = 32
"""Number of samples among which one is chosen for a row in a round."""
ROUNDS = 16
"""Largest number of rounds that fill rows."""
REPLACED = 3
"""Number of a row's chosen samples that a round may replace."""
PATCH = 16
"""Patches away from the mean that weigh as much as a token of padding."""
ENOUGH = 2048
"""A row is not filled further for less than this fraction of it."""
ALIKE = 2048
"""Samples that differ in less than this fraction of a row are of about the same size."""


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
        self.tokens, self.patches, self.seq_len = tokens, patches, seq_len
        self.budget = max_patches or MANY
        self.density = int(patches.sum()) / max(int(tokens.sum()), 1)
        """Patches per token of all waiting samples."""
        self.row_of = np.full(len(tokens), -1, np.int64)
        self.used = np.zeros((2, rows), np.int64)
        """Tokens and patches of each row."""

    def place_old(self) -> None:
        """Spreads old samples over the rows, the largest first.

        Each round gives the emptiest rows a sample each: those with the most patches for their tokens to the
        rows with the fewest.
        """
        rows = self.used.shape[1]
        rest = min(1 - SPREAD, 2 * float(self.tokens.mean()) / self.seq_len)
        old = int(np.searchsorted(np.cumsum(self.tokens), (1 - rest) * rows * self.seq_len))
        bundle, sizes = self._bundles(max(old, 1))
        # A row in which patches grow with the tokens has the mean of both at its end.
        excess = sizes[1] - np.rint(self.density * sizes[0]).astype(np.int64)
        order = np.concatenate([[0], 1 + np.argsort(-sizes[0][1:], kind="stable")])
        row_of = np.full(len(excess), -1, np.int64)
        row_excess = np.zeros(rows, np.int64)

        for first in range(0, len(order), at_once := -(-rows // TURNS)):
            chosen = order[first : first + at_once]
            chosen = chosen[np.argsort(excess[chosen], kind="stable")]
            emptiest = sorted_by(self.used[0])[: len(chosen)]
            emptiest = emptiest[sorted_by(-row_excess[emptiest])]
            after = self.used[:, emptiest] + sizes[:, chosen]
            fits = (after[0] <= self.seq_len) & (after[1] <= self.budget)
            chosen, emptiest = chosen[fits], emptiest[fits]
            row_of[chosen] = emptiest
            self.used[:, emptiest] = after[:, fits]
            row_excess[emptiest] += excess[chosen]
        self.row_of[: len(bundle)] = row_of[bundle]

    def _bundles(self, old: int) -> tuple[Integers, Integers]:
        """Bundles small ones of the first samples. The oldest one is alone, and the first bundle.

        Returns:
            The bundle of each sample, int64 [old]; tokens and patches of each bundle, int64 [2, m].
        """
        tokens, least = self.tokens[:old], -(-self.seq_len // BUNDLE)
        small = tokens < least
        small[0] = False
        starts = np.cumsum(np.where(small, tokens, 0)) - tokens
        _, bundle = np.unique(np.where(small, starts // least, np.arange(old) - old), return_inverse=True)
        sizes = [np.bincount(bundle, each[:old]) for each in (tokens, self.patches)]
        return bundle, np.array(sizes).astype(np.int64)

    def fill(self) -> None:
        """Fills the rest of the rows from all samples that wait.

        In each round, every row adds a sample, or exchanges one that it added before. If several rows choose
        the same sample, it goes to the one that it suits best. A row stops once nothing improves it much.
        """
        going = np.arange(self.used.shape[1])
        least = PATCH * self.seq_len // ENOUGH
        # The first column stands for no sample.
        added = np.full((len(going), 1 + REPLACED), -1, np.int64)
        # The youngest sample of a row may leave too, unless it has waited long.
        placed = np.flatnonzero(self.row_of >= 0)
        younger = placed[len(placed) // 2 + 1 :]
        added[self.row_of[younger], 1] = younger
        for turn in range(ROUNDS):
            free = np.flatnonzero(self.row_of < 0)
            free = free[sorted_by(self.tokens[free])]
            if not len(free) or not len(going):
                return
            gain, sample, column = self._best(going, free, added[going], turn)
            going, gain, sample, column = (each[gain > least] for each in (going, gain, sample, column))

            best_last = np.argsort(gain, kind="stable")
            owner = np.full(len(self.tokens), -1, np.int64)
            owner[sample[best_last]] = going[best_last]
            won = owner[sample] == going
            self._exchange(going[won], added, column[won], sample[won], turn)

    def _exchange(
        self, rows: Integers, added: Integers, column: Integers, sample: Integers, turn: int
    ) -> None:
        """Puts a sample into each of these rows, in the place of another one of it if that is not -1."""
        removed = added[rows, column]
        for row, each, sign in ((rows[removed >= 0], removed[removed >= 0], -1), (rows, sample, 1)):
            self.row_of[each] = row if sign > 0 else -1
            self.used[:, row] += sign * np.stack([self.tokens[each], self.patches[each]])
        added[rows, np.where(column > 0, column, 1 + turn % REPLACED)] = sample

    def _best(
        self, rows: Integers, free: Integers, added: Integers, turn: int
    ) -> tuple[Integers, Integers, Integers]:
        """The best exchange for each row.

        Args:
            free: samples to take, ascending by tokens.
            added: int64 [rows, n], samples of each row that may leave it; -1: none.

        Returns:
            How much better the row becomes, the sample that comes, and the column of the one that leaves.
        """
        mean = int(self.density * self.seq_len)
        room, lack = self.seq_len - self.used[0, rows], mean - self.used[1, rows]
        left = np.where(added >= 0, self.tokens[added], 0) + room[:, None]
        needed = np.where(added >= 0, self.patches[added], 0) + lack[:, None]
        allowed = needed + (self.budget - mean)

        sizes = self.tokens[free]
        end = np.searchsorted(sizes, left, side="right")
        # Rows with the same need look at different samples: in early rounds, at smaller ones too.
        near = sizes[np.maximum(end - 1, 0)] - self.seq_len // ALIKE - (left >> (1 + turn))
        alike = end - np.searchsorted(sizes, near) - CHOICES
        end -= (rows[:, None] * 7919) % np.maximum(alike, 1)
        choices = end[:, :, None] - 1 - np.arange(CHOICES)
        sample = free[np.maximum(choices, 0)]
        patches = self.patches[sample]
        cost = PATCH * (left[:, :, None] - self.tokens[sample]) + np.abs(needed[:, :, None] - patches)
        cost[(choices < 0) | (patches > allowed[:, :, None])] = MANY
        cost[:, 1:][added[:, 1:] < 0] = MANY

        flat = cost.reshape(len(rows), -1)
        best = flat.argmin(axis=1)
        gain = PATCH * room + np.abs(lack) - flat[np.arange(len(rows)), best]
        return gain, sample.reshape(len(rows), -1)[np.arange(len(rows)), best], best // CHOICES


def sorted_by(values: Integers) -> Integers:
    """The places of values in ascending order, equal ones as they come: a stable argsort that is faster."""
    count = max(len(values), 1)
    return np.sort(values * count + np.arange(len(values))) % count


def deal(
    row_of: Integers,
    sizes: Integers,
    rows: int,
    ranks: int,
    seq_len: int,
    max_patches: int = 0,
) -> Integers:
    """Deals rows to ranks, equally many to each, with about equal sums of patches.

    If whole rows do not make the sums equal, because a few of them have far more or fewer patches than
    others, single samples are exchanged between rows of two ranks. The samples of the step stay the same.

    Args:
        row_of: int64 [n], the row of each sample.
        sizes: int64 [2, n], their tokens and patches.
        rows: a multiple of ``ranks``.

    Returns:
        The new row of each sample, int64 [n]. Rank ``r`` has the rows from ``r * rows // ranks`` on.
    """
    used = np.stack([np.bincount(row_of, each, rows).astype(np.int64) for each in sizes])
    dealt = np.argsort(deal_rows(used[1], ranks), kind="stable")
    new_row = np.empty(rows, np.int64)
    new_row[dealt] = np.arange(rows)
    row_of = new_row[row_of]
    _even_out(row_of, sizes, used[:, dealt], ranks, seq_len, max_patches or MANY)
    return row_of


def deal_rows(patches: Integers, ranks: int) -> Integers:
    """The rank of each row, int64 [rows], so that ranks with equally many have about equal sums.

    Args:
        patches: int64 [rows] of each row; their number is a multiple of ``ranks``.
    """
    largest = sorted_by(-patches).reshape(-1, ranks)
    sums, rank_of = np.zeros(ranks, np.int64), np.zeros(len(patches), np.int64)
    for rows in largest:
        # The ranks with the least get the largest of the next rows.
        rank_of[rows] = sorted_by(sums)
        sums[rank_of[rows]] += patches[rows]
    # Whole rows change places if as many of them may be in a rank as before.
    share = np.full(ranks, len(largest))
    _even_out(
        rank_of,
        np.stack([np.ones_like(patches), patches]),
        np.stack([share, sums]),
        ranks,
        len(largest),
        MANY,
    )
    return rank_of


def _even_out(
    row_of: Integers, sizes: Integers, used: Integers, ranks: int, seq_len: int, budget: int
) -> None:
    """Exchanges samples between ranks, so that all have about equally many patches.

    In each round, every rank with too many or too few takes the exchange that brings it nearest to the mean.
    A rank whose rows hold a long text needs a little of many others: none falls below the mean by more than
    :data:`GIVEN` for that. Samples without tokens are in a row only to be counted, and stay there.

    Args:
        row_of: as :func:`deal` returns it; changed here.
        used: int64 [2, rows], tokens and patches of the rows; changed here.
    """
    share, (tokens, patches) = used.shape[1] // ranks, sizes
    by_tokens = sorted_by(tokens)
    by_tokens = by_tokens[tokens[by_tokens] > 0]
    ascending = tokens[by_tokens]
    offered = _largest(row_of // share, tokens, ranks)
    place = np.full(len(tokens), -1, np.int64)  # of a sample in `offered`
    place[offered[offered >= 0]] = np.flatnonzero(offered >= 0)
    sums = used[1].reshape(ranks, share).sum(axis=1)
    mean = int(sums.sum()) // ranks
    failed = np.zeros(ranks, np.int64)

    for turn in range(EXCHANGES):
        uneven = (sums > mean * (1 + EVEN)) | (sums < mean * (1 - FEWER))
        urgent = np.flatnonzero(uneven & (failed < TRIES))
        urgent = urgent[sorted_by(-np.abs(sums[urgent] - mean))][:AT_ONCE]
        if not len(urgent):
            return

        # [ranks, samples that may leave, samples that may come]
        leave = offered[urgent]
        left = np.array([[seq_len], [budget]]) - used
        here = left[:, row_of[leave]]
        end = np.searchsorted(ascending, tokens[leave] + here[0], side="right")
        alike = end - np.searchsorted(ascending, tokens[leave] - seq_len // ALIKE) - PARTNERS
        end -= (7919 * (leave + turn)) % np.maximum(alike, 1)
        choices = end[:, :, None] - 1 - np.arange(PARTNERS)
        come = by_tokens[np.maximum(choices, 0)]
        row = row_of[come]
        more, leave, here = patches[come] - patches[leave][:, :, None], leave[:, :, None], here[:, :, :, None]
        after = sums[row // share] - more
        fits = (choices >= 0) & (leave >= 0) & (row // share != urgent[:, None, None])
        fits &= (tokens[leave] - tokens[come] <= left[0, row]) & (more <= here[1]) & (-more <= left[1, row])
        fits &= (more < 0) | (after >= mean * (1 - GIVEN))
        away = np.abs(sums[urgent] - mean)
        # The larger distance of the two ranks from the mean.
        cost = np.abs(np.where(more > 0, 0, after - mean))
        cost = np.maximum(cost, np.abs((sums[urgent] - mean)[:, None, None] + more))
        cost = np.where(fits, cost, MANY).reshape(len(urgent), -1)

        best = cost.argmin(axis=1)
        gain = away - cost[np.arange(len(urgent)), best]
        failed[urgent] = np.where(gain > 0, 0, failed[urgent] + 1)
        best, mover, gain = best[gain > 0], urgent[gain > 0], gain[gain > 0]
        came = come.reshape(len(urgent), -1)[np.isin(urgent, mover), best]
        left_at = best // PARTNERS
        partner = row_of[came] // share
        best_last = sorted_by(gain)
        claim = np.full(ranks, -1, np.int64)
        claim[np.stack([mover, partner])[:, best_last].T.ravel()] = np.repeat(best_last, 2)
        won = (claim[mover] == np.arange(len(mover))) & (claim[partner] == np.arange(len(mover)))

        mover, partner, came, went = mover[won], partner[won], came[won], offered[mover, left_at][won]
        change = sizes[:, came] - sizes[:, went]
        used[:, row_of[went]] += change
        used[:, row_of[came]] -= change
        sums[mover] += change[1]
        sums[partner] -= change[1]
        row_of[went], row_of[came] = row_of[came], row_of[went]
        place[went], place[came] = place[came], place[went]
        for each in (went, came):
            offered.flat[place[each[place[each] >= 0]]] = each[place[each] >= 0]


def _largest(rank_of: Integers, tokens: Integers, ranks: int) -> Integers:
    """The largest samples of each rank, int64 [ranks, n]; -1 if there are fewer. They have tokens."""
    order = np.flatnonzero(tokens)
    order = order[np.lexsort((-tokens[order], rank_of[order]))]
    counts = np.bincount(rank_of[order], minlength=ranks)
    number = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    found = np.full((ranks, min(int(counts.max(initial=0)), OFFERED)), -1, np.int64)
    large = number < OFFERED
    found[rank_of[order[large]], number[large]] = order[large]
    return found


EVEN = 0.01
"""Share by which the largest sum may exceed the mean."""
FEWER = 0.02
"""Share by which the smallest sum may fall short of the mean."""
GIVEN = 0.03
"""Share of the mean below which no rank gives samples to one with far fewer patches."""
EXCHANGES = 64
"""Largest number of rounds in which ranks exchange samples."""
TRIES = 4
"""Number of rounds without an exchange after which a rank stays as it is."""
AT_ONCE = 256
"""Largest number of ranks that look for an exchange in a round: those that are farthest from the mean."""
OFFERED = 40
"""Number of its largest samples that a rank exchanges."""
PARTNERS = 48
"""Number of samples of about the same size that may come for one of them."""
MANY = 1 << 40
"""More patches than any row has."""
