"""The loader of a run whose batches are planned (see :mod:`megatron_vl.data.planned_rows`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_vl.config import DataConfig
from megatron_vl.data.blend import summary
from megatron_vl.data.description import SplitFacts
from megatron_vl.data.order import Deal
from megatron_vl.data.planned_rows import PlannedRankRows, Planning
from megatron_vl.data.row_loader import PLANNED, RESTART, RowLoader
from megatron_vl.data.state import StateError, from_json, to_json
from megatron_vl.data.streams import Sources

ORDER_VERSION = 3
"""Version of the order of samples and of the planning of rows."""
OF_STREAMS = ("packing_buffer", "shuffle_buffer", "shuffle_buffer_gib")
"""Fields of an identity that only streams depend on."""
EARLIER = f"resume from an earlier checkpoint, {RESTART}"


class PlannedLoader(RowLoader):
    """Iterator over the rows of one data-parallel rank, of batches that all ranks plan alike."""

    def __init__(
        self,
        planning: Planning,
        sources: Sources,
        identity: dict[str, Any],
        facts: SplitFacts,
        deal: Deal,
        dp_rank: int,
        data: DataConfig,
    ) -> None:
        own = {name: value for name, value in identity.items() if name not in OF_STREAMS}
        own |= {"planned": ORDER_VERSION, "shuffled": data.shuffle_buffer > 0}
        own |= {"packing_buffer": data.packing_buffer} if data.pack else {}
        super().__init__(sources, planning.encoder, own, facts, deal, dp_rank, data)
        self._planning, self._start = planning, 0
        self._own: PlannedRankRows | None = None

    def _begin(self) -> Any:
        deal, workers = self._deal, self._data.num_workers
        self._own = PlannedRankRows(self._planning, self._dp_rank, deal.ranks, workers, self._start)
        return self._own

    @property
    def notes(self) -> list[str]:
        """Lines to print once at the start of a run."""
        rows = self._deal.rows_per_step
        return [
            *summary(self._sources.blend),
            f"the {rows} rows of each step are planned from the stored sizes of the samples, with about equal"
            " numbers of patches (data.balance); each rank reads only the samples of its own rows",
            *self._said,
        ]

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state as JSON values. Rank 0 saves where the data stand, for all.

        Raises:
            StateError: this rank has not taken all its rows of a step.
        """
        rows, state = self._start, self._planning.state
        if self._own is not None:
            rows, state = self._own.rows, self._own.state
        return {
            "num_workers": self._data.num_workers,
            "identity": self._identity,
            "rows": rows,
            "starts": dict(self._begun),
            PLANNED: {
                "ranks": self._deal.ranks,
                "rows_per_step": self._deal.rows_per_step,
                "rank": self._dp_rank,
                "state": to_json(state) if self._dp_rank == 0 else None,
            },
        }

    def load_state_dict(
        self, state: dict[str, Any], read: Callable[[int], dict[str, Any]] | None = None
    ) -> None:
        """Continues where states were saved, on any number of ranks and workers.

        Args:
            state: the state of one data-parallel rank of then.
            read: gives the state of another rank of then. It is needed if ``state`` is not that of rank 0.

        Raises:
            StateError: the state belongs to another data set or to other packing, or rows were already read.
        """
        if self._rows is not None:
            raise StateError("a loader state must be loaded before the first row is read")
        if PLANNED not in state:
            raise StateError(
                "the loader state is of a run whose batches are not planned; let this run go on so too,"
                f" {RESTART}"
            )

        self._check(state)
        self._begun |= state.get("starts") or {}

        state = self._of_rank_0(state, read)

        try:
            self._planning.state = from_json(state[PLANNED]["state"])
            # Damage is found here, and not by the processes that plan.
            self._planning.planner()
            self._start = int(state["rows"])
            self._said += self._moves(state[PLANNED], state["num_workers"])
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            said = str(error) if isinstance(error, StateError) else f"the loader state is damaged ({error!r})"
            raise StateError(f"{said}; {EARLIER}") from error

    def _of_rank_0(
        self, state: dict[str, Any], read: Callable[[int], dict[str, Any]] | None
    ) -> dict[str, Any]:
        """The state of the rank that saved for all."""
        try:
            rank, rows = state[PLANNED]["rank"], state["rows"]
        except (KeyError, TypeError) as error:
            raise StateError(f"the loader state is damaged ({error!r}); {EARLIER}") from error
        if rank == 0:
            return state
        if read is None:
            raise StateError("the state of data-parallel rank 0 is needed too: it says where data stand")
        found = read(0)
        if PLANNED not in found or found.get("rows") != rows:
            raise StateError("the loader state of data-parallel rank 0 is of another step")
        return found

    def _moves(self, saved: dict[str, Any], workers: int) -> list[str]:
        """What differs from the run that saved."""
        now, said = self._deal, []
        if (saved["ranks"], workers) != (now.ranks, self._data.num_workers):
            said.append(
                f"the data continue on {now.ranks} data-parallel ranks x {self._data.num_workers} workers,"
                f" after {saved['ranks']} x {workers}: every step takes the same samples as before"
            )
        if saved["rows_per_step"] != now.rows_per_step:
            said.append(
                f"each step takes {now.rows_per_step} rows, after {saved['rows_per_step']}: samples keep"
                " their order, and none is repeated or left out"
            )
        return said
