"""Resolves a run: what it trains, in which layout, on which data, and where it begins.

:func:`resolve_run` only reads files. ``train --dry-run`` prints its result. Rank 0 calls it and sends the
result to the other ranks. No other code decides any of this.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

from megatron_vl.config import RunConfigError, TrainConfig, validate_config
from megatron_vl.config.checks import check_inputs, check_outputs, config_remarks
from megatron_vl.core_fixes.core_version import check_core_version
from megatron_vl.data.source.dataset_description import Description, SplitFacts, read_description
from megatron_vl.data.source.location import check_data_path
from megatron_vl.estimate.gpus import find_gpu, local_gpu
from megatron_vl.estimate.memory_check import check_host_memory, check_memory, resolve_offload_fraction
from megatron_vl.estimate.split import run_layout, split_source, with_split
from megatron_vl.spec.families import LinearAttentionSpec, ModelSpec, run_spec
from megatron_vl.spec.layout import Layout, read_layout
from megatron_vl.spec.lora import freeze_parts_without_lora
from megatron_vl.training.input_files import read_loader_digests, read_model_digests
from megatron_vl.training.lora import check_lora_base, check_same_lora, check_same_model, with_start_lora
from megatron_vl.training.resolved_run import ResolvedRun
from megatron_vl.training.state.keep import check_free_space
from megatron_vl.weights.run_folder import SavedCheckpoint, find_latest_checkpoint


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
) -> ResolvedRun:
    """Decides everything about a run of ``world_size`` ranks. Reads files only, and starts nothing.

    Args:
        machine_memory: the memory of the ranks; None: that of this machine's GPUs (without any, of an H200),
            and no limit on host memory.
        spec: the model's sizes, if they are not those of ``model.hf``.

    Raises:
        UserError: the run is impossible. The message names the field, path or number, and what to change.
        FileNotFoundError: a file of the checkpoint or of the model is missing.
    """
    dp, spec = _check_fields(config, world_size, spec)
    source_checkpoint = find_source_checkpoint(config)
    # LoRA of an earlier run decides its own fields, and parts without LoRA are frozen.
    config = with_start_lora(config, spec, source_checkpoint)
    config = freeze_parts_without_lora(config, spec)
    gpu = None if config.platform == "cpu" else local_gpu()
    if machine_memory is None:
        gpu_gib = None if config.platform == "cpu" else (gpu or find_gpu()).memory_gib
        machine_memory = MachineMemory(gpu_gib, math.inf)
    if config.dtype == "auto":
        on_cpu = machine_memory.gpu_gib is None
        config = dataclasses.replace(config, dtype="float32" if on_cpu else "bfloat16")

    # A resumed run keeps the split with which its checkpoint was saved.
    saved_layout = _saved_layout(config, spec, source_checkpoint)
    layout = run_layout(config, spec, world_size, saved_layout=saved_layout)

    # These checks see the user's own fields, because their advice names options that differ from them.
    memory_note = check_memory(config, spec, layout, world_size, gpu) if gpu is not None else ""
    check_host_memory(config, spec, layout, dp, machine_memory.gpu_gib, machine_memory.host_gib)

    # From here on, the config has the split and the offloaded share as numbers.
    settled_config = resolve_offload_fraction(
        with_split(config, layout) if layout.pp > 1 else config,
        spec,
        layout,
        dp,
        machine_memory.gpu_gib,
        machine_memory.host_gib,
    )
    resolved_run = ResolvedRun(
        settled_config, spec, layout, dp, split_source(config, saved_layout), source_checkpoint
    )
    return _with_checked_inputs(resolved_run, memory_note, on_cpu=machine_memory.gpu_gib is None)


def _check_fields(config: TrainConfig, world_size: int, spec: ModelSpec | None) -> tuple[int, ModelSpec]:
    """Makes the cheap checks, so that a mistake in a field is reported within a second."""
    check_core_version()
    dp = validate_config(config, world_size)
    check_inputs(config)
    spec = run_spec(config, spec)
    if not config.data.is_synthetic:
        check_data_path(config.data.path)
    check_outputs(config)
    if config.model.moe_aux_loss is not None and spec.language.moe is None:
        raise RunConfigError(
            f"model.moe_aux_loss is for models with experts; {spec.family} is dense: leave it empty"
        )
    if spec.language.linear_attention is not None and config.fp8.recipe != "none":
        check_fp8_linear_attention(spec.language.linear_attention, config)
    return dp, spec


def check_fp8_linear_attention(linear: LinearAttentionSpec, config: TrainConfig) -> None:
    """Raises RunConfigError if linear attention cannot run in FP8: by its widths, or by recomputed norms."""
    recompute = config.recompute
    if recompute.language == "selective" and "layernorm" in recompute.language_modules:
        raise RunConfigError(
            "recompute.language_modules: in FP8, norms before linear attention cannot be computed again;"
            " leave out layernorm"
        )
    width = linear.conv_channels + linear.value_heads * (linear.value_dim + 2)
    if width // (tp := config.parallel.tp) % 16:
        raise RunConfigError(
            f"fp8.recipe {config.fp8.recipe}: with parallel.tp {tp}, the first matrix of linear attention has"
            f" {width // tp} rows on a rank, and FP8 needs a multiple of 16; set fp8.recipe to none or"
            " parallel.tp to a smaller number"
        )


def _with_checked_inputs(resolved_run: ResolvedRun, memory_note: str, on_cpu: bool) -> ResolvedRun:
    """Checks weights and data of a run that starts here, and adds notes and the facts of the data."""
    from converters.hf_checkpoint import HfCheckpoint  # they import torch
    from megatron_vl.training.start_weights import added_layer_notes, check_start_weights, hf_weights_name
    from megatron_vl.weights.model_digest import RANDOM_DIGEST, model_digest

    config, spec = resolved_run.config, resolved_run.spec
    source_checkpoint = resolved_run.source_checkpoint
    run_notes = [f"NOTE: {remark}" for remark in config_remarks(config, on_cpu)]
    if resolved_run.layer_split_origin != "given":
        origin = {"planned": "by FLOPs", "saved": "as it was saved"}[resolved_run.layer_split_origin]
        run_notes.append(
            f"decoder layers of the stages {list(resolved_run.layout.layers_per_chunk)}: {origin}"
        )
    check_free_space(config, spec)
    if memory_note:
        run_notes.append(f"NOTE: {memory_note}")

    is_synthetic = config.data.is_synthetic
    if not is_synthetic:
        from megatron_vl.data.sample.chat import ChatEncoder

        # Raises if tokenizer or chat template are missing, or do not fit the model.
        if serving_note := ChatEncoder(config.model.hf, spec, config.data).serving_note:
            run_notes.append(f"NOTE: {serving_note}")

    start_weights = None
    if source_checkpoint is None or config.lora.rank:
        start_weights = check_start_weights(config, spec)
        if isinstance(start_weights, HfCheckpoint):
            run_notes += [f"NOTE: {note}" for note in start_weights.rounding_notes()]
    model_digests = read_model_digests(config, source_checkpoint)
    base_digest = ""
    if config.lora.rank:
        base_digest = RANDOM_DIGEST
        if start_weights is not None:  # the digest of a Hugging Face folder is known already
            base_digest = model_digests.get(hf_weights_name(config)) or model_digest(start_weights)
    if source_checkpoint is None:
        check_lora_base(config, spec, base_digest)
    else:
        check_own_checkpoint(config, spec, source_checkpoint.path, base_digest)
    run_notes += added_layer_notes(config, source_checkpoint)

    if is_synthetic:
        from megatron_vl.data.synthetic import synthetic_identity  # it imports torch

        facts_by_split = {"train": SplitFacts(synthetic_identity(config.data))}
        loader_digests = {}
    else:
        dataset_description = read_description(config.data.path)
        facts_by_split = read_split_facts(config, dataset_description)
        loader_digests = read_loader_digests(config, dataset_description)
    return dataclasses.replace(
        resolved_run,
        facts_by_split=facts_by_split,
        model_digests=model_digests,
        loader_digests=loader_digests,
        run_notes=tuple(run_notes),
        base_digest=base_digest,
    )


def read_split_facts(config: TrainConfig, dataset_description: Description) -> dict[str, SplitFacts]:
    """Reads the facts of each split that a run uses, about 60 bytes for each shard.

    Raises:
        LoaderError: there is no data set, one of these splits is empty, or its description could run code or
            refers to files outside its folder.
    """
    from megatron_vl.data.source.sample_sizes import find_datasets_without_sizes  # it imports torch

    splits = {"train", config.eval.split} if config.eval.interval or config.eval.answers else {"train"}
    facts_by_split = {split: dataset_description.split_facts(split) for split in sorted(splits)}
    unsized = find_datasets_without_sizes(dataset_description, config.model.hf, config.data)
    facts_by_split["train"] = dataclasses.replace(
        facts_by_split["train"], datasets_without_sizes=tuple(str(dataset.path) for dataset in unsized)
    )
    return facts_by_split


def check_own_checkpoint(
    config: TrainConfig, spec: ModelSpec, checkpoint_path: Path, base_digest: str
) -> None:
    """Checks that the run can continue from its own checkpoint, the step folder ``checkpoint_path``.

    The checkpoint's files say which model it holds. Without LoRA, ``model.checkpoint`` is not read and need
    not exist.
    """
    from megatron_vl.training.start_weights import start_weights_path
    from megatron_vl.training.state.load import open_checkpoint_weights, suggest_remedy
    from megatron_vl.weights.model_digest import recorded_base

    with suggest_remedy(checkpoint_path):
        metadata, weight_reader = open_checkpoint_weights(checkpoint_path)
    check_same_model(f"checkpoint {checkpoint_path}", weight_reader.spec, config, spec)
    check_same_lora(checkpoint_path, weight_reader.lora, config, spec)
    if recorded_base(metadata).differs_from(base_digest):
        raise RunConfigError(
            f"the adapters in {checkpoint_path} were trained on another model than the one in"
            f" {start_weights_path(config)}; give the weights that the run began with"
        )


# --- The start of a run -------------------------------------------------------------------------------------


def find_source_checkpoint(config: TrainConfig) -> SavedCheckpoint | None:
    """The checkpoint that a run resumes from: the latest in its folder; None if it begins anew."""
    run_dir = config.checkpoint.dir
    return find_latest_checkpoint(Path(run_dir)) if run_dir else None


def _saved_layout(
    config: TrainConfig, spec: ModelSpec, source_checkpoint: SavedCheckpoint | None
) -> Layout | None:
    """The layout of a checkpoint, whose split a resumed run keeps; None if the run does not need it.

    It is also None if the checkpoint is damaged, which :func:`check_own_checkpoint` reports.
    """
    if source_checkpoint is None or config.parallel.pp == 1 or isinstance(config.parallel.layers, list):
        return None
    try:
        return read_layout(spec, json.loads((source_checkpoint.path / "run.json").read_text())["layout"])
    except (ValueError, KeyError, TypeError, OSError, RuntimeError):
        return None
