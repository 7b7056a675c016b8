"""Checks of what a run reads and writes, before anything is started. torch is imported only to look into a
checkpoint."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_vl import host_memory
from megatron_vl.config import RunConfigError, TrainConfig, video_rule
from megatron_vl.data.source.location import in_store, location
from megatron_vl.planning.memory import stage_memories
from megatron_vl.planning.offload import largest_share, least_share, with_share
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.weights.video_rule import trained_video_rule, weights_video_rule
from megatron_vl.words import counted

MANY_TRACED = 10
"""If a trace has more steps than this, a line warns of its cost."""


def check_host_memory(
    config: TrainConfig, spec: ModelSpec, layout: Layout, dp: int, gpu_gib: float | None, host_gib: float
) -> None:
    """Checks that a node has enough memory for the offloaded optimizer state, before any is allocated.

    Args:
        gpu_gib: memory of a GPU; None on CPU.
        host_gib: host memory for each rank.

    Raises:
        RunConfigError: it does not. The message says how much there is, and which share would fit.
    """
    asked = config.optimizer.offload_fraction
    if gpu_gib is None or asked == 0:
        return
    share = least_share(config, spec, layout, dp, gpu_gib) if asked == "auto" else asked
    if share is None or asked == "auto" and not config.failures.check_memory:
        return  # the run takes what host memory allows

    settled = with_share(config, share)
    needed = max(stage.host for stage in stage_memories(settled, spec, layout, dp)) / host_memory.GIB
    if needed <= host_gib:
        return
    advice = "less would not fit the GPU: take more GPUs or more recompute"
    if asked != "auto":
        advice = f"lower it to {largest_share(config, spec, layout, dp, host_gib):g}"
    named, ranks = f"auto ({share:g})" if asked == "auto" else f"{asked}", host_memory.ranks_of_node()
    raise RunConfigError(
        f"optimizer.offload_fraction {named} needs {ranks * needed:.1f} GiB of host memory for"
        f" {counted(ranks, 'rank')} of a node, which has {ranks * host_gib:.1f} GiB left; {advice}, or start"
        " fewer ranks per node"
    )


def check_inputs(config: TrainConfig, *, model_only: bool = False) -> None:
    """Refuses a run whose model or data set is not there. It looks only at which files exist.

    Args:
        model_only: check ``model.hf`` alone, which may then be a ``config.json`` too.

    Raises:
        RunConfigError: names the field and says what to give.
    """
    hf = config.model.hf
    if not hf:
        raise RunConfigError("model.hf is empty; give the Hugging Face folder that the model comes from")
    if model_only:
        return

    if not (Path(hf) / "config.json").is_file():
        raise RunConfigError(
            f"model.hf {hf} holds no config.json; give the folder of a downloaded checkpoint "
            "(hf download REPOSITORY --local-dir FOLDER)"
        )
    check_data_path(config.data.path)


def check_outputs(config: TrainConfig) -> None:
    """Refuses folders that cannot be written to, and exports and reports that cannot be made.

    Raises:
        RunConfigError: names the field and says what to give.
    """
    check_folder("checkpoint.dir", config.checkpoint.dir)
    check_folder("log.tensorboard", config.log.tensorboard)
    check_folder("profile.dir", config.profile.dir)
    check_folder("wandb.dir", config.wandb.dir)
    check_wandb(config.wandb.project)
    check_export(config)


def check_data_path(path: str) -> None:
    """Checks that ``path`` is a data set's folder or a metadataset.

    Only the existence of files is checked, because importing Energon takes seconds.

    Raises:
        RunConfigError: it is neither. The message says what is missing.
    """
    advice = "give a folder written by `megatron-vl data convert`"
    if not path:
        raise RunConfigError(f"data.path is empty; {advice}")
    if in_store(path):
        location(path)
        return

    folder = Path(path)
    if not folder.exists():
        raise RunConfigError(f"data.path {path} does not exist; {advice}")
    if folder.is_file():
        if folder.suffix != ".yaml":
            raise RunConfigError(
                f"data.path {path} is neither a data set's folder nor a metadataset (.yaml); {advice}"
            )
    elif not (folder / ".nv-meta").is_dir():
        if (folder / ".convert").is_dir():
            raise RunConfigError(
                f"data.path {path} holds an unfinished conversion; run `megatron-vl data convert` again"
            )
        raise RunConfigError(f"data.path {path} is not a data set (it holds no .nv-meta); {advice}")


def check_folder(field: str, path: str) -> None:
    """Checks that an output folder, and every folder above it, is not a file. A run's own is writable, too.

    Args:
        field: the field that names the folder, for the message.
        path: the folder; empty: there is none.

    Raises:
        RunConfigError: it cannot be used. The message names the field and the folder or file.
    """
    folder = Path(path)
    in_the_way = next(
        (part for part in (folder, *folder.parents) if part.exists() and not part.is_dir()), None
    )
    if path and in_the_way:
        raise RunConfigError(f"{field} {path}: {in_the_way} is a file; give a folder, which may be a new one")
    # All ranks write checkpoints, and other folders only the first one.
    there = next(part for part in (folder, *folder.absolute().parents) if part.exists())
    if path and field == "checkpoint.dir" and not os.access(there, os.W_OK | os.X_OK):
        raise RunConfigError(
            f"{field} {path} cannot be written, because {there} is read-only or belongs to another user; give"
            f" another {field}, or write permission there"
        )


def check_wandb(project: str) -> None:
    """Checks that the package of W&B is installed, if the run uses it.

    Raises:
        RunConfigError: it is not. The message names the extra to install.
    """
    found = find_spec("wandb") if project else None
    # W&B keeps its files in a folder wandb/, which Python considers an empty package.
    if project and (found is None or found.origin is None):
        raise RunConfigError(
            f"wandb.project {project} needs the package wandb, which is not installed: install the extra"
            " wandb (pip install 'megatron-vl[wandb]', in a checkout pip install -e '.[wandb]'), or leave"
            " wandb.project empty"
        )


def check_export(config: TrainConfig) -> None:
    """Checks that ``model.hf`` has weights, because exports use their names and types of tensors.

    Raises:
        RunConfigError: it has none. The message names the missing file.
    """
    if not config.checkpoint.export_hf:
        return
    folder = Path(config.model.hf)
    index = folder / "model.safetensors.index.json"
    try:
        files = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunConfigError(f"{index} is damaged ({error}); download it again") from error
    missing = sorted(name for name in files or {"model.safetensors"} if not (folder / name).is_file())
    if missing:
        raise RunConfigError(
            f"checkpoint.export_hf takes names and types of tensors from the weights in model.hf, and"
            f" {folder} has no {missing[0]}; download the whole checkpoint, or set checkpoint.export_hf to 0"
        )


def check_own_checkpoint(
    config: TrainConfig, spec: ModelSpec, dp: int, source: Path, restart_data: bool
) -> None:
    """Checks that the run can continue from its own checkpoint, the step folder ``source``.

    The checkpoint's files say which model it holds. ``model.checkpoint`` is not read and need not exist.

    Raises:
        CheckpointError: files are missing or damaged, or the order of samples would change.
        RunConfigError: the checkpoint holds another model than ``model.hf``.
    """
    from megatron_vl.training import checkpoint

    saved = checkpoint.check_resumable(source, run_facts(config, dp), restart_data)
    check_same_model(f"checkpoint {source}", checkpoint.open_weights(source, saved).spec, config, spec)


def run_facts(config: TrainConfig, dp: int) -> dict[str, Any]:
    """The facts about how samples are read that a checkpoint records."""
    return {"dp": dp, "num_workers": config.data.num_workers, "seq_len": config.data.seq_len}


def check_video_rule(config: TrainConfig, spec: ModelSpec, source: Path) -> None:
    """Checks that the rule for videos is that of the step folder ``source``, even with ``restart_data``.

    Raises:
        RunConfigError: the rules differ. The message names the field, both rules, and what to do.
    """
    trained = trained_video_rule(source, spec)
    for name, now in video_rule(config.data, spec.vision.video_timestamps).items():
        before = trained.get(name, now)
        if before != now:
            raise RunConfigError(
                f"data.{name} is {now!r}, but {source} was trained under {before!r}: set data.{name} to"
                f" {before!r} to continue this run, or start a new one from its weights (model.checkpoint)"
                f" under {now!r}"
            )


def check_start_weights(config: TrainConfig, spec: ModelSpec) -> str:
    """Checks the weights in ``model.checkpoint``.

    Returns:
        A note if they were trained under another rule for videos than this run's; otherwise an empty text.

    Raises:
        RunConfigError: they are not there, or of another model than ``model.hf``.
        WeightsError, FileNotFoundError: they cannot be read.
    """
    from megatron_vl.weights.reader import WeightReader

    path = config.model.checkpoint
    if not Path(path).exists():
        raise RunConfigError(f"model.checkpoint {path} does not exist; `megatron-vl convert` writes it")
    weights = WeightReader(path)
    check_same_model(f"model.checkpoint {path}", weights.spec, config, spec)

    trained = weights_video_rule(weights.path, weights.manifest, spec)
    for name, now in video_rule(config.data, spec.vision.video_timestamps).items():
        before = trained.get(name, now)
        if before != now:
            return (
                f"{weights.path} was trained under data.{name} {before!r}, but this run uses {now!r};"
                f" --data.{name} {before} keeps the rule"
            )
    return ""


def check_same_model(held_by: str, held: ModelSpec, config: TrainConfig, spec: ModelSpec) -> None:
    """Checks that weights are of the model that ``model.hf`` describes.

    Args:
        held_by: names the weights in the message.
        held: the model of the weights.

    Raises:
        RunConfigError: they are of another model.
    """
    if held.differences(spec):
        theirs, ours = held.family, spec.family
        sizes = f"both {ours}, other sizes" if theirs == ours else f"{theirs}, {ours}"
        raise RunConfigError(f"{held_by} holds another model than model.hf {config.model.hf} ({sizes})")


def remarks(config: TrainConfig, on_cpu: bool, resumes: bool = False) -> list[str]:
    """Notes on settings that are allowed but rarely intended.

    Args:
        on_cpu: whether the run has no GPUs.
        resumes: whether weights come from the run's own checkpoint.
    """
    found = []
    c = config.checkpoint
    if not c.dir:
        found.append("checkpoint.dir is empty: no checkpoint of this run is saved")
    elif not c.interval:
        found.append(
            f"checkpoint.interval is 0: the only checkpoint is that of the last step ({config.steps}), so a"
            " run that fails earlier loses everything. Set an interval, for instance --checkpoint.interval"
            " 500"
        )

    traced = config.profile.steps
    if traced and traced[1] - traced[0] >= MANY_TRACED:
        found.append(
            f"profile.steps {traced} traces {traced[1] - traced[0] + 1} steps, which needs much memory and"
            " disk space on each traced rank; three to five steps are usually enough"
        )

    if not config.model.checkpoint and not resumes:
        found.append("model.checkpoint is empty: weights are random")

    frozen = {"vision": config.model.freeze_vision, "merger": config.model.freeze_merger}
    for part, rate in (("vision", config.optimizer.vision_lr), ("merger", config.optimizer.merger_lr)):
        if frozen[part] and rate is not None:
            found.append(
                f"optimizer.{part}_lr {rate:g} has no effect, because model.freeze_{part} keeps those weights"
                " unchanged"
            )
        elif rate == 0:
            found.append(
                f"optimizer.{part}_lr 0 keeps those weights unchanged, but still computes their gradients and"
                f" stores their moments; --model.freeze_{part} true saves both"
            )

    if on_cpu and config.dtype == "bfloat16":
        found.append("dtype bfloat16 is slow and less exact on cpu; give --dtype float32")
    return found
