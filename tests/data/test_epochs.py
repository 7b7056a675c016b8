"""Passes over the data: every usable sample exactly once in each, whatever the rows and the resumes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from megatron_vl.data.packing.batch_planner import BatchPlanner
from megatron_vl.data.source.location import LoaderError
from megatron_vl.data.source.sample_order import SampleOrder
from megatron_vl.data.state_json import state_from_json, state_to_json

SEQ_LEN = 256


def planner(samples: int, rows: int, epochs: int, *, packs: bool = True) -> BatchPlanner:
    """Samples of 20 to 119 tokens; each seventh cannot be used."""
    tokens = np.random.default_rng(7).integers(20, 120, samples)
    tokens[::7] = 0
    order = SampleOrder([samples], [1.0], seed=3, is_shuffled=True)
    return BatchPlanner(
        order,
        lambda _, index: (tokens[index], tokens[index] // 2),
        rows,
        SEQ_LEN,
        0,
        packs_samples=packs,
        draw_limit=epochs * samples,
    )


def trained_samples(plan: BatchPlanner, steps: int | None = None) -> list[list[int]]:
    """The samples of each step that have tokens."""
    batches = []
    while not plan.is_at_end and steps != len(batches):
        batch = plan.next_batch()
        _, index, tokens, _, _ = batch.sample_table
        assert np.bincount(batch.row_of_sample, tokens, batch.num_rows).max() <= SEQ_LEN
        batches.append(index[tokens > 0].tolist())
    return batches


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(("samples", "rows", "epochs"), [(1, 8, 2), (40, 8, 1), (400, 6, 1), (57, 4, 3)])
def test_pass_trains_on_every_usable_sample_exactly_once(samples, rows, epochs, packs):
    if samples == 1:
        plan = BatchPlanner(
            SampleOrder([1], [1.0], seed=3, is_shuffled=True),
            lambda _, index: (index + 30, index),
            rows,
            SEQ_LEN,
            0,
            draw_limit=epochs,
        )
        assert Counter(sum(trained_samples(plan), [])) == {0: epochs}
        return
    counts = Counter(sum(trained_samples(planner(samples, rows, epochs, packs=packs)), []))
    assert counts == {i: epochs for i in range(samples) if i % 7}


def test_pass_without_a_usable_sample_is_refused():
    with pytest.raises(LoaderError, match="^2 consecutive draws gave no usable sample: each is empty"):
        planner(1, 8, 2).next_batch()


def test_resumed_pass_ends_with_the_same_steps():
    whole = trained_samples(planner(57, 4, 3))
    for step in range(len(whole) + 1):
        first = planner(57, 4, 3)
        trained_samples(first, step)
        later = planner(57, 4, 3)
        later.restore_state(state_from_json(state_to_json(first.planner_state())))
        assert trained_samples(later) == whole[step:]


def test_further_pass_continues_a_run_that_has_ended():
    first = planner(57, 4, 1)
    trained = sum(trained_samples(first), [])
    longer = planner(57, 4, 2)
    longer.restore_state(state_from_json(state_to_json(first.planner_state())))
    assert Counter(trained + sum(trained_samples(longer), [])) == {i: 2 for i in range(57) if i % 7}


def test_pass_of_a_blend_needs_repetitions():
    assert SampleOrder([10], [1.0], seed=1, is_shuffled=True).pass_size == 10
    assert SampleOrder([10, 20], [0.5, 0.5], seed=1, is_shuffled=True).pass_size is None
    repeated = SampleOrder([10, 20], [0.5, 0.5], seed=1, is_shuffled=True, draws_per_pass=[20, 20])
    assert repeated.pass_size == 40
