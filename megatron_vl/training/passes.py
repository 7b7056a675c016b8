"""The steps of a run that trains on its data once, or several times: counted by planning all of them."""

from __future__ import annotations

import dataclasses
import math

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

MAX_COUNTED_SAMPLES = 100_000
"""Largest data set whose passes are counted, in half a second, although ``steps`` is given."""


def with_counted_steps(resolved_run: ResolvedRun, world_size: int) -> ResolvedRun:
    """The run with its number of steps, which rank 0 counts unless ``steps`` gives it. Collective.

    A line for its start says how many passes they are. The sizes of all samples must be known.
    """
    config = resolved_run.config
    num_samples = resolved_run.facts_by_split["train"].dataset_identity.get("samples") or math.inf
    if config.steps and (config.data.is_synthetic or num_samples > MAX_COUNTED_SAMPLES):
        return resolved_run
    counted = dataclasses.replace(resolved_run, config=dataclasses.replace(config, epochs=config.epochs or 1))
    if config.steps:
        counted = dataclasses.replace(counted, source_checkpoint=None)
    steps = broadcast_from_rank_0(lambda: count_steps(counted))
    passes = config.steps / max(1, steps) if config.steps else float(counted.config.epochs)
    if not config.steps:
        # A run has either; from here on, it has both, because its data end after so many steps.
        validate_config(dataclasses.replace(config, steps=steps, epochs=0), world_size)
        config = dataclasses.replace(counted.config, steps=steps)
    tokens = config.steps * config.global_batch_size * config.data.seq_len
    passes_text = pluralize(f"{passes:.1f}".removesuffix(".0"), "pass")
    note = f"{pluralize(f'{config.steps:,}', 'step')}: {passes_text} over the data, at most {tokens:,} tokens"
    return dataclasses.replace(resolved_run, config=config, run_notes=(note, *resolved_run.run_notes))


def count_steps(resolved_run: ResolvedRun) -> int:
    """Number of steps of ``config.epochs`` passes over the data, and of those done before.

    A resumed run counts from its checkpoint, because its rows so far may have been planned for fewer passes.

    Raises:
        LoaderError: as :func:`~megatron_vl.data.loader.build_loader` raises them.
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
