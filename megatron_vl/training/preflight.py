"""Checks that run before anything is started. torch is imported only after fields and paths were checked."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_vl import host_memory
from megatron_vl.config import RunConfigError, TrainConfig, validate, video_rule
from megatron_vl.core_fixes.register import check_core_version
from megatron_vl.data.description import META, SIZES, SplitFacts, read_description
from megatron_vl.data.location import in_store, location
from megatron_vl.parallel.open_files import raise_open_files
from megatron_vl.planning.fit import check_memory
from megatron_vl.planning.gpus import calibration_for, calibration_here
from megatron_vl.planning.memory import stage_memories
from megatron_vl.planning.run import check_layout, run_layout, split_source
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.layout import Layout, read_layout
from megatron_vl.weights.run_folder import (
    DataRestart,
    Lineage,
    Saved,
    StepMissingError,
    choose,
    read_signed,
)
from megatron_vl.weights.video_rule import trained_video_rule, weights_video_rule

OWN_FILES = 512
"""Open files that a rank needs besides a connection to each peer: for libraries, shards, workers and logs."""

MANY_TRACED = 10
"""If a trace has more steps than this, a line warns of its cost."""


def launched_world_size() -> int:
    """Number of ranks of this training, as torchrun sets it; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1))


def check(config: TrainConfig, world_size: int | None = None) -> tuple[ModelSpec, Layout]:
    """Checks fields, the model's config, layout, paths, and whether the run's checkpoint can be resumed.

    Args:
        world_size: number of ranks; None: as launched.

    Raises:
        RunConfigError, LayoutError, ConfigError, CheckpointError: a check failed. The message names the
            field, path or number.
        CoreVersionError: this version of Megatron-core was never tested with this toolkit.
    """
    check_core_version()
    world_size = launched_world_size() if world_size is None else world_size
    validate(config, world_size)
    check_inputs(config)

    spec = read_spec(config.model.hf)
    dp = check_layout(config, spec, world_size)
    if config.model.moe_aux_loss is not None and spec.language.moe is None:
        raise RunConfigError(
            f"model.moe_aux_loss is for models with experts; {spec.family} is dense: leave it empty"
        )
    if config.data.balance and not may_have_sizes(config.data.path):
        check_open_files(dp)
    check_folder("checkpoint.dir", config.checkpoint.dir)
    check_folder("log.tensorboard", config.log.tensorboard)
    check_folder("profile.dir", config.profile.dir)
    check_folder("wandb.dir", config.wandb.dir)
    check_wandb(config.wandb.project)
    check_export(config)

    start = plan_start(config, dp)
    layout = split_of(config, spec, world_size, start.source)
    check_gpu_memory(config, spec, layout, world_size)
    check_host_memory(config, spec, layout, dp)
    if start.source is not None:
        check_video_rule(config, spec, start.source.path)
        check_own_checkpoint(config, spec, dp, start)
    else:
        check_start_path(config)
    return spec, layout


def check_start_path(config: TrainConfig) -> None:
    """Refuses a ``model.checkpoint`` that is not there."""
    if config.model.checkpoint and not Path(config.model.checkpoint).exists():
        raise RunConfigError(
            f"model.checkpoint {config.model.checkpoint} does not exist; `megatron-vl convert` writes it"
        )


def split_of(config: TrainConfig, spec: ModelSpec, world_size: int, source: Saved | None) -> Layout:
    """The layout of a run on this machine. A run that resumes from ``source`` keeps its split."""
    rates, saved = calibration_for(config.platform), saved_layout(config, spec, source)
    return run_layout(config, spec, world_size, calibration=rates, saved=saved)


def split_note(config: TrainConfig, spec: ModelSpec, layout: Layout, source: Saved | None) -> str:
    """A line that says where the split of the decoder layers comes from; empty if the run gives the split.

    Args:
        config: the run before :func:`settle_split`.
    """
    how = split_source(config, layout, saved_layout(config, spec, source))
    if how == "given":
        return ""
    where = f"planned, {calibration_for(config.platform).source}" if how == "planned" else "as it was saved"
    return f"decoder layers of the stages {list(layout.layers)}: {where}"


