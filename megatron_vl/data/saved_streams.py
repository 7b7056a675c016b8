"""Reads where the streams of a run stood when a checkpoint was saved.

Each data-parallel rank saves some of the streams (:meth:`megatron_vl.data.order.Deal.keeper`). A run that
goes on with other ranks reads the files that hold its own streams, and no others.

Versions before 2026-11-22 saved the state of one Energon loader for each rank. Its worker w is stream
``rank * workers + w`` of the present order, with the same samples, the same seed and the same turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_vl.data.order import Deal, RowOrder, read_deal
from megatron_vl.data.state import StateError, from_json, to_json
from megatron_vl.data.streams import StreamState

STATE_VERSION = 3
"""Version of the form of a state."""
ONE_LOADER = 2
"""The last version that saved one Energon loader for each rank. Its samples come in the same order."""
_AROUND = ("SimpleSavableDatasetWrapper", "GcDataset", "WatchdogDataset")
"""Energon's loader puts these around a data set. They have no state of their own that matters here."""


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
        drawn: what the sources are known by in states of versions that did not write it.

    Raises:
        StateError: the state is damaged.
    """

    def __init__(
        self,
        state: dict[str, Any],
        read: Callable[[int], dict[str, Any]] | None,
        drawn: tuple[str, ...] = (),
    ) -> None:
        self._read, self._drawn = read, drawn
        self.one_loader = "energon" in state
        self._files: dict[int, dict[int, StreamState]] = {}
        self.workers = 1
        if self.one_loader:
            rank, ranks = state["identity"]["dp_rank"], state["identity"]["dp_size"]
            self.workers = max(state["identity"]["num_workers"], 1)
            # Any number of rows in a step gives each rank the same rows; that of this run is not known.
            self.deal = Deal(RowOrder(ranks * self.workers, ranks), 0, ranks, ranks)
        else:
            rank = state["rank"]
            self.deal = read_deal(state["deal"])
        self._files[rank], self.rows = self._parse(state, rank)

    def get(self, numbers: Iterable[int]) -> dict[int, StreamState]:
        """Where streams stand; one that has made no row may be missing.

        Raises:
            StateError: a file lacks a stream, or is of another step.
        """
        found = {}
        for number in numbers:
            rank = number // self.workers if self.one_loader else self.deal.keeper(number, self.rows)
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
        if self.one_loader != ("energon" in state):
            raise StateError(f"the loader state of data-parallel rank {rank} is of another version")
        self._files[rank], rows = self._parse(state, rank)
        if rows != self.rows:
            raise StateError(
                f"the loader state of data-parallel rank {rank} stands at row {rows}, others at {self.rows}"
            )
        return self._files[rank]

    def _parse(self, state: dict[str, Any], rank: int) -> tuple[dict[int, StreamState], int]:
        """The streams that a rank has saved, and the number of rows that all ranks had taken."""
        if not self.one_loader:
            streams = {
                int(number): self._stream(saved["rows"], from_json(saved["dataset"]), saved)
                for number, saved in state["streams"].items()
            }
            return streams, int(state["rows"])

        loader = from_json(state["energon"])
        if loader is None:
            return {}, 0
        first = rank * self.workers
        streams = {
            first + i: self._stream(*_of_worker(worker)) for i, worker in enumerate(loader.worker_states)
        }
        made = sum(map(_made, loader.worker_states)) * self.deal.ranks
        late = [number for number, at in streams.items() if at.rows > self.deal.order.taken(number, made)]
        if late or len(streams) != self.workers:
            raise StateError(
                f"the loader state of data-parallel rank {rank} is damaged: its workers do not fit"
            )
        return streams, made

    def _stream(self, rows: int, dataset: Any, saved: Mapping[str, Any] | None = None) -> StreamState:
        saved = saved or {}
        drawn = tuple(saved["drawn"]) if "drawn" in saved else self._drawn
        return StreamState(rows, dataset, drawn, from_json(saved["parked"]) if "parked" in saved else {})


def _of_worker(saved: Any) -> tuple[int, Any]:
    """(rows, Energon's state) of one worker of an Energon loader, where its state stands."""
    if isinstance(saved, dict):
        return saved["_sample_index"], _inner(saved)
    if saved.state is None:
        return 0, None
    return saved.state.sample_index, _inner(saved.state.dataset_state)


def _made(saved: Any) -> int:
    """Rows that a worker of an Energon loader had sent. With processes, a state may be older by some rows."""
    if isinstance(saved, dict):
        return saved["_sample_index"]
    return saved.offset + (saved.state.sample_index if saved.state is not None else 0)


def _inner(state: Any) -> Any:
    while state is not None and state["__class__"] in _AROUND:
        [state] = state["datasets"]
    return state
