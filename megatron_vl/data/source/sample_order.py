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
FEISTEL_ROUNDS = 6
LANES = 64
"""Number of blocks from which samples are drawn in turn."""


def _hash_values(hashed_values: NDArray[np.uint64], hash_key_value: int) -> NDArray[np.uint64]:
    """A hash of 64 bits (the finalizer of SplitMix64)."""
    with np.errstate(over="ignore"):
        mixed_bits = hashed_values + np.uint64((hash_key_value * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF)
        mixed_bits = (mixed_bits ^ (mixed_bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed_bits = (mixed_bits ^ (mixed_bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed_bits ^ (mixed_bits >> np.uint64(31))


@lru_cache(maxsize=1024)
def combine_hash_key(*key_numbers: int) -> int:
    """A key of 64 bits that depends on every number and on their order."""
    key = 0
    for number in key_numbers:
        hashed_number = _hash_values(np.array([(key ^ number) & 0xFFFFFFFFFFFFFFFF], np.uint64), 1)
        key = int(hashed_number[0])
    return key


def _key_number(source_key: str) -> int:
    return int.from_bytes(hashlib.sha256(source_key.encode()).digest()[:8], "little")


def permute_positions(
    positions: Integers, range_size: int, permutation_key: int, families: Integers | None = None
) -> Integers:
    """The places of positions in a permutation of ``range(size)``.

    It is a Feistel network on the smallest even number of bits that holds ``range_size``. A result outside the
    range goes through the network again, which keeps the map one to one.

    Args:
        positions: int64 [n], each below ``range_size``.
        permutation_key: chooses the permutation.
        families: int64 [n], a number that chooses a permutation for each position. Left out: all have one.
    """
    half_bits = max(1, -(-max(range_size - 1, 1).bit_length() // 2))
    half_mask, half_shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    permuted_values = positions.astype(np.uint64)
    outside_indices = np.arange(len(permuted_values))
    tweaks = (
        np.zeros(1, np.uint64)
        if families is None
        else _hash_values(families.astype(np.uint64), permutation_key)
    )
    while len(outside_indices):
        tweak = tweaks if families is None else tweaks[outside_indices]
        left_half, right_half = (
            permuted_values[outside_indices] >> half_shift,
            permuted_values[outside_indices] & half_mask,
        )
        for round_number in range(FEISTEL_ROUNDS):
            left_half, right_half = (
                right_half,
                left_half
                ^ (
                    _hash_values(right_half ^ tweak, combine_hash_key(permutation_key, round_number))
                    & half_mask
                ),
            )
        permuted_values[outside_indices] = (left_half << half_shift) | right_half
        outside_indices = outside_indices[permuted_values[outside_indices] >= range_size]
    return permuted_values.astype(np.int64)


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
            turns * LANES
            + permute_positions(positions[last] - turns * LANES, rest, combine_hash_key(key, 1)),
            self.block,
        )

        full = numbers < whole
        numbers[full] = permute_positions(numbers[full], whole, key)
        if self.block > 1:
            within[full] = permute_positions(
                within[full], self.block, combine_hash_key(key, 2), numbers[full]
            )
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
        sample_counts: number of samples of each data set.
        source_weights: share of the draws that each gets.
        seed: of the run.
        is_shuffled: off keeps the order of each data set.
        source_keys: what each data set is known by. It decides the data set's order, which is the same at any
            position of a blend. Left out: its position.
        first_indices: index of the first sample of each data set. Left out: 0.
        a_pass: number of draws from each data set in one pass of a blend by repetitions; 0 for all, or left
            out: the weights decide.
        shards: for each data set, int64 [shards] with the samples of each shard. Left out: each is one shard.
        block: as for :class:`BlockOrder`.
    """

    def __init__(
        self,
        sample_counts: Sequence[int],
        source_weights: Sequence[float],
        seed: int,
        *,
        is_shuffled: bool,
        source_keys: Sequence[str] | None = None,
        first_indices: Sequence[int] | None = None,
        draws_per_pass: Sequence[int] | None = None,
        shards: Sequence[Integers] | None = None,
        block: int = 1,
    ) -> None:
        self.sample_counts, self.seed, self.is_shuffled = list(sample_counts), seed, is_shuffled
        self.source_weights = list(source_weights)
        self.source_keys = list(source_keys or map(str, range(len(sample_counts))))
        self.first_indices = list(first_indices or [0] * len(sample_counts))
        self._source_numbers = [_key_number(key) for key in self.source_keys]
        self._orders = [
            BlockOrder(each, block)
            for each in shards or [np.array([size], np.int64) for size in sample_counts]
        ]
        self._pass_bounds = np.cumsum(draws_per_pass or [0])
        self._weight_bounds = np.cumsum(np.array(source_weights, np.float64) / sum(source_weights))
        self.draw_counts = [0] * len(sample_counts)
        """Number of draws from each data set so far."""
        self.total_draws = 0
        """Number of all draws, those from data sets of before included."""

    def draw_samples(self, draw_count: int) -> tuple[Integers, Integers]:
        """The next samples: data set and number of the draw from it, int64 [count] each."""
        first_draw = self.total_draws
        self.total_draws += draw_count
        sources = self._choose_sources(np.arange(first_draw, first_draw + draw_count))
        draw_numbers = np.zeros(draw_count, np.int64)
        for source in np.unique(sources).tolist():
            own_positions = np.flatnonzero(sources == source)
            draw_numbers[own_positions] = self.draw_counts[source] + np.arange(len(own_positions))
            self.draw_counts[source] += len(own_positions)
        return sources, draw_numbers

    def _choose_sources(self, draw_positions: Integers) -> Integers:
        """The data set of each draw."""
        if len(self.sample_counts) == 1:
            return np.zeros(len(draw_positions), np.int64)
        if pass_size := int(self._pass_bounds[-1]):
            pass_numbers, pass_positions = np.divmod(draw_positions, pass_size)
            for pass_number in np.unique(pass_numbers).tolist():
                is_in_pass = pass_numbers == pass_number
                pass_positions[is_in_pass] = permute_positions(
                    pass_positions[is_in_pass], pass_size, combine_hash_key(self.seed, 3, pass_number)
                )
            return np.searchsorted(self._pass_bounds, pass_positions, side="right")

        hashed_draws = _hash_values(draw_positions.astype(np.uint64), combine_hash_key(self.seed, 1))
        chosen_sources = np.searchsorted(self._weight_bounds, hashed_draws / 2.0**64, side="right")
        return np.minimum(chosen_sources, len(self.sample_counts) - 1)

    def sample_indices(self, source_indices: Integers, draw_numbers: Integers) -> Integers:
        """The samples of draws: their indices in their data sets, int64 [n]."""
        sample_indices = np.zeros(len(source_indices), np.int64)
        for source in np.unique(source_indices).tolist():
            size = self.sample_counts[source]
            epoch_numbers, epoch_positions = np.divmod(draw_numbers, size)
            for epoch_number in np.unique(epoch_numbers[source_indices == source]).tolist():
                is_own_epoch = (source_indices == source) & (epoch_numbers == epoch_number)
                key = combine_hash_key(self.seed, 2, self._source_numbers[source], epoch_number)
                order = self._orders[source]
                sample_indices[is_own_epoch] = (
                    order.samples(epoch_positions[is_own_epoch], key)
                    if self.is_shuffled
                    else epoch_positions[is_own_epoch]
                )
            sample_indices[source_indices == source] += self.first_indices[source]
        return sample_indices
