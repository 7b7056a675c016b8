"""The steps of a run that trains on its data once, or several times: counted by planning all of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from megatron_vl.config.checks import validate_config
from megatron_vl.parallel.process_groups import broadcast_from_rank_0
from megatron_vl.system.plurals import pluralize
from megatron_vl.training.resolved_run import ResolvedRun
from megatron_vl.training.state.load import (
    read_loader_state,
    read_run_metadata,
    restore_loader,
    suggest_remedy,
)

if TYPE_CHECKING:
    from megatron_vl.data.row_loader import RowLoader


def with_counted_steps(resolved_run: ResolvedRun, world_size: int) -> ResolvedRun:
    """The run with its number of steps, which rank 0 counts unless ``steps`` gives it. Collective.

    A line for its start says how many passes they are. The sizes of all samples must be known.

    Raises:
        LoaderError, CheckpointError: as :func:`count_steps`.
    """
    config = resolved_run.config
    if config.steps:
        if config.data.is_synthetic:
            return resolved_run
        passes = broadcast_from_rank_0(lambda: _open_loader(resolved_run).count_passes(config.steps))
        if passes is None:
            return resolved_run
        passes_text = f"about {passes:.1f} passes" if passes >= 0.1 else "fewer than 0.1 passes"
    else:
        counted_config = dataclasses.replace(config, epochs=config.epochs or 1)
        steps = broadcast_from_rank_0(
            lambda: count_steps(dataclasses.replace(resolved_run, config=counted_config))
        )
        # A run has either; from here on, it has both, because its data end after so many steps.
        validate_config(dataclasses.replace(config, steps=steps, epochs=0), world_size)
        config = dataclasses.replace(counted_config, steps=steps)
        passes_text = pluralize(config.epochs, "pass")
    tokens = config.steps * config.global_batch_size * config.data.seq_len
    note = f"{pluralize(f'{config.steps:,}', 'step')}: {passes_text} over the data, at most {tokens:,} tokens"
    return dataclasses.replace(resolved_run, config=config, run_notes=(note, *resolved_run.run_notes))


def count_steps(resolved_run: ResolvedRun) -> int:
    """Number of steps of ``config.epochs`` passes over the data, and of those done before.

    A resumed run counts from its checkpoint, because its rows so far may have been planned for fewer passes.

    Raises:
        LoaderError: no sample can be used; or as :func:`~megatron_vl.data.loader.build_loader` raises it.
        CheckpointError: the checkpoint's state belongs to other data.
    """
    loader, source = _open_loader(resolved_run), resolved_run.source_checkpoint
    if source is None:
        return loader.count_steps()
    with suggest_remedy(source.path):
        loader_state = read_loader_state(source.path, read_run_metadata(source.path)["files"])
    if loader_state is not None:
        restore_loader(loader, loader_state, resolved_run.config.checkpoint.dir)
    return source.step + loader.count_steps()


def _open_loader(resolved_run: ResolvedRun) -> RowLoader:
    from megatron_vl.data.loader import build_loader  # it imports Energon

    config = resolved_run.config
    return build_loader(
        config.data,
        resolved_run.spec,
        config.model.hf,
        split_facts=resolved_run.facts_by_split["train"],
        rows_per_step=config.global_batch_size,
        epochs=config.epochs,
    )
