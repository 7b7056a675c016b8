"""Intervals are tested by what they promise: 95 of 100 hold the true value."""

from __future__ import annotations

import math

import numpy as np
import pytest

from data_tools.estimates import Stratum, mean, quantile, share

REPEATS = 600
# The standard error of a coverage of 95 % in 600 repeats is 0.9 %.
LEAST, MOST = 0.92, 0.985


def _skewed(size: int, centre: float, seed: int) -> np.ndarray:
    """Whole numbers with a long tail, as numbers of tokens have."""
    return np.random.default_rng(seed).lognormal(centre, 0.7, size).round()


def _drawn(population: np.ndarray, n: int, share_: float, rng: np.random.Generator) -> Stratum:
    return Stratum(share_, len(population), rng.choice(population, n, replace=False))


def _coverage(estimate, truth: float, parts: list[tuple[np.ndarray, int, float]]) -> float:
    rng = np.random.default_rng(11)
    hits = 0
    for _ in range(REPEATS):
        found = estimate([_drawn(*part, rng) for part in parts])
        hits += (found.low is None or found.low <= truth) and (found.high is None or truth <= found.high)
    return hits / REPEATS


# The second draws 40 % of the population, where intervals that ignore its size would hold too often (0.99).
@pytest.mark.parametrize(("size", "n"), [(20_000, 400), (1000, 400)])
def test_intervals_of_one_source_hold_what_they_promise(size, n):
    population = _skewed(size, 6.0, seed=3)
    parts = [(population, n, 1.0)]
    assert LEAST < _coverage(mean, population.mean(), parts) < MOST
    for at in (0.05, 0.5, 0.95):
        truth = np.sort(population)[math.ceil(at * size) - 1]
        # Whole numbers repeat, so an interval may hold more often.
        assert LEAST < _coverage(lambda strata, at=at: quantile(strata, at), truth, parts), at

    rare = (np.arange(size) % 50 == 0).astype(float)
    assert LEAST < _coverage(share, rare.mean(), [(rare, n, 1.0)])


def test_intervals_of_a_mixture_hold_what_they_promise():
    # Training draws three quarters from the small source, of which most is read.
    small, large = _skewed(500, 5.0, seed=4), _skewed(30_000, 6.5, seed=5)
    parts = [(small, 400, 0.75), (large, 150, 0.25)]
    truth = 0.75 * small.mean() + 0.25 * large.mean()
    assert LEAST < _coverage(mean, truth, parts) < MOST

    values = np.concatenate([small, large])
    weights = np.concatenate([np.full(500, 0.75 / 500), np.full(30_000, 0.25 / 30_000)])
    order = values.argsort()
    median = values[order][np.searchsorted(weights[order].cumsum(), 0.5)]
    assert LEAST < _coverage(lambda strata: quantile(strata, 0.5), median, parts)


def test_numbers_worked_out_by_hand():
    # 4 of 100 values: mean 5, standard deviation sqrt(20/3), t(3) = 3.182, correction sqrt(0.96).
    found = mean([Stratum(1.0, 100, np.array([2.0, 4.0, 6.0, 8.0]))])
    half = 3.182 * math.sqrt(20 / 3 / 4 * 0.96)
    assert found.value == 5 and found.high - 5 == pytest.approx(half, rel=2e-3)

    # Wilson's interval of 5 of 50: 4.35 % to 21.36 %.
    found = share([Stratum(1.0, math.inf, np.array([1.0] * 5 + [0.0] * 45))])
    assert (found.low, found.high) == (pytest.approx(0.0435, abs=1e-4), pytest.approx(0.2136, abs=1e-4))

    # Ranks 50 - 9.8 and 50 + 9.8 of 100 hold the median: the 40th and the 60th value.
    found = quantile([Stratum(1.0, math.inf, np.arange(1.0, 101.0))], 0.5)
    assert (found.low, found.value, found.high) == (40, 50, 60)


def test_a_population_that_was_read_as_a_whole_has_no_error():
    values = np.array([3.0, 1.0, 2.0, 10.0])
    strata = [Stratum(1.0, 4, values)]
    assert mean(strata).exact and mean(strata).value == 4
    assert quantile(strata, 0.5).exact and quantile(strata, 0.5).value == 2
    assert quantile(strata, 1.0).value == 10
    assert share([Stratum(1.0, 2, np.array([1.0, 0.0]))]).exact


def test_too_small_a_sample_gives_no_bound_instead_of_a_wrong_one():
    strata = [Stratum(1.0, 1000, np.array([1.0, 2.0, 3.0]))]
    assert quantile(strata, 0.99).high is None and quantile(strata, 0.01).low is None
    assert mean([Stratum(1.0, 1000, np.array([5.0]))]).high is None
    with pytest.raises(ValueError, match="no value"):
        mean([Stratum(1.0, 1000, np.array([]))])
