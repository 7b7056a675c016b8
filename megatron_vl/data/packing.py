"""Which samples share a row.

Energon's ``PackingDataset`` hands its buffer to a function and drops what the function does not return, so
the last row of every buffer is partly filled. :class:`RowPacking` puts the rest back into that buffer
instead. The buffer is part of Energon's saved state (as restore keys, in order), so a resumed run packs the
same rows.

Each time one row is made: the oldest sample of the buffer and those others that fill the row best. The oldest
always goes, so none waits for ever. Fill rates over 1,000 rows (lengths of COCO pictures at their own size
plus text, 64 samples in the buffer, 4,096 / 8,192 tokens): 93.0 / 89.5 % when each buffer is packed first-fit
decreasing and emptied, 96 % when the worst row is held back, above 99.99 % here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from megatron.energon import WorkerConfig
from megatron.energon.wrappers.packing_dataset import PackingDataset

UNREACHED = 1 << 30


def fill_row(sizes: list[tuple[int, int]], tokens: int, patches: int = 0) -> list[int]:
    """The samples that share the fullest row with sample 0: subset sum, exact on both budgets.

    Args:
        sizes: (tokens, patches) of each sample, the oldest first; none may exceed a budget.
        tokens: budget of the row. patches: budget of the row; 0: none.

    Returns:
        Ascending indices, 0 among them. Of equally full rows, one with older samples.
    """
    room = tokens - sizes[0][0]
    # least[t]: the fewest patches with which some of the samples looked at so far take t tokens.
    least = np.full(room + 1, UNREACHED, np.int32)
    least[0] = sizes[0][1] if patches else 0
    later = [
        (i, sizes[i][0], sizes[i][1] if patches else 0)
        for i in range(len(sizes) - 1, 0, -1)
        if sizes[i][0] <= room
    ]
    tables = [least]
    for _, need, pixels in later:
        least = least.copy()
        np.minimum(least[need:], tables[-1][: room + 1 - need] + pixels, out=least[need:])
        tables.append(least)
    budget = patches or UNREACHED - 1
    used, row = int(np.flatnonzero(least <= budget)[-1]), [0]
    # The oldest were looked at last: the way back takes them first.
    for (i, need, pixels), before in zip(reversed(later), reversed(tables[:-1]), strict=True):
        if need <= used and before[used - need] <= budget - pixels:
            row.append(i)
            used, budget = used - need, budget - pixels
    return row


def pack_greedily(sizes: list[tuple[int, int]], tokens: int, patches: int = 0) -> list[list[int]]:
    """First-fit decreasing on two budgets: indices of the samples of each row.

    Args:
        sizes: (tokens, patches) of each sample; none may exceed a budget.
        tokens: budget of a row. patches: budget of a row; 0: none.

    Returns:
        Rows in the order of their earliest sample, samples in their order: packing shuffles as little as it
        can.
    """
    rows: list[list[int]] = []
    free: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i][0], i)):
        need, pixels = sizes[i][0], sizes[i][1] if patches else 0
        place = next((r for r, (t, p) in enumerate(free) if need <= t and pixels <= p), None)
        if place is None:
            place = len(rows)
            rows.append([])
            free.append([tokens, patches])
        rows[place].append(i)
        free[place][0] -= need
        free[place][1] -= pixels
    return sorted((sorted(row) for row in rows), key=lambda row: row[0])


class RowPacking(PackingDataset):
    """Energon's packing with a memory: samples that are not in a row yet stay in the buffer.

    Args:
        dataset: encoded samples.
        buffer_size: samples among which is chosen.
        select: gets the buffer, oldest first, and whether it is the last one; returns the rows to make now
            and the samples that wait (none when it is the last). What is in neither is left out.
        encode, pack: as Energon's ``sample_encoder`` and ``final_packer``; both stateless.
    """

    def __init__(
        self,
        dataset: Any,
        buffer_size: int,
        select: Callable[[list[Any], bool], tuple[list[list[Any]], list[Any]]],
        encode: Callable[[Any], Any],
        pack: Callable[[list[Any]], Any],
        worker_config: WorkerConfig,
    ) -> None:
        self.select = select
        # Tolerance 0 is "no limit": which share of bad samples is too much is decided by the run, not here.
        super().__init__(
            dataset,
            buffer_size=buffer_size,
            pre_packer=self._rows_now,
            final_packer=pack,
            final_packer_stateless=True,
            sample_encoder=encode,
            sample_encoder_stateless=True,
            pre_packer_failure_tolerance=0,
            final_packer_failure_tolerance=0,
            sample_encoder_failure_tolerance=0,
            worker_config=worker_config,
        )

    def _rows_now(self, samples: list[Any]) -> list[list[Any]]:
        # A buffer that is not full is handed over only when the data set has ended (Energon 7.4.1,
        # `__iter__`); and Energon has emptied its buffer before it calls, so what is put there now is what it
        # goes on with.
        rows, rest = self.select(samples, len(samples) < self.buffer_size)
        self._reading_buffer.extend(rest)
        return rows

    def _fill_reading_buffer(self, source_iter: Iterator[Any], log_progress: bool = False) -> bool:
        """Without Energon's progress bar, which every worker would draw over the run's output."""
        return super()._fill_reading_buffer(source_iter)
