"""The planned split: how many decoder layers each entry of a pipeline gets.

It follows from the fields of a run, the model and the number of ranks alone, by plain arithmetic, so that all
ranks and all commands find the same one. Nothing is measured.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_vl.config import TrainConfig
from megatron_vl.planning.cost import Costs, PassTime
from megatron_vl.planning.memory import GIB, RESERVE_GIB, stage_memories
from megatron_vl.planning.predict import chunk_times
from megatron_vl.planning.simulate import pipeline_seconds
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout, make_layout

SIMULATED = 1500
"""Up to so many passes, a split is judged by its timeline; above, by the times of its stages."""
MOVES = 60
"""Most improvements of a split by moving layers."""


def planned_layers(costs: Costs, *, patches: int | None = None, quick: bool = False) -> tuple[int, ...]:
    """The split with the shortest step among those that fit the calibration's GPU.

    If none fits, it is the one that lacks least.

    Args:
        costs: their layout gives the sizes; its ``layers`` are not read.
        patches: patches of the fullest row, for memory; None: as many as a row can hold.
        quick: judge splits by the times of their stages, without timelines.
    """
    return _Search(costs, patches, quick).improve(balanced_layers(costs))


def layout_of_sizes(config: TrainConfig, spec: ModelSpec) -> Layout:
    """The layout of a run whose split is still to be found: all layers are in the last entry.

    Raises:
        LayoutError: the sizes are impossible.
    """
    p = config.parallel
    layers = [0] * (p.pp * p.vpp - 1) + [spec.language.num_layers]
    decoupled = config.vision.placement == "decoupled"
    return make_layout(spec, p.tp, p.pp, p.vpp, layers, p.ep, p.etp, decoupled, p.cp)


def balanced_layers(costs: Costs) -> tuple[int, ...]:
    """A split whose entries all take about equally long, whatever memory they take."""
    layout = costs.layout
    entries = layout.pp * layout.vpp
    if entries == 1:
        return (costs.spec.language.num_layers,)
    empty = dataclasses.replace(layout, layers=(0,) * entries)
    first = chunk_times(costs, empty, 0)[0].both
    last = chunk_times(costs, empty, layout.pp - 1)[-1].both
    # What every pass takes says nothing about where layers should be.
    each = 2 * costs.calibration.pass_s
    layers = [costs.decoder_layer(i).both for i in range(costs.spec.language.num_layers)]
    return balanced(layers, first - each, last - each, entries)


def balanced(times: Sequence[float], first: float, last: float, entries: int) -> tuple[int, ...]:
    """Splits layers so that all entries take about equally long.

    Args:
        times: of each layer.
        first, last: what the first and the last entry take besides.
    """
    layers = []
    done = 0
    left = sum(times) + first + last
    fixed = [first, *[0.0] * (entries - 1)]
    fixed[-1] += last

    for entry in range(entries - 1):
        share = left / (entries - entry)
        took = fixed[entry]
        count = 0
        # A layer belongs to the entry that it fits better.
        while done + count < len(times) and took + times[done + count] / 2 <= share:
            took += times[done + count]
            count += 1
        layers.append(count)
        done += count
        left -= took

    return (*layers, len(times) - done)


@dataclass
class _Search:
    """Improves a split by moving single layers from one entry to another."""

    costs: Costs
    patches: int | None
    quick: bool

    def improve(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        best, score = layers, self.score(layers)
        for _ in range(MOVES // 6 if self.quick else MOVES):
            found = min(((self.score(other), other) for other in self._moves(best)), default=None)
            if found is None or found[0] >= score:
                break
            score, best = found
        return best

    def _moves(self, layers: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Splits with one layer of the slowest or fullest entries elsewhere, and nearby ones."""
        entries = len(layers)
        pairs = itertools.permutations(range(entries), 2)

        if entries > 6:
            # With many entries, layers of the ends and of the longest entry move to the shortest ones.
            most = max(range(entries), key=lambda i: layers[i])
            least = sorted(range(1, entries - 1), key=lambda i: layers[i])[:2]
            ends = {0, entries - 1, most, *least}
            pairs = itertools.permutations(sorted(ends), 2)

        found = []
        for source, target in pairs:
            if layers[source]:
                moved = list(layers)
                moved[source] -= 1
                moved[target] += 1
                found.append(tuple(moved))

        return found

    def score(self, layers: tuple[int, ...]) -> tuple[float, float]:
        """GiB that are lacking, then seconds: smaller is better."""
        costs = self.costs
        layout = dataclasses.replace(costs.layout, layers=layers)
        memories = stage_memories(costs.config, costs.spec, layout, costs.dp, self.patches)
        peak = max(memory.total for memory in memories) / GIB
        times = [chunk_times(costs, layout, stage) for stage in range(layout.pp)]
        micro_batches = costs.config.global_batch_size // costs.dp
        return max(0.0, peak + RESERVE_GIB - costs.calibration.memory_gib), self._seconds(
            times, micro_batches
        )

    def _seconds(self, times: list[tuple[PassTime, ...]], micro_batches: int) -> float:
        pp, vpp = len(times), len(times[0])
        if not self.quick and 2 * pp * vpp * min(micro_batches, 8 * pp) <= SIMULATED:
            return pipeline_seconds(times, micro_batches, self.costs.message())
        return quick_seconds(times, micro_batches, self.costs.message())


def quick_seconds(times: Sequence[Sequence[PassTime]], micro_batches: int, message: float) -> float:
    """The pipeline's time without a timeline: the slowest stage all the time, the others once.

    With virtual chunks, a stage also waits where its chunks take unequally long.
    """
    vpp = len(times[0])
    stages = [sum(chunk.both for chunk in stage) for stage in times]
    slowest = max(stages)
    uneven = max(max(chunk.both for chunk in stage) for stage in times) * vpp - slowest
    fill = (sum(stages) - slowest) / vpp + 2 * message * (len(times) - 1)
    return micro_batches * slowest + fill + max(0.0, uneven) * micro_batches / 4
