"""A run that goes on with a changed blend: nothing of what stays is repeated or left out."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from megatron_vl.data.blend import sources_of
from megatron_vl.data.changed_blend import BlendChange
from megatron_vl.data.state import StateError
from megatron_vl.data.streams import Sources
from tests.data.test_blend import leaf, mixed, part

from .mixtures import identity, loader, write

BIRDS, SHIPS, OTHER = ({"path": name} for name in ("birds", "ships", "other"))
CONTINUE = {"on_changed_blend": "continue"}


def blend(*parts: dict[str, Any], kind: str = "blend") -> dict[str, Any]:
    return {kind: list(parts)}


class Reading:
    """A run that reads the sets of a folder, and stops and goes on."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.settings = folder, settings
        self.names = {self.key(name): name for name in ("birds", "ships", "other")}
        self.taken: Counter[tuple[str, str]] = Counter()
        self.states: list[dict[str, Any]] = []
        self.rows: Any = None

    def key(self, name: str) -> str:
        return sources_of(identity(self.folder / name))[0].key

    def start(self, train: Any, **settings: Any) -> Reading:
        """Starts with another train split, or goes on with it where the last start stopped."""
        path = self.folder / train if isinstance(train, str) else write(self.folder, train=train)
        self.rows = loader(path, **self.settings | settings)
        if self.states:
            self.rows.load_state_dict(self.states[0], lambda rank: self.states[rank])
        return self

    def take(self, count: int) -> Reading:
        """Takes rows, and stops."""
        blend = self.rows._sources.blend
        for row in islice(self.rows, count):
            for source, key in zip(row.sources or [0] * len(row.keys), row.keys, strict=True):
                self.taken[self.names[blend[source].key], key] += 1
        self.states = [json.loads(json.dumps(self.rows.state_dict()))]
        return self

    def of(self, name: str) -> Counter[str]:
        return Counter({key: count for (source, key), count in self.taken.items() if source == name})

    def drawn(self, name: str) -> Counter[str]:
        """How often each sample of a source has come out of its data set, into a row or a buffer."""
        order = self.order(name)
        found = self.of(name)
        for key in order:
            found[key] += 0
        for index in self.waiting(name):
            found[order[index]] += 1
        return found

    def order(self, name: str) -> list[str]:
        rows = loader(self.folder / name, shuffle_buffer=0, pack=False, packing_buffer=1)
        [source] = rows._sources.blend
        return [row.keys[0] for row in islice(rows, source.samples)]

    def waiting(self, name: str) -> list[int]:
        """The indices of the samples that wait in buffers, or that were set aside with their source."""
        live = self.rows._rows._local.streams[0].state()
        key = self.key(name)
        aside = live.parked.get(key, {"waiting": []})["waiting"]
        keys = [tuple(one) for one in aside]
        node = live.dataset
        for buffer in ("_reading_buffer", "_pre_packing_buffer"):
            keys += [one for one in node[buffer]["_restore_keys"] if self._is_of(one, key, live.drawn)]
        shuffled = node["datasets"][0]["datasets"][0]
        if shuffled["__class__"] == "ShuffleBufferDataset":
            buffered = shuffled["_active_buffer"]["_restore_keys"]
            keys += [one for one in buffered if self._is_of(one, key, live.drawn)]
        return [one[-1] for one in keys]

    @staticmethod
    def _is_of(sample: tuple[Any, ...], key: str, drawn: tuple[str, ...]) -> bool:
        if "BlendDataset" not in sample:
            return drawn == (key,)
        return drawn[sample[sample.index("BlendDataset") + 1]] == key

    def exact(self, name: str) -> None:
        """Asserts that each pass through a source has taken each of its samples once."""
        counts = self.drawn(name).values()
        assert max(counts) - min(counts) <= 1, sorted(self.drawn(name).items())
        assert max(counts) > 0


def told(reading: Reading) -> str:
    return "\n".join(reading.rows.notes)


def test_sources_move_leave_and_come_back_without_a_gap(folder):
    """Weights, order and parts change at every stop; each source goes on in its pass."""
    run = Reading(folder).start(blend(BIRDS | {"weight": 3}, SHIPS)).take(14)
    run.start(blend(OTHER, SHIPS | {"weight": 2}, BIRDS), **CONTINUE)
    said = told(run)
    assert "the blend has changed (" in said and "); from here on:" in said
    assert "other is new and begins at its start: weight 1, 25.0% of the samples expected" in said
    assert "ships goes on where it is: weight 1 (25.0%) becomes weight 2 (50.0%)" in said
    assert "birds goes on where it is: weight 3 (75.0%) becomes weight 1 (25.0%)" in said
    for name in ("birds", "ships", "other"):
        run.take(9).exact(name)

    birds = run.of("birds")
    run.start(blend(OTHER, SHIPS), **CONTINUE)
    assert "birds is left out; its counts are kept" in told(run)
    run.take(12)
    assert run.of("birds") == birds, "no sample of it any more, not even one that was waiting"

    run.start(blend(BIRDS, OTHER, SHIPS), **CONTINUE)
    assert "birds is back and goes on where it was when it left: weight 1, 33.3%" in told(run)
    run.take(30)
    for name in ("birds", "ships", "other"):
        run.exact(name)
    assert run.of("birds").total() > birds.total()


