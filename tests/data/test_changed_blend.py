"""A run that goes on with a changed blend: nothing of what stays is repeated or left out."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from megatron.energon import WorkerConfig
from megatron.energon.flavors.webdataset.sharder import Sharder

from megatron_vl.data.blend import sources_of
from megatron_vl.data.changed_blend import BlendChange, _Tree, carried
from megatron_vl.data.state import StateError
from megatron_vl.data.streams import Sources, StreamState
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
        self.taken: Counter[tuple[int, str, str]] = Counter()
        """Rows' samples by stream, source and key."""
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
            number = self.rows._rows.rows - 1
            stream, _ = self.rows._deal.order.place(number)
            for source, key in zip(row.sources or [0] * len(row.keys), row.keys, strict=True):
                self.taken[stream, self.names[blend[source].key], key] += 1
        self.states = [json.loads(json.dumps(self.rows.state_dict()))]
        return self

    def of(self, name: str) -> Counter[str]:
        return Counter({key: count for (_, source, key), count in self.taken.items() if source == name})

    def exact(self, name: str) -> None:
        """Asserts that each pass through a source has drawn each sample once, into a row or a buffer."""
        order = [row.keys[0] for row in islice(self.in_order(name), 99)]
        for stream, live in self.rows._rows._local.streams.items():
            state, key = live.state(), self.key(name)
            if key in state.parked:
                position, waiting = state.parked[key]["position"], state.parked[key]["waiting"]
            else:
                position = _Tree(state.dataset, state.drawn).places()[key].position
                waiting = [one for one in self.buffered(state) if self.source_of(one, state.drawn) == key]
            reader = position["datasets"][0]["datasets"][0]

            found = {key: count for (s, n, key), count in self.taken.items() if (s, n) == (stream, name)}
            drawn = Counter(found) + Counter(order[one[-1]] for one in waiting)
            assert drawn.total() == reader["_sample_count"] > 0
            size = self.sizes(name)[stream]
            passes, more = divmod(drawn.total(), size)
            assert Counter(drawn.values()) == +Counter({passes: size - more, passes + 1: more} | {0: 0})

    def in_order(self, name: str) -> Any:
        rows = loader(self.folder / name, shuffle_buffer=0, pack=False, packing_buffer=1)
        return islice(rows, rows._sources.blend[0].samples)

    def sizes(self, name: str) -> list[int]:
        """How many samples of a source each stream has."""
        streams, start = self.rows._deal.order.streams, self.rows._begun[self.key(name)]
        [source] = loader(self.folder / name)._sources.datasets
        config = WorkerConfig(rank=0, world_size=1, num_workers=streams)
        bounds = Sharder.split_samples_to_workers(
            0, len(source.dataset), config, rotation_offset=start % streams
        )
        return [end - first for first, end in pairwise(bounds)]

    @staticmethod
    def buffered(state: StreamState) -> list[tuple[Any, ...]]:
        """The keys of the samples that wait in a stream."""
        found: list[tuple[Any, ...]] = []
        for buffer in ("_reading_buffer", "_pre_packing_buffer"):
            found += state.dataset[buffer]["_restore_keys"]
        shuffled = state.dataset["datasets"][0]["datasets"][0]
        if shuffled["__class__"] == "ShuffleBufferDataset":
            found += shuffled["_active_buffer"]["_restore_keys"]
        return found

    @staticmethod
    def source_of(sample: tuple[Any, ...], drawn: tuple[str, ...]) -> str:
        return drawn[sample[sample.index("BlendDataset") + 1]] if "BlendDataset" in sample else drawn[0]


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
    run.exact("other")

    run.start(blend(BIRDS, SHIPS, OTHER), **CONTINUE).take(20)
    for name in ("birds", "ships"):
        run.exact(name)


def exhausted(run: Reading) -> list[bool]:
    """Which sources of a blend by repetitions have done their passes."""
    node = run.rows._rows._local.streams[0].state().dataset
    while node["__class__"] != "BlendDataset":
        node = node["datasets"][0]
    return node["exhausted"]


def test_a_stream_whose_unfinished_source_leaves_begins_anew(folder):
    """One source has done its passes and waits for the other one, which leaves."""
    run = Reading(folder).start(blend(BIRDS | {"repetitions": 2}, SHIPS, kind="blend_epochized"))
    for _ in range(60):
        if sum(exhausted(run.take(1))) == 1:
            break
    [done] = [name for name, is_done in zip(("birds", "ships"), exhausted(run), strict=True) if is_done]
    before = run.of(done).total()
    run.start(blend({"path": done}, OTHER, kind="blend_epochized"), **CONTINUE).take(20)
    assert run.of(done).total() > before
    run.exact(done)


