"""Fits the rates of a calibration to measured times."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from megatron_vl.planning.calibration import Calibration

LARGEST_SPEEDUP = 32.0
"""Largest factor by which all rates together are changed to match measured steps."""


def fit_saturating_rate(work_sizes: Sequence[float], measured_rates: Sequence[float]) -> tuple[float, float]:
    """Fits ``rate(n) = r n / (n + s)`` to the rates measured for each size. Returns ``(r, s)``.

    The relative errors of the times are least. If rates do not grow with the size, ``s`` is 0, and ``r`` is
    the harmonic mean.
    """
    size_array, rate_array = np.asarray(work_sizes, dtype=float), np.asarray(measured_rates, dtype=float)
    # The time of a unit of work is linear: 1 / rate = 1 / r + (s / r) / n.
    linear_terms = np.stack((np.ones_like(size_array), 1 / size_array), axis=1) * rate_array[:, None]
    (time_offset, time_slope), *_ = np.linalg.lstsq(linear_terms, np.ones_like(size_array), rcond=None)
    if time_slope <= 0 or time_offset <= 0:
        return len(rate_array) / float((1 / rate_array).sum()), 0.0
    return float(1 / time_offset), float(time_slope / time_offset)


def scale_compute_rates(calibration: Calibration, speed_factor: float) -> Calibration:
    """The calibration with all rates of computation multiplied by ``speed_factor``."""
    names = ("product_tflops", "memory_tb_s", "attention_tflops", "tower_attention_tflops", "expert_tflops")
    scaled_rates = {name: getattr(calibration, name) * speed_factor for name in names}
    scaled_durations = {
        name: getattr(calibration, name) / speed_factor for name in ("optimizer_ps", "gradient_ps")
    }
    return dataclasses.replace(calibration, **scaled_rates, **scaled_durations)


def fit_speed_factor(
    calibration: Calibration,
    predict_steps: Callable[[Calibration], Sequence[float]],
    measured_seconds: Sequence[float],
) -> float:
    """The factor for all rates of computation with which predicted steps match measured ones.

    Args:
        predict_steps: returns the predicted steps of some runs in seconds under a calibration.
        measured_seconds: the measured steps of these runs. Their geometric mean is matched.
    """

    def error(speed_factor: float) -> float:
        return sum(
            math.log(predicted / real)
            for predicted, real in zip(
                predict_steps(scale_compute_rates(calibration, speed_factor)), measured_seconds, strict=True
            )
        )

    lower_bound, upper_bound = math.log(1 / LARGEST_SPEEDUP), math.log(LARGEST_SPEEDUP)
    for _ in range(40):
        log_factor = (lower_bound + upper_bound) / 2
        if error(math.exp(log_factor)) > 0:
            lower_bound = log_factor
        else:
            upper_bound = log_factor
    return math.exp((lower_bound + upper_bound) / 2)
