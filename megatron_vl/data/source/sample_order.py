"""The order in which a run draws samples whose sizes are known: any position can be looked up at once.

Each data set is shuffled again for each epoch by permutations that are computed, not stored, so the time for
a look-up does not grow with the data set. Blocks of successive samples of a shard are shuffled, so that
storage sees few large reads (:class:`BlockOrder`). In a blend by weights, a hash of the draw's number chooses
the data set. One pass of a blend by repetitions is a permutation too: each data set comes exactly as often as
it repeats. Nothing depends on ranks or processes.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
FEISTEL_ROUNDS = 6
LANES = 64
"""Number of blocks of a data set from which samples are drawn in turn."""


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
        key = int(_hash_values(np.array([(key ^ number) & 0xFFFFFFFFFFFFFFFF], np.uint64), 1)[0])
    return key


def permute_positions(
    positions: Integers, range_size: int, permutation_key: int, families: Integers | None = None
) -> Integers:
    """The images of positions under a permutation of ``range(range_size)``, int64 [n].

    It is a Feistel network on the smallest even number of bits that holds ``range_size``. A result outside
    the range goes through the network again, which keeps the map one to one.

    Args:
        positions: int64 [n], each below ``range_size``.
        permutation_key: chooses the permutation.
        families: int64 [n]. Positions with different numbers use different permutations. None: all positions
            use the same one.
    """
    half_bits = max(1, -(-max(range_size - 1, 1).bit_length() // 2))
    half_mask = np.uint64((1 << half_bits) - 1)
    half_shift = np.uint64(half_bits)
    permuted_values = positions.astype(np.uint64)
    outside_indices = np.arange(len(permuted_values))
    tweaks = np.zeros(1, np.uint64)
    if families is not None:
        tweaks = _hash_values(families.astype(np.uint64), permutation_key)

    # On average, less than three quarters of the values are outside after each pass.
    while len(outside_indices):
        tweak = tweaks if families is None else tweaks[outside_indices]
        left_half = permuted_values[outside_indices] >> half_shift
        right_half = permuted_values[outside_indices] & half_mask
        for round_number in range(FEISTEL_ROUNDS):
            mixed_half = _hash_values(right_half ^ tweak, combine_hash_key(permutation_key, round_number))
            left_half, right_half = right_half, left_half ^ mixed_half & half_mask
        permuted_values[outside_indices] = (left_half << half_shift) | right_half
        outside_indices = outside_indices[permuted_values[outside_indices] >= range_size]
    return permuted_values.astype(np.int64)


class BlockOrder:
    """The order of one data set in an epoch, by blocks of successive samples of a shard.

    Samples come from :data:`LANES` lanes in turn. A lane uses up one block after the other. The blocks are in
    random order, and so are the samples of each block. Lanes begin new blocks at different times, so that
    storage is read at a steady rate. A block is used up within ``LANES * block_size`` draws. Some blocks are
    left that do not fill all lanes. They come last, with their samples in any order.

    The samples at the end of a shard that do not fill a block are put together with those of other shards
    into blocks. The last such block may be shorter. It is among the samples that come last.

    Args:
        shard_sizes: int64 [shards], number of samples of each shard.
        block_size: number of samples of a block. With 1, every sample is drawn on its own. The largest shard
            is the limit.
    """

    def __init__(self, shard_sizes: Integers, block_size: int) -> None:
        self.size = int(shard_sizes.sum())
        self.block_size = min(block_size, max(int(shard_sizes.max(initial=1)), 1))
        self._shard_starts = np.cumsum(shard_sizes) - shard_sizes
        block_counts, end_sizes = np.divmod(shard_sizes, self.block_size)
        self._cumulative_blocks = np.cumsum(block_counts)
        """int64 [shards]: number of whole blocks of all shards up to each, itself included."""
        self._cumulative_ends = np.cumsum(end_sizes)
        """int64 [shards]: number of samples in the ends of all shards up to each, itself included."""
        self._end_starts = self._shard_starts + block_counts * self.block_size

    def samples(self, positions: Integers, epoch_key: int) -> Integers:
        """The samples at positions of an epoch, int64 [n].

        Args:
            positions: int64 [n], each below the number of samples.
            epoch_key: chooses the order of the epoch.
        """
        # Each position has a lane and a turn in it. Lanes are shifted against each other by parts of a block.
        block_count = self.size // self.block_size
        turns_per_lane = block_count // LANES * self.block_size
        turns, lanes = np.divmod(positions, LANES)
        turns = (turns + lanes * self.block_size // LANES) % max(turns_per_lane, 1)
        blocks = turns // self.block_size * LANES + lanes
        offsets = turns % self.block_size

        # What does not fill all lanes comes last, sample by sample.
        first_of_rest = turns_per_lane * LANES
        is_rest = positions >= first_of_rest
        rest_positions = permute_positions(
            positions[is_rest] - first_of_rest, self.size - first_of_rest, combine_hash_key(epoch_key, 1)
        )
        blocks[is_rest], offsets[is_rest] = np.divmod(first_of_rest + rest_positions, self.block_size)

        # Whole blocks change places, and so do the samples of each. The last block may be shorter and stays.
        is_whole = blocks < block_count
        blocks[is_whole] = permute_positions(blocks[is_whole], block_count, epoch_key)
        if self.block_size > 1:
            offsets[is_whole] = permute_positions(
                offsets[is_whole], self.block_size, combine_hash_key(epoch_key, 2), blocks[is_whole]
            )
        return self._samples_of_list(blocks * self.block_size + offsets)

    def _samples_of_list(self, positions: Integers) -> Integers:
        """The samples at positions of the list of all whole blocks, followed by the ends of all shards."""
        samples_in_blocks = int(self._cumulative_blocks[-1]) * self.block_size
        is_in_block = positions < samples_in_blocks
        samples = np.empty_like(positions)

        block_numbers, offsets = np.divmod(positions[is_in_block], self.block_size)
        shards, block_numbers = _find_shards(block_numbers, self._cumulative_blocks)
        samples[is_in_block] = self._shard_starts[shards] + block_numbers * self.block_size + offsets

        shards, offsets = _find_shards(positions[~is_in_block] - samples_in_blocks, self._cumulative_ends)
        samples[~is_in_block] = self._end_starts[shards] + offsets
        return samples


def _find_shards(numbers: Integers, cumulative_counts: Integers) -> tuple[Integers, Integers]:
    """The shard of each number over all shards, and the number within that shard, int64 [n] each."""
    shards = np.searchsorted(cumulative_counts, numbers, side="right")
    return shards, numbers - np.where(shards > 0, cumulative_counts[shards - 1], 0)


class SampleOrder:
    """Draws samples from data sets. The draws never end.

    Args:
        sample_counts: number of samples of each data set.
        source_weights: share of the draws that each data set gets. They need not sum to 1.
        seed: the seed of the run.
        is_shuffled: whether each data set is shuffled. Otherwise, it keeps its order.
        source_keys: identifies each data set. The key decides the data set's order, which is the same at any
            position of a blend. None: its position is the key.
        draws_per_pass: number of draws from each data set in one pass of a blend by repetitions. None, or 0
            for all: the weights decide.
        shard_sizes: for each data set, int64 [shards] with the number of samples of each shard. None: each
            data set is one shard.
        block_size: as for :class:`BlockOrder`.
    """

    def __init__(
        self,
        sample_counts: Sequence[int],
        source_weights: Sequence[float],
        seed: int,
        *,
        is_shuffled: bool,
        source_keys: Sequence[str] | None = None,
        draws_per_pass: Sequence[int] | None = None,
        shard_sizes: Sequence[Integers] | None = None,
        block_size: int = 1,
    ) -> None:
        self.sample_counts, self.seed, self.is_shuffled = list(sample_counts), seed, is_shuffled
        self.source_weights = list(source_weights)
        self.source_keys = list(source_keys or map(str, range(len(sample_counts))))
        digests = (hashlib.sha256(key.encode()).digest() for key in self.source_keys)
        self._source_numbers = [int.from_bytes(digest[:8], "little") for digest in digests]
        shard_sizes = shard_sizes or [np.array([count], np.int64) for count in sample_counts]
        self._orders = [BlockOrder(sizes, block_size) for sizes in shard_sizes]
        self._pass_bounds = np.cumsum(draws_per_pass or [0])
        self._weight_bounds = np.cumsum(np.array(source_weights, np.float64) / sum(source_weights))
        self.draw_counts = [0] * len(sample_counts)
        self.total_draws = 0
        """Number of all draws, including those from data sets that the blend no longer has."""

    @property
    def pass_size(self) -> int | None:
        """Number of draws in which each sample comes once, or as often as its data set repeats; None for a
        blend by weights."""
        if len(self.sample_counts) == 1:
            return self.sample_counts[0]
        return int(self._pass_bounds[-1]) or None

    def draw_samples(self, draw_count: int) -> tuple[Integers, Integers]:
        """Draws the next samples.

        Returns:
            The data set of each sample and the number of the draw from that data set, int64 [draw_count]
            each.
        """
        first_draw = self.total_draws
        self.total_draws += draw_count
        source_indices = self._choose_sources(np.arange(first_draw, first_draw + draw_count))

        # A data set's order follows the draws from it alone, so that it does not change with the blend.
        draw_numbers = np.zeros(draw_count, np.int64)
        for source_index in np.unique(source_indices).tolist():
            positions = np.flatnonzero(source_indices == source_index)
            draw_numbers[positions] = self.draw_counts[source_index] + np.arange(len(positions))
            self.draw_counts[source_index] += len(positions)
        return source_indices, draw_numbers

    def _choose_sources(self, draw_positions: Integers) -> Integers:
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
        return np.minimum(
            np.searchsorted(self._weight_bounds, hashed_draws / 2.0**64, side="right"),
            len(self.sample_counts) - 1,
        )

    def sample_indices(self, source_indices: Integers, draw_numbers: Integers) -> Integers:
        """The samples of draws: their indices in their data sets, int64 [n].

        Args:
            source_indices, draw_numbers: int64 [n] each, as :meth:`draw_samples` returns them.
        """
        sample_indices = np.zeros(len(source_indices), np.int64)
        for source_index in np.unique(source_indices).tolist():
            is_of_source = source_indices == source_index
            epochs, positions = np.divmod(draw_numbers, self.sample_counts[source_index])
            for epoch in np.unique(epochs[is_of_source]).tolist():
                is_of_epoch = is_of_source & (epochs == epoch)
                samples = positions[is_of_epoch]
                if self.is_shuffled:
                    # Each data set has another order in each epoch.
                    samples = self._orders[source_index].samples(
                        samples, combine_hash_key(self.seed, 2, self._source_numbers[source_index], epoch)
                    )
                sample_indices[is_of_epoch] = samples
        return sample_indices
