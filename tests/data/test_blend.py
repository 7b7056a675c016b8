"""The sources of a blend: names, keys, shares, and a run that goes on with a changed blend."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_vl.config import DataConfig
from megatron_vl.data import planned_rows
from megatron_vl.data.loader import validation_rows
from megatron_vl.data.source.blend import read_blend_sources
from megatron_vl.data.source.dataset_description import read_description
from megatron_vl.data.source.location import LoaderError
from megatron_vl.data.source.sample_order import SampleOrder
from megatron_vl.data.state_json import LoaderStateError, state_from_json
from megatron_vl.spec.families import read_spec
from tests.tiny import tiny_checkpoint

from .mixtures import identity, loader, write


def leaf(content: str, samples: int = 10, **fields: Any) -> dict[str, Any]:
    return {"content": content, "split": "train", "samples": samples, "shards": 1, "list": "x"} | fields


def mixed(*parts: dict[str, Any], kind: str = "blend") -> dict[str, Any]:
    return {"mixture": {kind: list(parts)}}


def part(name: str, **fields: Any) -> dict[str, Any]:
    """A part of a mixture, whose content is called like it."""
    return {"name": name, "data": leaf(name)} | fields


# --- Names and shares --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["sets/charts", "sets/photographs"], ["charts", "photographs"]),
        (["charts/train", "photographs/train", "text"], ["charts/train", "photographs/train", "text"]),
        (["/a/x/out", "/b/x/out", "/b/y/out"], ["a/x/out", "b/x/out", "y/out"]),
        (["charts", "charts", "charts"], ["charts", "charts-2", "charts-3"]),
        (["../charts", "./charts"], ["charts", "charts-2"]),
        (["a", "a", "a-2"], ["a", "a-3", "a-2"]),
    ],
)
def test_source_names_are_given_or_the_ends_of_paths(paths, names):
    assert [source.source_name for source in read_blend_sources(mixed(*map(part, paths)))] == names
    called = mixed(part("a", called="charts\n2026"), part("b"), part("c", called="b"))
    assert [source.source_name for source in read_blend_sources(called)] == ["charts 2026", "b", "b-2"]


def test_sample_shares_worked_out_by_hand():
    sources = read_blend_sources(mixed(part("a", weight=3), part("b"), part("c", weight=4)))
    assert [source.sample_share for source in sources] == pytest.approx([0.375, 0.125, 0.5])
    assert [source.weight_text for source in sources] == ["weight 3", "weight 1", "weight 4"]

    # 10 samples twice, 30 samples half a time: 20 and 15 of 35.
    epochs = part("a", data=leaf("a", 10), repetitions=2), part("b", data=leaf("b", 30), repetitions=0.5)
    sources = read_blend_sources(mixed(*epochs, kind="blend_epochized"))
    assert [source.sample_share for source in sources] == pytest.approx([20 / 35, 15 / 35])
    assert sources[1].summary_line() == "b: 0.5 epochs, 30 samples, 42.9% of the samples expected"


# --- What a source is known by -----------------------------------------------------------------------------


def keys_of(identity: Any) -> list[str]:
    return [source.source_key for source in read_blend_sources(identity)]


@pytest.mark.parametrize(
    "changed", [leaf("again"), leaf("uuid", split="val"), leaf("uuid", 11), leaf("uuid", list="y")]
)
def test_source_key_follows_content_and_split(changed):
    assert keys_of(mixed(part("uuid", data=changed), part("b")))[0] != keys_of(mixed(part("uuid")))[0]


def test_data_set_named_twice_is_two_sources():
    first, second = keys_of(mixed(part("a", weight=1), part("a", weight=2)))
    assert second == f"{first}-2"


def test_source_key_without_content_id_follows_shards():
    first, second = keys_of(mixed(*(part(f"x/{name}", data=leaf("", list=name)) for name in "ab")))
    assert first != second
    assert keys_of(mixed(part("y/c", data=leaf("", list="a")))) == [first]


# --- What is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("birds", "ships", "message"),
    [
        ({"weight": -1}, {}, "the weight of birds is -1; give 0 or more"),
        ({"weight": ".inf"}, {}, "the weight of birds is '.inf'"),
        ({"weight": 0}, {"weight": 0}, "nothing is drawn from any part"),
        ({"weight": 3}, {"repetitions": 2}, "ships of the blend has rep"),
    ],
)
def test_blend_rejects_impossible_weights_by_name(folder, birds, ships, message):
    write(folder, train={"blend": [{"path": "birds"} | birds, {"path": "ships"} | ships]})
    with pytest.raises(LoaderError, match=rf"meta.yaml: .*{message}"):
        read_description(folder / "meta.yaml").split_facts("train")


# --- Rows --------------------------------------------------------------------------------------------------


def test_rows_name_the_source_of_each_sample(folder):
    """Their tokens name it; weight 0 draws nothing, and the numbers stay those of the blend."""
    given = [{"path": "other", "weight": 0}, {"path": "birds", "weight": 3}, {"path": "ships"}]
    path = write(folder, train={"blend": given})
    rows = loader(path)
    names = [source.source_name for source in read_blend_sources(identity(path))]
    tokenizer = rows._planning_context.row_encoder.chat_encoder.tokenizer
    seen: Counter[str] = Counter()
    for row in islice(rows, 40):
        bounds = row.cu_seqlens.tolist()
        assert len(row.source_indices) == row.num_samples
        for source, first, end in zip(row.source_indices, bounds, bounds[1:], strict=False):
            assert f"{names[source]} " in tokenizer.decode(row.tokens[first:end])
            seen[names[source]] += 1
    assert set(seen) == {"birds", "ships"} and 0.6 < seen["birds"] / seen.total() < 0.9
    count = read_blend_sources(identity(path))[1].sample_count
    assert rows.start_notes[0].startswith("source other: weight 0, ")
    assert rows.start_notes[0].endswith(" samples, nothing is drawn from it")
    assert rows.start_notes[1] == f"source birds: weight 3, {count} samples, 75.0% of the samples expected"


def test_rows_of_one_data_set_name_no_source(folder):
    rows = loader(folder / "birds")
    assert next(rows).source_indices == [] and not any("source" in note for note in rows.start_notes)


# --- A run that goes on with a changed blend: nothing of what stays is repeated or left out -----------------

BIRDS, SHIPS, OTHER = ({"path": name} for name in ("birds", "ships", "other"))


def blend(*parts: dict[str, Any], kind: str = "blend") -> dict[str, Any]:
    return {kind: list(parts)}


class Reading:
    """A run that reads the sets of a folder, and stops and goes on."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.settings = folder, settings
        self.names = {self.key(name): name for name in ("birds", "ships", "other")}
        self.taken: Counter[tuple[str, str]] = Counter()
        """Rows' samples by source and key."""
        self.state: dict[str, Any] = {}
        self.rows: Any = None

    def key(self, name: str) -> str:
        return read_blend_sources(identity(self.folder / name))[0].source_key

    def start(self, train: Any, **settings: Any) -> Reading:
        """Starts with another train split, or goes on with it where the last start stopped."""
        path = self.folder / train if isinstance(train, str) else write(self.folder, train=train)
        self.rows = loader(path, **self.settings | settings)
        if self.state:
            self.rows.load_state_dict(self.state)
        return self

    def take(self, count: int) -> Reading:
        blend = self.rows._planning_context.blend_sources
        for row in islice(self.rows, count):
            sources = row.source_indices or [0] * len(row.sample_keys)
            for source, key in zip(sources, row.sample_keys, strict=True):
                self.taken[self.names[blend[source].source_key], key] += 1
        self.state = json.loads(json.dumps(self.rows.state_dict()))
        return self

    def of(self, name: str) -> Counter[str]:
        return Counter({key: count for (source, key), count in self.taken.items() if source == name})

    def exact(self, *names: str) -> None:
        """Asserts that each pass through a source has drawn each sample once, into a row or to wait."""
        for name in names:
            self._exact(name)

    def _exact(self, name: str) -> None:
        hf, key = tiny_checkpoint("qwen2_5_vl"), self.key(name)
        data = DataConfig(path=str(self.folder / name), seq_len=64, pack=False)
        keys = [row.sample_keys[0] for row in validation_rows(data, read_spec(hf), hf, "train")]

        state = state_from_json(self.state["planner"])
        sources, numbers = state["waiting"]
        waiting = [n for s, n in zip(sources, numbers, strict=True) if state["keys"][s] == key]
        waiting += state["aside"].get(key, [])
        described = read_description(self.folder / name)
        sizes = [described.samples_by_shard[shard] for shard in described.shards_by_split["train"]]
        settings = {"shard_sizes": [np.array(sizes)], "block_size": planned_rows.SHUFFLE_BLOCK}
        settings |= {"source_keys": [key], "is_shuffled": self.settings.get("shuffle", True)}
        order = SampleOrder([len(keys)], [1.0], data.seed, **settings)
        indices = order.sample_indices(np.zeros(len(waiting), np.int64), np.array(waiting, np.int64))

        drawn = self.of(name) + Counter(keys[index] for index in indices)
        assert drawn.total() == state["drawn"][key] > 0
        if key in (passes_made := self.rows.source_passes):
            assert passes_made[key] == self.of(name).total() / len(keys)
        passes, more = divmod(drawn.total(), len(keys))
        assert Counter(drawn.values()) == +Counter({passes: len(keys) - more, passes + 1: more} | {0: 0})


