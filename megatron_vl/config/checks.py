"""Refuses impossible values before any process group starts."""

import dataclasses
import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_vl.config.fields import RANDOM_WEIGHTS, SYNTHETIC_ROWS, LoraConfig, RunConfigError, TrainConfig
from megatron_vl.config.options import valid_range
from megatron_vl.system.folder_kind import folder_kind, why_no_model
from megatron_vl.system.plurals import pluralize

LONG_CPU_STEP = 8192
"""Tokens of a step that takes minutes on CPU, even with the smallest models."""


def _refuse_if(is_impossible: object, message: str) -> None:
    if is_impossible:
        raise RunConfigError(message)


def validate_config(config: TrainConfig, world_size: int) -> int:
    """Raises RunConfigError for values that are impossible whatever the model and the files are.

    Returns the data-parallel size.
    """
    check_field_ranges(config)
    return check_sizes(config, world_size)


def check_sizes(config: TrainConfig, world_size: int) -> int:
    """:func:`validate_config` of a run whose single fields are known to be in range."""
    dp = _check_parallel_sizes(config, world_size)
    _check_row_sharing(config)
    _check_pipeline_chunks(config, dp)
    _check_steps_and_rows(config)
    check_fp8(config, on_cpu=config.platform == "cpu")
    _check_model_parts(config)
    _check_export(config)
    _check_profile(config, world_size)
    return dp


def _check_parallel_sizes(config: TrainConfig, world_size: int) -> int:
    """Checks the sizes of process groups. Returns the data-parallel size."""
    parallel, batch = config.parallel, config.global_batch_size
    sizes, replica_ranks = (
        _sizes_text({"tp": parallel.tp, "cp": parallel.cp, "pp": parallel.pp}),
        parallel.replica_ranks,
    )
    fields = "parallel.tp, parallel.cp or parallel.pp" if parallel.cp > 1 else "parallel.tp or parallel.pp"
    _refuse_if(
        world_size % replica_ranks,
        f"parallel: {sizes} = {replica_ranks} ranks do not divide the world size {world_size};"
        f" start a multiple of {replica_ranks} processes (on one node: --nproc-per-node {replica_ranks}), or"
        f" change {fields}",
    )
    dp = world_size // replica_ranks
    stage_ranks, expert_ranks = parallel.tp * parallel.cp * dp, parallel.ep * parallel.etp
    least_ranks = parallel.pp * math.lcm(parallel.tp * parallel.cp, expert_ranks)
    _refuse_if(
        stage_ranks % expert_ranks,
        f"parallel: ep {parallel.ep} x etp {parallel.etp} = {expert_ranks} ranks do not divide the"
        f" {pluralize(stage_ranks, 'rank')} of a pipeline stage"
        f" ({_sizes_text({'tp': parallel.tp, 'cp': parallel.cp, 'dp': dp})}); lower parallel.ep or etp, or"
        f" start a multiple of {least_ranks} processes (on one node: --nproc-per-node {least_ranks})",
    )
    _refuse_if(
        batch < 1 or batch % dp,
        f"global_batch_size {batch} must be a multiple of the data-parallel size {dp}"
        f" ({pluralize(world_size, 'rank')} / ({sizes})); take {_near_multiples(batch, dp)}",
    )
    return dp


def _sizes_text(sizes: dict[str, int]) -> str:
    """Sizes as in ``tp 2 x pp 4``. Context parallelism is left out if it is not used."""
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if name != "cp" or size > 1)


def _near_multiples(number: int, divisor: int) -> str:
    lower = number // divisor * divisor
    return " or ".join(str(near) for near in (lower, lower + divisor) if near > 0)


def _check_row_sharing(config: TrainConfig) -> None:
    parallel, seq_len, recipe = config.parallel, config.data.seq_len, config.fp8.recipe
    tp, cp, sequence_parallel = parallel.tp, parallel.cp, parallel.sequence_parallel
    _refuse_if(sequence_parallel and tp == 1, "parallel.sequence_parallel needs parallel.tp of at least 2")
    _refuse_if(
        sequence_parallel and seq_len % tp,
        f"data.seq_len {seq_len} must be a multiple of parallel.tp {tp} with sequence_parallel",
    )
    gathered_parts = tp if sequence_parallel else 1
    tensor_text = f" x tp {tp} with sequence_parallel" if sequence_parallel else ""
    _refuse_if(
        cp > 1 and seq_len % (cp * gathered_parts),
        f"data.seq_len {seq_len} must be a multiple of {cp * gathered_parts} (parallel.cp {cp}{tensor_text});"
        f" take {_near_multiples(seq_len, cp * gathered_parts)}",
    )
    # Tokens of a rank's products in FP8 come in blocks of 128, or for Tensor Cores in a multiple of 16. With
    # sequence parallelism, Transformer Engine also wants a multiple of 8 in what each rank gathers.
    multiple = cp * math.lcm(128 if recipe == "blockwise" else 16, 8 * gathered_parts)
    _refuse_if(
        recipe != "none" and seq_len % multiple,
        f"data.seq_len {seq_len} must be a multiple of {multiple} with fp8.recipe {recipe}, parallel.tp {tp}"
        f" and cp {cp}; take {_near_multiples(seq_len, multiple)}",
    )


