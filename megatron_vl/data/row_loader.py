"""The rows of one data-parallel rank as an iterator whose state can be saved and loaded."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from megatron.energon.errors import FatalSampleError

from megatron_vl.config import DataConfig
from megatron_vl.data.blend import BlendError, Source, named, sources_of, starts_of, summary
from megatron_vl.data.changed_blend import BlendChange
from megatron_vl.data.description import LoaderError, SplitFacts, difference
from megatron_vl.data.order import Deal
from megatron_vl.data.row import Row
from megatron_vl.data.saved_streams import SavedStreams, streams_to_json
from megatron_vl.data.shuffling import at_most
from megatron_vl.data.state import StateError
from megatron_vl.data.streams import RankRows, Sources, StreamState
from megatron_vl.data.thinking import ThinkingRule
from megatron_vl.json_files import check_version

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
PLANNED = "planned"
"""Entry of the states of loaders whose batches are planned."""
WAYS_OUT = {
    "dataset": f"{BACK}, {RESTART}",
    "split": "load the state of this split",
    "pixels": f"set data.{', data.'.join(f for f in PIXEL_FIELDS if f != 'video_min_pixels')} back",
    "chat_template": "give the chat template that the run began with",
    "video_positions": "resume with the rule that the run began with: set data.video_positions to that",
    "video_prompt": "resume with the rule that the run began with: set data.video_prompt to that",
    "empty_think": "resume with the rule that the run began with: set data.empty_think to that",
    "earlier_answers": "resume with the rule that the run began with: set data.earlier_answers to that",
    "shuffled": "set data.shuffle_buffer back (0 keeps the order, above 0 shuffles)",
}


class RowLoader:
    """Iterator over the rows of one data-parallel rank.

    Training repeats the data set without end; validation ends after one pass.

    Args:
        encoder: a :class:`~megatron_vl.data.loader.RowEncoder`.
        identity: what determines the rows of the streams.
        deal: how rows are dealt if no state is loaded.
    """

    def __init__(
        self,
        sources: Sources,
        encoder: Any,
        identity: dict[str, Any],
        facts: SplitFacts,
        deal: Deal,
        dp_rank: int,
        data: DataConfig,
    ) -> None:
        self._sources, self._encoder, self._data, self._facts = sources, encoder, data, facts
        self._identity, self._deal, self._dp_rank = identity, deal, dp_rank
        self.samples = facts.samples
        """Number of samples in the split, over all ranks; None for a metadataset."""
        self._said: list[str] = []
        self._states: dict[int, StreamState] = {}
        self._rows: RankRows | None = None
        self._begun = starts_of(sources.blend)
        self._lists_are_shared = False
        self._closed = False

    def __iter__(self) -> RowLoader:
        return self

    def __next__(self) -> Row:
        if self._closed:
            raise LoaderError("the loader is closed")
        if self._rows is None:
            self._rows = self._begin()
        try:
            return next(self._rows)
        except (FatalSampleError, LoaderError) as error:
            raise LoaderError(_own_words(str(error))) from error

    @property
    def _keys(self) -> list[str]:
        return [source.key for source in self._sources.blend]

    def share_lists(self) -> None:
        """Builds a stream, whose lists of shards all others share."""
        self._sources.stream(0, self._deal.order.streams, self._data.seed, self._encoder, None)
        self._lists_are_shared = True

    def _begin(self) -> RankRows:
        data = self._data
        if not self._lists_are_shared:
            self.share_lists()
        return RankRows(
            self._sources,
            self._encoder,
            self._deal,
            self._dp_rank,
            data.num_workers,
            data.seed,
            self._states,
        )

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
        train = self._identity["split"] == "train"
        buffers = [self._buffers()] if train and self._data.shuffle_buffer > 1 else []
        blend = [*summary(self._sources.blend), *self._thin_sources()] if train else []
        return [*blend, *buffers, *self._costs(), *self._said]

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state as JSON values.

        After :meth:`load_state_dict`, the next row is the one that would come next here.

        Raises:
            StateError: this rank has not taken all its rows of a step.
        """
        if self._rows is None:
            rows, kept = self._deal.start, self._deal.kept_by(self._dp_rank, self._deal.start)
            streams = {number: self._states[number] for number in kept if number in self._states}
        else:
            rows, streams = self._rows.rows, self._rows.kept()
        now = {
            "num_workers": self._data.num_workers,
            "identity": self._identity,
            "starts": dict(self._begun),
        }
        return now | streams_to_json(self._deal, rows, self._dp_rank, streams)

    def load_state_dict(
        self, state: dict[str, Any], read: Callable[[int], dict[str, Any]] | None = None
    ) -> None:
        """Continues where states were saved, on any number of ranks and workers.

        Call it before the first row.

        Args:
            state: the state of one data-parallel rank of then, preferably of the same rank number.
            read: gives the state of another rank of then. It is needed if this rank takes rows of other
                streams.

        Raises:
            StateError: the state belongs to another data set or to other packing, or rows were already read.
        """
        if self._rows is not None:
            raise StateError("a loader state must be loaded before the first row is read")
        if PLANNED in state:
            raise StateError(
                "the loader state is of a run whose batches are planned, and this loader's are not; set"
                f" data.balance true, with the sizes of `megatron-vl data index` in place, {RESTART}"
            )
        self._check(state)
        saved = SavedStreams(state, read)
        order = saved.deal.order
        if self._data.streams not in (0, order.streams):
            raise StateError(
                f"the run divides its data among {order.streams} streams, and data.streams is"
                f" {self._data.streams}; leave data.streams empty or set it to {order.streams}, {RESTART}"
            )

        now = self._deal
        self._deal = Deal(order, saved.rows, now.rows_per_step, now.ranks)
        needed = {*self._deal.streams_of(self._dp_rank), *self._deal.kept_by(self._dp_rank, saved.rows)}
        self._states = saved.get(sorted(needed))
        self._said += self._changes(saved, state["num_workers"])

        # Streams divide a source as they did when it began, wherever it is in the blend now.
        self._begun |= state["starts"]
        self._sources.starts = [self._begun[key] for key in self._keys]
        if empty := self._sources.empty_streams(order.streams):
            raise StateError(
                f"the data are divided among {order.streams} streams since the run began, {empty} of which"
                f" would have none of {self._sources.samples} samples: let the blend draw from more sources,"
                f" or add samples, {RESTART}"
            )
        self.share_lists()

    def _check(self, state: dict[str, Any]) -> None:
        """Refuses a state that does not belong to this loader."""
        saved = state.get("identity", {})
        for name in ("version", PLANNED):
            if name in self._identity:
                now = self._identity[name]
                check_version("the loader state", saved.get(name), now, RESUME_THERE, StateError)
        if found := difference(saved.get("dataset"), self._identity["dataset"]):
            before = _read_sources(saved.get("dataset"))
            self._change_blend(BlendChange(before, self._sources.blend, frozenset(state["starts"])), found)
        for name, value in self._identity.items():
            before = saved.get(name)
            if name != "dataset" and before != value:
                raise StateError(
                    f"the loader state was saved with {name} = {before!r}, this loader has {value!r} "
                    f"and would not make the same rows; {WAYS_OUT.get(name, f'set data.{name} back')}"
                )

    def _change_blend(self, change: BlendChange, found: str) -> None:
        """Notes what changes in the blend.

        Args:
            found: the first difference, as a clause.

        Raises:
            StateError: the run was not told to go on with another blend, or no source of before stays.
        """
        problem = f"the loader state was saved with another data set: {found}"
        if not change.stays:
            raise StateError(f"{problem}; {WAYS_OUT['dataset']}")
        if self._data.on_changed_blend != "continue":
            told = "; ".join(change.told())
            raise StateError(f"{problem}; {BACK}, {CONTINUE} ({told}), {RESTART}")
        self._said += [f"the blend has changed ({found}); from here on:", *(f"  {t}" for t in change.told())]

    def _changes(self, saved: SavedStreams, workers: int) -> list[str]:
        """What differs from the run that saved."""
        before, now = saved.deal, self._deal
        said = []
        if (before.ranks, workers) != (now.ranks, self._data.num_workers):
            said.append(
                f"the data continue on {now.ranks} data-parallel ranks x {self._data.num_workers} workers,"
                f" after {before.ranks} x {workers}: every step takes the same rows as before"
            )
        if before.rows_per_step != now.rows_per_step:
            said.append(
                f"each step takes {now.rows_per_step} rows, after {before.rows_per_step}: the order of rows"
                " does not change"
            )
        return said

    def _thin_sources(self) -> list[str]:
        """Whether there are sources that not all streams have samples of."""
        blend, streams = self._sources.blend, self._deal.order.streams
        thin = [source.name for source in blend if source.share and source.samples < streams]
        if len(blend) < 2 or not thin:
            return []
        return [
            f"these sources have fewer samples than the data have streams ({streams}): {named(thin)}. Some"
            " streams draw nothing of them, so their shares are smaller than expected; give fewer streams"
            " (data.streams) in a new run, or add samples"
        ]

    def _costs(self) -> list[str]:
        """Whether streams are read more than once."""
        deal = self._deal
        readers = Counter(stream for rank in range(deal.ranks) for stream in deal.streams_of(rank))
        several = sum(count > 1 for count in readers.values())
        if not several:
            return []
        return [
            f"{several} of {deal.order.streams} streams of the data are read by up to {max(readers.values())}"
            " data-parallel ranks, since one rank alone does not take all their rows; pictures are still"
            " decoded once. A data-parallel size that divides"
            f" {deal.order.lanes} avoids this, or more streams (data.streams) in a new run"
        ]

    def _buffers(self) -> str:
        """A note on the memory that the shuffle buffers of a rank may take."""
        data, deal = self._data, self._deal
        bound = data.shuffle_buffer_gib
        count = max(len(readers) for readers in (deal.streams_of(rank) for rank in range(deal.ranks)))
        workers = max(data.num_workers, 1)
        copies = max(count, workers)
        samples, gib = at_most(data.shuffle_buffer, bound, self._facts.sample_bytes)
        expected = f"{samples} samples"
        if self._facts.sample_bytes:
            size = self._facts.sample_bytes / 1e6
            expected = f"about {gib:.2f} GiB ({samples} samples of {size:.2f} MB)"

        most = "without a limit in bytes"
        if bound:
            most = f"at most {bound:g} GiB a stream and {bound * copies:g} GiB a rank"
        return (
            f"shuffle buffer: {expected} for each of {copies} streams in {workers} workers of each"
            f" data-parallel rank, {most} (data.shuffle_buffer, data.shuffle_buffer_gib)"
        )

    def close(self) -> None:
        """Ends the worker processes. The loader cannot be used afterwards."""
        self._closed = True
        if self._rows is not None:
            self._rows.close()


def _own_words(message: str) -> str:
    """The message of an error without the lines that Energon and torch add, which hold a traceback."""
    found = re.search(r"\d+ samples in a row cannot be used\b[^\n]*", message)
    if found:
        return found.group()
    raised = re.findall(r"^[\w.]*(?:FatalSampleError|LoaderError): ([^\n]+)", message, re.MULTILINE)
    return str(raised[-1]) if raised else message


def _read_sources(identity: Any) -> tuple[Source, ...]:
    """The sources of a saved identity; none if it cannot be read."""
    try:
        return sources_of(identity, "the former data set")
    except (BlendError, KeyError, TypeError, ValueError, AttributeError):
        return ()
