"""The layout of a run, for ``train``, ``plan`` and ``bench``: which entry of the pipeline gets which layers.

An entry is one chunk of one stage. Without ``parallel.layers``, the stages get about equal FLOPs. The split
depends only on the fields of a run and the model, so all ranks, machines and commands find the same one.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Literal

from megatron_vl.config import TrainConfig, validate_config
from megatron_vl.estimate.flops import RowFlops
from megatron_vl.estimate.rows import assumed_rows, executed_flops
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout, check_experts_use_sequence_parallel, configured_layout


def run_layout(
    config: TrainConfig, spec: ModelSpec, world_size: int, *, saved_layout: Layout | None = None
) -> Layout:
    """The layout of a run.

    Args:
        saved_layout: layout of the checkpoint that the run resumes from. Its split stays, as long as it has
            the same stages and chunks, and the vision tower the same placement.

    Raises:
        RunConfigError, LayoutError: the layout is impossible.
    """
    validate_config(config, world_size)
    parallel_config = config.parallel
    check_experts_use_sequence_parallel(spec, parallel_config.tp, parallel_config.sequence_parallel)
    layers_origin, layers = split_source(config, saved_layout), parallel_config.layers
    if layers_origin == "planned":
        return planned_layout(config, spec)
    if layers_origin == "saved" and saved_layout is not None:
        return configured_layout(config, spec, saved_layout.layers_per_chunk)
    return configured_layout(config, spec, layers if isinstance(layers, list) else None)


def with_split(config: TrainConfig, layout: Layout) -> TrainConfig:
    layers = list(layout.layers_per_chunk) if layout.pp > 1 else None
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, layers=layers))


def split_source(config: TrainConfig, saved_layout: Layout | None) -> Literal["given", "saved", "planned"]:
    """The origin of a run's split: its fields, its checkpoint, or the FLOPs."""
    if config.parallel.pp == 1 or isinstance(config.parallel.layers, list):
        return "given"
    if saved_layout is not None:
        saved_split = saved_layout.pp, saved_layout.vpp, saved_layout.decoupled
        if saved_split == (config.parallel.pp, config.parallel.vpp, config.vision.placement == "decoupled"):
            return "saved"
    return "planned"


def planned_layout(config: TrainConfig, spec: ModelSpec) -> Layout:
    """The layout with the planned split. Raises LayoutError if the sizes are impossible."""
    entry_count = config.parallel.pp * config.parallel.vpp
    unsplit = configured_layout(config, spec, [0] * (entry_count - 1) + [spec.language.num_layers])
    return balanced_layout(unsplit, executed_flops(config, spec, assumed_rows(config, spec)))


def balanced_layout(layout: Layout, flops: RowFlops) -> Layout:
    tower_flops = 0.0 if layout.decoupled else flops.tower
    layers = balance_layers(flops.layer_totals, tower_flops, flops.output, layout.pp, layout.vpp)
    return dataclasses.replace(layout, layers_per_chunk=layers)


@functools.cache
def balance_layers(
    layer_flops: Sequence[float], first_flops: float, last_flops: float, pp: int, vpp: int = 1
) -> tuple[int, ...]:
    """Splits layers over the ``pp * vpp`` entries so that stages, and entries, have about equal FLOPs.

    Args:
        layer_flops: FLOPs of each layer.
        first_flops, last_flops: those of the first and the last entry without their layers.
    """
    best_layers = _balance_entries(layer_flops, first_flops, last_flops, pp * vpp)
    if vpp == 1:
        return best_layers
    # If the tower exceeds an entry's share, the other chunks of the first stage make up for it.
    flops_before = [0.0, *itertools.accumulate(layer_flops)]

    def entry_flops(layers: Sequence[int]) -> list[float]:
        ends = [0, *itertools.accumulate(layers)]
        entries = [flops_before[end] - flops_before[start] for start, end in itertools.pairwise(ends)]
        entries[0] += first_flops
        entries[-1] += last_flops
        return entries

    def imbalance(layers: Sequence[int]) -> tuple[float, float]:
        entries = entry_flops(layers)
        return max(sum(entries[stage::pp]) for stage in range(pp)), max(entries)

    for _ in layer_flops:
        entries = entry_flops(best_layers)
        stages = sorted(range(pp), key=lambda stage: sum(entries[stage::pp]))
        moves = itertools.product(range(stages[-1], pp * vpp, pp), range(stages[0], pp * vpp, pp))
        neighbours = [
            tuple(n - (i == source) + (i == target) for i, n in enumerate(best_layers))
            for source, target in moves
            if best_layers[source]
        ]
        best_neighbour = min(neighbours, key=imbalance, default=best_layers)
        if imbalance(best_neighbour) >= imbalance(best_layers):
            break
        best_layers = best_neighbour
    return best_layers


def _balance_entries(
    layer_flops: Sequence[float], first_flops: float, last_flops: float, entry_count: int
) -> tuple[int, ...]:
    layers_per_entry: list[int] = []
    assigned_layers = 0
    remaining_flops = sum(layer_flops) + first_flops + last_flops
    for entry_index in range(entry_count - 1):
        target_flops = remaining_flops / (entry_count - entry_index)
        entry_flops = 0.0 if entry_index else first_flops
        first_layer = assigned_layers
        # A layer belongs to the entry that it fits better.
        while (
            assigned_layers < len(layer_flops)
            and entry_flops + layer_flops[assigned_layers] / 2 <= target_flops
        ):
            entry_flops += layer_flops[assigned_layers]
            assigned_layers += 1
        layers_per_entry.append(assigned_layers - first_layer)
        remaining_flops -= entry_flops
    return (*layers_per_entry, len(layer_flops) - assigned_layers)
