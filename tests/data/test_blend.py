"""The sources of a blend: what they are called, what they are known by, and how often they are drawn."""

from collections import Counter
from itertools import islice
from typing import Any

import pytest

from megatron_vl.data.source.blend import read_blend_sources
from megatron_vl.data.source.dataset_description import read_description
from megatron_vl.data.source.location import LoaderError

from .mixtures import identity, loader, write


def leaf(content: str, samples: int = 10, **fields: Any) -> dict[str, Any]:
    """The identity of a data set."""
    return {"content": content, "split": "train", "samples": samples, "shards": 1, "list": "x"} | fields


def mixed(*parts: dict[str, Any], kind: str = "blend") -> dict[str, Any]:
    return {"mixture": {kind: list(parts)}}


def part(name: str, **fields: Any) -> dict[str, Any]:
    """A part of a mixture, whose content is called like it."""
    return {"name": name, "data": leaf(name)} | fields


# --- Names and shares ---------------------------------------------------------------------------------------


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


# --- What a source is known by ------------------------------------------------------------------------------


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


# --- What is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "told"),
    [
        ([{"path": "birds", "weight": -1}, {"path": "ships"}], "the weight of birds is -1; give 0 or more"),
        ([{"path": "birds", "weight": ".inf"}, {"path": "ships"}], "the weight of birds is '.inf'"),
        ([{"path": "birds", "weight": 0}, {"path": "ships", "weight": 0}], "nothing is drawn from any part"),
        ([{"path": "birds", "weight": 3}, {"path": "ships", "repetitions": 2}], "ships of the blend has rep"),
    ],
)
def test_blend_rejects_impossible_weights_by_name(folder, train, told):
    write(folder, train={"blend": train})
    with pytest.raises(LoaderError, match=rf"meta.yaml: .*{told}"):
        read_description(folder / "meta.yaml").split_facts("train")


# --- Rows ---------------------------------------------------------------------------------------------------


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