def state_of(*sources: dict[str, Any], exhausted: list[bool]) -> dict[str, Any]:
    """The state of a stream of a blend by repetitions, without samples that wait."""
    blended = {
        "__class__": "BlendDataset",
        "datasets": list(sources),
        "exhausted": exhausted,
        "_worker_rng": 1,
    }
    repeated = {"__class__": "RepeatDataset", "datasets": [blended], "_repetition": 0, "_index": 0}
    buffers = {name: {"_restore_keys": []} for name in ("_reading_buffer", "_pre_packing_buffer")}
    encoded = {"__class__": "MapDataset", "datasets": [repeated]}
    return {"__class__": "RowPacking", "datasets": [encoded], "_pre_packing_lengths": [], **buffers}


def source_state(samples: int) -> dict[str, Any]:
    reader = {"__class__": "WebdatasetSampleLoaderDataset", "_epoch_sample_count": samples}
    inner = {"__class__": "MapDataset", "datasets": [reader]}
    return {"__class__": "MapDataset", "datasets": [inner]}


@pytest.mark.parametrize(
    ("done", "now", "begun"),
    [
        ([True, False, False], ["a", "c"], [True, False]),
        ([True, False, True], ["a", "c"], [False, False]),
        ([True, False, False], ["a", "new"], [False, False]),
        ([True, True, False], ["c", "a"], [False, True]),
    ],
)
def test_passes_begin_again_if_all_that_stays_has_done_them(done, now, begun):
    """Energon fails if every source with samples in the stream is done; a new one may have none there."""
    old = state_of(*map(source_state, (1, 2, 3)), exhausted=done)
    fresh = state_of(*(source_state(0) for _ in now), exhausted=[False] * len(now))
    found, parked = carried(old, ["a", "b", "c"], fresh, now, {}, 4)
    places = _Tree(found, now).places()
    assert [places[key].done for key in now] == begun
    assert {key: place.index for key, place in places.items()} == {
        key: {"a": 1, "b": 2, "c": 3}.get(key, 0) for key in now
    }
    assert set(parked) == {"a", "b", "c"} - set(now) and fresh["datasets"] is not found["datasets"]


@pytest.mark.parametrize("damaged", [{}, {"datasets": []}, {"datasets": [{"datasets": []}]}])
def test_a_state_of_another_form_is_refused(damaged):
    fresh = state_of(source_state(0), exhausted=[False])
    with pytest.raises(StateError, match="damaged"):
        carried(damaged, ["a"], fresh, ["a"], {}, 4)
    whole = state_of(source_state(0), source_state(0), exhausted=[False] * 2)
    with pytest.raises(StateError, match="2 sources, 1 are named"):
        carried(whole, ["a"], fresh, ["a"], {}, 4)


def test_streams_keep_their_parts_of_a_source(folder):
    """Which stream gets one sample more depends on the sources before it in the blend in which it began."""
    run = Reading(folder, streams=7).start(blend(BIRDS, SHIPS)).take(14)
    began = dict(run.rows._begun)
    run.start(blend(OTHER, SHIPS, BIRDS), **CONTINUE).take(42)
    assert {key: run.rows._begun[key] for key in began} == began
    run.exact("birds")
    run.exact("ships")
    run.start(blend(OTHER, SHIPS, BIRDS)).take(14)
    run.exact("birds")
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
    assert "birds goes on where it is: weight 3, 50.0% of the samples expected, after 75.0%" in message
    assert "other is new" in message


def test_a_blend_of_which_nothing_stays_is_refused_with_the_switch_too(folder):
    run = Reading(folder).start(blend(BIRDS, SHIPS)).take(3)
    with pytest.raises(StateError, match="restart_data") as caught:
        run.start("other", **CONTINUE)
    assert "on_changed_blend" not in str(caught.value)


def test_a_change_that_leaves_streams_without_samples_is_refused(folder):
    run = Reading(folder, streams=20, **CONTINUE).start(blend(BIRDS, SHIPS)).take(20)
    with pytest.raises(
        StateError, match=r"divided among 20 streams since the run began.* samples: .*add sam"
    ):
        run.start(blend(SHIPS), streams=0)


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