def test_a_source_of_weight_0_stays_where_it_is(folder):
    run = Reading(folder).start(blend(BIRDS, SHIPS)).take(10)
    birds = run.of("birds")
    run.start(blend(BIRDS | {"weight": 0}, SHIPS), **CONTINUE)
    assert "nothing is drawn from birds any more (weight 0); its position is kept" in told(run)
    run.take(10)
    assert run.of("birds") == birds

    run.start(blend(BIRDS | {"weight": 2}, SHIPS), **CONTINUE)
    assert "birds goes on where it is: weight 0 (0.0%) becomes weight 2 (66.7%)" in told(run)
    run.take(20)
    run.exact("birds")
    run.exact("ships")


@pytest.mark.parametrize("settings", [{}, {"shuffle_buffer": 0}, {"pack": False}], ids=str)
def test_one_data_set_becomes_a_blend_and_one_again(folder, settings):
    run = Reading(folder, **settings).start("birds").take(10)
    run.start(blend(SHIPS, BIRDS), **CONTINUE).take(20)
    change = "the only data set (100.0%) becomes weight 1 (50.0%)"
    assert f"birds goes on where it is: {change}" in told(run)
    run.exact("birds")
    run.exact("ships")
    run.start("birds", **CONTINUE).take(10)
    change = "weight 1 (50.0%) becomes the only data set (100.0%)"
    assert f"birds goes on where it is: {change}" in told(run)
    run.exact("birds")


def test_weights_become_epochs_and_epochs_change(folder):
    run = Reading(folder).start(blend(BIRDS, SHIPS)).take(10)
    epochs = blend(BIRDS | {"repetitions": 2}, SHIPS, kind="blend_epochized")
    run.start(epochs, **CONTINUE).take(25)
    assert "birds goes on where it is: weight 1 (50.0%) becomes 2 epochs" in told(run)
    run.exact("birds")
    run.exact("ships")

    # One pass instead of two, and another source: the tree of data sets has another form.
    changed = blend(OTHER | {"repetitions": 1.5}, BIRDS, SHIPS, kind="blend_epochized")
    run.start(changed, **CONTINUE).take(40)
    for name in ("birds", "ships"):
        run.exact(name)
    assert run.of("other").total() > 20

    run.start(blend(BIRDS, SHIPS, OTHER), **CONTINUE).take(20)
    for name in ("birds", "ships"):
        run.exact(name)


def test_a_stream_whose_unfinished_source_leaves_begins_anew(folder):
    """Ships are done first and wait for 30 passes of the birds, which then leave."""
    epochs = blend(BIRDS | {"repetitions": 30}, SHIPS, kind="blend_epochized")
    run = Reading(folder).start(epochs)
    while run.take(5).rows._rows._local.streams[0].state().dataset["datasets"][0]["datasets"][0]["datasets"][
        0
    ]["datasets"][0]["exhausted"] != [False, True]:
        assert run.of("birds").total() < 1000
    ships = run.of("ships").total()
    run.start(blend(SHIPS, OTHER, kind="blend_epochized"), **CONTINUE).take(20)
    assert run.of("ships").total() > ships
    run.exact("ships")


def test_streams_and_ranks_change_with_the_blend(folder):
    """Streams that have made no row since an earlier change carry the blend of then."""
    run = Reading(folder, streams=3).start(blend(BIRDS, SHIPS)).take(5)
    run.start(blend(SHIPS, OTHER), **CONTINUE).take(1)
    drawn = [tuple(one["drawn"]) for one in run.states[0]["streams"].values()]
    assert len(set(drawn)) == 2, "one stream under the present blend, others under the former"

    # Three ranks from one, whose rows together are those of one rank.
    path = write(folder, train=blend(OTHER, BIRDS, SHIPS))
    alone = loader(path, streams=3, **CONTINUE)
    alone.load_state_dict(run.states[0])
    wanted = [row.tokens.tolist() for row in islice(alone, 12)]
    found = []
    for rank in range(3):
        rows = loader(path, rank=rank, ranks=3, rows_per_step=3, **CONTINUE)
        rows.load_state_dict(run.states[0], lambda number: run.states[number])
        found += [row.tokens.tolist() for row in islice(rows, 4)]
    assert sorted(found) == sorted(wanted)


