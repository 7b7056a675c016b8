"""Batches that are planned from sizes: worked by hand, and the properties that a run relies on."""

from collections import Counter
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from megatron_vl.data.packing import batch_planner
from megatron_vl.data.packing import plan_rows as batch_plan
from megatron_vl.data.packing.batch_planner import (
    BatchPlanner,
    PlannedBatch,
    PlannedSample,
    count_finished_draws,
)
from megatron_vl.data.packing.plan_rows import plan_rows, rank_of_rows
from megatron_vl.data.source.location import LoaderError
from megatron_vl.data.source.sample_order import LANES, BlockOrder, SampleOrder, permute_positions
from megatron_vl.data.state_json import LoaderStateError, state_from_json, state_to_json

SEQ_LEN = 1024


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def grouped(row_of: np.ndarray) -> list[list[int]]:
    return [np.flatnonzero(row_of == row).tolist() for row in range(row_of.max() + 1)]


def test_plan_of_two_rows_by_hand():
    """0.8 patches a token. Each image shares a row with a text, so that both rows have 8 patches."""
    assert grouped(plan_rows(ints(5, 5, 5, 5), ints(8, 0, 0, 8), 2, 10)) == [[0, 2], [1, 3]]


def test_plan_keeps_the_limit_of_patches_by_hand():
    """8 patches at most: two images of 5 never share a row. All samples have 1.25 patches a token."""
    both = grouped(plan_rows(ints(2, 2, 2, 2), ints(5, 5, 0, 0), 2, 10, max_patches=8))
    assert [len({0, 1} & set(row)) for row in both] == [1, 1]
    # Without the limit, the second image joins the first.
    assert grouped(plan_rows(ints(2, 2, 6), ints(5, 5, 0), 1, 10)) == [[0, 1, 2]]


def test_rows_dealt_to_ranks_by_hand():
    """5 | 4, then 3 to the second and 2 to the first, then 1 and 1: 8 patches each."""
    assert rank_of_rows(ints(5, 4, 3, 2, 1, 1), 2).tolist() == [[0, 3, 4], [1, 2, 5]]
    assert rank_of_rows(ints(0, 0, 0, 0), 2).tolist() == [[0, 2], [1, 3]]
    assert rank_of_rows(ints(3, 5), 1).tolist() == [[1, 0]] and rank_of_rows(ints(3), 1).tolist() == [[0]]
    # The first rank has rows 0 and 3, which become 0 and 1. The samples of row 1 are in row 2 then.
    table = np.zeros((5, 5), np.int64)
    table[3] = [4, 2, 1, 2, 1]
    dealt = PlannedBatch(table, ints(0, 1, 1, 2, 3), 4).assign_to_ranks(2)
    assert dealt.row_of_sample.tolist() == [0, 2, 2, 3, 1]


def test_rows_exchanged_by_hand():
    """Largest first gives 5, 2, 2 and 4, 4, 0. Rows of 4 and 2 change places: 11 and 6 become 9 and 8."""
    dealt = rank_of_rows(ints(5, 4, 4, 2, 2, 0), 2)
    assert sorted(dealt.ravel().tolist()) == [*range(6)]
    assert sorted(ints(5, 4, 4, 2, 2, 0)[dealt].sum(axis=1).tolist()) == [8, 9]
    # The largest first would give 13 and 11. No exchange of two rows helps: all others go together.
    patches = ints(7, 5, 3, 3, 3, 3, 0, 0)
    dealt = rank_of_rows(patches, 2)
    assert sorted(map(sorted, patches[dealt].tolist())) == [[0, 0, 5, 7], [3, 3, 3, 3]]


