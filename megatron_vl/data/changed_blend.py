"""Carries the state of a stream from one blend to another.

Energon finds the state of a data set by its place in the blend. When a run goes on with a changed blend,
what stays moves to its new place: the position of each source, and the samples that wait in the shuffle and
packing buffers. A source that leaves the blend, or of which nothing is drawn any more, is set aside with its
waiting samples, and goes on from there if it comes back.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_vl.data.blend import LISTED, Source
from megatron_vl.data.state import StateError

ALONE = "the only data set"
"""What stands in place of a weight for a data set that is not blended."""

_BLEND, _REPEAT, _MAP = "BlendDataset", "RepeatDataset", "MapDataset"
"""Names of Energon's classes in states and in the keys of samples."""
_BUFFERS = ("_reading_buffer", "_pre_packing_buffer", "_pre_packing_lengths", "_active_buffer")
"""Fields of states that say which samples wait."""


@dataclass(frozen=True)
class BlendChange:
    """What differs between the blend of a checkpoint and that of the run."""

    before: tuple[Source, ...]
    now: tuple[Source, ...]
    begun: frozenset[str] = frozenset()
    """What all sources are known by that were ever in the run's blend."""

    @property
    def stays(self) -> bool:
        """Whether a source of before is still there."""
        return bool({source.key for source in self.before} & {source.key for source in self.now})

    def told(self) -> list[str]:
        """What happens to each source, one line for each; those to which nothing happens share a line."""
        old = {source.key: source for source in self.before}
        lines = []
        same = []
        for source in self.now:
            line = self._of(source, old.pop(source.key, None))
            if line:
                lines.append(line)
            else:
                same.append(source.name)
        lines += [f"{source.name} is left out; its counts are kept" for source in old.values()]

        more = len(lines) - LISTED
        lines = lines[:LISTED] + ([f"{more} more sources change"] if more > 0 else [])
        if same:
            who = same[0] if len(same) == 1 else f"{len(same)} sources"
            lines.append(f"{who} as before, from where the checkpoint stands")
        return lines

    def _of(self, source: Source, before: Source | None) -> str:
        """What happens to a source of the run; empty if nothing does."""
        given = source.given or ALONE
        share = f"{given}, {source.share:.1%} of the samples expected"
        if before is None:
            if source.key in self.begun:
                return f"{source.name} is back and goes on where it was when it left: {share}"
            known = any(one.name == source.name for one in self.before)
            other = " (another data set than the one that had this name)" if known else ""
            return f"{source.name} is new{other} and begins at its start: {share}"

        renamed = source.name != before.name and bool(before.given)  # a set alone has no name in a checkpoint
        name = f"{source.name}, which was {before.name}," if renamed else source.name
        if not source.share and before.share:
            return f"nothing is drawn from {name} any more ({source.given}); its position is kept"
        if source.given != before.given:
            was = f"{before.given or ALONE} ({before.share:.1%})"
            return f"{name} goes on where it is: {was} becomes {given} ({source.share:.1%})"
        if f"{source.share:.1%}" != f"{before.share:.1%}":
            shares = f"{source.share:.1%} of the samples expected, after {before.share:.1%}"
            return f"{name} goes on where it is: {given}, {shares}"
        return f"{name} goes on where it is" if renamed else ""


# --- States of streams --------------------------------------------------------------------------------------


@dataclass
class Place:
    """Where a source stands in a stream."""

    position: Any
    """Energon's state of its data set."""
    passes: int = 0
    """Passes that are done, of those that ``blend_epochized`` asks for."""
    index: int = 0
    """Number of samples that were drawn in the pass under way."""
    done: bool = False
    """Whether all its passes are done, and it waits for the other sources."""


def fits(dataset: Any, state: Any) -> bool:
    """Whether a state has the form of a data set of Energon."""
    inner = getattr(dataset, "datasets", ())
    held = state.get("datasets", ())
    alike = type(dataset).__name__ == state["__class__"] and len(inner) == len(held)
    return alike and all(fits(one, saved) for one, saved in zip(inner, held, strict=True))


def carried(
    state: Any, drawn: Sequence[str], fresh: Any, now: Sequence[str], parked: Mapping[str, Any], room: int
) -> tuple[Any, dict[str, Any]]:
    """The state of a stream under another blend, and the sources that are set aside, as values for JSON.

    Args:
        state: Energon's state of the stream's rows.
        drawn: what the sources in it are known by, in order.
        fresh: the state of a stream of the new blend at its start.
        now: what the sources in ``fresh`` are known by.
        parked: sources that were set aside before.
        room: number of samples that the packing buffer holds.

    Raises:
        StateError: the state has another form than Energon's.
    """
    old, new = _Tree(state, drawn), _Tree(copy.deepcopy(fresh), now)
    new.take_over(old)
    waiting = new.take_samples(old)

    held = old.places()
    both_epochs = old.epochs is not None and new.epochs is not None
    for key in now:
        if key in held:
            place = held[key]
            new.put(key, place if both_epochs else Place(place.position, index=place.index))
        elif key in parked:
            new.put(key, Place(parked[key]["position"], index=parked[key]["index"]))
            new.add_samples(parked[key]["waiting"], key, room)
    new.begin_if_all_are_done([key for key in now if key in held])

    aside = {key: value for key, value in parked.items() if key not in now}
    for key in held.keys() - set(now):
        place = held[key]
        aside[key] = {"position": place.position, "index": place.index, "waiting": waiting.get(key, [])}
    return new.state, aside