def _check_pipeline_chunks(config: TrainConfig, dp: int) -> None:
    pp, vpp, layers = config.parallel.pp, config.parallel.vpp, config.parallel.layers
    rows = config.global_batch_size // dp
    _refuse_if(
        vpp > 1 and (pp < 2 or rows % pp),
        f"parallel.vpp {vpp} needs pp of at least 2 and a multiple of pp ({pp}) rows on each data-parallel"
        f" rank, not {rows}",
    )
    if isinstance(layers, list):
        _refuse_if(
            len(layers) != pp * vpp,
            f"parallel.layers {layers} has {len(layers)} entries; pp {pp} x vpp {vpp} needs {pp * vpp}",
        )


def _check_steps_and_rows(config: TrainConfig) -> None:
    steps, warmup_steps, data = config.steps, config.optimizer.warmup_steps, config.data
    _refuse_if(
        steps and config.epochs, f"steps {steps} and epochs {config.epochs} exclude each other: give one"
    )
    # Steps that are counted from the data are checked when they are known.
    _refuse_if(
        steps and warmup_steps and warmup_steps >= steps,
        f"optimizer.warmup_steps {warmup_steps} must be below steps {steps}",
    )
    schedule, decay_steps = config.optimizer.schedule, config.optimizer.decay_steps
    _refuse_if(
        decay_steps and schedule != "wsd",
        f"optimizer.decay_steps {decay_steps} needs optimizer.schedule wsd; {schedule} has no such steps",
    )
    _refuse_if(
        steps and decay_steps and config.warmup_steps + decay_steps > steps,
        f"optimizer.decay_steps {decay_steps} and {config.warmup_steps} steps of warm-up are more than steps"
        f" {steps}",
    )
    _refuse_if(
        steps and (config.stop_after or 0) > steps,
        f"stop_after {config.stop_after} must not be above steps {steps}; raise steps to go on",
    )
    _refuse_if(
        data.is_synthetic and data.path not in SYNTHETIC_ROWS,
        f"data.path {data.path}: random rows are {' or '.join(SYNTHETIC_ROWS)}",
    )
    for name in ("interval", "answers") if data.is_synthetic else ():
        value = getattr(config.eval, name)
        _refuse_if(value, f"eval.{name} {value} needs a data set, and data.path is {data.path}; set it to 0")
    _refuse_if(
        0 < data.max_pixels < data.min_pixels,
        f"data.min_pixels {data.min_pixels} must not be above data.max_pixels {data.max_pixels}",
    )


def check_fp8(config: TrainConfig, on_cpu: bool) -> None:
    """Raises RunConfigError for a run in FP8 on CPU, or with parameters in float32."""
    _refuse_if(
        config.fp8.recipe != "none" and (on_cpu or config.dtype == "float32"),
        f"fp8.recipe {config.fp8.recipe} needs a GPU and dtype bfloat16; set fp8.recipe to none",
    )


def _check_model_parts(config: TrainConfig) -> None:
    recompute, model = config.recompute, config.model
    keeps_cut_experts = "experts" in recompute.keep and config.parallel.etp > 1
    _refuse_if(
        recompute.keep and (recompute.language != "full" or config.fp8.recipe != "none") or keeps_cut_experts,
        f"recompute.keep {recompute.keep} needs recompute.language full and fp8.recipe none, and for experts"
        " parallel.etp 1; change these, or remove it",
    )
    _refuse_if(
        "layernorm" in recompute.language_modules
        and (recompute.language, config.fp8.recipe) == ("selective", "delayed"),
        "recompute.language_modules: with fp8.recipe delayed, Transformer Engine keeps outputs of norms in"
        " FP8 and cannot compute them again; leave out layernorm, or set fp8.recipe to tensorwise",
    )
    tower_is_recomputed = recompute.vision == "full" and not model.freeze_vision
    _refuse_if(
        recompute.offload_inputs and recompute.language != "full" and not tower_is_recomputed,
        "recompute.offload_inputs moves the inputs of layers under full recompute; set recompute.language to"
        " full, or recompute.vision if the tower is trained",
    )
    _refuse_if(
        config.lora.rank and not config.lora.targets, "lora.targets is empty, so nothing would be trained"
    )
    _refuse_if(
        not any(map(config.trains_part, ("language", "vision", "merger"))),
        "model.freeze_vision, freeze_merger and freeze_language leave nothing to train; set one to false",
    )


