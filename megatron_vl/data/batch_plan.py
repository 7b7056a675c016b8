"""Plans which samples share a row, and which rank takes which rows of a step, from sizes alone.

All rows of a global batch are planned together, so that they have about as many patches each, and then dealt
to the ranks so that the sums are equal. The result depends only on the sizes, so that every rank computes the
same without a message. Rows do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from megatron_vl.data.balance import balance
from megatron_vl.data.packing import fill_row

Integers = NDArray[np.int64]

AHEAD = 1.5
"""Tokens of the samples to choose from, as a multiple of those that a step takes."""
SPREAD = 0.92
"""Share of a step's tokens that is placed by age. The others are chosen to fill the rows."""
CHOICES = 48
"""Number of samples among which the last ones of a row are chosen."""
GROUP = 256
"""Largest number of rows that are planned together: the work for each sample grows with it."""
ABOVE = (0.02, 0.1, 0.4)
"""Shares by which a row may exceed the mean number of patches for its last samples: at first, and then if
many of its tokens would be padding. Ranks are evened out later."""
PADDING = 0.005
"""Share of a row's tokens that is many."""


def plan_rows(
    tokens: Integers, patches: Integers, rows: int, seq_len: int, max_patches: int = 0
) -> list[list[int]]:
    """Chooses the samples of the next ``rows`` rows.

    Rows have at most ``seq_len`` tokens and ``max_patches`` patches, and otherwise about the mean number of
    patches. The oldest sample is always taken, so that none waits without end.

    Args:
        tokens, patches: int64 [n], sizes of the waiting samples, the oldest first; none exceeds a row.
        max_patches: 0: no limit.

    Returns:
        For each row its samples, ascending. A row is empty only if there are too few samples.
    """
    density = float(patches.sum()) / max(float(tokens.sum()), 1.0)
    groups = -(-rows // GROUP)
    found: list[list[int]] = []
    for number, own in enumerate(_groups(tokens, patches, groups)):
        size = (rows * (number + 1)) // groups - (rows * number) // groups
        chosen = _plan_group(tokens[own], patches[own], size, seq_len, max_patches, density)
        found += [own[row].tolist() for row in chosen]
    return found


def _groups(tokens: Integers, patches: Integers, count: int) -> list[Integers]:
    """Divides samples into groups with about equal sums of patches and of tokens, each in order of age."""
    if count == 1:
        return [np.arange(len(tokens))]
    order = np.lexsort((-tokens, -patches))
    # There and back again, so that no group always gets the larger of two neighbours.
    turns = np.arange(len(order)) % (2 * count)
    group = np.minimum(turns, 2 * count - 1 - turns)
    return [np.sort(order[group == number]) for number in range(count)]


def _plan_group(
    tokens: Integers, patches: Integers, rows: int, seq_len: int, max_patches: int, density: float
) -> list[list[int]]:
    """Rows of one group. Old samples are spread over the rows, the largest first; others fill the rest.

    Args:
        density: patches per token of all waiting samples.
    """
    old = int(np.searchsorted(np.cumsum(tokens), SPREAD * rows * seq_len))
    order = np.argsort(-tokens[1:old], kind="stable") + 1
    found: list[list[int]] = [[] for _ in range(rows)]
    used_tokens, used_patches = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    budget = max_patches or np.iinfo(np.int64).max

    placed = set()
    for sample in [0, *order.tolist()] if len(tokens) else []:
        after_tokens, after_patches = used_tokens + tokens[sample], used_patches + patches[sample]
        # A row in which patches grow with the tokens has the mean of both at its end.
        excess = np.abs(after_patches - density * after_tokens)
        excess[(after_tokens > seq_len) | (after_patches > budget)] = np.inf
        # Of rows that are as near, the one with the least tokens: in a step of text alone, all are as near.
        nearest = np.flatnonzero(excess == excess.min())
        row = int(nearest[used_tokens[nearest].argmin()])
        if excess[row] < np.inf:
            placed.add(sample)
            found[row].append(sample)
            used_tokens[row], used_patches[row] = after_tokens[row], after_patches[row]

    is_free = np.ones(len(tokens), bool)
    is_free[list(placed)] = False
    free = np.flatnonzero(is_free)
    mean = density * seq_len
    for above, row in product(ABOVE, np.argsort(used_patches, kind="stable").tolist()):
        if above != ABOVE[0] and used_tokens[row] >= (1 - PADDING) * seq_len:
            continue
        most = min(budget, max(int(mean * (1 + above)), int(used_patches[row])))
        used = int(used_tokens[row]), int(used_patches[row])
        filled = _fill(tokens, patches, free, used, seq_len, mean, most)
        found[row] += filled
        used_tokens[row] += tokens[filled].sum()
        used_patches[row] += patches[filled].sum()
        is_free[filled] = False
        free = free[is_free[free]]
    return [sorted(row) for row in found]


def _fill(
    tokens: Integers,
    patches: Integers,
    free: Integers,
    used: tuple[int, int],
    seq_len: int,
    mean: float,
    most: int,
) -> list[int]:
    """The samples that fill a row best, chosen from those that bring it to the mean number of patches.

    Args:
        used: tokens and patches of the row so far.
        mean, most: patches that a row should have, and may have.
    """
    room = seq_len - used[0]
    free = free[(tokens[free] <= room) & (patches[free] <= most - used[1])]
    if not len(free):
        return []
    # Whichever of them are chosen, the row then needs as many patches for each of the tokens that are left.
    needed = max(mean - used[1], 0.0) / max(room, 1)
    away = np.abs(patches[free] - needed * tokens[free])
    choices = np.sort(free[np.argsort(away, kind="stable")[:CHOICES]])
    sizes = [used, *zip(tokens[choices].tolist(), patches[choices].tolist(), strict=True)]
    # A limit of 0 patches would mean none.
    chosen = fill_row(sizes, seq_len, max(most, 1))
    return [int(choices[number - 1]) for number in chosen[1:]]


type Sized = tuple[int, int]
"""Tokens and patches of a sample."""


def deal(rows: list[list[Sized]], ranks: int, seq_len: int, max_patches: int = 0) -> Dealt:
    """Deals rows to ranks, equally many to each, with about equal sums of patches.

    If whole rows do not make the sums equal, because a few of them have far more or fewer patches than
    others, single samples are exchanged between rows of two ranks. The samples of the step stay the same.

    Args:
        rows: the samples of each row; there are a multiple of ``ranks`` rows.

    Returns:
        For each rank its rows, each as a list of samples: the row that it was in, and its place there.
    """
    dealt = deal_rows([sum(patches for _, patches in row) for row in rows], ranks)
    found = [[[(row, place) for place in range(len(rows[row]))] for row in own] for own in dealt]
    sums = np.array([sum(rows[row][place][1] for part in own for row, place in part) for own in found])

    evening = _Evening(rows, found, sums, seq_len, max_patches)
    evening.lower_the_fullest()
    evening.raise_the_emptiest()
    return found


type Dealt = list[list[list[tuple[int, int]]]]
"""For each rank its rows, each as a list of samples: the row that it was in, and its place there."""


@dataclass(frozen=True)
class _Evening:
    """Exchanges samples between ranks, so that all have about equally many patches."""

    rows: list[list[Sized]]
    found: Dealt
    sums: Integers
    """Patches of each rank."""
    seq_len: int
    max_patches: int
    _offers: dict[int, _Offers] = field(default_factory=dict)
    """Those of each rank that was asked since its rows changed."""

    def lower_the_fullest(self) -> None:
        """Exchanges until no rank has many more patches than the mean. Others wait for the fullest one."""
        sums = self.sums
        for _ in range(EXCHANGES * len(sums)):
            heavy = int(sums.argmax())
            if sums[heavy] <= sums.mean() * (1 + EVEN):
                return
            lights = np.argsort(sums, kind="stable")[:PARTNERS].tolist()
            if not self._first((heavy, light, int(sums[heavy] - sums[light]) // 2) for light in lights):
                return

    def raise_the_emptiest(self) -> None:
        """Exchanges until no rank has far fewer patches than the mean.

        A rank whose rows hold a long text needs a little of many others. None of them falls below the mean by
        more than :data:`GIVEN` for that, and the rank does not rise above the mean. A rank stays as it is if
        no samples suit.
        """
        sums, mean = self.sums, float(self.sums.mean())
        stuck = np.zeros(len(sums), bool)
        for _ in range(EXCHANGES * len(sums)):
            light = int(np.where(stuck, MANY, sums).argmin())
            if stuck[light] or sums[light] >= mean * (1 - FEWER):
                return
            heavies = np.argsort(-sums, kind="stable")[:GIVERS].tolist()
            lacking, least = mean - sums[light], mean * (1 - GIVEN)
            most = {heavy: int(min(sums[heavy] - least, lacking)) for heavy in heavies}
            stuck[light] = not self._first((heavy, light, most[heavy] // 2) for heavy in heavies)

    def _first(self, wanted: Iterable[tuple[int, int, int]]) -> bool:
        """Makes the first exchange that is possible.

        Args:
            wanted: the ranks that have more and fewer patches, and how many should move.
        """
        for heavy, light, patches in wanted:
            moved = self._exchange(heavy, light, patches)
            if moved:
                self.sums[heavy] -= moved
                self.sums[light] += moved
                return True
        return False

    def _exchange(self, heavy: int, light: int, wanted: int) -> int:
        """Exchanges one or two samples of a row of each of two ranks, so that about ``wanted`` patches move.

        Returns how many patches moved; 0: no exchange helps.
        """
        given, taken = self._offers_of(heavy), self._offers_of(light)
        if not len(given.rows) or not len(taken.rows):
            return 0

        more_tokens, more_patches = (
            np.subtract.outer(given.sizes[:, unit], taken.sizes[:, unit]) for unit in (0, 1)
        )
        fits = (more_tokens <= taken.left[:, 0]) & (-more_tokens <= given.left[:, :1])
        fits &= (more_patches <= taken.left[:, 1]) & (more_patches > 0) & (more_patches < 2 * wanted)
        if not fits.any():
            return 0
        away = np.where(fits, np.abs(more_patches - wanted), MANY)
        one, other = map(int, np.unravel_index(int(away.argmin()), away.shape))

        here, there = self.found[heavy][given.rows[one]], self.found[light][taken.rows[other]]
        leave = [here[place] for place in given.places_of(one)]
        come = [there[place] for place in taken.places_of(other)]
        here[:] = [at for at in here if at not in leave] + come
        there[:] = [at for at in there if at not in come] + leave
        del self._offers[heavy], self._offers[light]
        return int(more_patches[one, other])

    def _offers_of(self, rank: int) -> _Offers:
        if rank not in self._offers:
            self._offers[rank] = _offers(self.rows, self.found[rank], self.seq_len, self.max_patches)
        return self._offers[rank]


EVEN = 0.01
"""Share by which the largest sum may exceed the mean."""
FEWER = 0.04
"""Share by which the smallest sum may fall short of the mean."""
GIVEN = 0.04
"""Share of the mean below which no rank gives samples to one with far fewer patches."""
EXCHANGES = 4
"""Largest number of exchanges for each rank."""
PARTNERS, GIVERS = 4, 16
"""Number of ranks with the least patches, and of ranks with the most, to try as partners."""


@dataclass(frozen=True)
class _Offers:
    """What a rank can give: one sample of a row, or two."""

    rows: Integers
    """[n], the row of each offer, by its number in the rank."""
    places: Integers
    """[n, 2], places of the samples in the row; the second is -1 if there is only one."""
    sizes: Integers
    """[n, 2], tokens and patches of the samples."""
    left: Integers
    """[n, 2], tokens and patches for which the row has room."""

    def places_of(self, offer: int) -> list[int]:
        return [place for place in self.places[offer].tolist() if place >= 0]


def _offers(
    rows: list[list[Sized]], own: list[list[tuple[int, int]]], seq_len: int, max_patches: int
) -> _Offers:
    """All offers of a rank: single samples, and pairs of the larger ones of a row.

    Samples without tokens are in a row only to be counted, and stay there.
    """
    found = []
    for number, part in enumerate(own):
        sizes = np.array([rows[row][place] for row, place in part], np.int64).reshape(-1, 2)
        tokens, patches = sizes.sum(axis=0).tolist()
        left = seq_len - tokens, (max_patches or patches + MANY) - patches

        real = np.flatnonzero(sizes[:, 0])
        larger = real[np.argsort(-sizes[real, 0], kind="stable")[:PAIRED]]
        singles = np.stack([real, np.full(len(real), -1)], axis=1)
        places = np.concatenate([singles, larger[_pairs(len(larger))]])
        both = np.concatenate([sizes[real], sizes[places[len(real) :]].sum(axis=1)])
        found.append((np.full(len(places), number), places, both, np.tile(left, (len(places), 1))))

    return _Offers(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


@cache
def _pairs(count: int) -> Integers:
    """All pairs of the numbers below ``count``, int64 [count (count - 1) / 2, 2], in order."""
    return np.stack(np.triu_indices(count, 1), axis=1)


PAIRED = 12
"""Number of samples of a row that are offered in pairs."""
MANY = 1 << 40
"""More patches than any row has."""


def deal_rows(patches: Iterable[int], ranks: int) -> list[list[int]]:
    """The rows that each rank takes, equally many, with about equal sums of patches.

    Args:
        patches: of each row; their number is a multiple of ``ranks``.
    """
    costs = list(patches)
    order = sorted(range(len(costs)), key=lambda row: (-costs[row], row))
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for first in range(0, len(order), ranks):
        # The ranks with the least get the largest of the next rows.
        by_sum = sorted(range(ranks), key=lambda rank: (sums[rank], rank))
        for rank, row in zip(by_sum, order[first : first + ranks], strict=True):
            dealt[rank].append(row)
            sums[rank] += costs[row]
    places = balance([[costs[row] for row in own] for own in dealt])
    return [[dealt[place.rank][place.row] for place in own] for own in places]
