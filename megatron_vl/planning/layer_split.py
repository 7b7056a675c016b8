"""Plans the split: the number of decoder layers of each entry of the pipeline.

An entry is one chunk of one stage. The split depends only on the fields of a run, the model and the number of
ranks. Nothing is measured, so all ranks and all commands find the same one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_vl.config import TrainConfig
from megatron_vl.planning.cost import PassTime, StepCosts
from megatron_vl.planning.memory import RESERVE_GIB, peak_stage_gib, stage_memories
from megatron_vl.planning.pipeline_timeline import pipeline_seconds
from megatron_vl.planning.predict import chunk_times
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout, configured_layout

MAX_SIMULATED_PASSES = 1500
"""A split with at most this many passes is judged by its timeline, and a longer one by the times of its
stages."""
MAX_LAYER_MOVES = 60
"""Largest number of layers that are moved to improve a split."""


def planned_layers(step_costs: StepCosts, *, skip_timelines: bool = False) -> tuple[int, ...]:
    """The split with the shortest step among those that fit the calibration's GPU.

    If none fits, it is the split whose fullest stage exceeds the memory least.

    Args:
        step_costs: its layout gives the sizes; ``layers_per_chunk`` is not read.
        skip_timelines: whether to judge splits by the times of their stages alone.
    """
    return _SplitSearch(step_costs, skip_timelines).improve_split(balanced_layers(step_costs))


def unsplit_layout(config: TrainConfig, spec: ModelSpec) -> Layout:
    """The layout of a run whose split is still to be found: all layers are in the last entry.

    Raises:
        LayoutError: the sizes are impossible.
    """
    empty_entries = config.parallel.pp * config.parallel.vpp - 1
    return configured_layout(config, spec, [0] * empty_entries + [spec.language.num_layers])


def balanced_layers(step_costs: StepCosts) -> tuple[int, ...]:
    """A split whose entries all take about equally long. Their memory is not considered."""
    layout = step_costs.layout
    entry_count = layout.pp * layout.vpp
    if entry_count == 1:
        return (step_costs.spec.language.num_layers,)

    empty_layout = dataclasses.replace(layout, layers_per_chunk=(0,) * entry_count)
    first_seconds = chunk_times(step_costs, empty_layout, 0)[0].total_seconds
    last_seconds = chunk_times(step_costs, empty_layout, layout.pp - 1)[-1].total_seconds
    # All entries have the overhead of their passes, so it does not matter for the split.
    pass_overhead = 2 * step_costs.calibration.pass_s
    layer_seconds = []
    num_layers = step_costs.spec.language.num_layers
    for layer_index in range(num_layers):
        single_layer = range(layer_index, layer_index + 1)
        layer_time = step_costs.decoder_layers_time(single_layer)
        layer_seconds.append(layer_time.total_seconds)
    return balance_layers(
        layer_seconds, first_seconds - pass_overhead, last_seconds - pass_overhead, entry_count
    )


def balance_layers(
    layer_seconds: Sequence[float], first_seconds: float, last_seconds: float, entry_count: int
) -> tuple[int, ...]:
    """Splits layers so that all entries take about equally long.

    Args:
        layer_seconds: seconds of each layer.
        first_seconds, last_seconds: seconds of the first and the last entry without their layers.
    """
    layers_per_entry = []
    assigned_layers = 0
    remaining_seconds = sum(layer_seconds) + first_seconds + last_seconds
    fixed_seconds = [first_seconds, *[0.0] * (entry_count - 1)]
    fixed_seconds[-1] += last_seconds

    for entry_index in range(entry_count - 1):
        target_seconds = remaining_seconds / (entry_count - entry_index)
        entry_seconds = fixed_seconds[entry_index]
        layer_count = 0
        # A layer belongs to the entry that it fits better.
        while (
            assigned_layers + layer_count < len(layer_seconds)
            and entry_seconds + layer_seconds[assigned_layers + layer_count] / 2 <= target_seconds
        ):
            entry_seconds += layer_seconds[assigned_layers + layer_count]
            layer_count += 1
        layers_per_entry.append(layer_count)
        assigned_layers += layer_count
        remaining_seconds -= entry_seconds

    return (*layers_per_entry, len(layer_seconds) - assigned_layers)


@dataclass
class _SplitSearch:
    """Improves a split by moving single layers from one entry to another."""

    step_costs: StepCosts
    skip_timelines: bool

    def improve_split(self, initial_layers: tuple[int, ...]) -> tuple[int, ...]:
        """Moves to the best neighbour of a split until none is better than the split itself."""
        best_layers, best_score = initial_layers, self.split_score(initial_layers)
        for _ in range(MAX_LAYER_MOVES // 6 if self.skip_timelines else MAX_LAYER_MOVES):
            best_neighbour = min(
                ((self.split_score(other), other) for other in self._neighbour_splits(best_layers)),
                default=None,
            )
            if best_neighbour is None or best_neighbour[0] >= best_score:
                break
            best_score, best_layers = best_neighbour
        return best_layers

    def _neighbour_splits(self, layers: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Splits in which one layer is in another entry. With many entries, only some of them are tried."""
        entry_count = len(layers)
        entry_pairs = itertools.permutations(range(entry_count), 2)

        if entry_count > 6:
            # With many entries, layers of the ends and of the longest entry move to the shortest ones.
            longest_entry = max(range(entry_count), key=lambda i: layers[i])
            shortest_entries = sorted(range(1, entry_count - 1), key=lambda i: layers[i])[:2]
            movable_entries = {0, entry_count - 1, longest_entry, *shortest_entries}
            entry_pairs = itertools.permutations(sorted(movable_entries), 2)

        neighbour_splits = []
        for source_entry, target_entry in entry_pairs:
            if layers[source_entry]:
                moved_layers = list(layers)
                moved_layers[source_entry] -= 1
                moved_layers[target_entry] += 1
                neighbour_splits.append(tuple(moved_layers))

        return neighbour_splits

    def split_score(self, layers: tuple[int, ...]) -> tuple[float, float]:
        """(GiB that are lacking, seconds of the step). Smaller is better, and memory comes first."""
        step_costs = self.step_costs
        layout = dataclasses.replace(step_costs.layout, layers_per_chunk=layers)
        stage_memory_list = stage_memories(
            step_costs.config,
            step_costs.spec,
            layout,
            step_costs.data_parallel_size,
        )
        needed_gib = peak_stage_gib(stage_memory_list) + RESERVE_GIB
        missing_gib = max(0.0, needed_gib - step_costs.calibration.memory_gib)

        simulated_micro_batches = min(step_costs.micro_batches, 8 * layout.pp)
        pass_count = 2 * layout.pp * layout.vpp * simulated_micro_batches
        pipeline_arguments = (
            [chunk_times(step_costs, layout, stage) for stage in range(layout.pp)],
            step_costs.micro_batches,
            step_costs.stage_message_seconds(),
        )
        if self.skip_timelines or pass_count > MAX_SIMULATED_PASSES:
            return missing_gib, quick_pipeline_seconds(*pipeline_arguments)
        return missing_gib, pipeline_seconds(*pipeline_arguments)


def quick_pipeline_seconds(
    times_by_stage: Sequence[Sequence[PassTime]], micro_batches: int, message_seconds: float
) -> float:
    """An estimate of the pipeline's seconds without a timeline.

    The slowest stage runs all micro-batches, and each other stage adds one. With virtual chunks, a stage also
    waits if its chunks take unequally long.
    """
    virtual_pipeline_size = len(times_by_stage[0])
    stages = [sum(chunk.total_seconds for chunk in stage) for stage in times_by_stage]
    slowest_seconds = max(stages)
    uneven_seconds = (
        max(max(chunk.total_seconds for chunk in stage) for stage in times_by_stage) * virtual_pipeline_size
        - slowest_seconds
    )
    fill_seconds = (sum(stages) - slowest_seconds) / virtual_pipeline_size + 2 * message_seconds * (
        len(times_by_stage) - 1
    )
    return micro_batches * slowest_seconds + fill_seconds + max(0.0, uneven_seconds) * micro_batches / 4
