"""What can be refused before anything is started: no torch is imported until the fields and paths are right."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megatron_vl.config import RULES_BEFORE, RunConfigError, TrainConfig, validate, video_rule
from megatron_vl.models.families import ModelSpec, read_spec
from megatron_vl.parallel.layout import Layout, run_layout


def launched_world_size() -> int:
    """Ranks of this training, as torchrun says; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def check(config: TrainConfig, world_size: int | None = None) -> tuple[ModelSpec, Layout]:
    """Fields, the model's config, layout, paths, and whether the run's checkpoint can be resumed.

    Args:
        world_size: None: as launched.

    Raises:
        RunConfigError, LayoutError, ConfigError, CheckpointError: the message names the field, path or number.
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
        raise RunConfigError(f"model.moe_aux_loss is for models with experts; {spec.family} is dense: leave it empty")
    if config.optimizer.cpu_offload and config.checkpoint.dir:
        raise RunConfigError(
            "optimizer.cpu_offload cannot be saved yet: its moments live outside the optimizer that a checkpoint reads. "
            "Leave checkpoint.dir empty, or cpu_offload off"
        )
    check_data_path(config.data.path)
    if config.model.checkpoint and not Path(config.model.checkpoint).exists():
        raise RunConfigError(f"model.checkpoint {config.model.checkpoint} does not exist; `megatron-vl convert` writes it")
    check_folder("checkpoint.dir", config.checkpoint.dir)
    check_folder("log.tensorboard", config.log.tensorboard)
    step = step_to_resume(config)
    if step is not None:
        from . import checkpoint

        source = checkpoint.step_folder(Path(config.checkpoint.dir), step)
        if not source.is_dir():
            steps = ", ".join(map(str, checkpoint.saved_steps(Path(config.checkpoint.dir)))) or "none"
            raise RunConfigError(f"checkpoint.step {step} is not in {config.checkpoint.dir}; steps that are: {steps}")
        checkpoint.check_resumable(source, run_facts(config, dp), config.checkpoint.restart_data)
        check_video_rule(config, spec, source)
    if config.eval.interval:
        from megatron_vl.data.loader import split_size

        split_size(Path(config.data.path), config.eval.split)  # refuses an empty one
    return spec, layout


def check_data_path(path: str) -> None:
    """Refuses what is neither a data set's folder nor a metadataset, by what is there; Energon's import takes seconds.

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
            raise RunConfigError(f"data.path {path} is neither a data set's folder nor a metadataset (.yaml); {advice}")
    elif not (folder / ".nv-meta").is_dir():
        if (folder / ".convert").is_dir():
            raise RunConfigError(f"data.path {path} holds an unfinished conversion; run `megatron-vl data convert` again")
        raise RunConfigError(f"data.path {path} is no data set (it holds no .nv-meta); {advice}")


def check_folder(field: str, path: str) -> None:
    """Refuses a folder to be written, given by ``field`` (empty: none), that a file is in the way of.

    Raises:
        RunConfigError: names the field and the file.
    """
    folder = Path(path)
    in_the_way = next((part for part in (folder, *folder.parents) if part.exists() and not part.is_dir()), None)
    if path and in_the_way:
        raise RunConfigError(f"{field} {path}: {in_the_way} is a file; give a folder, which need not exist yet")


def step_to_resume(config: TrainConfig) -> int | None:
    """The step whose checkpoint this run goes on from; None when it starts anew."""
    c = config.checkpoint
    if not (c.dir and c.resume):
        return None
    if c.step is not None:
        return c.step
    folder = Path(c.dir)
    if not (folder / "latest.json").is_file() and not any(folder.glob("step_*")):
        return None
    from .checkpoint import latest_step

    return latest_step(folder)


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
                f"data.{name} is {now!r}, but {source} was trained under {before!r}: set data.{name} to {before!r} "
                f"to go on with this run, or start a new one from its weights (model.checkpoint) under {now!r}"
            )


def check_start_weights(config: TrainConfig, spec: ModelSpec) -> Any:
    """The reader of ``model.checkpoint``.

    Raises:
        RunConfigError: it holds another model than ``model.hf``.
        WeightsError, FileNotFoundError: it cannot be read.
    """
    from megatron_vl.weights import WeightReader

    reader = WeightReader(config.model.checkpoint)
    if reader.spec.family != spec.family or reader.spec.vision != spec.vision or reader.spec.language != spec.language:
        theirs, ours = reader.spec.family, spec.family
        sizes = f"both {ours}, other sizes" if theirs == ours else f"{theirs}, {ours}"
        raise RunConfigError(
            f"model.checkpoint {config.model.checkpoint} holds another model than model.hf {config.model.hf} ({sizes})"
        )
    return reader


def remarks(config: TrainConfig, platform: str) -> list[str]:
    """What is allowed and rarely meant."""
    found = []
    c = config.checkpoint
    if not c.dir:
        found.append("checkpoint.dir is empty: nothing of this run is saved")
    elif not c.interval:
        found.append(
            f"checkpoint.interval is 0: the only checkpoint is that of the last step ({config.steps}); a run that dies before "
            "loses everything. Set an interval, for instance --checkpoint.interval 500"
        )
    if not config.model.checkpoint:
        found.append("model.checkpoint is empty: weights are random")
    frozen = {"vision": config.model.freeze_vision, "merger": config.model.freeze_merger}
    for part, rate in (("vision", config.optimizer.vision_lr), ("merger", config.optimizer.merger_lr)):
        if frozen[part] and rate is not None:
            found.append(f"optimizer.{part}_lr {rate:g} has no effect: model.freeze_{part} keeps those weights as they are")
    if platform == "cpu" and config.dtype == "bfloat16":
        found.append("dtype bfloat16 is slow and less exact on cpu; give --dtype float32")
    return found
