"""The order in which a run draws samples whose sizes are known: any position can be looked up at once.

Each data set is shuffled anew for each epoch by permutations that are computed, not stored: four positions
take as long as four in a data set of 10^8 samples. What is shuffled are blocks of successive samples of a
shard, so that storage sees few large reads (:class:`BlockOrder`). Data sets of a blend by weights are chosen
by a hash of the draw's number. One pass of a blend by repetitions is a permutation too: each data set comes
exactly as often as it repeats. Nothing depends on ranks or processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
ROUNDS = 6
LANES = 64
"""Number of blocks from which samples are drawn in turn."""


def _mixed(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """A hash of 64 bits (the finalizer of SplitMix64)."""
    with np.errstate(over="ignore"):
        mixed = values + np.uint64((key * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


@lru_cache(maxsize=1024)
def key_of(*numbers: int) -> int:
    """A key of 64 bits that depends on every number and on their order."""
    key = 0
    for number in numbers:
        mixed = _mixed(np.array([(key ^ number) & 0xFFFFFFFFFFFFFFFF], np.uint64), 1)
        key = int(mixed[0])
    return key


def _number(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")


def permuted(positions: Integers, size: int, key: int, families: Integers | None = None) -> Integers:
    """The places of positions in a permutation of ``range(size)``.

    It is a Feistel network on the smallest even number of bits that holds ``size``. A result outside the
    range goes through the network again, which keeps the map one to one.

    Args:
        positions: int64 [n], each below ``size``.
        key: chooses the permutation.
        families: int64 [n], a number that chooses a permutation for each position. Left out: all have one.
    """
    half = max(1, -(-max(size - 1, 1).bit_length() // 2))
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    found = positions.astype(np.uint64)
    outside = np.arange(len(found))
    tweaks = np.zeros(1, np.uint64) if families is None else _mixed(families.astype(np.uint64), key)
    while len(outside):
        tweak = tweaks if families is None else tweaks[outside]
        left, right = found[outside] >> shift, found[outside] & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (_mixed(right ^ tweak, key_of(key, number)) & mask)
        found[outside] = (left << shift) | right
        outside = outside[found[outside] >= size]
    return found.astype(np.int64)


class BlockOrder:
    """The order of one data set in an epoch, by blocks of successive samples of a shard.

    Each of :data:`LANES` lanes gives a sample in turn. A lane takes one block after the other, at random and
    each in an order of its own; lanes begin their blocks one after the other, so that new blocks are needed
    at a steady rate. A block is used up within ``LANES * block`` draws. The blocks that do not fill all lanes
    come last, and their samples in any order.

    What is left at the end of a shard is less than a block: these ends are put together to blocks. The last
    one of them may be shorter, and is among the samples that come last.

    Args:
        shards: int64 [shards], number of samples of each.
        block: samples of a block; 1: every sample is drawn on its own. One that is larger than the largest
            shard counts as that shard.
    """

    def __init__(self, shards: Integers, block: int) -> None:
        self.size = int(shards.sum())
        self.block = min(block, max(int(shards.max(initial=1)), 1))
        self._starts = np.cumsum(shards) - shards
        blocks, ends = np.divmod(shards, self.block)
        self._blocks, self._ends = np.cumsum(blocks), np.cumsum(ends)
        """Number of whole blocks, and of samples in the ends, of all shards up to each."""
        self._first_ends = self._starts + blocks * self.block

    def samples(self, positions: Integers, key: int) -> Integers:
        """The samples at positions of an epoch, int64 [n].

        Args:
            positions: int64 [n], each below the number of samples.
            key: of the epoch.
        """
        whole = self.size // self.block
        turns = whole // LANES * self.block  # of each lane
        rounds, lanes = np.divmod(positions, LANES)
        rounds = (rounds + lanes * self.block // LANES) % max(turns, 1)
        numbers, within = rounds // self.block * LANES + lanes, rounds % self.block

        last = positions >= turns * LANES
        rest = self.size - turns * LANES
        numbers[last], within[last] = np.divmod(
            turns * LANES + permuted(positions[last] - turns * LANES, rest, key_of(key, 1)), self.block
        )

        full = numbers < whole
        numbers[full] = permuted(numbers[full], whole, key)
        if self.block > 1:
            within[full] = permuted(within[full], self.block, key_of(key, 2), numbers[full])
        return self._sample(numbers * self.block + within)

    def _sample(self, places: Integers) -> Integers:
        """The samples at places of the list of all whole blocks and then of all shards' ends."""
        in_blocks = int(self._blocks[-1]) * self.block
        whole = places < in_blocks
        samples = np.empty_like(places)

        numbers, within = np.divmod(places[whole], self.block)
        shards, numbers = _located(numbers, self._blocks)
        samples[whole] = self._starts[shards] + numbers * self.block + within

        shards, numbers = _located(places[~whole] - in_blocks, self._ends)
        samples[~whole] = self._first_ends[shards] + numbers
        return samples


