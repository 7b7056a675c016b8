"""Plans one batch after the other from the sizes of samples (see :mod:`megatron_vl.data.packing.plan_rows`).

All ranks plan the same batches. The state consists of the samples that were drawn but not used yet, by
number. It does not depend on ranks or processes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_vl.data.packing.plan_rows import CHOICES_PER_ROW, LOOKAHEAD_FACTOR, plan_rows, rank_of_rows
from megatron_vl.data.source.location import LoaderError
from megatron_vl.data.source.sample_order import SampleOrder
from megatron_vl.data.state_json import LoaderStateError

Integers = NDArray[np.int64]

MIN_SEARCHED = 10_000
"""A search for usable samples of a blend does not end before this many consecutive unusable ones, because a
source with a small weight is drawn from rarely."""
MAX_SEARCHED = 1_000_000
"""A search for usable samples ends after this many consecutive unusable ones at the latest. It ends earlier
once every sample was drawn twice."""
NO_LIMIT = 1 << 62
PART_SHIFT = 40
DRAW_MASK = (1 << PART_SHIFT) - 1
"""An entry is ``part << PART_SHIFT | draw``: the number of the draw from the data set, and the part of the
sample that was drawn. So the entry of a whole sample is the number of its draw."""


def count_finished_draws(planner_state: dict[str, Any]) -> dict[str, int]:
    """Number of draws from each data set whose samples are in rows or were left out, by the data set's key.

    Args:
        planner_state: as :meth:`BatchPlanner.planner_state` returns it. A sample of which a part waits, or
            that was set aside, is not finished.
    """
    finished = {key: int(count) for key, count in planner_state["drawn"].items()}
    sources, entries = planner_state["waiting"].astype(np.int64)
    waiting_draws = np.unique(sources << PART_SHIFT | entries & DRAW_MASK)
    unfinished = np.bincount(waiting_draws >> PART_SHIFT, minlength=len(planner_state["keys"])).tolist()
    for key, count in zip(planner_state["keys"], unfinished, strict=True):
        finished[key] -= count
    for key, kept in planner_state["aside"].items():
        finished[key] -= len({entry & DRAW_MASK for entry in kept})
    return finished


class PlannedSample(NamedTuple):
    """One planned sample."""

    source: int
    index: int  # type: ignore[assignment]  # tuple has a method of this name
    tokens: int
    """Number of its tokens. A sample with 0 tokens cannot be used and is read only to be counted."""
    patches: int
    part: int = 0


@dataclass(frozen=True)
class PlannedBatch:
    """The rows of one step."""

    sample_table: Integers
    """int64 [5, n], the fields of a :class:`PlannedSample` for each sample."""
    row_of_sample: Integers
    """int64 [n], the row of each sample."""
    num_rows: int

    def assign_to_ranks(self, num_ranks: int) -> PlannedBatch:
        """The same rows, sorted by rank: each rank takes the next ``num_rows // num_ranks`` rows."""
        patches_per_row = np.bincount(self.row_of_sample, self.sample_table[3], self.num_rows)
        new_row = np.empty(self.num_rows, np.int64)
        new_row[rank_of_rows(patches_per_row.astype(np.int64), num_ranks).ravel()] = np.arange(self.num_rows)
        return PlannedBatch(self.sample_table, new_row[self.row_of_sample], self.num_rows)

    def rows_of_rank(self, rank: int = 0, num_ranks: int = 1) -> list[list[PlannedSample]]:
        """The rows of a rank, after :meth:`assign_to_ranks`."""
        rows_per_rank = self.num_rows // num_ranks
        rows: list[list[PlannedSample]] = [[] for _ in range(rows_per_rank)]
        samples = np.flatnonzero(self.row_of_sample // rows_per_rank == rank)
        for row_index, *fields in np.vstack([self.row_of_sample, self.sample_table])[:, samples].T.tolist():
            rows[row_index % rows_per_rank].append(PlannedSample(*fields))
        return rows


class BatchPlanner:
    """Plans one batch after the other.

    Args:
        lookup_sizes: ``lookup_sizes(source_index, sample_indices)`` returns the tokens and patches, int64 [n]
            each, of samples of one data set.
        rows_per_step: number of rows of a batch, on all ranks.
        seq_len, max_patches: largest number of tokens and patches in a row; 0 patches: no limit.
        least_ahead: smallest number of samples to choose from beyond those that fill a step.
        packs_samples: whether several samples may share a row.
        draw_limit: number of draws after which the data end; None: they never do.
        cut_sample: ``cut_sample(source_index, sample_index)`` returns tokens and patches of each part of a
            sample that does not fit into a row; nothing if it cannot be cut. A part that is too large is left
            out as such a sample is. None: samples are never cut.
    """

    def __init__(
        self,
        sample_order: SampleOrder,
        lookup_sizes: Callable[[int, Integers], tuple[Integers, Integers]],
        rows_per_step: int,
        seq_len: int,
        max_patches: int,
        *,
        least_ahead: int = 64,
        packs_samples: bool = True,
        draw_limit: int | None = None,
        cut_sample: Callable[[int, int], list[tuple[int, int]]] | None = None,
    ) -> None:
        self.draw_limit, self.cut_sample = draw_limit, cut_sample
        self.sample_order, self.lookup_sizes = sample_order, lookup_sizes
        self.rows_per_step, self.seq_len, self.max_patches = rows_per_step, seq_len, max_patches
        self.least_ahead, self.packs_samples = least_ahead, packs_samples
        self._draws_of_removed: dict[str, int] = {}
        """Number of draws from each data set that the blend no longer has. It may come back."""
        self._draws_set_aside: dict[str, list[int]] = {}
        """Samples drawn but unused when their data set was removed, oldest first."""
        self._waiting_samples = np.zeros((5, 0), np.int64)
        """Samples that were drawn and wait, the oldest first, as :meth:`_with_sizes` returns them."""

    @property
    def is_at_end(self) -> bool:
        """Whether every sample was planned, as often as ``draw_limit`` allows."""
        return self._draws_left() == 0 and not self._waiting_samples.size

    def _draws_left(self) -> int:
        if self.draw_limit is None:
            return sys.maxsize
        return max(0, self.draw_limit - self.sample_order.total_draws)

    def next_batch(self) -> PlannedBatch:
        """Plans the rows of the next step. At the end of the data, rows may be empty.

        Raises:
            LoaderError: no sample can be used.
        """
        unusable = self._draw_samples()
        waiting = self._waiting_samples
        if self.packs_samples:
            row_of_sample = plan_rows(
                waiting[3], waiting[4], self.rows_per_step, self.seq_len, self.max_patches
            )
        else:
            row_of_sample = np.arange(waiting.shape[1])
            row_of_sample[self.rows_per_step :] = -1

        # The samples that are not taken wait for the next step.
        is_taken = row_of_sample >= 0
        self._waiting_samples = np.compress(~is_taken, waiting, axis=1)

        # Unusable samples come with some row, so that a loader process reads, counts and logs them.
        row_of_unusable = np.arange(unusable.shape[1]) % self.rows_per_step
        samples = np.concatenate([np.compress(is_taken, waiting, axis=1), unusable], axis=1)
        row_of_sample = np.concatenate([row_of_sample[is_taken], row_of_unusable])
        return PlannedBatch(
            np.concatenate([samples[[0, 2, 3, 4]], samples[1:2] >> PART_SHIFT]),
            row_of_sample,
            self.rows_per_step,
        )

    def _draw_samples(self) -> Integers:
        """Draws until there are enough samples to choose from. Returns those that cannot be used."""
        unusable_chunks = [self._waiting_samples[:, :0]]
        largest_sizes = np.array([[self.seq_len], [self.max_patches or NO_LIMIT]])
        consecutive_unusable = 0
        sample_counts = self.sample_order.sample_counts
        max_searched = min(max(MIN_SEARCHED * (len(sample_counts) > 1), 2 * sum(sample_counts)), MAX_SEARCHED)
        while draw_count := min(self._next_draw_count(), self._draws_left()):
            samples = self._cut_samples(self._with_sizes(*self.sample_order.draw_samples(draw_count)))
            is_usable = (samples[3] > 0) & (samples[3:] <= largest_sizes).all(axis=0)
            consecutive_unusable = 0 if is_usable.any() else consecutive_unusable + samples.shape[1]
            if consecutive_unusable > max_searched or consecutive_unusable == self.draw_limit:
                limits = "data.seq_len" + f" or data.max_patches ({self.max_patches})" * (
                    self.max_patches > 0
                )
                raise LoaderError(
                    f"{consecutive_unusable} consecutive draws gave no usable sample: each is empty or"
                    f" exceeds {limits}; {self.long_samples() or 'none is longer than a row'}. Raise"
                    f" {limits}, or lower data.max_pixels if images fill rows"
                )
            if not is_usable.all():
                samples[3:, ~is_usable] = 0
                unusable_chunks.append(samples[:, ~is_usable])
                samples = samples[:, is_usable]
            self._waiting_samples = np.concatenate([self._waiting_samples, samples], axis=1)
        return np.concatenate(unusable_chunks, axis=1)

    def long_samples(self) -> str:
        """How many samples are longer than a row, and how long the longest one is; empty if none is."""
        counts = (min(count, MAX_SEARCHED) for count in self.sample_order.sample_counts)
        tokens = np.concatenate([self.lookup_sizes(i, np.arange(n))[0] for i, n in enumerate(counts)])
        too_long = int((tokens > self.seq_len).sum())
        numbers = f"{too_long:,} of {tokens.size:,}, the longest of {tokens.max(initial=0):,} tokens"
        return f"samples longer than data.seq_len {self.seq_len}: {numbers}" if too_long else ""

    def _next_draw_count(self) -> int:
        """How many samples to draw next; 0 if enough wait."""
        waiting_count = self._waiting_samples.shape[1]
        least_draws = max(self.rows_per_step, 64)
        if not self.packs_samples:
            return least_draws if waiting_count < self.rows_per_step else 0

        # The number of the oldest samples that fill a step. If too few wait, their mean size gives an
        # estimate.
        cumulative_tokens = np.cumsum(self._waiting_samples[3])
        tokens_per_step = self.rows_per_step * self.seq_len
        filling_count = int(np.searchsorted(cumulative_tokens, tokens_per_step)) + 1
        if filling_count > waiting_count:
            filling_count = 1
            if waiting_count:
                filling_count = -(-tokens_per_step * waiting_count // max(int(cumulative_tokens[-1]), 1))

        ahead_count = min(filling_count // LOOKAHEAD_FACTOR, CHOICES_PER_ROW * self.rows_per_step)
        missing_count = filling_count + max(self.least_ahead, ahead_count) - waiting_count
        # An estimate from few samples may be far too high, so the number that waits at most doubles.
        return max(least_draws, min(missing_count, waiting_count)) if missing_count > 0 else 0

    def _with_sizes(self, source_indices: Integers, entries: Integers) -> Integers:
        """Drawn samples with their sizes, int64 [5, n].

        The rows are the data set, the entry (:data:`PART_SHIFT`), the sample's index in the data set, tokens
        and patches.
        """
        sample_indices = self.sample_order.sample_indices(source_indices, entries & DRAW_MASK)
        sizes = np.zeros((2, len(source_indices)), np.int64)
        for source_index in np.flatnonzero(np.bincount(source_indices)).tolist():
            positions = np.flatnonzero(source_indices == source_index)
            sizes[:, positions] = self.lookup_sizes(source_index, sample_indices[positions])
        return np.stack([source_indices, entries, sample_indices, *sizes])

    def _parts_of(self, samples: Integers) -> dict[int, list[tuple[int, int]]]:
        """Tokens and patches of the parts of samples that have to be cut, by their place in the table."""
        if self.cut_sample is None:
            return {}
        places = np.flatnonzero(
            (samples[3:] > [[self.seq_len], [self.max_patches or NO_LIMIT]]).any(axis=0)
        ).tolist()
        return {
            place: sizes for place in places if (sizes := self.cut_sample(*samples[[0, 2], place].tolist()))
        }

    def _cut_samples(self, samples: Integers) -> Integers:
        """The table with the parts of a sample in place of each sample that has to be cut."""
        if not (parts := self._parts_of(samples)):
            return samples
        part_counts = np.ones(samples.shape[1], np.int64)
        part_counts[list(parts)] = [len(sizes) for sizes in parts.values()]
        first_places = np.cumsum(part_counts) - part_counts
        samples = samples.repeat(part_counts, axis=1)
        for place, sizes in parts.items():
            columns = slice(first_places[place], first_places[place] + len(sizes))
            samples[1, columns] |= np.arange(len(sizes)) << PART_SHIFT
            samples[3:, columns] = np.array(sizes).T
        return samples

    # --- State ----------------------------------------------------------------------------------------------

    def planner_state(self) -> dict[str, Any]:
        """The state from which planning continues, about 100 bytes for each row of a step."""
        order = self.sample_order
        return {
            "keys": list(order.source_keys),
            "drawn": self._draws_of_removed | dict(zip(order.source_keys, order.draw_counts, strict=True)),
            "total": order.total_draws,
            "waiting": self._waiting_samples[:2].copy(),
            "aside": {key: list(numbers) for key, numbers in self._draws_set_aside.items()},
        }

    def restore_state(self, saved_state: dict[str, Any]) -> None:
        """Continues after the batch at which a state was taken.

        A new data set begins at its start. If nothing is drawn from a data set any more, its waiting samples
        are set aside. If it comes back, they are the first to be used.

        Raises:
            LoaderStateError: the state is damaged.
        """
        order = self.sample_order
        try:
            draw_counts = dict(saved_state["drawn"])
            set_aside = dict(saved_state["aside"])
            waiting = self._restore_waiting(saved_state, set_aside)
            total_draws = int(saved_state["total"])
            current_draws = [int(draw_counts.pop(key, 0)) for key in order.source_keys]
        except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
            raise LoaderStateError(
                "the loader state is damaged: it does not say which samples were drawn and wait"
            ) from error
        order.total_draws, order.draw_counts = total_draws, current_draws
        self._draws_of_removed, self._draws_set_aside = draw_counts, set_aside
        samples = self._with_sizes(*waiting)
        part_numbers = samples[1] >> PART_SHIFT
        parts = self._parts_of(samples)
        for place in range(samples.shape[1]):
            sizes = parts.get(place, [])
            if part_numbers[place] >= max(1, len(sizes)):
                raise LoaderStateError("the loader state is damaged: it names parts that no sample has")
            if sizes:
                samples[3:, place] = sizes[part_numbers[place]]
        self._waiting_samples = samples

    def _restore_waiting(self, saved_state: dict[str, Any], set_aside: dict[str, list[int]]) -> Integers:
        """The data sets and entries that wait, int64 [2, n]. Entries are set aside or come back."""
        saved_indices, draw_numbers = saved_state["waiting"].astype(np.int64)
        if len(saved_indices) and min(saved_indices.min(), draw_numbers.min()) < 0:
            raise ValueError("a negative number")

        # Data sets may have other places in the blend now, or have left it.
        order = self.sample_order
        drawn_from = {
            key: i
            for i, (key, weight) in enumerate(zip(order.source_keys, order.source_weights, strict=True))
            if weight > 0
        }
        saved_keys = list(saved_state["keys"])
        current_indices = np.array([drawn_from.get(key, -1) for key in saved_keys], np.int64)[saved_indices]
        for saved_index, key in enumerate(saved_keys):
            if key not in drawn_from and (draws := draw_numbers[saved_indices == saved_index].tolist()):
                set_aside[key] = [*set_aside.get(key, ()), *draws]

        # What was set aside comes first, then what waits.
        tables = []
        for key, source_index in drawn_from.items():
            returning = np.array(set_aside.pop(key, ()), np.int64)
            tables.append(np.stack([np.full_like(returning, source_index), returning]))
        tables.append(np.stack([current_indices, draw_numbers])[:, current_indices >= 0])
        return np.concatenate(tables, axis=1)
