"""The rows of one data-parallel rank as an iterator whose state can be saved and loaded.

Batches are planned (see :mod:`megatron_vl.data.planned_rows`), so a state does not depend on ranks or
workers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from megatron.energon.errors import FatalSampleError

from megatron_vl.config import DataConfig
from megatron_vl.data.packing.row import Row
from megatron_vl.data.planned_rows import PlannedRankRows, Planning
from megatron_vl.data.sample.thinking import ThinkingRule
from megatron_vl.data.source.blend import BlendError, Source, sources_of, summary
from megatron_vl.data.source.changed_blend import BlendChange
from megatron_vl.data.source.description import LoaderError, SplitFacts, difference
from megatron_vl.data.state import StateError, from_json, to_json
from megatron_vl.json_files import check_version

STATE_VERSION = 1
"""Version of the form of a state, of the order of samples and of the planning of rows."""
PIXEL_FIELDS = (
    "min_pixels",
    "max_pixels",
    "video_min_pixels",
    "video_max_pixels",
    "video_fps",
    "video_max_frames",
)
BACK = "give the data set that the run began with"
CONTINUE = "go on with the changed blend with --data.on_changed_blend continue"
RESTART = "or keep weights and optimizer and read the data from its start with --checkpoint.restart_data true"
RESUME_THERE = f"resume with the program that saved it, {RESTART}"
EARLIER = f"resume from an earlier checkpoint, {RESTART}"
WAYS_OUT = {
    "dataset": f"{BACK}, {RESTART}",
    "pixels": f"set data.{', data.'.join(f for f in PIXEL_FIELDS if f != 'video_min_pixels')} back",
    "chat_template": "give the chat template that the run began with",
    "video_positions": "resume with the rule that the run began with: set data.video_positions to that",
    "video_prompt": "resume with the rule that the run began with: set data.video_prompt to that",
    "empty_think": "resume with the rule that the run began with: set data.empty_think to that",
    "earlier_answers": "resume with the rule that the run began with: set data.earlier_answers to that",
}


class RowLoader:
    """Iterator over the rows of one data-parallel rank, of batches that all ranks plan alike. It never ends.

    Args:
        identity: what determines the rows.
        ranks: the data-parallel size.
    """

    def __init__(
        self,
        planning: Planning,
        identity: dict[str, Any],
        facts: SplitFacts,
        dp_rank: int,
        ranks: int,
        data: DataConfig,
    ) -> None:
        self._planning, self._identity, self._data = planning, identity, data
        self._dp_rank, self._ranks = dp_rank, ranks
        self.samples = facts.samples
        """Number of samples in the split, over all ranks; None for a metadataset."""
        self._changes: list[str] = []
        self._begun = {source.key for source in planning.blend}
        """What all sources are known by that were ever in the run's blend."""
        self._start = 0
        self._rows: PlannedRankRows | None = None
        self._closed = False

    def __iter__(self) -> RowLoader:
        return self

    def __next__(self) -> Row:
        if self._closed:
            raise LoaderError("the loader is closed")
        if self._rows is None:
            workers = self._data.num_workers
            self._rows = PlannedRankRows(self._planning, self._dp_rank, self._ranks, workers, self._start)
        try:
            return next(self._rows)
        except (FatalSampleError, LoaderError) as error:
            raise LoaderError(_without_traceback(str(error))) from error

    @property
    def dataset(self) -> Any:
        """The data set's identity in this loader's states."""
        return self._identity["dataset"]

    @property
    def thinking(self) -> dict[str, str]:
        """The rule of what is learnt of thinking; empty if the chat template writes none."""
        names = (field.name for field in dataclasses.fields(ThinkingRule))
        return {name: self._identity[name] for name in names if name in self._identity}

    @property
    def notes(self) -> list[str]:
        """Lines to print once at the start of a run."""
        return [*summary(tuple(self._planning.blend)), *self._changes]

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state as JSON values. Rank 0 saves where the data stand, for all.

        After :meth:`load_state_dict`, the next row is the one that would come next here.

        Raises:
            StateError: this rank has not taken all its rows of a step.
        """
        rows, state = self._start, self._planning.state
        if self._rows is not None:
            rows, state = self._rows.rows, self._rows.state
        return {
            "identity": self._identity,
            "begun": sorted(self._begun),
            "num_workers": self._data.num_workers,
            "ranks": self._ranks,
            "rank": self._dp_rank,
            "rows_per_step": self._planning.rows_per_step,
            "rows": rows,
            "planner": to_json(state) if self._dp_rank == 0 else None,
        }

    def load_state_dict(
        self, state: dict[str, Any], read: Callable[[int], dict[str, Any]] | None = None
    ) -> None:
        """Continues where states were saved, on any number of ranks and workers.

        Call it before the first row.

        Args:
            state: the state of one data-parallel rank of then.
            read: gives the state of another rank of then. It is needed if ``state`` is not that of rank 0.

        Raises:
            StateError: the state belongs to another data set or to other packing, or rows were already read.
        """
        if self._rows is not None:
            raise StateError("a loader state must be loaded before the first row is read")

        try:
            self._check(state)
            self._begun |= set(state["begun"])
            state = self._of_rank_0(state, read)
            self._planning.state = from_json(state["planner"])
            # Damage is found here, and not by the processes that plan.
            self._planning.planner()
            self._start = int(state["rows"])
            self._changes += self._moves(state)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, StateError) and "damaged" not in str(error):
                raise
            damage = (
                str(error) if isinstance(error, StateError) else f"the loader state is damaged ({error!r})"
            )
            raise StateError(f"{damage}; {EARLIER}") from error

    def _of_rank_0(
        self, state: dict[str, Any], read: Callable[[int], dict[str, Any]] | None
    ) -> dict[str, Any]:
        """The state of the rank that saved for all."""
        if state["rank"] == 0:
            return state
        if read is None:
            raise StateError("the state of data-parallel rank 0 is needed too: it says where data stand")
        first = read(0)
        if first.get("rows") != state["rows"]:
            raise StateError("the loader state of data-parallel rank 0 is of another step")
        return first

    def _check(self, state: dict[str, Any]) -> None:
        """Refuses a state that does not belong to this loader."""
        saved = state.get("identity", {})
        now = self._identity["version"]
        check_version("the loader state", saved.get("version"), now, RESUME_THERE, StateError)
        if changed := difference(saved.get("dataset"), self._identity["dataset"]):
            before, begun = _read_sources(saved.get("dataset")), frozenset(state["begun"])
            self._change_blend(BlendChange(before, tuple(self._planning.blend), begun), changed)
        for name, value in self._identity.items():
            before = saved.get(name)
            if name != "dataset" and before != value:
                raise StateError(
                    f"the loader state was saved with {name} = {before!r}, this loader has {value!r} "
                    f"and would not make the same rows; {WAYS_OUT.get(name, f'set data.{name} back')}"
                )

    def _change_blend(self, change: BlendChange, first: str) -> None:
        """Notes what changes in the blend.

        Args:
            first: the first difference, as a clause.

        Raises:
            StateError: the run was not told to go on with another blend, or no source of before stays.
        """
        problem = f"the loader state was saved with another data set: {first}"
        if not change.stays:
            raise StateError(f"{problem}; {WAYS_OUT['dataset']}")
        if self._data.on_changed_blend != "continue":
            changes = "; ".join(change.told())
            raise StateError(f"{problem}; {BACK}, {CONTINUE} ({changes}), {RESTART}")
        lines = [f"  {line}" for line in change.told()]
        self._changes += [f"the blend has changed ({first}); from here on:", *lines]

    def _moves(self, saved: dict[str, Any]) -> list[str]:
        """What differs from the run that saved."""
        lines = []
        workers, rows = self._data.num_workers, self._planning.rows_per_step
        if (saved["ranks"], saved["num_workers"]) != (self._ranks, workers):
            lines.append(
                f"the data continue on {self._ranks} data-parallel ranks x {workers} workers, after"
                f" {saved['ranks']} x {saved['num_workers']}: every step takes the same samples as before"
            )
        if saved["rows_per_step"] != rows:
            lines.append(
                f"each step takes {rows} rows, after {saved['rows_per_step']}: samples keep their order, and"
                " none is repeated or left out"
            )
        return lines

    def close(self) -> None:
        """Ends the worker processes. The loader cannot be used afterwards."""
        self._closed = True
        if self._rows is not None:
            self._rows.close()


def _without_traceback(message: str) -> str:
    """The message of an error without the lines that torch adds, which hold a traceback."""
    search = re.search(r"\d+ samples in a row cannot be used\b[^\n]*", message)
    if search:
        return search.group()
    raised = re.findall(r"^[\w.]*(?:FatalSampleError|LoaderError): ([^\n]+)", message, re.MULTILINE)
    return str(raised[-1]) if raised else message


def _read_sources(identity: Any) -> tuple[Source, ...]:
    """The sources of a saved identity; none if it cannot be read."""
    try:
        return sources_of(identity, "the former data set")
    except (BlendError, KeyError, TypeError, ValueError, AttributeError):
        return ()
