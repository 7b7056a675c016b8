"""Reads where the streams of a run stood when a checkpoint was saved.

Each data-parallel rank saves some of the streams (:meth:`megatron_vl.data.order.Deal.keeper`). A run that
goes on with other ranks reads the files that hold its own streams, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from megatron_vl.data.order import Deal, read_deal
from megatron_vl.data.state import StateError, from_json, to_json
from megatron_vl.data.streams import StreamState

STATE_VERSION = 1
"""Version of the form of a state."""


def streams_to_json(deal: Deal, rows: int, rank: int, streams: dict[int, StreamState]) -> dict[str, Any]:
    """The part of a rank's state that says where streams stand."""
    return {
        "deal": deal.as_json(),
        "rank": rank,
        "rows": rows,
        "streams": {
            str(number): {
                "rows": state.rows,
                "dataset": to_json(state.dataset),
                "drawn": list(state.drawn),
                "parked": to_json(state.parked),
            }
            for number, state in streams.items()
        },
    }


class SavedStreams:
    """The streams of a checkpoint.

    Args:
        state: the state of any rank.
        read: gives the state of a rank by its number.

    Raises:
        StateError: the state is damaged.
    """

    def __init__(self, state: dict[str, Any], read: Callable[[int], dict[str, Any]] | None) -> None:
        self._read = read
        self._files: dict[int, dict[int, StreamState]] = {}
        rank = state["rank"]
        self.deal = read_deal(state["deal"])
        self._files[rank], self.rows = _parse(state)

    def get(self, numbers: Iterable[int]) -> dict[int, StreamState]:
        """Where streams stand; one that has made no row may be missing.

        Raises:
            StateError: a file lacks a stream, or is of another step.
        """
        found = {}
        for number in numbers:
            rank = self.deal.keeper(number, self.rows)
            state = self._file(rank).get(number)
            if state is not None:
                found[number] = state
            elif self.deal.order.taken(number, self.rows):
                raise StateError(
                    f"the loader state of data-parallel rank {rank} lacks stream {number} of the data"
                )
        return found

    def _file(self, rank: int) -> dict[int, StreamState]:
        if rank in self._files:
            return self._files[rank]
        if self._read is None:
            raise StateError(
                f"the state of data-parallel rank {rank} is needed too: this loader takes rows of its streams"
            )
        state = self._read(rank)
        self._files[rank], rows = _parse(state)
        if rows != self.rows:
            raise StateError(
                f"the loader state of data-parallel rank {rank} stands at row {rows}, others at {self.rows}"
            )
        return self._files[rank]


def _parse(state: dict[str, Any]) -> tuple[dict[int, StreamState], int]:
    """The streams that a rank has saved, and the number of rows that all ranks had taken."""
    streams = {
        int(number): StreamState(
            saved["rows"], from_json(saved["dataset"]), tuple(saved["drawn"]), from_json(saved["parked"])
        )
        for number, saved in state["streams"].items()
    }
    return streams, int(state["rows"])
