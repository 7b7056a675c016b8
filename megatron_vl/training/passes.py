"""The steps of a run that trains on its data once, or several times: counted by planning all of them."""

from __future__ import annotations

import dataclasses

from megatron_vl.config.checks import validate_config
from megatron_vl.parallel.process_groups import broadcast_from_rank_0
from megatron_vl.training.resolved_run import ResolvedRun
from megatron_vl.training.state.load import (
    read_loader_state,
    read_run_metadata,
    restore_loader,
    suggest_remedy,
)


def with_counted_steps(resolved_run: ResolvedRun, world_size: int) -> ResolvedRun:
    """The run with its number of steps, which rank 0 counts unless ``steps`` gives it. Collective.

    The sizes of all samples must be known.

    Raises:
        LoaderError: no sample can be used, or the data are a blend by weights.
        RunConfigError: a field does not fit the number of steps.
    """
    config = resolved_run.config
    if config.steps:
        return resolved_run
    config = dataclasses.replace(config, epochs=config.epochs or 1)
    steps = broadcast_from_rank_0(lambda: count_steps(dataclasses.replace(resolved_run, config=config)))
    # A run has either; from here on, it has both, because its data end after so many steps.
    validate_config(dataclasses.replace(config, steps=steps, epochs=0), world_size)
    return dataclasses.replace(resolved_run, config=dataclasses.replace(config, steps=steps))


def count_steps(resolved_run: ResolvedRun) -> int:
    """Number of steps of ``config.epochs`` passes over the data, and of those done before.

    A resumed run counts from its checkpoint, because its rows so far may have been planned for fewer passes.

    Raises:
        LoaderError, SizesError: as :func:`~megatron_vl.data.loader.build_loader` raises them.
        CheckpointError: the checkpoint's state belongs to other data.
    """
    from megatron_vl.data.loader import build_loader  # it imports Energon

    config, source = resolved_run.config, resolved_run.source_checkpoint
    loader = build_loader(
        config.data,
        resolved_run.spec,
        config.model.hf,
        split_facts=resolved_run.facts_by_split["train"],
        rows_per_step=config.global_batch_size,
        epochs=config.epochs,
    )
    if source is None:
        return loader.count_steps()
    with suggest_remedy(source.path):
        loader_state = read_loader_state(source.path, read_run_metadata(source.path)["files"])
    if loader_state is not None:
        restore_loader(loader, loader_state, config.checkpoint.dir)
    return source.step + loader.count_steps()