def _check_export(config: TrainConfig) -> None:
    export_hf, interval = config.checkpoint.export_hf, config.checkpoint.interval
    _refuse_if(
        export_hf and not config.checkpoint.dir,
        f"checkpoint.export_hf {export_hf} needs checkpoint.dir: what is exported is a saved step",
    )
    _refuse_if(
        config.eval.answers and config.lora.rank and config.model.checkpoint,
        f"eval.answers {config.eval.answers} merges adapters into model.hf, and model.checkpoint may hold"
        " other weights; leave it out, or set eval.answers to 0",
    )
    _refuse_if(
        config.eval.answers and not config.checkpoint.dir,
        f"eval.answers {config.eval.answers} needs checkpoint.dir: the last saved step answers",
    )
    if isinstance(export_hf, int):
        _refuse_if(
            export_hf < 0 or export_hf and (not interval or export_hf % interval),
            f"checkpoint.export_hf {export_hf} must be a multiple of checkpoint.interval {interval}, as saved"
            " steps alone can be exported; or give last",
        )


def _check_profile(config: TrainConfig, world_size: int) -> None:
    steps, ranks = config.profile.steps, config.profile.ranks
    if not steps:
        return
    _refuse_if(
        len(steps) != 2 or not 1 <= steps[0] <= steps[-1] <= (config.steps or steps[-1]),
        f"profile.steps {steps} must be the first and the last step to trace, as in [5, 7], between 1 and"
        f" {f'steps {config.steps}' if config.steps else 'the last step of the run'}",
    )
    _refuse_if(
        not ranks or not set(ranks) <= set(range(world_size)),
        f"profile.ranks {ranks} must be ranks of this run, 0 to {world_size - 1}, at least one",
    )
    _refuse_if(not config.checkpoint.dir, "profile.steps needs checkpoint.dir, to write the traces to")


def check_field_ranges(config_section: Any, name_prefix: str = "") -> None:
    """Checks that numbers are in the range that their field declares, if it does.

    Empty fields and words such as ``auto`` are not checked.
    """
    for config_field in dataclasses.fields(config_section):
        name, field_metadata = name_prefix + config_field.name, config_field.metadata
        value = getattr(config_section, config_field.name)
        if dataclasses.is_dataclass(value):
            check_field_ranges(value, f"{name}.")
        elif field_metadata and isinstance(value, int | float):
            if range_text := valid_range(value, field_metadata):
                raise RunConfigError(f"{name} {value} must be {range_text}")


# --- Files and folders --------------------------------------------------------------------------------------


def check_inputs(config: TrainConfig) -> None:
    """Raises RunConfigError for a run whose model does not exist, or lacks weights. No file is read."""
    hf_dir, lora = Path(config.model.hf), config.lora
    _refuse_if(
        not config.steps and config.data.is_synthetic, f"data.path {config.data.path} has no end: give steps"
    )
    _refuse_if(
        not config.model.hf, "model.hf is empty; give the Hugging Face folder that the model comes from"
    )
    _refuse_if(
        not (hf_dir / "config.json").is_file() and not (config.data.is_synthetic and hf_dir.is_file()),
        f"model.hf {why_no_model(hf_dir)}",
    )
    has_random_base = config.model.checkpoint == RANDOM_WEIGHTS and not config.data.is_synthetic
    _refuse_if(
        has_random_base and (lora.rank or lora.adapter),
        f"lora.{f'rank {lora.rank}' if lora.rank else f'adapter {lora.adapter}'} needs trained weights,"
        " which stay frozen, but model.checkpoint is"
        f" {RANDOM_WEIGHTS}; leave it empty to train adapters of the weights in model.hf",
    )