def start_notes(reading: Reading) -> str:
    return "\n".join(reading.rows.start_notes)


def test_changed_blend_repeats_and_skips_no_sample(folder):
    """Weights, order and parts change at every stop; each source goes on in its pass."""
    run = Reading(folder).start(blend(BIRDS | {"weight": 3}, SHIPS)).take(14)
    run.start(blend(OTHER, SHIPS | {"weight": 2}, BIRDS))
    said = start_notes(run)
    assert "the blend has changed; from here on:" in said
    assert "other is new: weight 1 (25.0%)" in said
    assert "ships continues: weight 1 (25.0%) becomes weight 2 (50.0%)" in said
    assert "birds continues: weight 3 (75.0%) becomes weight 1 (25.0%)" in said
    for name in ("birds", "ships", "other"):
        run.take(20).exact(name)

    birds = run.of("birds")
    run.start(blend(OTHER, SHIPS))
    assert "birds is left out; its position and counts are kept" in start_notes(run)
    run.take(12)
    assert run.of("birds") == birds, "no sample of it any more, not even one that was waiting"

    run.start(blend(BIRDS, OTHER, SHIPS))
    assert "birds is back and continues: weight 1 (33.3%)" in start_notes(run)
    run.take(30).exact("birds", "ships", "other")
    assert run.of("birds").total() > birds.total()