def check_gpu_memory(config: TrainConfig, spec: ModelSpec, layout: Layout, world_size: int) -> str:
    """Compares the memory estimate with this machine's GPUs, if there are any and the run uses them.

    Returns:
        A remark if the run may not fit but is not refused; otherwise an empty text.

    Raises:
        RunConfigError: the run does not fit.
    """
    gpu = None if config.platform == "cpu" else calibration_here()
    return "" if gpu is None else check_memory(config, spec, layout, world_size, gpu)


def saved_layout(config: TrainConfig, spec: ModelSpec, source: Saved | None) -> Layout | None:
    """The layout of a checkpoint, whose split a resumed run keeps; None if the run does not need it.

    It is also None if the checkpoint is damaged, which other checks report.
    """
    if source is None or config.parallel.pp == 1 or isinstance(config.parallel.layers, list):
        return None
    try:
        return read_layout(spec, read_signed(source.path / "run.json", source.step)["layout"])
    except (ValueError, KeyError, TypeError, OSError, RuntimeError):
        return None


def settle_split(config: TrainConfig, layout: Layout) -> None:
    """Writes the chosen split into the config, so that all later code uses the same one."""
    if layout.pp > 1:
        config.parallel.layers = list(layout.layers)


def check_host_memory(config: TrainConfig, spec: ModelSpec, layout: Layout, dp: int) -> None:
    """Checks that this node has enough memory for the offloaded optimizer state, before any is allocated.

    Raises:
        RunConfigError: it does not. The message says how much there is, and which share would fit.
    """
    share, ranks = config.optimizer.offload_fraction, int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if config.platform == "cpu" or share in (0, "auto"):
        return
    needed = ranks * max(stage.host for stage in stage_memories(config, spec, layout, dp))
    there = host_memory.available()
    if needed > there:
        fits = math.floor(20 * float(share) * there / needed) / 20
        raise RunConfigError(
            f"optimizer.offload_fraction {share} needs {needed / host_memory.GIB:.1f} GiB of host memory for"
            f" {ranks} ranks of this node, which has {there / host_memory.GIB:.1f} GiB left; lower it to"
            f" {fits:g}, or start fewer ranks per node"
        )


def check_open_files(dp: int) -> None:
    """Checks that this process may open enough connections to exchange rows between all replicas.

    Raises:
        RunConfigError: the limit on open files is too low. The message names the limit that is needed.
    """
    needed, allowed = dp + OWN_FILES, raise_open_files()
    if needed > allowed:
        raise RunConfigError(
            f"data.balance connects each of {dp} data-parallel ranks to all others. That needs {needed} open"
            f" files per process, and {allowed} are allowed: raise the limit (ulimit -Hn {needed}), or set"
            " data.balance to false"
        )


def may_have_sizes(path: str) -> bool:
    """Whether a data set may have sizes from which batches are planned, which no exchange of rows needs.

    Only rank 0 finds out, after process groups have started.
    """
    folder = Path(path)
    return in_store(path) or folder.is_file() or (folder / META / SIZES).is_dir()


def check_inputs(config: TrainConfig) -> None:
    """Refuses a run whose model or data set is not there. It looks only at which files exist.

    Raises:
        RunConfigError: names the field and says what to give.
    """
    if not config.model.hf:
        raise RunConfigError("model.hf is empty; give the Hugging Face folder that the model comes from")
    if not (Path(config.model.hf) / "config.json").is_file():
        raise RunConfigError(
            f"model.hf {config.model.hf} holds no config.json; give the folder of a downloaded checkpoint "
            "(hf download REPOSITORY --local-dir FOLDER)"
        )
    check_data_path(config.data.path)


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


