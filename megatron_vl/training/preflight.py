"""What can be refused before anything is started: no torch is imported until the fields and paths are
right."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vl.config import RULES_BEFORE, RunConfigError, TrainConfig, validate, video_rule
from megatron_vl.data.description import SplitFacts, read_description
from megatron_vl.parallel.open_files import raise_open_files
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.layout import Layout, run_layout
from megatron_vl.weights.run_folder import DataRestart, Lineage, Saved, StepMissingError, choose

OWN_FILES = 512
"""Open files that a rank needs beside one connection to each peer: libraries, shards, workers, log files."""


def launched_world_size() -> int:
    """Ranks of this training, as torchrun says; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def check(config: TrainConfig, world_size: int | None = None) -> tuple[ModelSpec, Layout]:
    """Fields, the model's config, layout, paths, and whether the run's checkpoint can be resumed.

    Args:
        world_size: None: as launched.

    Raises:
        RunConfigError, LayoutError, ConfigError, CheckpointError: the message names the field, path or
        number.
    """
    dp = validate(config, launched_world_size() if world_size is None else world_size)
    if not config.model.hf:
        raise RunConfigError("model.hf is empty; give the Hugging Face folder that the model comes from")
    if not (Path(config.model.hf) / "config.json").is_file():
        raise RunConfigError(
            f"model.hf {config.model.hf} holds no config.json; give the folder of a downloaded checkpoint "
            "(hf download REPOSITORY --local-dir FOLDER)"
        )
    spec = read_spec(config.model.hf)
    layout = run_layout(spec, config.parallel)
    if config.model.moe_aux_loss is not None and spec.language.moe is None:
        raise RunConfigError(
            f"model.moe_aux_loss is for models with experts; {spec.family} is dense: leave it empty"
        )
    if config.optimizer.cpu_offload and config.checkpoint.dir:
        raise RunConfigError(
            "optimizer.cpu_offload cannot be saved yet: its moments live outside the optimizer that a"
            " checkpoint reads. Leave checkpoint.dir empty, or cpu_offload off"
        )
    if config.data.balance:
        check_open_files(dp)
    check_data_path(config.data.path)
    check_folder("checkpoint.dir", config.checkpoint.dir)
    check_folder("log.tensorboard", config.log.tensorboard)
    start = plan_start(config, dp)
    if start.source is not None:
        check_video_rule(config, spec, start.source.path)
        check_own_checkpoint(config, spec, dp, start)
    elif config.model.checkpoint and not Path(config.model.checkpoint).exists():
        raise RunConfigError(
            f"model.checkpoint {config.model.checkpoint} does not exist; `megatron-vl convert` writes it"
        )
    return spec, layout


def check_open_files(dp: int) -> None:
    """Refuses to exchange rows between more replicas than this process may hold connections to.

    Raises:
        RunConfigError: names the limit that is needed.
    """
    needed, allowed = dp + OWN_FILES, raise_open_files()
    if needed > allowed:
        raise RunConfigError(
            f"data.balance connects each of {dp} data-parallel ranks to all others. That takes {needed} open"
            f" files a process, and {allowed} are allowed: raise the limit (ulimit -Hn {needed}), or set"
            " data.balance to false"
        )


def check_data_path(path: str) -> None:
    """Refuses what is neither a data set's folder nor a metadataset, by what is there; Energon's import takes
    seconds.

    Raises:
        RunConfigError: says what is missing.
    """
    advice = "give a folder written by `megatron-vl data convert`"
    if not path:
        raise RunConfigError(f"data.path is empty; {advice}")
    folder = Path(path)
    if not folder.exists():
        raise RunConfigError(f"data.path {path} does not exist")
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
        raise RunConfigError(f"data.path {path} is no data set (it holds no .nv-meta); {advice}")


def read_data(config: TrainConfig) -> dict[str, SplitFacts]:
    """What loaders need to know of the data set's splits: ``train``, and ``eval.split`` where there is
    evaluation.

    One rank of a run calls this (see :func:`megatron_vl.training.loop.share_data`): it reads about 60 bytes
    for each shard.

    Raises:
        LoaderError: there is no data set, or a split of it is empty.
        DescriptionError: its description could run code, or leads out of its folder.
    """
    found = read_description(Path(config.data.path))
    splits = {"train", config.eval.split} if config.eval.interval else {"train"}
    return {split: found.facts(split) for split in sorted(splits)}


def check_folder(field: str, path: str) -> None:
    """Refuses a folder to be written, given by ``field`` (empty: none), that a file is in the way of.

    Raises:
        RunConfigError: names the field and the file.
    """
    folder = Path(path)
    in_the_way = next(
        (part for part in (folder, *folder.parents) if part.exists() and not part.is_dir()), None
    )
    if path and in_the_way:
        raise RunConfigError(
            f"{field} {path}: {in_the_way} is a file; give a folder, which need not exist yet"
        )


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        source: the checkpoint that it goes on from; None: it starts anew, from ``model.checkpoint`` or random
            weights.
        lineage: of what it will save.
        restart_data: whether the data set is read from its start.
        said: lines for the user.
    """

    source: Saved | None
    lineage: Lineage
    restart_data: bool
    said: tuple[str, ...]


def plan_start(config: TrainConfig, dp: int) -> Start:
    """Decides where a run with data-parallel size ``dp`` begins.

    Raises:
        RunConfigError: ``checkpoint.step`` is not there.
        CheckpointError: which checkpoint is the latest cannot be known, or it cannot be read.
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
        # The record stays: one start without the option does not make a file that pins it restart again.
        return Start(source, lineage, False, choice.said)
    if source is None:
        return Start(
            None, dataclasses.replace(lineage, data_restart=DataRestart(0, c.attempt)), False, choice.said
        )

    done = source.lineage.data_restart
    if done is not None and done.attempt >= c.attempt and _reads_the_same(source, run_facts(config, dp)):
        told = (
            f"checkpoint.restart_data: the data set was read from its start at step {done.step}, as this"
            " checkpoint records; going on in it. To read it from its start once more, give"
            f" --checkpoint.attempt {done.attempt + 1}"
        )
        return Start(source, lineage, False, (*choice.said, told))
    told = (
        f"checkpoint.restart_data: the data set is read from its start at step {source.step}; once this run"
        " has saved, a start with the same option goes on in it"
    )
    lineage = dataclasses.replace(lineage, data_restart=DataRestart(source.step, c.attempt))
    return Start(source, lineage, True, (*choice.said, told))


