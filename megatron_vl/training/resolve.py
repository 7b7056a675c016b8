"""Resolves a run: what it trains, in which layout, on which data, and where it begins.

:func:`resolve` only reads files. ``megatron-vl train --dry-run`` prints its result and ``doctor`` judges it.
Rank 0 of a run makes it and sends it to the other ranks. No other code decides any of these facts.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vl.config import RunConfigError, TrainConfig, validate
from megatron_vl.core_fixes.register import check_core_version
from megatron_vl.data.source.description import SplitFacts, read_description
from megatron_vl.data.source.location import location
from megatron_vl.planning.fit import check_memory
from megatron_vl.planning.gpus import calibration_for, calibration_here
from megatron_vl.planning.offload import settle_offload
from megatron_vl.planning.run import run_layout, split_source
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.layout import Layout, read_layout
from megatron_vl.training import preflight
from megatron_vl.training.resolved_run import ResolvedRun, Start
from megatron_vl.weights.run_folder import (
    DataRestart,
    Saved,
    StepMissingError,
    choose,
    read_signed,
)


@dataclass(frozen=True)
class Machine:
    """What the ranks of a run have."""

    gpu_gib: float | None
    """Memory of a GPU; None on CPU."""
    host_gib: float
    """Host memory that each rank may still use, on the node that has the least."""


def resolve(
    config: TrainConfig, world_size: int, machine: Machine | None = None, *, show_only: bool = False
) -> ResolvedRun:
    """Decides everything about a run of ``world_size`` ranks. Reads files only, and starts nothing.

    Args:
        machine: what the ranks have; None: by the GPUs of this machine (without any, an H200), and without a
            limit on host memory.
        show_only: whether the run will not start here. Then data set, weights, GPUs and enough memory need
            not be there, and of ``model.hf`` only ``config.json`` is read.

    Raises:
        UserError: the run is impossible. The message names the field, path or number, and what to change.
        FileNotFoundError: a file of the checkpoint or of the model is missing.
    """
    check_core_version()
    dp = validate(config, world_size)
    preflight.check_inputs(config, model_only=show_only)
    if not show_only:
        preflight.check_outputs(config)
    spec = read_spec(config.model.hf)
    if config.model.moe_aux_loss is not None and spec.language.moe is None:
        raise RunConfigError(
            f"model.moe_aux_loss is for models with experts; {spec.family} is dense: leave it empty"
        )

    start = _find_start(config, dp)
    saved = _saved_layout(config, spec, start.source)
    calibration = calibration_for(config.platform)
    layout = run_layout(config, spec, world_size, calibration=calibration, saved=saved)
    split = split_source(config, layout, saved, calibration)
    if machine is None:
        machine = Machine(None if config.platform == "cpu" else calibration.memory_gib, math.inf)
    gpu = None if config.platform == "cpu" or show_only else calibration_here()
    # The advice of these checks names options that differ from the user's own.
    memory_note = "" if gpu is None else check_memory(config, spec, layout, world_size, gpu)
    preflight.check_host_memory(config, spec, layout, dp, machine.gpu_gib, machine.host_gib)

    if layout.pp > 1:
        parallel = dataclasses.replace(config.parallel, layers=list(layout.layers))
        config = dataclasses.replace(config, parallel=parallel)
    config = settle_offload(config, spec, layout, dp, machine.gpu_gib, machine.host_gib)

    run = ResolvedRun(config, spec, layout, dp, split, start, {}, ())
    return run if show_only else _with_inputs(run, memory_note, on_cpu=machine.gpu_gib is None)


def _with_inputs(run: ResolvedRun, memory_note: str, on_cpu: bool) -> ResolvedRun:
    """Checks weights and data of a run that starts here, and adds what follows from them."""
    config, spec, source = run.config, run.spec, run.start.source
    notes = [f"NOTE: {remark}" for remark in preflight.remarks(config, on_cpu, run.resumes)]
    if run.split != "given":
        origins = {
            "planned": f"planned, {calibration_for(config.platform).source}",
            "saved": "as it was saved",
            "even": "even, as no rates of this CPU are known",
        }
        notes.append(f"decoder layers of the stages {list(run.layout.layers)}: {origins[run.split]}")
    if memory_note:
        notes.append(f"NOTE: {memory_note}")

    if source is not None:
        from megatron_vl.training.checkpoint import remedied

        with remedied(source.path):
            preflight.check_video_rule(config, spec, source.path)
        preflight.check_own_checkpoint(config, spec, run.dp, source.path, run.start.restart_data)
    elif config.model.checkpoint and (note := preflight.check_start_weights(config, spec)):
        notes.append(f"NOTE: {note}")

    return dataclasses.replace(run, data=read_data(config), notes=tuple(notes))


def read_data(config: TrainConfig) -> dict[str, SplitFacts]:
    """Reads the facts of each split that a run uses, about 60 bytes for each shard.

    Raises:
        LoaderError: there is no data set, or one of these splits is empty.
        DescriptionError: the data set's description could run code, or refers to files outside its folder.
    """
    from megatron_vl.data.source.sizes import without_sizes  # it imports torch

    description = read_description(location(config.data.path))
    splits = {"train", config.eval.split} if config.eval.interval else {"train"}
    facts = {split: description.facts(split) for split in sorted(splits)}
    lacking = tuple(str(one.path) for one in without_sizes(description, config.model.hf, config.data))
    facts["train"] = dataclasses.replace(facts["train"], without_sizes=lacking)
    return facts


# --- Where a run begins -------------------------------------------------------------------------------------


def _find_start(config: TrainConfig, dp: int) -> Start:
    """Decides where a run with data-parallel size ``dp`` begins.

    Raises:
        RunConfigError: there is no checkpoint of step ``checkpoint.step``.
        CheckpointError: the latest checkpoint is not known or cannot be read.
    """
    c = config.checkpoint
    folder = Path(c.dir) if c.dir and c.resume else None
    try:
        choice = choose(folder, c.step, c.branch, c.attempt)
    except StepMissingError as error:
        if c.step is None:
            raise
        raise RunConfigError(str(error)) from error

    source, lineage = choice.source, choice.lineage
    if not c.restart_data:
        # The record of an earlier restart is kept. So if the run's YAML sets restart_data, a start that
        # overrides it does not make the next start restart the data again.
        return Start(source, lineage, False, choice.said)
    if source is None:
        lineage = dataclasses.replace(lineage, data_restart=DataRestart(0, c.attempt))
        return Start(None, lineage, False, choice.said)

    done, facts = source.lineage.data_restart, preflight.run_facts(config, dp)
    if done is not None and done.attempt >= c.attempt and _reads_the_same(source, facts):
        note = (
            f"checkpoint.restart_data: this checkpoint records that the data set was read from its start at"
            f" step {done.step}; the run continues in it. To read it from its start once more, give"
            f" --checkpoint.attempt {done.attempt + 1}"
        )
        return Start(source, lineage, False, (*choice.said, note))

    note = (
        f"checkpoint.restart_data: the data set is read from its start at step {source.step}; once this run"
        " has saved, a start with the same option continues in it"
    )
    lineage = dataclasses.replace(lineage, data_restart=DataRestart(source.step, c.attempt))
    return Start(source, lineage, True, (*choice.said, note))


def _reads_the_same(source: Saved, now: dict[str, Any]) -> bool:
    """Whether a run with the facts ``now`` can continue in the data where a checkpoint stopped."""
    from megatron_vl.training.checkpoint import SAME, read_run

    saved = read_run(source.path)
    return all(saved.get(name) == now[name] for name in SAME)


def _saved_layout(config: TrainConfig, spec: ModelSpec, source: Saved | None) -> Layout | None:
    """The layout of a checkpoint, whose split a resumed run keeps; None if the run does not need it.

    It is also None if the checkpoint is damaged, which :func:`preflight.check_own_checkpoint` reports.
    """
    if source is None or config.parallel.pp == 1 or isinstance(config.parallel.layers, list):
        return None
    try:
        return read_layout(spec, read_signed(source.path / "run.json", source.step)["layout"])
    except (ValueError, KeyError, TypeError, OSError, RuntimeError):
        return None
