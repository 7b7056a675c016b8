"""Refuses impossible values before any process group starts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from megatron_vl.config.fields import RECOMPUTE_MODULES, RunConfigError, TrainConfig
from megatron_vl.config.options import in_range
from megatron_vl.words import counted


def validate(config: TrainConfig, world_size: int) -> int:
    """Checks what needs no model and no files. Returns the data-parallel size.

    Raises:
        RunConfigError: names the field and what would be valid.
    """
    _check_ranges(config)
    dp = _check_parallel(config, world_size)
    _check_layers(config, dp)
    _check_steps(config)
    _check_checkpoint(config)
    _check_profile(config, world_size)
    _check_parts(config)
    return dp


def _check_parallel(config: TrainConfig, world_size: int) -> int:
    """The sizes of process groups, and the options that need them. Returns the data-parallel size."""
    p = config.parallel
    ranks = p.replica_ranks
    sizes = f"tp {p.tp} x cp {p.cp} x pp {p.pp}" if p.cp > 1 else f"tp {p.tp} x pp {p.pp}"
    if world_size % ranks:
        change = "parallel.tp, parallel.cp or parallel.pp" if p.cp > 1 else "parallel.tp or parallel.pp"
        raise RunConfigError(
            f"parallel: {sizes} = {ranks} ranks do not divide the world size {world_size};"
            f" start a multiple of {ranks} processes, or change {change}"
        )
    dp = world_size // ranks
    stage_ranks = p.tp * p.cp * dp
    if stage_ranks % (p.ep * p.etp):
        fitting = p.pp * math.lcm(p.tp * p.cp, p.ep * p.etp)
        stage = f"tp {p.tp} x cp {p.cp} x dp {dp}" if p.cp > 1 else f"tp {p.tp} x dp {dp}"
        raise RunConfigError(
            f"parallel: ep {p.ep} x etp {p.etp} = {p.ep * p.etp} ranks do not divide the"
            f" {counted(stage_ranks, 'rank')} of a pipeline stage ({stage});"
            f" lower parallel.ep or etp, or start a multiple of {fitting} processes"
        )
    rows = config.global_batch_size
    if rows < 1 or rows % dp:
        near = dict.fromkeys(n for n in (rows // dp * dp, (rows // dp + 1) * dp) if n > 0)
        raise RunConfigError(
            f"global_batch_size {rows} must be a multiple of the data-parallel size {dp}"
            f" ({counted(world_size, 'rank')} / ({sizes})); take {' or '.join(map(str, near))}"
        )

    if p.sequence_parallel and p.tp == 1:
        raise RunConfigError("parallel.sequence_parallel needs parallel.tp of at least 2")
    if p.sequence_parallel and config.data.seq_len % p.tp:
        raise RunConfigError(
            f"data.seq_len {config.data.seq_len} must be a multiple of parallel.tp {p.tp} with"
            " sequence_parallel"
        )
    if p.cp > 1:
        _check_context_parallel(config)
    if p.tp_comm_overlap and not p.sequence_parallel:
        raise RunConfigError("parallel.tp_comm_overlap needs parallel.sequence_parallel")
    if p.overlap_param_gather and not p.distributed_optimizer:
        raise RunConfigError("parallel.overlap_param_gather needs parallel.distributed_optimizer")
    return dp


def _check_context_parallel(config: TrainConfig) -> None:
    """What a row needs to be shared by context-parallel ranks."""
    p, seq_len = config.parallel, config.data.seq_len
    shards = p.cp * (p.tp if p.sequence_parallel else 1)
    if seq_len % shards:
        multiple = f"parallel.cp {p.cp}" + (
            f" x tp {p.tp} with sequence_parallel" if p.sequence_parallel else ""
        )
        near = [n for n in (seq_len // shards * shards, (seq_len // shards + 1) * shards) if n]
        raise RunConfigError(
            f"data.seq_len {seq_len} must be a multiple of {shards} ({multiple});"
            f" take {' or '.join(map(str, near))}"
        )
    if config.eval.interval and config.eval.samples:
        raise RunConfigError(
            f"eval.samples {config.eval.samples}: answers are not generated with parallel.cp above 1; set"
            " eval.samples to 0 (the loss is still evaluated), and run megatron-vl generate on a checkpoint"
        )


def _check_layers(config: TrainConfig, dp: int) -> None:
    """The stages and virtual chunks of the pipeline."""
    p = config.parallel
    micro_batches = config.global_batch_size // dp
    if p.vpp > 1 and (p.pp < 2 or micro_batches % p.pp):
        raise RunConfigError(
            f"parallel.vpp {p.vpp} needs pp of at least 2 and a multiple of pp ({p.pp}) rows on each"
            f" data-parallel rank, not {micro_batches}"
        )
    if isinstance(p.layers, list) and len(p.layers) != p.pp * p.vpp:
        raise RunConfigError(
            f"parallel.layers {p.layers} has {len(p.layers)} entries; pp {p.pp} x vpp {p.vpp} needs"
            f" {p.pp * p.vpp}"
        )


def _check_steps(config: TrainConfig) -> None:
    """The length of the run and of its warm-up."""
    if config.optimizer.warmup_steps >= config.steps and config.optimizer.warmup_steps:
        raise RunConfigError(
            f"optimizer.warmup_steps {config.optimizer.warmup_steps} must be below steps {config.steps}"
        )
    if config.stop_after is not None and config.stop_after > config.steps:
        raise RunConfigError(
            f"stop_after {config.stop_after} must not be above steps {config.steps}; raise steps to go on"
        )


def _check_checkpoint(config: TrainConfig) -> None:
    """Where the run goes back to, and what it exports."""
    c = config.checkpoint
    if c.step is not None and not (c.dir and c.resume):
        raise RunConfigError(
            f"checkpoint.step {c.step} needs checkpoint.dir, where that step was saved, and checkpoint.resume"
        )
    if c.branch and c.step is None:
        raise RunConfigError(
            f"checkpoint.branch {c.branch} needs checkpoint.step, the step of that branch to go back to"
        )
    _check_export(config)


def _check_parts(config: TrainConfig) -> None:
    """The vision tower, its pictures, what is recomputed, and which parts are trained."""
    if config.vision.placement == "decoupled" and config.fp8.vision and config.fp8.recipe != "none":
        raise RunConfigError(
            "fp8.vision needs vision.placement first_stage: with decoupled, ranks run the tower a different"
            " number of times in a step. Set fp8.vision to false"
        )

    unknown = set(config.recompute.language_modules) - set(RECOMPUTE_MODULES)
    if unknown:
        raise RunConfigError(
            f"recompute.language_modules {sorted(unknown)} are unknown; valid: {', '.join(RECOMPUTE_MODULES)}"
        )

    low, high = config.data.min_pixels, config.data.max_pixels
    if min(low, high) > 0 and low > high:
        raise RunConfigError(f"data.min_pixels {low} must not be above data.max_pixels {high}")

    m = config.model
    if m.freeze_vision and m.freeze_merger and m.freeze_language:
        raise RunConfigError(
            "model.freeze_vision, freeze_merger and freeze_language leave nothing to train; set one to false"
        )


def _check_export(config: TrainConfig) -> None:
    c = config.checkpoint
    if not c.export_hf:
        return
    if not c.dir:
        raise RunConfigError(
            f"checkpoint.export_hf {c.export_hf} needs checkpoint.dir: what is exported is a saved step"
        )

    if c.export_hf == "last":
        return
    if c.export_hf < 0:
        raise RunConfigError(f"checkpoint.export_hf {c.export_hf} must be at least 0, or last")

    if not c.interval or c.export_hf % c.interval:
        raise RunConfigError(
            f"checkpoint.export_hf {c.export_hf} must be a multiple of checkpoint.interval {c.interval}, as"
            " saved steps alone can be exported; or give last"
        )


def _check_profile(config: TrainConfig, world_size: int) -> None:
    profile = config.profile
    if not profile.steps:
        return

    steps = profile.steps
    if len(steps) != 2 or not 1 <= steps[0] <= steps[1] <= config.steps:
        raise RunConfigError(
            f"profile.steps {steps} must be the first and the last step to trace, as in [5, 7], between 1 and"
            f" steps {config.steps}"
        )
    strange = [rank for rank in profile.ranks if not 0 <= rank < world_size]
    if strange or not profile.ranks:
        raise RunConfigError(
            f"profile.ranks {profile.ranks} must be ranks of this run, 0 to {world_size - 1}, at least one"
        )
    if not (profile.dir or config.checkpoint.dir):
        raise RunConfigError("profile.steps needs profile.dir or checkpoint.dir, to write the traces to")


def _check_ranges(section: Any, prefix: str = "") -> None:
    """The range of each field, where it is declared. Empty fields and words such as auto are not checked."""
    for item in dataclasses.fields(section):
        name, value, facts = prefix + item.name, getattr(section, item.name), item.metadata
        if dataclasses.is_dataclass(value):
            _check_ranges(value, f"{name}.")
        elif facts and isinstance(value, int | float) and not in_range(value, facts):
            low, high, above = facts["least"], facts["most"], facts["above"]
            valid = f"between {low} and {high}" if high < math.inf else f"at least {low:g}"
            raise RunConfigError(f"{name} {value} must be {f'above {above:g}' if above > low else valid}")