def check_weights_exist(config: TrainConfig) -> None:
    """Raises RunConfigError if the weights that a new run starts from are not there."""
    hf_dir, weights_path = config.model.hf, config.model.checkpoint
    _refuse_if(
        not weights_path and not any(Path(hf_dir).glob("*.safetensors")),
        f"model.checkpoint is empty, and model.hf {hf_dir} holds no weights (*.safetensors); download the"
        " whole checkpoint, give model.checkpoint a folder that `megatron-vl convert` wrote, or set it to"
        f" {RANDOM_WEIGHTS} to train from scratch",
    )
    is_folder, other_kind = weights_path not in ("", RANDOM_WEIGHTS), folder_kind(weights_path)
    _refuse_if(is_folder and other_kind, f"model.checkpoint {other_kind}")
    _refuse_if(
        is_folder and not Path(weights_path).exists(),
        f"model.checkpoint {weights_path} does not exist; leave it empty to start from the weights in"
        f" model.hf, or write it with `megatron-vl convert --hf {hf_dir} --out {weights_path}`",
    )


def check_outputs(config: TrainConfig) -> None:
    """Raises RunConfigError for folders that cannot be written to and exports that cannot be made."""
    check_output_dir("checkpoint.dir", config.checkpoint.dir)
    _refuse_if(
        config.checkpoint.dir and Path(config.checkpoint.dir).resolve() == Path(config.model.hf).resolve(),
        f"checkpoint.dir {config.checkpoint.dir} is the folder of model.hf, which exports copy; give another",
    )
    check_output_dir("log.tensorboard", config.log.tensorboard)
    check_wandb_installed(config.wandb.project)
    check_export_weights(config)


def check_wandb_installed(project: str) -> None:
    """Raises RunConfigError if the run uses W&B and its package is not installed."""
    # W&B keeps its files in a folder wandb/, which Python considers an empty package.
    wandb = find_spec("wandb") if project else None
    _refuse_if(
        project and (wandb is None or wandb.origin is None),
        f"wandb.project {project} needs the package wandb, which is not installed: install the"
        " extra wandb (pip install 'megatron-vl[wandb]', in a checkout pip install -e '.[wandb]'), or"
        " leave wandb.project empty",
    )


def check_output_dir(field_name: str, output_path: str) -> None:
    """Raises RunConfigError if an output folder or any folder above it is a file.

    The folder of checkpoints must be writable, too. An empty path stands for no folder.
    """
    if not output_path:
        return
    output_dir = Path(output_path)
    existing_path = next(part for part in (output_dir, *output_dir.absolute().parents) if part.exists())
    _refuse_if(
        not existing_path.is_dir(),
        f"{field_name} {output_path}: {existing_path} is a file; give a folder, which may be a new one",
    )
    # All ranks write checkpoints. Other folders are written by rank 0, whose machine may be another one.
    _refuse_if(
        field_name == "checkpoint.dir" and not os.access(existing_path, os.W_OK | os.X_OK),
        f"{field_name} {output_path} cannot be written, because {existing_path} is read-only or belongs to"
        f" another user; give another {field_name}, or write permission there",
    )


def check_export_weights(config: TrainConfig) -> None:
    """Raises RunConfigError if exports, which use types of tensors, find no weights in ``model.hf``."""
    _refuse_if(
        (config.checkpoint.export_hf or config.eval.answers)
        and not any(Path(config.model.hf).glob("*.safetensors")),
        f"an export takes names and types of tensors from the weights in model.hf, and {config.model.hf}"
        " holds none (*.safetensors); download the whole checkpoint, or set checkpoint.export_hf and"
        " eval.answers to 0",
    )


def config_remarks(config: TrainConfig, on_cpu: bool) -> list[str]:
    """Notes on settings that are allowed but rarely intended.

    Args:
        on_cpu: whether the run has no GPUs.
    """
    remarks, lora = [], config.lora
    if not config.checkpoint.dir:
        remarks.append("checkpoint.dir is empty: no checkpoint of this run is saved")
    if not (lora.rank or lora.adapter) and lora != LoraConfig():
        remarks.append("lora.rank is 0: the whole model is trained, and other fields of lora have no effect")
    if config.fp8.recipe == "none" and config.fp8.vision:
        remarks.append("fp8.recipe is none: fp8.vision has no effect")
    step_tokens = config.global_batch_size * config.data.seq_len
    if on_cpu and step_tokens > LONG_CPU_STEP and not config.data.is_synthetic:
        remarks.append(
            f"{step_tokens:,} tokens are a long step on cpu; give a smaller --global_batch_size to try a run"
        )
    if on_cpu and config.dtype == "bfloat16":
        remarks.append("dtype bfloat16 is slow and less exact on cpu; leave dtype out for float32")
    return remarks
