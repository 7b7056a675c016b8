"""Resolves a run: what it trains, in which layout, on which data, and where it begins.

:func:`resolve_run` only reads files. ``megatron-vl train --dry-run`` prints its result, and ``doctor`` judges
it. Rank 0 of a run calls it and sends the result to the other ranks. No other code decides any of this.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vl.config import RunConfigError, TrainConfig, validate_config
from megatron_vl.core_fixes.register import check_core_version
from megatron_vl.data.source.dataset_description import Description, SplitFacts, read_description
from megatron_vl.data.source.location import resolve_location
from megatron_vl.planning.gpus import calibration_for_platform, read_local_calibration
from megatron_vl.planning.layout_search import with_split
from megatron_vl.planning.memory_check import check_memory
from megatron_vl.planning.offload_fraction import resolve_offload_fraction
from megatron_vl.planning.run_layout import run_layout, split_source
from megatron_vl.spec.adapters import freeze_unadapted_parts
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.layout import Layout, read_layout
from megatron_vl.training import preflight
from megatron_vl.training.input_files import read_loader_digests, read_model_digests
from megatron_vl.training.resolved_run import ResolvedRun
from megatron_vl.weights.run_folder import (
    DataRestart,
    SavedCheckpoint,
    StartPoint,
    StepMissingError,
    choose_start_point,
    read_signed_json,
)


@dataclass(frozen=True)
class MachineMemory:
    """The memory of the ranks of a run."""

    gpu_gib: float | None
    """Memory of a GPU; None on CPU."""
    host_gib: float
    """Host memory that each rank may still use, on the node that has the least."""


def resolve_run(
    config: TrainConfig,
    world_size: int,
    machine_memory: MachineMemory | None = None,
    *,
    spec: ModelSpec | None = None,
    show_only: bool = False,
) -> ResolvedRun:
    """Decides everything about a run of ``world_size`` ranks. Reads files only, and starts nothing.

    Args:
        machine_memory: the memory of the ranks; None: that of this machine's GPUs (without any, of an H200),
            and no limit on host memory.
        spec: the model's sizes, if they are not those of ``model.hf``.
        show_only: whether the run will not start here. Then it needs no data set, weights or GPUs, memory is
            not checked, and only ``config.json`` of ``model.hf`` is read.

    Raises:
        UserError: the run is impossible. The message names the field, path or number, and what to change.
        FileNotFoundError: a file of the checkpoint or of the model is missing.
    """
    dp, spec = _check_fields(config, world_size, spec, show_only)
    run_start = _find_run_start(config, dp)
    # Adapters of an earlier run decide their own fields, and parts without adapters are frozen.
    config = preflight.with_start_adapter(config, spec, run_start.source_checkpoint)
    config = freeze_unadapted_parts(config, spec)
    calibration = calibration_for_platform(config.platform)
    if machine_memory is None:
        machine_memory = MachineMemory(None if config.platform == "cpu" else calibration.memory_gib, math.inf)

    # A resumed run keeps the split with which its checkpoint was saved.
    saved_layout = _saved_layout(config, spec, run_start.source_checkpoint)
    layout = run_layout(config, spec, world_size, calibration=calibration, saved_layout=saved_layout)
    layer_split_origin = split_source(config, saved_layout)

    # These checks see the user's own fields, because their advice names options that differ from them.
    memory_note = ""
    if config.platform != "cpu" and not show_only and (gpu_calibration := read_local_calibration()):
        memory_note = check_memory(config, spec, layout, world_size, gpu_calibration, machine_memory.host_gib)
    preflight.check_host_memory(config, spec, layout, dp, machine_memory.gpu_gib, machine_memory.host_gib)

    # From here on, the config has the split and the offloaded share as numbers.
    settled_config = resolve_offload_fraction(
        with_split(config, layout) if layout.pp > 1 else config,
        spec,
        layout,
        dp,
        machine_memory.gpu_gib,
        machine_memory.host_gib,
    )
    resolved_run = ResolvedRun(settled_config, spec, layout, dp, layer_split_origin, run_start, {}, ())
    if show_only:
        return resolved_run
    return _with_checked_inputs(resolved_run, memory_note, on_cpu=machine_memory.gpu_gib is None)


def _check_fields(
    config: TrainConfig, world_size: int, spec: ModelSpec | None, show_only: bool
) -> tuple[int, ModelSpec]:
    """Makes the cheap checks, so that a mistake in a field is reported within a second.

    Returns:
        (data-parallel size, model).
    """
    check_core_version()
    dp = validate_config(config, world_size)
    preflight.check_inputs(config, model_only=show_only)
    if not show_only:
        preflight.check_outputs(config)
    spec = spec or read_spec(config.model.hf)
    if config.model.moe_aux_loss is not None and spec.language.moe is None:
        raise RunConfigError(
            f"model.moe_aux_loss is for models with experts; {spec.family} is dense: leave it empty"
        )
    return dp, spec


def _split_note(resolved_run: ResolvedRun) -> str:
    origin_texts = {
        "planned": f"planned, {calibration_for_platform(resolved_run.config.platform).source}",
        "saved": "as it was saved",
        "even": "even, as no rates of CPUs are known",
    }
    return (
        f"decoder layers of the stages {list(resolved_run.layout.layers_per_chunk)}:"
        f" {origin_texts[resolved_run.layer_split_origin]}"
    )


def _with_checked_inputs(resolved_run: ResolvedRun, memory_note: str, on_cpu: bool) -> ResolvedRun:
    """Checks weights and data of a run that starts here, and adds notes and the facts of the data."""
    config, spec = resolved_run.config, resolved_run.spec
    source_checkpoint = resolved_run.run_start.source_checkpoint
    config_remarks = preflight.config_remarks(config, on_cpu, resolved_run.is_resumed)
    run_notes = [f"NOTE: {remark}" for remark in config_remarks]
    if resolved_run.layer_split_origin != "given":
        run_notes.append(_split_note(resolved_run))
    if memory_note:
        run_notes.append(f"NOTE: {memory_note}")

    is_synthetic = config.data.is_synthetic
    if not is_synthetic and (serving_note := preflight.check_tokenizer(config, spec)):
        run_notes.append(f"NOTE: {serving_note}")

    base_digest = ""
    if config.model.checkpoint and (source_checkpoint is None or config.lora.rank):
        preflight.check_start_weights(config, spec)
        base_digest = preflight.read_base_digest(config)
    start_adapter = preflight.read_start_adapter(config, base_digest) if source_checkpoint is None else None
    if source_checkpoint is not None:
        saved_metadata = preflight.check_own_checkpoint(
            config,
            spec,
            resolved_run.dp,
            source_checkpoint.path,
            resolved_run.run_start.restarts_data,
            base_digest,
        )
        start_adapter = saved_metadata.get(preflight.START_ADAPTER_KEY)

    if is_synthetic:
        from megatron_vl.data.synthetic import synthetic_identity  # it imports torch

        facts_by_split = {"train": SplitFacts(synthetic_identity(config.data), largest_shard=0)}
        loader_digests = {}
    else:
        dataset_description = read_description(resolve_location(config.data.path))
        facts_by_split = read_split_facts(config, dataset_description)
        loader_digests = read_loader_digests(config, dataset_description)
    return dataclasses.replace(
        resolved_run,
        facts_by_split=facts_by_split,
        model_digests=read_model_digests(config, resolved_run.run_start),
        loader_digests=loader_digests,
        run_notes=tuple(run_notes),
        base_digest=base_digest,
        start_adapter=start_adapter,
    )


def read_split_facts(
    config: TrainConfig, dataset_description: Description | None = None
) -> dict[str, SplitFacts]:
    """Reads the facts of each split that a run uses, about 60 bytes for each shard.

    Args:
        dataset_description: the description of the data set, if it was read before.

    Raises:
        LoaderError: there is no data set, or one of these splits is empty.
        DescriptionError: the data set's description could run code, or refers to files outside its folder.
    """
    from megatron_vl.data.source.sample_sizes import find_datasets_without_sizes  # it imports torch

    dataset_description = dataset_description or read_description(resolve_location(config.data.path))
    facts_by_split = {
        split: dataset_description.split_facts(split)
        for split in sorted({"train", config.eval.split} if config.eval.interval else {"train"})
    }
    unsized_datasets = find_datasets_without_sizes(dataset_description, config.model.hf, config.data)
    facts_by_split["train"] = dataclasses.replace(
        facts_by_split["train"],
        datasets_without_sizes=tuple(str(dataset.path) for dataset in unsized_datasets),
    )
    return facts_by_split


# --- The start of a run -------------------------------------------------------------------------------------


def _find_run_start(config: TrainConfig, dp: int) -> StartPoint:
    """Decides from which checkpoint a run begins, and whether it reads its data from the start."""
    start_point = find_start_point(config)
    # The record of an earlier restart is kept. So if the run's YAML sets restart_data, a start that overrides
    # it does not make the next start restart the data again.
    return _restart_data(config, dp, start_point) if config.checkpoint.restart_data else start_point


def find_start_point(config: TrainConfig) -> StartPoint:
    """Decides from which checkpoint a run begins.

    Raises:
        RunConfigError: there is no checkpoint of step ``checkpoint.step``.
        CheckpointError: the latest checkpoint is not known or cannot be read.
    """
    checkpoint_config = config.checkpoint
    run_dir = Path(checkpoint_config.dir) if checkpoint_config.dir and checkpoint_config.resume else None
    try:
        return choose_start_point(
            run_dir, checkpoint_config.step, checkpoint_config.branch, checkpoint_config.attempt
        )
    except StepMissingError as error:
        if checkpoint_config.step is None:
            raise
        raise RunConfigError(str(error)) from error


def _restart_data(config: TrainConfig, dp: int, start_point: StartPoint) -> StartPoint:
    """The start of a run with ``checkpoint.restart_data``."""
    source_checkpoint, attempt = start_point.source_checkpoint, config.checkpoint.attempt
    earlier_restart = source_checkpoint.lineage.data_restart if source_checkpoint is not None else None
    if (
        source_checkpoint is not None
        and earlier_restart is not None
        and earlier_restart.attempt >= attempt
        and _reads_same_data(source_checkpoint, preflight.data_order_metadata(config, dp))
    ):
        restart_note = (
            f"checkpoint.restart_data: this checkpoint records that the data set was read from its start at"
            f" step {earlier_restart.step}; the run continues in it. To read it from its start once more,"
            f" give --checkpoint.attempt {earlier_restart.attempt + 1}"
        )
        return dataclasses.replace(start_point, user_messages=(*start_point.user_messages, restart_note))

    step = 0 if source_checkpoint is None else source_checkpoint.step
    lineage = dataclasses.replace(start_point.lineage, data_restart=DataRestart(step, attempt))
    if source_checkpoint is None:
        return dataclasses.replace(start_point, lineage=lineage)
    restart_note = (
        f"checkpoint.restart_data: the data set is read from its start at step {step}; once"
        " this run has saved, a start with the same option continues in it"
    )
    user_messages = (*start_point.user_messages, restart_note)
    return StartPoint(source_checkpoint, lineage, user_messages, restarts_data=True)


def _reads_same_data(source_checkpoint: SavedCheckpoint, current_metadata: dict[str, Any]) -> bool:
    """Whether a run with the fields ``current_metadata`` can continue in the data of a checkpoint."""
    from megatron_vl.training.checkpoint import UNCHANGEABLE_FIELDS, read_run_metadata

    saved_metadata = read_run_metadata(source_checkpoint.path)
    return all(saved_metadata.get(name) == current_metadata[name] for name in UNCHANGEABLE_FIELDS)


def _saved_layout(
    config: TrainConfig, spec: ModelSpec, source_checkpoint: SavedCheckpoint | None
) -> Layout | None:
    """The layout of a checkpoint, whose split a resumed run keeps; None if the run does not need it.

    It is also None if the checkpoint is damaged, which :func:`preflight.check_own_checkpoint` reports.
    """
    if source_checkpoint is None or config.parallel.pp == 1 or isinstance(config.parallel.layers, list):
        return None
    try:
        return read_layout(
            spec, read_signed_json(source_checkpoint.path / "run.json", source_checkpoint.step)["layout"]
        )
    except (ValueError, KeyError, TypeError, OSError, RuntimeError):
        return None