def mixed_sizes(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Text, single images, several images and videos, in rows of 1,024 tokens."""
    chance = np.random.default_rng(seed)
    kinds = chance.choice(4, count, p=[0.3, 0.45, 0.15, 0.1])
    text = np.clip(chance.lognormal(3.5, 0.9, count), 5, 300).astype(np.int64)
    media = [chance.integers(*sizes, count) for sizes in ((16, 160), (60, 400), (100, 600))]
    seen = np.choose(kinds, [np.zeros(count), *media]).astype(np.int64)
    return text + seen, 4 * seen


def planner(
    tokens: np.ndarray, patches: np.ndarray, rows: int = 16, max_patches: int = 0, shuffled: bool = True
) -> BatchPlanner:
    order = SampleOrder([len(tokens)], [1.0], 5, is_shuffled=shuffled)
    return BatchPlanner(order, lambda _, index: (tokens[index], patches[index]), rows, SEQ_LEN, max_patches)


def within(row: list[PlannedSample]) -> bool:
    return sum(place.tokens for place in row) <= SEQ_LEN and sum(place.patches for place in row) <= 3600


def spread(dealt: list[list[list[PlannedSample]]]) -> float:
    """The largest distance of a rank's patches from the mean, as a share of it."""
    loads = np.array([sum(place.patches for row in own for place in row) for own in dealt])
    return float(np.abs(loads / loads.mean() - 1).max())


def indices(dealt: list[list[list[PlannedSample]]]) -> list[int]:
    return sorted(place.index for own in dealt for row in own for place in row)


def samples(batch: PlannedBatch) -> list[int]:
    return [place.index for row in batch.rows_of_rank() for place in row]


def dealt_to(batch: PlannedBatch, ranks: int) -> list[list[list[PlannedSample]]]:
    dealt = batch.assign_to_ranks(ranks)
    return [dealt.rows_of_rank(rank, ranks) for rank in range(ranks)]


def test_planner_uses_samples_once_an_epoch_within_budgets():
    tokens, patches = mixed_sizes(3000)
    plan = planner(tokens, patches, max_patches=3600)
    steps = [plan.next_batch() for _ in range(60)]
    used = Counter(index for batch in steps for index in samples(batch))
    waiting = Counter(plan._waiting_samples[2].tolist())
    drawn = plan.sample_order.draw_counts[0]
    assert drawn > 2 * len(tokens)
    assert used.total() + waiting.total() == drawn
    epochs, rest = divmod(drawn, len(tokens))
    assert Counter((used + waiting).values()) == {epochs: len(tokens) - rest, epochs + 1: rest}

    fills, spreads = [], []
    for batch in steps:
        for row in batch.rows_of_rank():
            assert within(row)
            fills.append(sum(place.tokens for place in row) / SEQ_LEN)
        for ranks in (2, 4):
            dealt = dealt_to(batch, ranks)
            assert indices(dealt) == sorted(samples(batch))
            assert all(within(row) for own in dealt for row in own)
            spreads.append(spread(dealt))
    assert max(spreads) < 0.05
    assert np.mean(fills) > 0.995


def test_ranks_exchange_whole_rows(monkeypatch):
    """A long text leaves a row with hardly any patches. Its rank gets rows with more than the mean."""
    tokens, patches = mixed_sizes(6000)
    tokens[::10], patches[::10] = int(0.6 * SEQ_LEN), 0
    batch = planner(tokens, patches, rows=64, max_patches=3600).next_batch()
    dealt = dealt_to(batch, 16)
    rows, rows_dealt = batch.rows_of_rank(), [row for own in dealt for row in own]
    assert sorted(indices([[row]]) for row in rows_dealt) == sorted(indices([[row]]) for row in rows)
    assert spread(dealt) < 0.02

    monkeypatch.setattr(batch_plan, "MAX_EXCHANGE_ROUNDS", 0)
    assert spread(dealt_to(batch, 16)) > 0.03, "the control"


def test_many_rows_are_planned_in_groups():
    """600 rows take three groups. Small samples allow ranks with one row each to come close to the mean."""
    chance = np.random.default_rng(1)
    seen = chance.integers(0, 60, 60_000)
    batch = planner(seen + chance.integers(5, 60, 60_000), 4 * seen, rows=600).next_batch()
    assert spread([[row] for row in batch.rows_of_rank()]) < 0.07
    assert spread(dealt_to(batch, 600)) < 0.07 and spread(dealt_to(batch, 300)) < 0.05


def test_planner_handles_unusual_data_sets():
    text = np.full(200, 100)
    batch = planner(text, np.zeros(200, np.int64), rows=4).next_batch()
    assert [len(row) for row in batch.rows_of_rank()] == [10] * 4

    tokens, patches = mixed_sizes(300)
    tokens[7], patches[7] = SEQ_LEN, 4 * SEQ_LEN
    plan = planner(tokens, patches, rows=8, shuffled=False)
    rows = [row for _ in range(3) for row in plan.next_batch().rows_of_rank()]
    assert [len(row) for row in rows if any(place.index == 7 for place in row)] == [1]

    tokens[3] = 0
    tokens[11] = SEQ_LEN + 1
    batch = planner(tokens, patches, rows=8, shuffled=False).next_batch()
    held = {place.index: place.tokens for row in batch.rows_of_rank() for place in row}
    assert held[3] == held[11] == 0, "they are read only so that they are counted"
    message = r"^128 consecutive draws .* empty or exceeds data.seq_len; none is longer than a row\. Raise"
    with pytest.raises(LoaderError, match=message):
        planner(np.zeros(50, np.int64), np.zeros(50, np.int64)).next_batch()
    blend = SampleOrder([50, 50], [0.999, 0.001], 5, is_shuffled=True)
    sizes = lambda source, i: (text[i] * source, i * 0)  # noqa: E731
    rare = BatchPlanner(blend, sizes, 1, SEQ_LEN, 0, packs_samples=False)
    assert rare.next_batch().rows_of_rank()[0][0].source == 1


def test_search_for_usable_samples_ends(monkeypatch):
    """10^12 samples, of which none fits: the search is bounded, and its work grows with the samples only."""
    monkeypatch.setattr(batch_planner, "MAX_SEARCHED", 100_000)
    order = SampleOrder([10**12], [1.0], 5, is_shuffled=True)

    def sizes(_: int, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        large = index % 3 == 0
        return np.where(large, SEQ_LEN + 7 + index % 4, 9), np.where(large, 0, 5001 + index % 5)

    with pytest.raises(LoaderError) as raised:
        BatchPlanner(order, sizes, 4, SEQ_LEN, 5000).next_batch()
    message = str(raised.value)
    assert message.startswith("100032 consecutive draws gave no usable sample: each is empty or exceeds")
    assert "longer than data.seq_len 1024: 33,334 of 100,000, the longest of 1,034 tokens. Raise" in message


@pytest.mark.parametrize(
    ("images", "texts", "rows", "seq_len"),
    [
        # Rows of which a sample takes a fourth on average.
        *(([0, 0, 16, 16, 36, 36, 64, 64, 100, 144], (20, 80), rows, 320) for rows in (8, 64, 512)),
        # Text alone has no patches that would tell rows apart, and a row takes 819 of these samples.
        ([0], (10, 11), 16, 8192),
    ],
)
def test_rows_of_two_to_819_samples_are_full(images, texts, rows, seq_len):
    chance = np.random.default_rng(0)
    seen = chance.choice(images, 40_000)
    tokens = seen + chance.integers(*texts, 40_000)
    order = SampleOrder([40_000], [1.0], 5, is_shuffled=True)
    plan = BatchPlanner(order, lambda _, index: (tokens[index], 4 * seen[index]), rows, seq_len, 0)
    draw = Mock(wraps=order.draw_samples)
    order.draw_samples = draw  # type: ignore[method-assign]
    batches = [plan.next_batch() for _ in range(8)]
    filled = [np.bincount(b.row_of_sample, b.sample_table[2], rows).mean() / seq_len for b in batches]
    assert np.mean(filled) > 0.99
    assert draw.call_count < 80  # draws of 64 would look at those that wait thousands of times


def test_oldest_sample_never_waits_long():
    """Samples of more than half a row compete for rows, and still go in the order of their age."""
    chance = np.random.default_rng(3)
    tokens = np.where(chance.random(4000) < 0.3, 600, chance.integers(10, 500, 4000))
    plan = planner(tokens, np.zeros(4000, np.int64), rows=8)
    for _ in range(40):
        plan.next_batch()
    numbers = plan._waiting_samples[1]
    assert plan.sample_order.draw_counts[0] - numbers.min() < 40 * 8


def test_sample_order_of_a_source_ignores_weights():
    order = SampleOrder([40, 1000], [3.0, 1.0], 9, is_shuffled=True)
    sources, numbers = order.draw_samples(4000)
    assert Counter(sources.tolist())[0] == pytest.approx(3000, rel=0.03)
    assert numbers[sources == 0].tolist() == list(range(order.draw_counts[0]))

    other = SampleOrder([40, 1000], [1.0, 3.0], 9, is_shuffled=True)
    other.draw_counts = list(order.draw_counts)
    sources, numbers = other.draw_samples(4000)
    assert Counter(sources.tolist())[0] == pytest.approx(1000, rel=0.06)
    assert numbers[sources == 0][0] == order.draw_counts[0]


def test_finished_draws_by_hand():
    """Draw 3 of "a" waits with two of its parts, "b" gave one row, "c" has left the blend."""
    part = 1 << 40
    drawn, waiting = {"a": 5, "b": 1, "c": 4, "d": 0}, np.array([[0, 0, 0], [3 + part, 3 + 2 * part, 4]])
    state = {"keys": ["a", "b", "d"], "drawn": drawn, "waiting": waiting, "aside": {"c": [2, 2 + part]}}
    assert count_finished_draws(state) == {"a": 3, "b": 1, "c": 3, "d": 0}


def test_planner_rejects_damaged_states():
    tokens, patches = mixed_sizes(100)
    good = planner(tokens, patches).planner_state()
    planner(tokens, patches).restore_state(good)
    waiting = None, np.zeros(3), np.array([[0, -1], [3, 4]]), np.array([[0, 1], [3, 4]])
    others: list[dict[str, Any]] = [{"drawn": 3}, {"keys": None}, {"aside": 3}]
    damaged = [{}, *(good | change for change in (*({"waiting": each} for each in waiting), *others))]
    for state in damaged:
        with pytest.raises(LoaderStateError, match="damaged"):
            planner(tokens, patches).restore_state(state)


def planner_of_passes(samples: int, rows: int, passes: int, *, packs: bool = True) -> BatchPlanner:
    """Samples of 80 to 479 tokens; each seventh cannot be used, except the only one."""
    tokens = np.random.default_rng(7).integers(80, 480, samples)
    if samples > 1:
        tokens[::7] = 0
    order = SampleOrder([samples], [1.0], 3, is_shuffled=True)
    sizes = lambda _, index: (tokens[index], tokens[index] // 2)  # noqa: E731
    limit = passes * samples
    return BatchPlanner(order, sizes, rows, SEQ_LEN, 0, packs_samples=packs, draw_limit=limit)


def trained_samples(plan: BatchPlanner, steps: int | None = None) -> list[list[int]]:
    batches = []
    while not plan.is_at_end and steps != len(batches):
        batch = plan.next_batch()
        _, index, tokens, _, _ = batch.sample_table
        assert np.bincount(batch.row_of_sample, tokens, batch.num_rows).max() <= SEQ_LEN
        batches.append(index[tokens > 0].tolist())
    return batches


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(("samples", "rows", "passes"), [(1, 8, 2), (40, 8, 1), (400, 6, 1), (57, 4, 3)])
def test_pass_trains_on_every_usable_sample_exactly_once(samples, rows, passes, packs):
    counts = Counter(sum(trained_samples(planner_of_passes(samples, rows, passes, packs=packs)), []))
    assert counts == {i: passes for i in range(samples) if i % 7 or samples == 1}


def test_pass_without_a_usable_sample_is_refused():
    nothing = np.zeros(1, np.int64)
    order = SampleOrder([1], [1.0], 3, is_shuffled=True)
    with pytest.raises(LoaderError, match="^2 consecutive draws gave no usable sample: each is empty"):
        BatchPlanner(order, lambda _, i: (nothing[i], nothing[i]), 8, SEQ_LEN, 0, draw_limit=2).next_batch()


def test_resumed_pass_ends_with_the_same_steps():
    whole = trained_samples(planner_of_passes(57, 4, 3))
    for step in range(len(whole) + 1):
        first = planner_of_passes(57, 4, 3)
        trained_samples(first, step)
        later = planner_of_passes(57, 4, 3)
        later.restore_state(state_from_json(state_to_json(first.planner_state())))
        assert trained_samples(later) == whole[step:]


def test_further_pass_continues_a_run_that_has_ended():
    first = planner_of_passes(57, 4, 1)
    trained = sum(trained_samples(first), [])
    longer = planner_of_passes(57, 4, 2)
    longer.restore_state(state_from_json(state_to_json(first.planner_state())))
    assert Counter(trained + sum(trained_samples(longer), [])) == {i: 2 for i in range(57) if i % 7}


def test_pass_of_a_blend_needs_repetitions():
    assert SampleOrder([10], [1.0], seed=1, is_shuffled=True).pass_size == 10
    assert SampleOrder([10, 20], [0.5, 0.5], seed=1, is_shuffled=True).pass_size is None
    repeated = SampleOrder([10, 20], [0.5, 0.5], seed=1, is_shuffled=True, draws_per_pass=[20, 20])
    assert repeated.pass_size == 40


# --- The order of samples: each once in an epoch, by blocks of a shard, and any position at once -----------

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
