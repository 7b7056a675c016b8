"""Refuses impossible values before any process group starts."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_vl.config.fields import (
    RANDOM_WEIGHTS,
    RECOMPUTE_MODULES,
    SYNTHETIC_ROWS,
    LoraConfig,
    RunConfigError,
    TrainConfig,
)
from megatron_vl.config.options import valid_range
from megatron_vl.system.plurals import pluralize


def validate_config(config: TrainConfig, world_size: int) -> int:
    """Raises RunConfigError for values that are impossible whatever the model and the files are.

    Returns the data-parallel size.
    """
    _check_field_ranges(config)
    data_parallel_size = _check_parallel_sizes(config, world_size)
    _check_pipeline_chunks(config, data_parallel_size)
    _check_step_counts(config)
    _check_synthetic_rows(config)
    _check_export(config)
    _check_profile(config, world_size)
    _check_model_parts(config)
    return data_parallel_size


def _check_parallel_sizes(config: TrainConfig, world_size: int) -> int:
    """Checks the sizes of process groups and the options that need them. Returns the data-parallel size."""
    parallel = config.parallel
    ranks_per_replica = parallel.replica_ranks
    sizes_text = _sizes_text({"tp": parallel.tp, "cp": parallel.cp, "pp": parallel.pp})
    if world_size % ranks_per_replica:
        fields = (
            "parallel.tp, parallel.cp or parallel.pp" if parallel.cp > 1 else "parallel.tp or parallel.pp"
        )
        raise RunConfigError(
            f"parallel: {sizes_text} = {ranks_per_replica} ranks do not divide the world size {world_size};"
            f" start a multiple of {ranks_per_replica} processes, or change {fields}"
        )

    data_parallel_size = world_size // ranks_per_replica
    _check_expert_parallel(config, data_parallel_size)
    global_batch_size = config.global_batch_size
    if global_batch_size < 1 or global_batch_size % data_parallel_size:
        raise RunConfigError(
            f"global_batch_size {global_batch_size} must be a multiple of the data-parallel size"
            f" {data_parallel_size} ({pluralize(world_size, 'rank')} / ({sizes_text})); take"
            f" {_near_multiples(global_batch_size, data_parallel_size)}"
        )
    _check_row_sharing(config)
    return data_parallel_size


def _check_expert_parallel(config: TrainConfig, data_parallel_size: int) -> None:
    parallel = config.parallel
    stage_ranks = parallel.tp * parallel.cp * data_parallel_size
    expert_ranks = parallel.ep * parallel.etp
    if stage_ranks % expert_ranks:
        stage_text = _sizes_text({"tp": parallel.tp, "cp": parallel.cp, "dp": data_parallel_size})
        raise RunConfigError(
            f"parallel: ep {parallel.ep} x etp {parallel.etp} = {expert_ranks} ranks do not"
            f" divide the {pluralize(stage_ranks, 'rank')} of a pipeline stage ({stage_text});"
            f" lower parallel.ep or etp, or start a multiple of"
            f" {parallel.pp * math.lcm(parallel.tp * parallel.cp, expert_ranks)} processes"
        )


def _sizes_text(sizes: dict[str, int]) -> str:
    """Sizes as in ``tp 2 x pp 4``. Context parallelism is left out if it is not used."""
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if name != "cp" or size > 1)


def _near_multiples(number: int, divisor: int) -> str:
    """The two multiples of ``divisor`` next to ``number``, if they are above 0."""
    lower_multiple = number // divisor * divisor
    return " or ".join(str(near) for near in (lower_multiple, lower_multiple + divisor) if near > 0)


def _check_row_sharing(config: TrainConfig) -> None:
    """Checks that the ranks of a stage can share a row."""
    parallel, seq_len = config.parallel, config.data.seq_len
    if parallel.sequence_parallel and parallel.tp == 1:
        raise RunConfigError("parallel.sequence_parallel needs parallel.tp of at least 2")
    if parallel.sequence_parallel and seq_len % parallel.tp:
        raise RunConfigError(
            f"data.seq_len {seq_len} must be a multiple of parallel.tp {parallel.tp} with sequence_parallel"
        )
    if parallel.tp_comm_overlap and not parallel.sequence_parallel:
        raise RunConfigError("parallel.tp_comm_overlap needs parallel.sequence_parallel")

    shard_count = parallel.cp * (parallel.tp if parallel.sequence_parallel else 1)
    if parallel.cp > 1 and seq_len % shard_count:
        tensor_text = f" x tp {parallel.tp} with sequence_parallel" if parallel.sequence_parallel else ""
        raise RunConfigError(
            f"data.seq_len {seq_len} must be a multiple of {shard_count} (parallel.cp"
            f" {parallel.cp}{tensor_text}); take {_near_multiples(seq_len, shard_count)}"
        )
    _check_fp8_rows(config)


def _check_fp8_rows(config: TrainConfig) -> None:
    """Checks the tokens of a rank's products in FP8: blocks of 128, or for Tensor Cores a multiple of 16.

    With sequence parallelism, Transformer Engine also wants a multiple of 8 in what each rank gathers.
    """
    fp8_recipe, parallel, seq_len = config.fp8.recipe, config.parallel, config.data.seq_len
    if fp8_recipe == "none":
        return
    gathered_parts = parallel.tp if parallel.sequence_parallel else 1
    multiple = parallel.cp * math.lcm(128 if fp8_recipe == "blockwise" else 16, 8 * gathered_parts)
    if seq_len % multiple:
        raise RunConfigError(
            f"data.seq_len {seq_len} must be a multiple of {multiple} with fp8.recipe {fp8_recipe},"
            f" parallel.tp {parallel.tp} and cp {parallel.cp}; take {_near_multiples(seq_len, multiple)}"
        )


def _check_pipeline_chunks(config: TrainConfig, data_parallel_size: int) -> None:
    """Checks the stages and virtual chunks of the pipeline."""
    parallel = config.parallel
    micro_batches = config.global_batch_size // data_parallel_size
    if parallel.vpp > 1 and (parallel.pp < 2 or micro_batches % parallel.pp):
        raise RunConfigError(
            f"parallel.vpp {parallel.vpp} needs pp of at least 2 and a multiple of pp ({parallel.pp}) rows on"
            f" each data-parallel rank, not {micro_batches}"
        )
    if isinstance(parallel.layers, list) and len(parallel.layers) != parallel.pp * parallel.vpp:
        raise RunConfigError(
            f"parallel.layers {parallel.layers} has {len(parallel.layers)} entries; pp {parallel.pp} x vpp"
            f" {parallel.vpp} needs {parallel.pp * parallel.vpp}"
        )


def _check_step_counts(config: TrainConfig) -> None:
    """Checks the length of the run and of its warm-up."""
    if config.steps and config.epochs:
        raise RunConfigError(f"steps {config.steps} and epochs {config.epochs} exclude each other: give one")
    if not config.steps and config.data.is_synthetic:
        raise RunConfigError(f"data.path {config.data.path} has no end: give steps")
    if not config.steps:
        return  # they are counted from the data, and checked then
    if config.optimizer.warmup_steps and config.optimizer.warmup_steps >= config.steps:
        raise RunConfigError(
            f"optimizer.warmup_steps {config.optimizer.warmup_steps} must be below steps {config.steps}"
        )
    if config.stop_after is not None and config.stop_after > config.steps:
        raise RunConfigError(
            f"stop_after {config.stop_after} must not be above steps {config.steps}; raise steps to go on"
        )


def _check_synthetic_rows(config: TrainConfig) -> None:
    """Checks the fields of a run on random rows."""
    if not config.data.is_synthetic:
        return
    if config.data.path not in SYNTHETIC_ROWS:
        raise RunConfigError(f"data.path {config.data.path}: random rows are {' or '.join(SYNTHETIC_ROWS)}")
    if config.eval.interval:
        raise RunConfigError(
            f"eval.interval {config.eval.interval} needs a data set, and data.path is {config.data.path}; set"
            " it to 0"
        )


def _check_model_parts(config: TrainConfig) -> None:
    """Checks the vision tower, its pictures, recompute, and the parts that are trained."""
    if config.vision.placement == "decoupled" and config.fp8.vision and config.fp8.recipe != "none":
        raise RunConfigError(
            "fp8.vision needs vision.placement first_stage: with decoupled, ranks run the tower a different"
            " number of times in a step. Set fp8.vision to false"
        )

    unknown_modules = set(config.recompute.language_modules) - set(RECOMPUTE_MODULES)
    if unknown_modules:
        raise RunConfigError(
            f"recompute.language_modules {sorted(unknown_modules)} are unknown; valid:"
            f" {', '.join(RECOMPUTE_MODULES)}"
        )
    tower_is_recomputed = config.recompute.vision == "full" and not config.model.freeze_vision
    if config.recompute.offload_inputs and config.recompute.language != "full" and not tower_is_recomputed:
        raise RunConfigError(
            "recompute.offload_inputs moves the inputs of layers under full recompute; set recompute.language"
            " to full, or recompute.vision if the tower is trained"
        )

    min_pixels, max_pixels = config.data.min_pixels, config.data.max_pixels
    if min(min_pixels, max_pixels) > 0 and min_pixels > max_pixels:
        raise RunConfigError(f"data.min_pixels {min_pixels} must not be above data.max_pixels {max_pixels}")

    if config.lora.rank and not config.lora.targets:
        raise RunConfigError("lora.targets is empty, so nothing would be trained")
    model_config = config.model
    if model_config.freeze_vision and model_config.freeze_merger and model_config.freeze_language:
        raise RunConfigError(
            "model.freeze_vision, freeze_merger and freeze_language leave nothing to train; set one to false"
        )


def _check_export(config: TrainConfig) -> None:
    checkpoint = config.checkpoint
    if not checkpoint.export_hf:
        return
    if not checkpoint.dir:
        raise RunConfigError(
            f"checkpoint.export_hf {checkpoint.export_hf} needs checkpoint.dir: what is exported is a saved"
            " step"
        )
    if checkpoint.export_hf == "last":
        return
    if checkpoint.export_hf < 0:
        raise RunConfigError(f"checkpoint.export_hf {checkpoint.export_hf} must be at least 0, or last")
    if not checkpoint.interval or checkpoint.export_hf % checkpoint.interval:
        raise RunConfigError(
            f"checkpoint.export_hf {checkpoint.export_hf} must be a multiple of checkpoint.interval"
            f" {checkpoint.interval}, as saved steps alone can be exported; or give last"
        )


def _check_profile(config: TrainConfig, world_size: int) -> None:
    profile = config.profile
    if not profile.steps:
        return

    last_step = config.steps or profile.steps[-1]  # 0: not counted yet
    if len(profile.steps) != 2 or not 1 <= profile.steps[0] <= profile.steps[1] <= last_step:
        raise RunConfigError(
            f"profile.steps {profile.steps} must be the first and the last step to trace, as in [5, 7],"
            f" between 1 and steps {last_step}"
        )
    if not profile.ranks or not set(profile.ranks) <= set(range(world_size)):
        raise RunConfigError(
            f"profile.ranks {profile.ranks} must be ranks of this run, 0 to {world_size - 1}, at least one"
        )
    if not config.checkpoint.dir:
        raise RunConfigError("profile.steps needs checkpoint.dir, to write the traces to")


def _check_field_ranges(config_section: Any, name_prefix: str = "") -> None:
    """Checks that numbers are in the range that their field declares, if it does.

    Empty fields and words such as ``auto`` are not checked.
    """
    for config_field in dataclasses.fields(config_section):
        name, field_metadata = name_prefix + config_field.name, config_field.metadata
        value = getattr(config_section, config_field.name)
        if dataclasses.is_dataclass(value):
            _check_field_ranges(value, f"{name}.")
        elif field_metadata and isinstance(value, int | float):
            if range_text := valid_range(value, field_metadata):
                raise RunConfigError(f"{name} {value} must be {range_text}")


# --- Files and folders --------------------------------------------------------------------------------------


def check_inputs(config: TrainConfig) -> None:
    """Raises RunConfigError for a run whose model does not exist, or lacks weights. No file is read."""
    hf_dir = config.model.hf
    if not hf_dir:
        raise RunConfigError("model.hf is empty; give the Hugging Face folder that the model comes from")
    has_config = (Path(hf_dir) / "config.json").is_file()
    if not has_config and not (config.data.is_synthetic and Path(hf_dir).is_file()):
        raise RunConfigError(
            f"model.hf {hf_dir} holds no config.json; give the folder of a downloaded checkpoint "
            "(hf download REPOSITORY --local-dir FOLDER)"
        )
    has_random_base = config.model.checkpoint == RANDOM_WEIGHTS and not config.data.is_synthetic
    if (config.lora.rank or config.lora.adapter) and has_random_base:
        lora_field = f"rank {config.lora.rank}" if config.lora.rank else f"adapter {config.lora.adapter}"
        raise RunConfigError(
            f"lora.{lora_field} needs trained weights, which stay frozen, but model.checkpoint is"
            f" {RANDOM_WEIGHTS}; leave it empty to train adapters of the weights in model.hf"
        )


def check_outputs(config: TrainConfig) -> None:
    """Raises RunConfigError for folders that cannot be written to and exports that cannot be made."""
    check_output_dir("checkpoint.dir", config.checkpoint.dir)
    check_output_dir("log.tensorboard", config.log.tensorboard)
    check_wandb_installed(config.wandb.project)
    check_export_weights(config)


def check_output_dir(field_name: str, output_path: str) -> None:
    """Raises RunConfigError if an output folder or any folder above it is a file.

    The folder of checkpoints must be writable, too. An empty path stands for no folder.
    """
    output_dir = Path(output_path)
    blocking_file = next(
        (part for part in (output_dir, *output_dir.parents) if part.exists() and not part.is_dir()), None
    )
    if output_path and blocking_file:
        raise RunConfigError(
            f"{field_name} {output_path}: {blocking_file} is a file; give a folder, which may be a new one"
        )
    # All ranks write checkpoints. Other folders are written by rank 0, whose machine may be another one.
    existing_dir = next(part for part in (output_dir, *output_dir.absolute().parents) if part.exists())
    if output_path and field_name == "checkpoint.dir" and not os.access(existing_dir, os.W_OK | os.X_OK):
        raise RunConfigError(
            f"{field_name} {output_path} cannot be written, because {existing_dir} is read-only or belongs to"
            f" another user; give another {field_name}, or write permission there"
        )


def check_wandb_installed(wandb_project: str) -> None:
    """Raises RunConfigError if the run uses W&B and its package is not installed."""
    if not wandb_project:
        return
    # W&B keeps its files in a folder wandb/, which Python considers an empty package.
    package_spec = find_spec("wandb")
    if package_spec is None or package_spec.origin is None:
        raise RunConfigError(
            f"wandb.project {wandb_project} needs the package wandb, which is not installed: install the"
            " extra wandb (pip install 'megatron-vl[wandb]', in a checkout pip install -e '.[wandb]'), or"
            " leave wandb.project empty"
        )


def check_export_weights(config: TrainConfig) -> None:
    """Raises RunConfigError if exports, which use types of tensors, find no weights in ``model.hf``."""
    if not config.checkpoint.export_hf:
        return

    # A model of one file has no index.
    hf_dir = Path(config.model.hf)
    index_path = hf_dir / "model.safetensors.index.json"
    try:
        shard_names = (
            set(json.loads(index_path.read_text())["weight_map"].values()) if index_path.is_file() else set()
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunConfigError(f"{index_path} is damaged ({error}); download it again") from error
    missing_files = sorted(
        name for name in shard_names or {"model.safetensors"} if not (hf_dir / name).is_file()
    )
    if missing_files:
        raise RunConfigError(
            f"checkpoint.export_hf takes names and types of tensors from the weights in model.hf, and"
            f" {hf_dir} has no {missing_files[0]}; download the whole checkpoint, or set checkpoint.export_hf"
            " to 0"
        )


MAX_UNREMARKED_STEPS = 10
"""If a trace has more steps than this, a line warns of its cost."""


def config_remarks(config: TrainConfig, on_cpu: bool) -> list[str]:
    """Notes on settings that are allowed but rarely intended.

    Args:
        on_cpu: whether the run has no GPUs.
    """
    remark_texts = []
    if not config.checkpoint.dir:
        remark_texts.append("checkpoint.dir is empty: no checkpoint of this run is saved")
    elif not config.checkpoint.interval:
        remark_texts.append(
            "checkpoint.interval is 0: the only checkpoint is that of the last step, so a"
            " run that fails earlier loses everything. Set an interval, for instance --checkpoint.interval"
            " 500"
        )

    traced_steps = config.profile.steps
    if traced_steps and traced_steps[1] - traced_steps[0] >= MAX_UNREMARKED_STEPS:
        remark_texts.append(
            f"profile.steps {traced_steps} traces {traced_steps[1] - traced_steps[0] + 1} steps, which needs"
            " much memory and disk space on each traced rank; three to five steps are usually enough"
        )
    for model_part in ("vision", "merger"):
        part_rate = getattr(config.optimizer, f"{model_part}_lr")
        if getattr(config.model, f"freeze_{model_part}") and part_rate is not None:
            remark_texts.append(
                f"optimizer.{model_part}_lr {part_rate:g} has no effect, because model.freeze_{model_part}"
                " keeps those weights unchanged"
            )
        elif part_rate == 0:
            remark_texts.append(
                f"optimizer.{model_part}_lr 0 keeps those weights unchanged, but still computes their"
                f" gradients and stores their moments; --model.freeze_{model_part} true saves both"
            )
    has_adapters = config.lora.rank or config.lora.adapter
    if not has_adapters and config.lora != LoraConfig():
        remark_texts.append(
            "lora.rank is 0: the whole model is trained, and other fields of lora have no effect"
        )
    if on_cpu and config.dtype == "bfloat16":
        remark_texts.append("dtype bfloat16 is slow and less exact on cpu; give --dtype float32")
    return remark_texts
