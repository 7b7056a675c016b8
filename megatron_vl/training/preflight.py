"""Checks the inputs and outputs of a run before anything is started.

torch is imported only to look into a checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_vl import host_memory
from megatron_vl.config import LoraConfig, RunConfigError, TrainConfig
from megatron_vl.data.source.location import is_in_object_store, resolve_location
from megatron_vl.planning.memory import stage_memories
from megatron_vl.planning.offload_fraction import (
    largest_offload_fraction,
    least_offload_fraction,
    with_offload_fraction,
)
from megatron_vl.plurals import pluralize
from megatron_vl.spec.adapters import fused_adapters, saved_modules
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.weights.run_folder import SavedCheckpoint

MAX_UNREMARKED_STEPS = 10
"""If a trace has more steps than this, a line warns of its cost."""


def check_host_memory(
    config: TrainConfig, spec: ModelSpec, layout: Layout, dp: int, gpu_gib: float | None, host_gib: float
) -> None:
    """Checks that a node has enough memory for what is offloaded, before any is allocated.

    Args:
        gpu_gib: memory of a GPU; None on CPU.
        host_gib: host memory for each rank.

    Raises:
        RunConfigError: it does not. The message says how much there is, and which share would fit.
    """
    offload_share = config.optimizer.offload_fraction
    if gpu_gib is None:
        return
    free_gib = host_gib - _check_input_memory(config, spec, layout, dp, host_gib)
    if offload_share == 0:
        return
    share_text = f"{offload_share}"
    remedy_text = "less would not fit the GPU: take more GPUs or more recompute"
    if offload_share == "auto":
        least_share = least_offload_fraction(config, spec, layout, dp, gpu_gib)
        if least_share is None or not config.failures.check_memory:
            return  # the run takes what host memory allows
        offload_share, share_text = least_share, f"auto ({least_share:g})"
    else:
        remedy_text = f"lower it to {largest_offload_fraction(config, spec, layout, dp, host_gib):g}"

    stage_memory_list = stage_memories(with_offload_fraction(config, offload_share), spec, layout, dp)
    needed_gib = max(stage.host_bytes for stage in stage_memory_list) / host_memory.GIB
    node_ranks = host_memory.num_ranks_on_node()
    if needed_gib > free_gib:
        raise RunConfigError(
            f"optimizer.offload_fraction {share_text} needs {node_ranks * needed_gib:.1f} GiB of host memory"
            f" for {pluralize(node_ranks, 'rank')} of a node, which has {node_ranks * free_gib:.1f} GiB left;"
            f" {remedy_text}, or start fewer ranks per node"
        )


def _check_input_memory(
    config: TrainConfig, spec: ModelSpec, layout: Layout, dp: int, host_gib: float
) -> float:
    """GiB of host memory that a rank needs for the inputs of its layers (``recompute.offload_inputs``).

    Raises RunConfigError if a node has less.
    """
    if not config.recompute.offload_inputs:
        return 0.0
    needed_bytes = max(stage.host_input_bytes for stage in stage_memories(config, spec, layout, dp))
    needed_gib = needed_bytes / host_memory.GIB
    if needed_gib > host_gib:
        node_ranks = host_memory.num_ranks_on_node()
        raise RunConfigError(
            f"recompute.offload_inputs needs {node_ranks * needed_gib:.1f} GiB of host memory for"
            f" {pluralize(node_ranks, 'rank')} of a node, which has {node_ranks * host_gib:.1f} GiB left;"
            " set it to false, lower data.seq_len, raise parallel.cp, or start fewer ranks per node"
        )
    return needed_gib


def check_inputs(config: TrainConfig, *, model_only: bool = False) -> None:
    """Raises RunConfigError for a run whose model or data set does not exist. No file is read.

    Args:
        model_only: whether to check only ``model.hf``, which may then be a ``config.json`` too.
    """
    hf_dir = config.model.hf
    if not hf_dir:
        raise RunConfigError("model.hf is empty; give the Hugging Face folder that the model comes from")
    if model_only:
        return

    if not (Path(hf_dir) / "config.json").is_file():
        raise RunConfigError(
            f"model.hf {hf_dir} holds no config.json; give the folder of a downloaded checkpoint "
            "(hf download REPOSITORY --local-dir FOLDER)"
        )
    if (config.lora.rank or config.lora.adapter) and not config.model.checkpoint:
        lora_field = f"rank {config.lora.rank}" if config.lora.rank else f"adapter {config.lora.adapter}"
        raise RunConfigError(
            f"lora.{lora_field} needs model.checkpoint, the weights that stay frozen; `megatron-vl convert`"
            " writes them"
        )
    check_data_path(config.data.path)


def check_outputs(config: TrainConfig) -> None:
    """Raises RunConfigError for folders that cannot be written to and exports that cannot be made."""
    check_output_dir("checkpoint.dir", config.checkpoint.dir)
    check_output_dir("log.tensorboard", config.log.tensorboard)
    check_wandb_installed(config.wandb.project)
    check_export_weights(config)


def check_data_path(dataset_path: str) -> None:
    """Raises RunConfigError unless ``dataset_path`` is a data set's folder or a metadataset.

    Only the existence of files is checked, because importing Energon takes seconds.
    """
    remedy_text = "give a folder written by `megatron-vl data convert`"
    if not dataset_path:
        raise RunConfigError(f"data.path is empty; {remedy_text}")
    if is_in_object_store(dataset_path):
        resolve_location(dataset_path)
        return

    dataset_dir = Path(dataset_path)
    if not dataset_dir.exists():
        raise RunConfigError(f"data.path {dataset_path} does not exist; {remedy_text}")
    if dataset_dir.is_file():
        if dataset_dir.suffix != ".yaml":
            raise RunConfigError(
                f"data.path {dataset_path} is neither a data set's folder nor a metadataset (.yaml);"
                f" {remedy_text}"
            )
    elif not (dataset_dir / ".nv-meta").is_dir():
        if (dataset_dir / ".convert").is_dir():
            raise RunConfigError(
                f"data.path {dataset_path} holds an unfinished conversion; run `megatron-vl data convert`"
                " again"
            )
        raise RunConfigError(
            f"data.path {dataset_path} is not a data set (it holds no .nv-meta); {remedy_text}"
        )


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


START_ADAPTER_KEY = "lora_start"
"""The entry that says with which adapters the run began, see :func:`read_start_adapter`."""


def check_own_checkpoint(
    config: TrainConfig,
    spec: ModelSpec,
    checkpoint_path: Path,
    base_digest: str = "",
) -> dict[str, Any]:
    """Checks that the run can continue from its own checkpoint, the step folder ``checkpoint_path``.

    The checkpoint's files say which model it holds. Without LoRA, ``model.checkpoint`` is not read and need
    not exist.

    Args:
        base_digest: see :attr:`~megatron_vl.training.resolved_run.ResolvedRun.base_digest`.

    Returns:
        The checkpoint's ``run.json``.

    Raises:
        CheckpointError: files are missing or damaged.
        RunConfigError: the checkpoint holds another model than ``model.hf``, or other adapters.
    """
    from megatron_vl.training import checkpoint
    from megatron_vl.weights.model_digest import recorded_base

    with checkpoint.suggest_remedy(checkpoint_path):
        saved_metadata = checkpoint.read_run_metadata(checkpoint_path)
    weight_reader = checkpoint.open_checkpoint_weights(checkpoint_path, saved_metadata)
    check_same_model(f"checkpoint {checkpoint_path}", weight_reader.spec, config, spec)
    check_same_adapters(checkpoint_path, weight_reader.lora, config, spec)
    if recorded_base(saved_metadata).differs_from(base_digest):
        raise RunConfigError(
            f"the adapters in {checkpoint_path} were trained on another model than the one in"
            f" model.checkpoint {config.model.checkpoint}; give the weights that the run began with"
        )
    check_start_adapter(checkpoint_path, saved_metadata.get(START_ADAPTER_KEY), config)
    return saved_metadata


def read_start_adapter(config: TrainConfig, base_digest: str) -> dict[str, str]:
    """The ``path`` and ``digest`` of the adapters in ``lora.adapter``; both are empty without any.

    Args:
        base_digest: see :attr:`~megatron_vl.training.resolved_run.ResolvedRun.base_digest`.

    Raises:
        RunConfigError: the adapters were trained on other weights than those in ``model.checkpoint``.
    """
    adapter_dir = config.lora.adapter
    if not adapter_dir:
        return {"path": "", "digest": ""}

    from megatron_vl.weights.model_digest import model_digest  # it imports torch
    from megatron_vl.weights.weight_reader import WeightReader

    weight_reader = WeightReader(adapter_dir, takes_adapters=True, should_verify=False)
    if base_difference := weight_reader.adapter_base.difference_text(base_digest, config.model.checkpoint):
        raise RunConfigError(f"lora.adapter: the adapters in {adapter_dir} {base_difference}")
    return {"path": str(Path(adapter_dir).resolve()), "digest": model_digest(weight_reader)}


def check_start_adapter(
    checkpoint_path: Path, start_adapter: dict[str, str] | None, config: TrainConfig
) -> None:
    """Raises RunConfigError if ``lora.adapter`` of a resumed run names others than the run began with.

    The adapters continue from the checkpoint in any case. So nothing is refused if the folder that the run
    began with has moved, is gone, or belongs to a run that went on, or if the given folder has no weights.

    Args:
        start_adapter: the result of :func:`read_start_adapter` at the run's first start; None: not recorded.
    """
    adapter_dir = config.lora.adapter
    if start_adapter is None or not adapter_dir:
        return

    start_dir, start_digest = start_adapter["path"], start_adapter["digest"]
    if str(Path(adapter_dir).resolve()) == start_dir:
        return
    given_digest = _adapter_digest(adapter_dir)
    if given_digest in (None, start_digest) or start_dir and _adapter_digest(start_dir) != start_digest:
        return
    began_with = start_dir or "new adapters"
    remedy = f"give lora.adapter {start_dir}" if start_dir else "leave lora.adapter out"
    raise RunConfigError(
        f"lora.adapter names {adapter_dir}, but the run in {checkpoint_path.parent} began with {began_with}:"
        f" {remedy} to continue that run, or give another checkpoint.dir to begin a new one"
    )


def _adapter_digest(adapter_dir: str) -> str | None:
    """The digest of the adapters in a folder; None if it holds no weights of ours."""
    from megatron_vl.weights.model_digest import model_digest
    from megatron_vl.weights.weight_reader import WeightReader, WeightsError

    try:
        return model_digest(WeightReader(adapter_dir, takes_adapters=True, should_verify=False))
    except (OSError, WeightsError):
        return None


def with_start_adapter(
    config: TrainConfig, spec: ModelSpec, source_checkpoint: SavedCheckpoint | None = None
) -> TrainConfig:
    """The config of a run with the settings of the adapters in ``lora.adapter``, if it names any.

    Args:
        source_checkpoint: the checkpoint that the run resumes from. It holds the run's adapters, and the
            settings of those in ``lora.adapter`` are not read.

    Raises:
        RunConfigError: there are no weights, they are those of a whole model or cannot be read, the adapters
            belong to another model, or another field of ``lora`` says something else. The message names the
            field.
        WeightsError: the adapters in ``source_checkpoint`` cannot be read.
    """
    adapter_dir = config.lora.adapter
    if not adapter_dir:
        return config

    from megatron_vl.weights.weight_reader import WeightReader, WeightsError, read_adapters

    if source_checkpoint is None and (Path(adapter_dir) / "adapter_config.json").is_file():
        raise RunConfigError(
            f"lora.adapter {adapter_dir} holds PEFT's files; convert them first: `megatron-vl convert --hf"
            f" {config.model.hf} --adapter {adapter_dir} --out DIR`"
        )

    if source_checkpoint is not None:
        from megatron_vl.training.checkpoint import suggest_remedy

        with suggest_remedy(source_checkpoint.path):
            weight_reader = WeightReader(source_checkpoint.path / "weights", takes_adapters=True)
        if not weight_reader.lora.rank:
            return config  # check_same_adapters refuses it
    else:
        try:
            weight_reader = read_adapters(adapter_dir)
        except FileNotFoundError as error:
            raise RunConfigError(
                f"lora.adapter: {error}; give a run with LoRA or a folder of adapters, or, to continue a run,"
                " its checkpoint.dir"
            ) from error
        except WeightsError as error:
            raise RunConfigError(f"lora.adapter: {error}") from error
    holder = f"checkpoint {source_checkpoint.path}" if source_checkpoint else f"lora.adapter {adapter_dir}"
    check_same_model(holder, weight_reader.spec, config, spec)
    return with_stored_lora(config, weight_reader.lora, holder)


def with_stored_lora(config: TrainConfig, stored_lora: LoraConfig, holder: str) -> TrainConfig:
    """The config of a run with the settings of the adapters in ``holder``.

    Raises RunConfigError if a field of ``lora`` says something else.
    """
    # Dropout is no property of the adapters: each run chooses its own.
    run_fields = {"adapter": config.lora.adapter, "dropout": config.lora.dropout}
    stored_fields = dataclasses.asdict(stored_lora) | run_fields
    default_fields = dataclasses.asdict(LoraConfig())
    for name, value in dataclasses.asdict(config.lora).items():
        is_stated = value != default_fields[name] or name in config.lora.stated_fields
        if is_stated and value != stored_fields[name]:
            raise RunConfigError(
                f"lora.{name} is {value}, but the adapters in {holder} have {stored_fields[name]}; leave the"
                " field out"
            )
    return dataclasses.replace(config, lora=LoraConfig(**stored_fields))


def check_same_adapters(
    checkpoint_path: Path, saved: LoraConfig, config: TrainConfig, spec: ModelSpec
) -> None:
    """Raises RunConfigError unless a checkpoint holds what the run trains: a model, or the same adapters."""
    if bool(saved.rank) != bool(config.lora.rank):
        held = f"adapters of rank {saved.rank}" if saved.rank else "a whole model"
        raise RunConfigError(
            f"checkpoint {checkpoint_path} holds {held}, but this run has lora.rank {config.lora.rank}; give"
            " another checkpoint.dir to begin a new run"
        )
    has_same_modules = saved_modules(spec, saved) == saved_modules(spec, config.lora)
    if has_same_modules and fused_adapters(spec, saved) == fused_adapters(spec, config.lora):
        return

    # These two decide no shape and no scale.
    current = dataclasses.replace(config.lora, dropout=saved.dropout, adapter=saved.adapter)
    saved_fields, current_fields = dataclasses.asdict(saved), dataclasses.asdict(current)
    field_name = next(name for name, value in saved_fields.items() if value != current_fields[name])
    raise RunConfigError(
        f"lora.{field_name} is {current_fields[field_name]}, but {checkpoint_path} was saved with"
        f" {saved_fields[field_name]}; its adapters have other shapes or scales. Set lora.{field_name} to"
        f" {saved_fields[field_name]} to continue this run, or give another checkpoint.dir to begin a new one"
    )


def data_order_metadata(config: TrainConfig, dp: int) -> dict[str, Any]:
    """The fields of a run that decide the order of samples, as a checkpoint records them."""
    return {"dp": dp, "num_workers": config.data.num_workers, "seq_len": config.data.seq_len}


def check_start_weights(config: TrainConfig, spec: ModelSpec) -> None:
    """Checks the weights in ``model.checkpoint``.

    Raises:
        RunConfigError: they do not exist, or are of another model than ``model.hf``.
        WeightsError, FileNotFoundError: they cannot be read.
    """
    from megatron_vl.weights.weight_reader import WeightReader

    weights_path = config.model.checkpoint
    if not Path(weights_path).exists():
        raise RunConfigError(
            f"model.checkpoint {weights_path} does not exist; `megatron-vl convert` writes it"
        )
    weight_reader = WeightReader(weights_path)
    check_same_model(f"model.checkpoint {weights_path}", weight_reader.spec, config, spec)


def check_tokenizer(config: TrainConfig, spec: ModelSpec) -> str:
    """Checks tokenizer and chat template of ``model.hf``.

    Returns:
        A note if transformers would give a text other tokens than training does; otherwise an empty text.

    Raises:
        ChatError, FileNotFoundError: they are missing, or the tokenizer does not fit the model.
    """
    from megatron_vl.data.sample.chat import ChatEncoder

    return ChatEncoder(config.model.hf, spec).serving_note


def read_base_digest(config: TrainConfig) -> str:
    """Which model the adapters of a run belong to; empty without LoRA."""
    from megatron_vl.weights.model_digest import model_digest
    from megatron_vl.weights.weight_reader import WeightReader

    if not config.lora.rank:
        return ""
    return model_digest(WeightReader(config.model.checkpoint, should_verify=False))


def check_same_model(
    weights_name: str, weights_spec: ModelSpec, config: TrainConfig, spec: ModelSpec
) -> None:
    """Raises RunConfigError unless weights, which the message names, are of the model in ``model.hf``."""
    if weights_spec.different_fields(spec):
        difference_text = f"{weights_spec.family}, {spec.family}"
        if weights_spec.family == spec.family:
            difference_text = f"both {spec.family}, other sizes"
        raise RunConfigError(
            f"{weights_name} holds another model than model.hf {config.model.hf} ({difference_text})"
        )


def config_remarks(config: TrainConfig, on_cpu: bool, is_resumed: bool = False) -> list[str]:
    """Notes on settings that are allowed but rarely intended.

    Args:
        on_cpu: whether the run has no GPUs.
        is_resumed: whether weights come from the run's own checkpoint.
    """
    remark_texts = []
    if not config.checkpoint.dir:
        remark_texts.append("checkpoint.dir is empty: no checkpoint of this run is saved")
    elif not config.checkpoint.interval:
        remark_texts.append(
            f"checkpoint.interval is 0: the only checkpoint is that of the last step ({config.steps}), so a"
            " run that fails earlier loses everything. Set an interval, for instance --checkpoint.interval"
            " 500"
        )

    traced_steps = config.profile.steps
    if traced_steps and traced_steps[1] - traced_steps[0] >= MAX_UNREMARKED_STEPS:
        remark_texts.append(
            f"profile.steps {traced_steps} traces {traced_steps[1] - traced_steps[0] + 1} steps, which needs"
            " much memory and disk space on each traced rank; three to five steps are usually enough"
        )
    if not config.model.checkpoint and not is_resumed:
        remark_texts.append("model.checkpoint is empty: weights are random")
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