def test_without_the_switch_the_run_ends_and_says_what_changed(folder):
    run = Reading(folder).start(blend(BIRDS | {"weight": 3}, SHIPS)).take(3)
    with pytest.raises(StateError) as caught:
        run.start(blend(BIRDS | {"weight": 3}, SHIPS | {"weight": 2}, OTHER))
    message = str(caught.value)
    assert "--data.on_changed_blend continue" in message and "--checkpoint.restart_data true" in message
    assert "ships goes on where it is: weight 1 (25.0%) becomes weight 2 (33.3%)" in message
    assert "other is new" in message


def test_a_blend_of_which_nothing_stays_is_refused_with_the_switch_too(folder):
    run = Reading(folder).start(blend(BIRDS, SHIPS)).take(3)
    with pytest.raises(StateError, match="restart_data") as caught:
        run.start("other", **CONTINUE)
    assert "on_changed_blend" not in str(caught.value)


def test_the_switch_left_on_changes_nothing(folder):
    run = Reading(folder).start(blend(BIRDS | {"weight": 3}, SHIPS)).take(6)
    wanted = [row.tokens.tolist() for row in islice(run.rows, 12)]
    run.start(blend(BIRDS | {"weight": 6}, SHIPS | {"weight": 2}), **CONTINUE)
    assert [row.tokens.tolist() for row in islice(run.rows, 12)] == wanted
    assert "has changed" not in told(run)


def test_a_renamed_and_moved_set_is_the_same_source(folder):
    run = Reading(folder).start(blend(BIRDS | {"weight": 3}, SHIPS)).take(10)
    shutil.copytree(folder / "birds", folder / "sub" / "gulls")
    run.start(blend({"path": "sub/gulls"}, SHIPS), **CONTINUE)
    assert "gulls, which was birds, goes on where it is: weight 3 (75.0%) becomes weight 1 (50.0%)" in told(
        run
    )
    run.take(20)
    run.exact("birds")


def test_a_set_that_was_converted_again_is_another_source(folder):
    run = Reading(folder).start(blend(BIRDS, SHIPS)).take(3)
    shutil.rmtree(folder / "birds")
    shutil.copytree(folder / "other", folder / "birds")
    run.start(blend(BIRDS, SHIPS), **CONTINUE)
    assert "birds is new (another data set than the one that had this name) and begins at its start" in told(
        run
    )
    assert "birds is left out; its counts are kept" in told(run)


def test_states_that_do_not_name_their_sources_go_on_too(folder):
    """As those of versions before 2026-11-23."""
    run = Reading(folder).start(blend(BIRDS, SHIPS)).take(8)
    del run.states[0]["starts"]
    for stream in run.states[0]["streams"].values():
        del stream["drawn"], stream["parked"]
    run.start(blend(SHIPS, OTHER, BIRDS), **CONTINUE).take(25)
    run.exact("birds")
    run.exact("ships")


def test_lists_of_shards_are_built_for_the_streams_of_the_checkpoint(folder, monkeypatch):
    """A run keeps its streams when it moves to more ranks, even if these outnumber the samples."""
    run = Reading(folder, streams=3).start(blend(BIRDS, SHIPS)).take(3)
    built: list[int] = []
    real = Sources.stream

    def counted(self: Any, number: int, streams: int, *rest: Any) -> Any:
        built.append(streams)
        return real(self, number, streams, *rest)

    monkeypatch.setattr(Sources, "stream", counted)
    rows = loader(folder / "meta.yaml", ranks=64, rows_per_step=192)
    assert not built
    rows.load_state_dict(run.states[0], lambda number: run.states[number])
    next(rows)
    assert set(built) == {3}


def test_two_hundred_changes_take_few_lines():
    before = sources_of(mixed(*(part(f"s{i}", weight=i + 1) for i in range(200))))
    now = sources_of(mixed(*(part(f"s{i}", weight=i + 2) for i in range(150)), part("t")))
    lines = BlendChange(before, now).told()
    assert len(lines) == 41 and lines[-1].endswith("more sources change")
    same = sources_of(mixed(*(part(f"s{i}", weight=i + 1) for i in range(200))))
    assert BlendChange(before, same).told() == ["200 sources as before, from where the checkpoint stands"]
    assert BlendChange(sources_of(leaf("a")), sources_of(mixed(part("a"), part("b")))).stays