def _reads_the_same(source: Saved, now: dict[str, Any]) -> bool:
    """Whether a run with the facts ``now`` can go on in the data where a checkpoint stopped."""
    from megatron_vl.training.checkpoint import read_run

    saved = read_run(source.path)
    return all(saved.get(name) == value for name, value in now.items())


def step_to_resume(config: TrainConfig) -> int | None:
    """The step whose checkpoint this run goes on from; None when it starts anew."""
    c = config.checkpoint
    source = choose(Path(c.dir) if c.dir and c.resume else None, c.step, c.branch, c.attempt).source
    return None if source is None else source.step


def check_own_checkpoint(config: TrainConfig, spec: ModelSpec, dp: int, start: Start) -> None:
    """Refuses a checkpoint of this run that it cannot go on from.

    Its own files say which model it holds; ``model.checkpoint`` is neither read nor missed.

    Raises:
        CheckpointError: files are missing or damaged, or the order of samples could not be kept.
        RunConfigError: it holds another model than ``model.hf``.
    """
    from megatron_vl.training import checkpoint

    assert start.source is not None
    path = start.source.path
    saved = checkpoint.check_resumable(path, run_facts(config, dp), start.restart_data)
    check_same_model(f"checkpoint {path}", checkpoint.open_weights(path, saved).spec, config, spec)


def run_facts(config: TrainConfig, dp: int) -> dict[str, Any]:
    """What must be equal for a resumed run to read the same samples."""
    return {"dp": dp, "num_workers": config.data.num_workers, "seq_len": config.data.seq_len}


def check_video_rule(config: TrainConfig, spec: ModelSpec, source: Path) -> None:
    """Refuses another rule for videos than that of the step folder ``source``, with ``restart_data`` too.

    Raises:
        RunConfigError: names the field, both rules, and what to do.
    """
    path = source / "loader" / "dp_00000.json"
    if not path.is_file():
        return
    try:
        identity = dict(json.loads(path.read_text())["identity"])
    except (ValueError, KeyError, TypeError):  # a damaged one is told, by its hash, where it is needed
        return

    for name, now in video_rule(config.data, spec.vision.video_timestamps).items():
        before = identity.get(name, RULES_BEFORE[name])
        if before != now:
            raise RunConfigError(
                f"data.{name} is {now!r}, but {source} was trained under {before!r}: set data.{name} to"
                f" {before!r} to go on with this run, or start a new one from its weights (model.checkpoint)"
                f" under {now!r}"
            )


def check_start_weights(config: TrainConfig, spec: ModelSpec) -> Any:
    """The reader of ``model.checkpoint``.

    Raises:
        RunConfigError: it holds another model than ``model.hf``.
        WeightsError, FileNotFoundError: it cannot be read.
    """
    from megatron_vl.weights.reader import WeightReader

    reader = WeightReader(config.model.checkpoint)
    check_same_model(f"model.checkpoint {config.model.checkpoint}", reader.spec, config, spec)
    return reader


def check_same_model(held_by: str, held: ModelSpec, config: TrainConfig, spec: ModelSpec) -> None:
    """Raises RunConfigError unless weights are of the model that ``model.hf`` describes."""
    if held.family != spec.family or held.vision != spec.vision or held.language != spec.language:
        theirs, ours = held.family, spec.family
        sizes = f"both {ours}, other sizes" if theirs == ours else f"{theirs}, {ours}"
        raise RunConfigError(f"{held_by} holds another model than model.hf {config.model.hf} ({sizes})")


def remarks(config: TrainConfig, platform: str, resumes: bool = False) -> list[str]:
    """What is allowed and rarely meant.

    Args:
        resumes: weights come from the run's own checkpoint.
    """
    found = []
    c = config.checkpoint
    if not c.dir:
        found.append("checkpoint.dir is empty: nothing of this run is saved")
    elif not c.interval:
        found.append(
            f"checkpoint.interval is 0: the only checkpoint is that of the last step ({config.steps}); a run"
            " that dies before loses everything. Set an interval, for instance --checkpoint.interval 500"
        )
    if not config.model.checkpoint and not resumes:
        found.append("model.checkpoint is empty: weights are random")
    frozen = {"vision": config.model.freeze_vision, "merger": config.model.freeze_merger}
    for part, rate in (("vision", config.optimizer.vision_lr), ("merger", config.optimizer.merger_lr)):
        if frozen[part] and rate is not None:
            found.append(
                f"optimizer.{part}_lr {rate:g} has no effect: model.freeze_{part} keeps those weights as"
                " they are"
            )
        elif rate == 0:
            found.append(
                f"optimizer.{part}_lr 0 keeps those weights as they are, but computes their gradients and"
                f" keeps their moments; --model.freeze_{part} true spares both"
            )
    if platform == "cpu" and config.dtype == "bfloat16":
        found.append("dtype bfloat16 is slow and less exact on cpu; give --dtype float32")
    return found
