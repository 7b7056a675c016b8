"""A run that goes on with a changed blend: nothing of what stays is repeated or left out."""

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
from megatron_vl.data.source.sample_order import SampleOrder
from megatron_vl.data.state_json import LoaderStateError, state_from_json
from megatron_vl.spec.families import read_spec
from tests.tiny import tiny_checkpoint

from .mixtures import identity, loader, write

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
        """Takes rows, and stops."""
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


def told(reading: Reading) -> str:
    return "\n".join(reading.rows.start_notes)


def test_changed_blend_repeats_and_skips_no_sample(folder):
    """Weights, order and parts change at every stop; each source goes on in its pass."""
    run = Reading(folder).start(blend(BIRDS | {"weight": 3}, SHIPS)).take(14)
    run.start(blend(OTHER, SHIPS | {"weight": 2}, BIRDS))
    said = told(run)
    assert "the blend has changed; from here on:" in said
    assert "other is new: weight 1 (25.0%)" in said
    assert "ships continues: weight 1 (25.0%) becomes weight 2 (50.0%)" in said
    assert "birds continues: weight 3 (75.0%) becomes weight 1 (25.0%)" in said
    for name in ("birds", "ships", "other"):
        run.take(20).exact(name)

    birds = run.of("birds")
    run.start(blend(OTHER, SHIPS))
    assert "birds is left out; its position and counts are kept" in told(run)
    run.take(12)
    assert run.of("birds") == birds, "no sample of it any more, not even one that was waiting"

    run.start(blend(BIRDS, OTHER, SHIPS))
    assert "birds is back and continues: weight 1 (33.3%)" in told(run)
    run.take(30).exact("birds", "ships", "other")
    assert run.of("birds").total() > birds.total()


@pytest.mark.parametrize("settings", [{}, {"shuffle": False, "pack": False}], ids=str)
def test_data_set_becomes_a_blend_and_one_again(folder, settings):
    run = Reading(folder, **settings).start("birds").take(10)
    run.start(blend(SHIPS, BIRDS)).take(70)  # 64 samples of birds alone were drawn already
    assert "birds continues: the only data set (100.0%) becomes weight 1 (50.0%)" in told(run)
    run.exact("birds", "ships")
    run.start("birds").take(10)
    assert "birds continues: weight 1 (50.0%) becomes the only data set (100.0%)" in told(run)
    run.exact("birds")


def test_changed_blend_may_go_from_weights_to_epochs(folder):
    run = Reading(folder).start(blend(BIRDS, SHIPS)).take(10)
    epochs = blend(BIRDS | {"repetitions": 2}, SHIPS, kind="blend_epochized")
    run.start(epochs).take(25)
    assert "birds continues: weight 1 (50.0%) becomes 2 epochs" in told(run)
    run.exact("birds", "ships")

    # One pass instead of two, and another source: the tree of data sets has another form.
    changed = blend(OTHER | {"repetitions": 1.5}, BIRDS, SHIPS, kind="blend_epochized")
    run.start(changed).take(40).exact("birds", "ships", "other")
    run.start(blend(BIRDS, SHIPS, OTHER)).take(20).exact("birds", "ships")


def test_repetitions_draw_each_source_as_often_as_given(folder):
    """In each pass: birds twice, and ships one and a half times."""
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
    assert "gulls continues: weight 3 (75.0%) becomes weight 1 (50.0%)" in told(run)
    run.take(20)
    run.exact("birds")
