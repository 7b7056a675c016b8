"""Continues a run from its own checkpoint, and says which facts a checkpoint records for that."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_vl.config import video_rule
from megatron_vl.data.sample.thinking import ThinkingRule
from megatron_vl.data.source.description import difference
from megatron_vl.models.build import aux_loss_coefficient
from megatron_vl.training import checkpoint
from megatron_vl.training.metrics import MetricsLog, say
from megatron_vl.training.optimizer import SCHEDULE, changed_schedule, schedule_facts
from megatron_vl.training.preflight import run_facts
from megatron_vl.training.setup import Run, end_if_asked
from megatron_vl.training.step import SKIPPED
from megatron_vl.weights.run_folder import saved_checkpoints

_SKIPPED_STEPS, _AUX_LOSS, _THINKING, _SOURCES = "skipped_steps", "moe_aux_loss", "thinking_rule", "sources"
_MOMENTS = "moments_dtype"
"""Further entries of a checkpoint's ``run.json``, which need not be equal when resuming."""


def restore(run: Run) -> None:
    """Resumes from the chosen checkpoint, if there is one, and prints which one was chosen. Collective.

    Raises:
        CheckpointError: the checkpoint cannot be used. The message says what to do.
        SystemExit: a signal asked a rank to stop, see :func:`end_if_asked`.
    """
    for note in run.resolved.start.notes:
        say(run.grid, note)
    if run.resolved.resumes:
        _restore(run)
    end_if_asked(run.platform)  # what came before takes minutes with large models
    _make_up_exports(run)


def _restore(run: Run) -> None:
    start = run.resolved.start
    assert start.source is not None
    restored = checkpoint.load(
        start.source.path,
        chunks=run.chunks,
        optimizer=run.optimizer,
        spec=run.spec,
        layout=run.layout,
        grid=run.grid,
        run=run_facts(run.config, run.grid.dp),
        restart_data=start.restart_data,
    )
    if run.loader is not None and restored.loader is not None and restored.loader.ranks:
        _load_loader(run, restored.loader)
    run.step = start.source.step
    run.bad_samples = _kept_counts(run, restored.bad_samples)

    saved = checkpoint.read_run(start.source.path)
    try:
        run.skipped = {reason: int(saved[_SKIPPED_STEPS][reason]) for reason in SKIPPED}
        run.source_counts = dict(saved[_SOURCES])
        changes = [
            _changed_aux_loss(run, saved),
            _changed_thinking(run, saved),
            _changed_moments(run, saved),
            changed_schedule(run.config, saved[SCHEDULE], run.step),
        ]
    except (KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise checkpoint.CheckpointError(f"{start.source.path / 'run.json'} is damaged: {what}") from error

    say(run.grid, f"resumed at step {run.step} from {run.config.checkpoint.dir}")
    for change in filter(None, changes):
        say(run.grid, f"NOTE: {change}")


def checkpoint_facts(run: Run, log: MetricsLog) -> dict[str, Any]:
    """What ``run.json`` of a checkpoint says of the run, beside its layout and files."""
    return run_facts(run.config, run.grid.dp) | {
        _SKIPPED_STEPS: dict(run.skipped),
        "video_rule": video_rule(run.config.data, run.spec.vision.video_timestamps),
        _THINKING: dataclasses.asdict(ThinkingRule.of(run.config.data)),
        _MOMENTS: run.config.optimizer.moments_dtype,
        SCHEDULE: schedule_facts(run.config),
        _AUX_LOSS: aux_loss_coefficient(run.spec, run.config.model) if run.spec.language.moe else None,
        _SOURCES: log.sources.state_dict(),
    }


# --- What has changed since the checkpoint ------------------------------------------------------------------


def _changed_moments(run: Run, saved: dict[str, Any]) -> str:
    """A note if Adam's moments were saved in another type; otherwise empty."""
    before, now = saved[_MOMENTS], run.config.optimizer.moments_dtype
    if before == now:
        return ""
    how = "rounded to the nearest bfloat16" if now == "bfloat16" else "converted without loss"
    return (
        f"Adam's moments were saved in {before} and are {how}, because optimizer.moments_dtype is {now} from"
        " here on"
    )


def _changed_thinking(run: Run, saved: dict[str, Any]) -> str:
    """A note if the rule for the loss of answers with thinking has changed; otherwise empty.

    A loader that continues in its data refuses such a change. One that restarts its data does not.
    """
    if run.loader is None or not run.loader.thinking:
        return ""

    before = saved[_THINKING]
    changed = [
        f"data.{name} was {before[name]}, is {rule}"
        for name, rule in run.loader.thinking.items()
        if before[name] != rule
    ]
    if not changed:
        return ""
    return f"answers with thinking bear loss under another rule from here on: {'; '.join(changed)}"


def _changed_aux_loss(run: Run, saved: dict[str, Any]) -> str:
    """A note if the coefficient of the experts' load-balancing loss has changed; otherwise empty."""
    if run.spec.language.moe is None or run.config.model.freeze_language:
        return ""
    before, now = saved[_AUX_LOSS], aux_loss_coefficient(run.spec, run.config.model)
    if before == now:
        return ""
    return f"the experts' load-balancing loss had the coefficient {before}; from here on it is {now}"


# --- Data and exports ---------------------------------------------------------------------------------------


def _load_loader(run: Run, states: checkpoint.LoaderStates) -> None:
    """Makes the loader continue in its data.

    Raises:
        CheckpointError: the loader refuses the state. The message says how to restart the data instead.
    """
    try:
        run.loader.load_state_dict(states.read(run.grid.dp_rank % states.ranks), states.read)
    except ValueError as error:
        source = run.resolved.start.source
        done = source.lineage.data_restart if source is not None else None
        option = "--checkpoint.restart_data true"
        options = f"{option} --checkpoint.attempt {done.attempt + 1}" if done else option
        if option in str(error):
            raise checkpoint.CheckpointError(str(error).replace(option, options)) from error
        raise checkpoint.CheckpointError(
            f"{error}. Or keep weights and optimizer and read the data set from its start: {options}"
        ) from error


def _kept_counts(run: Run, counts: dict[str, Any] | None) -> dict[str, Any] | None:
    """The checkpoint's counts of bad samples; None if the run continues with another data set.

    Collective if the data was restarted.
    """
    if counts is None or not run.resolved.start.restart_data:
        return counts
    is_same_data = [run.loader is not None and not difference(counts.get("dataset"), run.loader.dataset)]
    if run.grid.world_size > 1:
        dist.broadcast_object_list(is_same_data)  # rank 0 owns a loader
    return counts if is_same_data[0] else None


def _make_up_exports(run: Run) -> None:
    """Starts the exports that an earlier start of the run did not finish; on rank 0."""
    start = run.resolved.start
    if run.exporter is None or start.source is None:
        return
    saved = saved_checkpoints(Path(run.config.checkpoint.dir))
    ancestors = [one for one in saved if start.lineage.holds(start.source.step, one.point)]
    run.exporter.make_up(sorted(ancestors, key=lambda one: one.step))