def _located(numbers: Integers, counts: Integers) -> tuple[Integers, Integers]:
    """The shard of each number, and its number in it.

    Args:
        counts: int64 [shards], how many there are in all shards up to each.
    """
    shards = np.searchsorted(counts, numbers, side="right")
    return shards, numbers - np.where(shards > 0, counts[shards - 1], 0)


class SampleOrder:
    """Draws samples from data sets, without end.

    Args:
        sizes: number of samples of each data set.
        weights: share of the draws that each gets.
        seed: of the run.
        shuffled: off keeps the order of each data set.
        keys: what each data set is known by. It decides the data set's order, which is the same at any
            position of a blend. Left out: its position.
        firsts: index of the first sample of each data set. Left out: 0.
        a_pass: number of draws from each data set in one pass of a blend by repetitions; 0 for all, or left
            out: the weights decide.
        shards: for each data set, int64 [shards] with the samples of each shard. Left out: each is one shard.
        block: as for :class:`BlockOrder`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        seed: int,
        *,
        shuffled: bool,
        keys: Sequence[str] | None = None,
        firsts: Sequence[int] | None = None,
        a_pass: Sequence[int] | None = None,
        shards: Sequence[Integers] | None = None,
        block: int = 1,
    ) -> None:
        self.sizes, self.seed, self.shuffled = list(sizes), seed, shuffled
        self.weights = list(weights)
        self.keys = list(keys or map(str, range(len(sizes))))
        self.firsts = list(firsts or [0] * len(sizes))
        self._numbers = [_number(key) for key in self.keys]
        self._orders = [
            BlockOrder(each, block) for each in shards or [np.array([size], np.int64) for size in sizes]
        ]
        self._pass_bounds = np.cumsum(a_pass or [0])
        self._bounds = np.cumsum(np.array(weights, np.float64) / sum(weights))
        self.drawn = [0] * len(sizes)
        """Number of draws from each data set so far."""
        self.total = 0
        """Number of all draws, those from data sets of before included."""

    def draw(self, count: int) -> tuple[Integers, Integers]:
        """The next samples: data set and number of the draw from it, int64 [count] each."""
        first = self.total
        self.total += count
        sources = self._chosen(np.arange(first, first + count))
        numbers = np.zeros(count, np.int64)
        for source in np.unique(sources).tolist():
            own = np.flatnonzero(sources == source)
            numbers[own] = self.drawn[source] + np.arange(len(own))
            self.drawn[source] += len(own)
        return sources, numbers

    def _chosen(self, draws: Integers) -> Integers:
        """The data set of each draw."""
        if len(self.sizes) == 1:
            return np.zeros(len(draws), np.int64)
        if size := int(self._pass_bounds[-1]):
            passes, places = np.divmod(draws, size)
            for number in np.unique(passes).tolist():
                inside = passes == number
                places[inside] = permuted(places[inside], size, key_of(self.seed, 3, number))
            return np.searchsorted(self._pass_bounds, places, side="right")

        hashed = _mixed(draws.astype(np.uint64), key_of(self.seed, 1))
        chosen = np.searchsorted(self._bounds, hashed / 2.0**64, side="right")
        return np.minimum(chosen, len(self.sizes) - 1)

    def indices(self, sources: Integers, numbers: Integers) -> Integers:
        """The samples of draws: their indices in their data sets, int64 [n]."""
        found = np.zeros(len(sources), np.int64)
        for source in np.unique(sources).tolist():
            size = self.sizes[source]
            epochs, places = np.divmod(numbers, size)
            for epoch in np.unique(epochs[sources == source]).tolist():
                own = (sources == source) & (epochs == epoch)
                key = key_of(self.seed, 2, self._numbers[source], epoch)
                order = self._orders[source]
                found[own] = order.samples(places[own], key) if self.shuffled else places[own]
            found[sources == source] += self.firsts[source]
        return found
