"""Refuses a run whose memory estimate does not fit, before anything is allocated, and says what would fit."""

from __future__ import annotations

from megatron_vl.config import RunConfigError, TrainConfig, validate
from megatron_vl.planning.calibration import Calibration
from megatron_vl.planning.memory import RESERVE_GIB, peak_gib, stage_memories
from megatron_vl.planning.offload import resolve
from megatron_vl.planning.predict import Prediction
from megatron_vl.planning.rows import stated_rows
from megatron_vl.planning.search import Wanted, options_of, what_fits
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout

EXPERTS_LESS = 1.12
"""With experts, the estimate was up to so many times too high."""


def check_memory(
    config: TrainConfig, spec: ModelSpec, layout: Layout, world: int, calibration: Calibration
) -> str | None:
    """Compares the estimate with the GPU's memory.

    Returns a remark where a run fits, but leaves less than :data:`RESERVE_GIB` free; None where it fits.

    Raises:
        RunConfigError: the run does not fit. The message says what would, and how to start all the same.
    """
    settled = resolve(config, spec, world, calibration.memory_gib)
    peak = peak_gib(stage_memories(settled, spec, layout, validate(config, world)))
    have = calibration.memory_gib
    if peak + RESERVE_GIB <= have:
        return None
    found = f"the memory estimate is {peak:.0f} GiB on the fullest GPU, with a row full of pictures"
    limit = have * (EXPERTS_LESS if spec.language.moe else 1.0)
    if peak <= limit or not config.failures.check_memory:
        return f"{found}; {calibration.gpu} has {have:.0f}, so the run may end for lack of memory"
    raise RunConfigError(
        f"the run does not fit: {found}, and {calibration.gpu} has {have:.0f}."
        f" {_advice(config, spec, world, calibration)}"
        " If the rows hold less than that, data.max_patches bounds their patches and with them the estimate."
        " --failures.check_memory false starts all the same"
    )


def _advice(config: TrainConfig, spec: ModelSpec, world: int, calibration: Calibration) -> str:
    fitting = what_would_fit(config, spec, world, calibration)
    if fitting is None:
        return f"No layout of {world} GPUs fits: take more, or lower data.seq_len or data.max_patches."
    return (
        f"What would fit, by `megatron-vl plan`: {options_of(config, fitting)} ({fitting.peak_gib:.0f} GiB)."
    )


def what_would_fit(
    config: TrainConfig, spec: ModelSpec, world: int, calibration: Calibration
) -> Prediction | None:
    """The planner's choice for the same model, rows and GPUs; None if nothing fits."""
    rows = stated_rows(spec, config.data.seq_len, config.data.max_patches)
    return what_fits(Wanted(config, spec, world, calibration, rows))