class _Tree:
    """A state of Energon's data sets, taken apart.

    Rows are packed from encoded samples, these come from the shuffle buffer, if there is one, and its samples
    from the blend. A blend by repetitions is repeated as a whole; a blend of one source is that source.

    Args:
        keys: what its sources are known by, in order.
    """

    def __init__(self, state: Any, keys: Sequence[str]) -> None:
        self.state, self.keys = state, list(keys)
        try:
            self.encoded = state["datasets"][0]
            holder = self.encoded
            below = holder["datasets"][0]
            self.shuffled = below if below["__class__"] == "ShuffleBufferDataset" else None
            holder = self.shuffled or holder
            self.epochs, self.blend = None, None

            node = holder["datasets"][0]
            if node["__class__"] == _REPEAT and node["datasets"][0]["__class__"] in (_BLEND, _REPEAT):
                self.epochs = holder = node
                node = node["datasets"][0]
            if node["__class__"] == _BLEND:
                self.blend = holder = node
        except (KeyError, IndexError, TypeError) as error:
            raise StateError(f"the loader state is damaged: {type(error).__name__} {error}") from error
        self.parts = holder["datasets"]
        if len(self.parts) != len(self.keys):
            raise StateError(
                f"the loader state is damaged: {len(self.parts)} sources, {len(self.keys)} are named"
            )

    def places(self) -> dict[str, Place]:
        """Where each source stands, by what it is known by."""
        found = {}
        for i, (key, part) in enumerate(zip(self.keys, self.parts, strict=True)):
            done = bool(self.blend["exhausted"][i]) if self.blend is not None else False
            if part["__class__"] == _REPEAT:
                found[key] = Place(part["datasets"][0], part["_repetition"], part["_index"], done)
            else:
                reader = part["datasets"][0]["datasets"][0]
                found[key] = Place(part, 0, reader["_epoch_sample_count"], done)
        return found

    def put(self, key: str, place: Place) -> None:
        i = self.keys.index(key)
        part = self.parts[i]
        if part["__class__"] == _REPEAT:
            part["datasets"][0] = place.position
            part["_repetition"], part["_index"] = place.passes, place.index
        else:
            self.parts[i] = place.position
        if self.blend is not None:
            self.blend["exhausted"][i] = place.done

    def begin_if_all_are_done(self, stayed: list[str]) -> None:
        """Begins the passes of all sources again if those that stayed have done theirs.

        Otherwise a stream whose unfinished sources have left would have nothing to draw from.
        """
        if self.blend is None:
            return
        done = self.blend["exhausted"]
        if all(done[self.keys.index(key)] for key in stayed):
            self.blend["exhausted"] = [False] * len(done)

    def take_over(self, old: _Tree) -> None:
        """Takes random numbers and counts from another state, and leaves buffers and sources alone."""
        for mine, theirs in (
            (self.state, old.state),
            (self.encoded, old.encoded),
            (self.shuffled, old.shuffled),
            (self.epochs, old.epochs),
            (self.blend, old.blend),
        ):
            if mine is not None and theirs is not None:
                kept = ("datasets", "exhausted", *_BUFFERS)
                mine.update({name: value for name, value in theirs.items() if name not in kept})

    def take_samples(self, old: _Tree) -> dict[str, list[Any]]:
        """Takes the samples that wait in another state. Returns those of sources that are not here."""
        left: dict[str, list[Any]] = {}
        groups = iter(old.state["_pre_packing_lengths"])
        before = old.state["_pre_packing_buffer"]["_restore_keys"]
        chosen, lengths = [], []
        while before:
            size = next(groups, len(before))
            kept = self._moved(before[:size], old, 2, left)
            chosen += kept
            lengths += [len(kept)] if kept else []
            before = before[size:]
        self.state["_pre_packing_buffer"]["_restore_keys"] = chosen
        self.state["_pre_packing_lengths"] = lengths

        reading = old.state["_reading_buffer"]["_restore_keys"]
        self.state["_reading_buffer"]["_restore_keys"] = self._moved(reading, old, 2, left)
        if self.shuffled is not None and old.shuffled is not None:
            buffered = old.shuffled["_active_buffer"]["_restore_keys"]
            self.shuffled["_active_buffer"]["_restore_keys"] = self._moved(buffered, old, 0, left)
        return left

    def add_samples(self, waiting: Sequence[Any], key: str, room: int) -> None:
        """Puts samples back that waited when their source left.

        Without a shuffle buffer, the packing buffer takes as many as it has room for.
        """
        samples = [self._key(key, tuple(rest)) for rest in waiting]
        if self.shuffled is not None:
            self.shuffled["_active_buffer"]["_restore_keys"] += samples
            return
        packed = self.state["_pre_packing_buffer"]["_restore_keys"]
        reading = self.state["_reading_buffer"]["_restore_keys"]
        free = max(0, room - len(packed) - len(reading))
        reading += [(_MAP, 0, *sample) for sample in samples[:free]]

    def _moved(self, keys: Sequence[Any], old: _Tree, ahead: int, left: dict[str, list[Any]]) -> list[Any]:
        """Keys of samples as they are here.

        Args:
            ahead: number of entries of a key before the source's.
            left: gets the samples of sources that are not here, without what is ahead.
        """
        found = []
        for key in keys:
            head, rest = tuple(key[:ahead]), tuple(key[ahead:])
            number = 0
            if old.blend is not None:
                number, rest = rest[1], rest[2:]
            source = old.keys[number]
            if source in self.keys:
                found.append((*head, *self._key(source, rest)))
            else:
                left.setdefault(source, []).append(rest)
        return found

    def _key(self, source: str, rest: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_BLEND, self.keys.index(source), *rest) if self.blend is not None else rest