@pytest.mark.parametrize("settings", [{}, {"shuffle": False, "pack": False}], ids=str)
def test_data_set_becomes_a_blend_and_one_again(folder, settings):
    run = Reading(folder, **settings).start("birds").take(10)
    run.start(blend(SHIPS, BIRDS)).take(70)  # 64 samples of birds alone were drawn already
    assert "birds continues: the only data set (100.0%) becomes weight 1 (50.0%)" in start_notes(run)
    run.exact("birds", "ships")
    run.start("birds").take(10)
    assert "birds continues: weight 1 (50.0%) becomes the only data set (100.0%)" in start_notes(run)
    run.exact("birds")


def test_changed_blend_may_go_from_weights_to_epochs(folder):
    run = Reading(folder).start(blend(BIRDS, SHIPS)).take(10)
    epochs = blend(BIRDS | {"repetitions": 2}, SHIPS, kind="blend_epochized")
    run.start(epochs).take(25)
    assert "birds continues: weight 1 (50.0%) becomes 2 epochs" in start_notes(run)
    run.exact("birds", "ships")

    # One pass instead of two, and another source: the tree of data sets has another form.
    changed = blend(OTHER | {"repetitions": 1.5}, BIRDS, SHIPS, kind="blend_epochized")
    run.start(changed).take(40).exact("birds", "ships", "other")
    run.start(blend(BIRDS, SHIPS, OTHER)).take(20).exact("birds", "ships")


def test_repetitions_draw_each_source_as_often_as_given(folder):
    epochs = blend(BIRDS | {"repetitions": 2}, SHIPS | {"repetitions": 1.5}, kind="blend_epochized")
    run = Reading(folder, pack=False).start(epochs)
    birds, ships = (source.sample_count for source in read_blend_sources(identity(folder / "meta.yaml")))
    for number in (1, 2):
        run.take(2 * birds + ships * 3 // 2)
        assert run.of("birds").total() == 2 * birds * number
        assert set(run.of("birds").values()) == {2 * number}
        assert run.of("ships").total() == ships * 3 // 2 * number
    assert set(run.of("ships").values()) == {3}


def test_changed_blend_without_an_earlier_source_is_refused(folder):
    run = Reading(folder).start(blend(BIRDS, SHIPS)).take(3)
    with pytest.raises(LoaderStateError, match="give the data set that the run began with"):
        run.start("other")


def test_renamed_and_moved_data_set_is_the_same_source(folder):
    run = Reading(folder).start(blend(BIRDS | {"weight": 3}, SHIPS)).take(10)
    shutil.copytree(folder / "birds", folder / "sub" / "gulls")
    run.start(blend({"path": "sub/gulls"}, SHIPS))
    assert "gulls continues: weight 3 (75.0%) becomes weight 1 (50.0%)" in start_notes(run)
    run.take(20)
    run.exact("birds")
