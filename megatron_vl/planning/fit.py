"""Says whether a run fits its GPUs by the memory estimate, and what would fit.

The start of a run, ``doctor`` and a rank that has run out of memory all ask here.
"""

from __future__ import annotations

from megatron_vl.config import RunConfigError, TrainConfig, validate
from megatron_vl.planning.calibration import Calibration
from megatron_vl.planning.memory import RESERVE_GIB, peak_gib, stage_memories
from megatron_vl.planning.offload import least_share, settle_offload
from megatron_vl.planning.predict import Prediction
from megatron_vl.planning.rows import stated_rows
from megatron_vl.planning.search import Wanted, options_of, what_fits
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout

EXPERTS_LESS = 1.12
"""With experts, the estimate was up to so many times too high."""


def check_memory(
    config: TrainConfig, spec: ModelSpec, layout: Layout, world: int, calibration: Calibration
) -> str:
    """Compares the estimate with the GPU's memory.

    Returns a remark where a run is let through, but leaves less than :data:`RESERVE_GIB` free; empty where it
    fits.

    Raises:
        RunConfigError: the run does not fit. The message says what would, and how to start anyway.
    """
    dp = validate(config, world)
    settled = settle_offload(config, spec, layout, dp, calibration.memory_gib)
    peak = peak_gib(stage_memories(settled, spec, layout, dp))
    have = calibration.memory_gib
    if peak + RESERVE_GIB <= have:
        return ""
    found = (
        f"the memory estimate is {peak:.0f} GiB on the fullest GPU, with a row full of pictures, and"
        f" {RESERVE_GIB:.0f} should stay free; {calibration.gpu} has {have:.0f}"
    )
    limit = have * (EXPERTS_LESS if spec.language.moe else 1.0)
    if peak <= limit or not config.failures.check_memory:
        share = _share_that_fits(config, spec, layout, dp, have)
        return f"{found}, so the run may end for lack of memory; {share}"

    raise RunConfigError(
        f"the run does not fit: {found}. {advice(config, spec, world, calibration)}"
        " If the rows hold less than that, data.max_patches bounds their patches and with them the estimate."
        " --failures.check_memory false starts anyway"
    )


def _share_that_fits(config: TrainConfig, spec: ModelSpec, layout: Layout, dp: int, have: float) -> str:
    share = least_share(config, spec, layout, dp, have)
    if share is None:
        return "not even --optimizer.offload_fraction 1 would change that"
    return f"--optimizer.offload_fraction {share:g} would fit"


def advice(
    config: TrainConfig, spec: ModelSpec, world: int, calibration: Calibration, *, near: bool = False
) -> str:
    """A sentence with the options that would fit, by the planner."""
    fitting = what_would_fit(config, spec, world, calibration, near=near)
    if fitting is None:
        return f"No layout of {world} GPUs fits: take more, or lower data.seq_len or data.max_patches."
    return (
        f"What would fit, by `megatron-vl plan`: {options_of(config, fitting)} ({fitting.peak_gib:.0f} GiB)."
    )


def what_would_fit(
    config: TrainConfig, spec: ModelSpec, world: int, calibration: Calibration, *, near: bool = False
) -> Prediction | None:
    """The planner's choice for the same model, rows and GPUs; None if nothing fits.

    Args:
        near: keep the run's parallel sizes, if their split, recompute, offload or the place of the tower can
            be chosen so that they fit.
    """
    rows = stated_rows(spec, config.data.seq_len, config.data.max_patches)
    wanted = Wanted(config, spec, world, calibration, rows)
    found = what_fits(wanted, same_sizes=True) if near else None
    return found or what_fits(wanted)
