"""The order of samples by blocks of a shard: each sample once in an epoch, and any position at once."""

from collections import Counter

import numpy as np
import pytest

from megatron_vl.data.source.sample_order import LANES, BlockOrder, SampleOrder, permute_positions

UNEVEN = np.random.default_rng(0).integers(1, 2000, 1000)


def order_of(*shards: int, block: int) -> BlockOrder:
    return BlockOrder(np.array(shards, np.int64), block)


@pytest.mark.parametrize("block", [1, 16, 5000])
def test_block_order_has_a_million_samples_once(block):
    order = order_of(*UNEVEN.tolist(), block=block)
    walk = order.samples(np.arange(order.size), 7)
    assert (np.bincount(walk, minlength=order.size) == 1).all()
    at = np.random.default_rng(1).integers(0, order.size, 1000)
    assert (order.samples(at, 7) == walk[at]).all()
    assert (order.samples(np.arange(1000), 8) != walk[:1000]).mean() > 0.99, "another epoch has another order"


@pytest.mark.parametrize("shards", [[1], [1] * 70, [3, 1, 999, 40], [31], [64] * 33, [7] * 40 + [2]], ids=str)
@pytest.mark.parametrize("block", [1, 3, 8, 10_000])
def test_block_order_of_small_data_sets_has_each_sample_once(shards, block):
    order = order_of(*shards, block=block)
    walk = order.samples(np.arange(order.size), 3)
    assert sorted(walk.tolist()) == [*range(order.size)]
    positions = range(0, order.size, 1 + order.size // 100)
    single = [order.samples(np.array([position]), 3)[0] for position in positions]
    assert single == walk[positions].tolist()


def test_block_order_keeps_blocks_together():
    """Of 400 shards of 100 samples, each has six blocks of 16 and an end of 4."""
    order = order_of(*[100] * 400, block=16)
    walk = order.samples(np.arange(order.size), 5)
    shard, number = np.divmod(walk, 100)
    at = np.flatnonzero(number < 96)
    block = (shard * 6 + number // 16)[at]
    first, last = np.full(2400, order.size), np.zeros(2400, np.int64)
    np.minimum.at(first, block, at)
    np.maximum.at(last, block, at)

    # Lanes begin in the middle of a block, the rest of which comes at the end of the epoch.
    whole = last - first < LANES * 16
    assert whole.sum() >= 2400 - LANES and (np.bincount(block) == 16).all()
    # New blocks are needed at a steady rate: one for 16 draws, of which 0.96 are no ends.
    begun = np.bincount(first[whole] // (LANES * 16))[1:-2]
    assert len(begun) > 30 and begun.min() > 0.75 * LANES and begun.max() <= 1.25 * LANES
    # A batch of 64 holds one sample of each lane, which are seldom of one shard.
    batches = shard[: 30_000 // 64 * 64].reshape(-1, 64)
    assert max(Counter(batch.tolist()).most_common(1)[0][1] for batch in batches) <= 5


def test_block_order_of_single_samples_is_a_full_shuffle():
    size = 1000 * LANES
    order = order_of(*[50] * (size // 50), block=1)
    assert (order.samples(np.arange(size), 9) == permute_positions(np.arange(size), size, 9)).all()


def test_block_order_of_10_8_samples_needs_flat_memory():
    order = BlockOrder(np.full(100_000, 1000, np.int64), 16)
    some = np.array([0, 10**8 - 1, 5 * 10**7, 33_333_333])
    assert len(set(order.samples(some, 3).tolist())) == 4
    held = sum(value.nbytes for value in vars(order).values() if isinstance(value, np.ndarray))
    assert held == 4 * 8 * 100_000, "four numbers for each shard"


def test_order_depends_on_seed_epoch_and_data_set():
    def first(seed: int, number: int, key: str) -> list[int]:
        order = SampleOrder([1000], [1.0], seed, is_shuffled=True, source_keys=[key], block_size=4)
        return order.sample_indices(np.zeros(50, np.int64), number + np.arange(50)).tolist()

    orders = [first(1, 0, "a"), first(2, 0, "a"), first(1, 1000, "a"), first(1, 0, "b")]
    assert len(set(map(tuple, orders))) == 4 and first(1, 0, "a") == orders[0]
