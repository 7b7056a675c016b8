"""Means, shares and quantiles of a population, estimated from a random sample, with confidence intervals.

A population has one or more strata (the data sets of a mixture). Within a stratum, samples are drawn without
replacement and with equal chance. Intervals are for 95 %: of a mean from its standard error with Student's t,
of a quantile from the order statistics (no distribution is assumed), of a share by Wilson's formula. All of
them shrink by the finite population correction, to nothing where a stratum was read as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
NORMAL = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


@dataclass(frozen=True)
class Stratum:
    """What was drawn from one part of the population."""

    share: float
    """Share of the population that the stratum is, or that training draws from it."""
    size: float
    """Number of values in the stratum; ``math.inf`` if values are drawn without end."""
    values: NDArray[np.float64]
    """[n]: the values that were drawn."""

    @property
    def unseen(self) -> float:
        """The finite population correction of a variance: 0 if all values were drawn."""
        return max(0.0, 1.0 - len(self.values) / self.size)


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    low: float | None
    """None: the sample is too small for a lower bound."""
    high: float | None
    """None: the sample is too small for an upper bound."""

    @property
    def exact(self) -> bool:
        return self.low == self.value == self.high

    def as_json(self) -> dict[str, float | None]:
        def rounded(number: float | None) -> float | None:
            return None if number is None else float(f"{number:.6g}")

        return {"value": rounded(self.value), "low": rounded(self.low), "high": rounded(self.high)}


def mean(strata: Sequence[Stratum]) -> Estimate:
    """The mean of the population. Strata without values are left out."""
    held = _held(strata)
    value = sum(share * float(stratum.values.mean()) for share, stratum in held)
    variance = 0.0
    for share, stratum in held:
        n = len(stratum.values)
        if not stratum.unseen:
            continue
        if n < 2:
            return Estimate(value, None, None)
        variance += share**2 * float(stratum.values.var(ddof=1)) / n * stratum.unseen

    seen = [stratum for _, stratum in held if stratum.unseen]
    error = _student(sum(len(stratum.values) - 1 for stratum in seen)) * math.sqrt(variance) if seen else 0.0
    return Estimate(value, value - error, value + error)


def quantile(strata: Sequence[Stratum], at: float) -> Estimate:
    """The smallest value that at least the share ``at`` of the population does not exceed."""
    held = _held(strata)
    values = np.concatenate([stratum.values for _, stratum in held])
    weights = np.concatenate(
        [np.full(len(stratum.values), share / len(stratum.values)) for share, stratum in held]
    )
    order = values.argsort(kind="stable")
    values, reached = values[order], weights[order].cumsum()
    found = float(values[min(int(np.searchsorted(reached, at - 1e-9)), len(values) - 1)])

    variance = 0.0
    for share, stratum in held:
        below = at if len(held) == 1 else float((stratum.values <= found).mean())
        variance += share**2 * below * (1 - below) / len(stratum.values) * stratum.unseen
    if not any(stratum.unseen for _, stratum in held):
        return Estimate(found, found, found)

    # One order statistic more on both sides: between two of them, the larger interval counts.
    error = NORMAL * math.sqrt(variance)
    low = int(np.searchsorted(reached, at - error + 1e-9)) - 1
    high = int(np.searchsorted(reached, at + error + 1e-9))
    return Estimate(
        found,
        float(values[low]) if low >= 0 else None,
        float(values[high]) if high < len(values) else None,
    )


def share(strata: Sequence[Stratum]) -> Estimate:
    """The share of the population whose value is 1; the others' is 0."""
    held = _held(strata)
    found = sum(part * float(stratum.values.mean()) for part, stratum in held)
    # The number of draws from one stratum that would be as exact.
    n = 1 / sum(part**2 / len(stratum.values) for part, stratum in held)
    unseen = sum(part * stratum.unseen for part, stratum in held)
    if not unseen:
        return Estimate(found, found, found)

    square = NORMAL**2 * unseen
    centre = (found + square / (2 * n)) / (1 + square / n)
    half = math.sqrt(square) * math.sqrt(found * (1 - found) / n + square / (4 * n * n)) / (1 + square / n)
    return Estimate(found, max(0.0, centre - half), min(1.0, centre + half))


def _held(strata: Sequence[Stratum]) -> list[tuple[float, Stratum]]:
    """The strata with values, each with its share of all that have some."""
    held = [stratum for stratum in strata if len(stratum.values) and stratum.share > 0]
    if not held:
        raise ValueError("no value was drawn")
    total = sum(stratum.share for stratum in held)
    return [(stratum.share / total, stratum) for stratum in held]


def _student(freedom: int) -> float:
    """Student's t for :data:`CONFIDENCE`, by the series in 1 / freedom (Abramowitz and Stegun, 26.7.5)."""
    z = NORMAL
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