def read_data(config: TrainConfig) -> dict[str, SplitFacts]:
    """Reads the facts that loaders need about ``train`` and, if the run evaluates, about ``eval.split``.

    Only one rank of a run calls this function (see :func:`megatron_vl.training.loop.share_data`). It reads
    about 60 bytes for each shard.

    Raises:
        LoaderError: there is no data set, or one of these splits is empty.
        DescriptionError: the data set's description could run code, or refers to files outside its folder.
    """
    found = read_description(location(config.data.path))
    splits = {"train", config.eval.split} if config.eval.interval else {"train"}
    facts = {split: found.facts(split) for split in sorted(splits)}
    if config.data.balance:
        # It imports torch, which only ranks do.
        from megatron_vl.data.sizes import why_not_planned

        unplanned = why_not_planned(found, config.model.hf, config.data)
        facts["train"] = dataclasses.replace(facts["train"], unplanned=unplanned)
    return facts


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


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        source: the checkpoint to resume from; None: the run starts from ``model.checkpoint`` or from random
            weights.
        lineage: lineage of the checkpoints that the run will save.
        restart_data: whether the data set is read from its start.
        said: lines to print for the user.
    """

    source: Saved | None
    lineage: Lineage
    restart_data: bool
    said: tuple[str, ...]


def plan_start(config: TrainConfig, dp: int) -> Start:
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
        return Start(
            None, dataclasses.replace(lineage, data_restart=DataRestart(0, c.attempt)), False, choice.said
        )

    done = source.lineage.data_restart
    if done is not None and done.attempt >= c.attempt and _reads_the_same(source, run_facts(config, dp)):
        line = (
            f"checkpoint.restart_data: this checkpoint records that the data set was read from its start at"
            f" step {done.step}; the run continues in it. To read it from its start once more, give"
            f" --checkpoint.attempt {done.attempt + 1}"
        )
        return Start(source, lineage, False, (*choice.said, line))

    line = (
        f"checkpoint.restart_data: the data set is read from its start at step {source.step}; once this run"
        " has saved, a start with the same option continues in it"
    )
    lineage = dataclasses.replace(lineage, data_restart=DataRestart(source.step, c.attempt))
    return Start(source, lineage, True, (*choice.said, line))


def _reads_the_same(source: Saved, now: dict[str, Any]) -> bool:
    """Whether a run with the facts ``now`` can continue in the data where a checkpoint stopped."""
    from megatron_vl.training.checkpoint import SAME, read_run

    saved = read_run(source.path)
    return all(saved.get(name) == now[name] for name in SAME)


def resumed_from(config: TrainConfig) -> Saved | None:
    """The checkpoint that this run resumes from; None if it starts from step 0."""
    c = config.checkpoint
    return choose(Path(c.dir) if c.dir and c.resume else None, c.step, c.branch, c.attempt).source


def step_to_resume(config: TrainConfig) -> int | None:
    """The step whose checkpoint this run resumes from; None if it starts from step 0."""
    source = resumed_from(config)
    return None if source is None else source.step


def check_own_checkpoint(config: TrainConfig, spec: ModelSpec, dp: int, start: Start) -> None:
    """Checks that the run can continue from its own checkpoint.

    The checkpoint's files say which model it holds. ``model.checkpoint`` is not read and need not exist.

    Raises:
        CheckpointError: files are missing or damaged, or the order of samples would change.
        RunConfigError: the checkpoint holds another model than ``model.hf``.
    """
    from megatron_vl.training import checkpoint

    assert start.source is not None
    path = start.source.path
    saved = checkpoint.check_resumable(path, run_facts(config, dp), start.restart_data)
    check_same_model(f"checkpoint {path}", checkpoint.open_weights(path, saved).spec, config, spec)


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


def check_start_weights(config: TrainConfig, spec: ModelSpec) -> Any:
    """Opens ``model.checkpoint``. Returns its reader.

    Raises:
        RunConfigError: the weights are of another model than ``model.hf``.
        WeightsError, FileNotFoundError: the weights cannot be read.
    """
    from megatron_vl.weights.reader import WeightReader

    reader = WeightReader(config.model.checkpoint)
    check_same_model(f"model.checkpoint {config.model.checkpoint}", reader.spec, config, spec)
    return reader


def changed_video_rule(weights: Any, config: TrainConfig, spec: ModelSpec) -> str:
    """A note if a run's start weights were trained under another rule for videos; otherwise empty.

    Args:
        weights: the result of :func:`check_start_weights`.
    """
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


def remarks(config: TrainConfig, platform: str, resumes: bool = False) -> list[str]:
    """Notes on settings that are allowed but rarely intended.

    Args:
        platform: ``cuda`` or ``cpu``.
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

    if platform == "cpu" and config.dtype == "bfloat16":
        found.append("dtype bfloat16 is slow and less exact on cpu; give --dtype float32")
    return found
