"""Rates of a calibration from measured times."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from megatron_vl.planning.calibration import Calibration

LARGEST = 32.0
"""Most that all rates together may be changed so that predicted steps are the measured ones."""


def saturating(sizes: Sequence[float], rates: Sequence[float]) -> tuple[float, float]:
    """``(r, s)`` such that ``r n / (n + s)`` comes nearest to the rate that was measured for each size ``n``.

    Relative errors count. Where rates do not grow with the size, ``s`` is 0 and ``r`` the mean.
    """
    n, measured = np.asarray(sizes, dtype=float), np.asarray(rates, dtype=float)
    # The time of a unit of work is linear: 1 / rate = 1 / r + (s / r) / n.
    terms = np.stack((np.ones_like(n), 1 / n), axis=1) * measured[:, None]
    (fixed, slope), *_ = np.linalg.lstsq(terms, np.ones_like(n), rcond=None)
    if slope <= 0 or fixed <= 0:
        return len(measured) / float((1 / measured).sum()), 0.0
    return float(1 / fixed), float(slope / fixed)


def faster(c: Calibration, times: float) -> Calibration:
    """The same GPU with all that computes so many times as fast."""
    names = ("product_tflops", "memory_tb_s", "attention_tflops", "tower_attention_tflops", "expert_tflops")
    changed = {name: getattr(c, name) * times for name in names}
    inverse = {name: getattr(c, name) / times for name in ("optimizer_ps", "gradient_ps")}
    return dataclasses.replace(c, **changed, **inverse)


def matched(
    c: Calibration, predict: Callable[[Calibration], Sequence[float]], measured: Sequence[float]
) -> float:
    """How many times as fast all that computes has to be so that predicted steps are the measured ones.

    Args:
        predict: the steps of some runs in seconds, by a calibration.
        measured: the same in reality; their geometric mean is met.
    """

    def error(times: float) -> float:
        steps = predict(faster(c, times))
        return sum(math.log(p / m) for p, m in zip(steps, measured, strict=True))

    low, high = math.log(1 / LARGEST), math.log(LARGEST)
    for _ in range(40):
        middle = (low + high) / 2
        if error(math.exp(middle)) > 0:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)
