"""Losses and counts by source: by hand, in a printed line, and in layouts of several ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from converters.convert import convert_weights
from megatron_vl.data.packing.assemble_row import TokenizedSample, pack_row
from megatron_vl.data.packing.training_row import TrainingRow
from megatron_vl.data.source.blend import read_blend_sources
from megatron_vl.training.report.sinks import scalar_metrics
from megatron_vl.training.rows import batch_broadcast
from megatron_vl.training.source_counts import SourceCounts, SourceMeter, abbreviate_count
from megatron_vl.training.step import _loss_by_source, token_loss
from tests.data.helpers import spec_of
from tests.data.test_blend import mixed, part
from tests.support.ranks import call
from tests.tiny import tiny_checkpoint
from tests.training.source_programs import losses_by_source


def row_of(*samples: tuple[int, list[float]], length: int = 12) -> TrainingRow:
    """A row of samples, each of them (source, weights of its tokens)."""
    spec = spec_of("qwen2_5_vl")
    made = [TokenizedSample(torch.arange(len(weights)) + 5, torch.tensor(weights)) for _, weights in samples]
    row = pack_row(made, spec, length)
    row.source_indices = [source for source, _ in samples]
    row.sample_keys = [str(number) for number in range(len(samples))]
    return row


def reported(row: TrainingRow, losses: list[float]) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss sum, report) of a row with these losses of its tokens, after its way through the feed."""
    packed = batch_broadcast._serialize_row(row)
    device_row = batch_broadcast._device_row(
        packed.row_header, batch_broadcast._unpack_tensors(packed.row_header, packed.flat_buffers)
    )
    total, _, report = token_loss(device_row, torch.tensor([losses]))
    return total.item(), report


def test_a_row_of_padding_counts_for_no_source():
    """The sample in it is none of the data set, which its keys say."""
    row = row_of((1, [0]))
    assert batch_broadcast._source_loss_tokens(row) == [(1, 0)]
    row.sample_keys = []
    assert batch_broadcast._source_loss_tokens(row) == []


FIRST = row_of((2, [0, 1, 1, 0]), (0, [0, 0, 0.5]), (2, [0, 1]))
SECOND = row_of((0, [0, 1, 2]), (1, [0, 0]))


def test_losses_of_sources_by_hand():
    """A label is the next token, so the mask of a sample moves forward by one.

    First row: source 2 learns tokens 0 and 1 (losses 1, 2), source 0 token 5 with weight 0.5 (loss 6),
    source 2 token 7 (loss 8). Second row: source 0 learns tokens 0 and 1 (losses 1 and 2, weights 1 and 2),
    source 1 nothing.
    """
    first, one = reported(FIRST, [1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    second, two = reported(SECOND, [1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    assert (first, second) == (1 + 2 + 3 + 8, 1 + 4)
    assert one["segments"].tolist() == [3, 3, 8, 0] and one["sources"].tolist() == [2, 0, 2, -1]
    assert _loss_by_source([one, two], 4).tolist() == [3 + 5, 0, 3 + 8, 0]

    counts = SourceCounts.from_rows(
        [batch_broadcast._source_loss_tokens(FIRST), batch_broadcast._source_loss_tokens(SECOND)], 4
    )
    assert counts.samples == [2, 1, 2, 0] and counts.tokens == [3, 0, 3, 0]
    assert SourceCounts.from_flat(counts.to_flat()) == counts


def test_a_loss_that_is_not_finite_shows_in_its_own_source_alone():
    _, report = reported(FIRST, [1.0, 2, 3, 4, 5, math.nan, 7, 8, 9, 10, 11, 12])
    source0, source1, source2 = _loss_by_source([report], 3).tolist()
    assert math.isnan(source0) and (source1, source2) == (0, 3 + 8)


def test_without_a_blend_nothing_is_added():
    row = row_of((0, [0, 1, 1]))
    row.source_indices = []
    described = batch_broadcast._serialize_row(row).row_header
    assert described["shapes"]["sources"] == (0,) and described["learnt"] == []
    assert set(reported(row, [1.0] * 12)[1]) == {"loss"}
    assert SourceMeter().take_line() == ({}, "")


def meter_of(*weights: float) -> SourceMeter:
    return SourceMeter(read_blend_sources(mixed(*(part(f"s{i}", weight=w) for i, w in enumerate(weights)))))


def test_a_line_has_means_since_the_last_one_and_counts_of_the_whole_run():
    meter = meter_of(3, 1, 0)
    meter.add(SourceCounts([2, 1, 0], [10, 5, 0], [20.0, 2.5, 0.0]))
    meter.add(SourceCounts([1, 0, 0], [30, 0, 0], [40.0, 0.0, 0.0]))
    numbers, words = meter.take_line()
    assert numbers["source/s0/loss"] == 1.5 and numbers["source/s1/loss"] == 0.5
    assert words == "s0 1.5000 (3, 40), s1 0.5000 (1, 5), s2 - (0, 0)"

    meter.add(SourceCounts([1000, 0, 0], [2000, 0, 0], [500.0, 0.0, 0.0]))
    numbers, words = meter.take_line()
    assert words == "s0 0.2500 (1.0k, 2.0k), s1 - (1, 5), s2 - (0, 0)"
    assert numbers == {
        "source/s0/loss": 0.25,
        "source/s0/samples_seen": 1003,
        "source/s0/loss_tokens_seen": 2040,
        "source/s1/loss": None,
        "source/s1/samples_seen": 1,
        "source/s1/loss_tokens_seen": 5,
        "source/s2/loss": None,
        "source/s2/samples_seen": 0,
        "source/s2/loss_tokens_seen": 0,
    }
    assert "source/s1/loss" not in scalar_metrics(numbers)
    assert scalar_metrics(numbers)["source/s0/loss"] == 0.25


def test_two_hundred_sources_fit_into_a_line_and_all_into_the_numbers():
    meter = meter_of(*range(1, 201))
    meter.add(SourceCounts([1] * 200, [2] * 200, [1.0] * 200))
    numbers, words = meter.take_line()
    assert words == (
        "s196 0.5000 (1, 2), s197 0.5000 (1, 2), s198 0.5000 (1, 2), s199 0.5000 (1, 2),"
        " 196 others 0.5000 (196, 392)"
    )
    assert len(numbers) == 3 * 200


def test_counts_go_on_after_a_resume_and_those_of_sources_that_left_stay():
    meter = meter_of(3, 1)
    meter.add(SourceCounts([2, 1], [10, 5], [0.0, 0.0]))
    state = meter.state_dict()

    moved = read_blend_sources(mixed(part("s1") | {"name": "elsewhere/ships"}, part("s2")))
    again = SourceMeter(moved)
    again.load_state_dict(state)
    again.add(SourceCounts([1, 4], [1, 4], [0.0, 0.0]))
    seen = {
        counts["name"]: (counts["samples"], counts["loss_tokens"])
        for counts in again.totals_by_source.values()
    }
    assert seen == {"s0": (2, 10), "ships": (2, 6), "s2": (4, 4)}
    assert state == meter.state_dict(), "a state that was given away does not change"


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1.0k"), (34_512, "34.5k"), (999_499, "999.5k"), (6_700_000, "6.7M")],
)
def test_short_numbers(number, text):
    assert abbreviate_count(number) == text


@pytest.mark.ranks
def test_losses_by_source_equal_those_of_each_sample_alone(tmp_path: Path) -> None:
    """Under DP2 x PP2 x VPP2 with the tower on every rank, and under DP2 x TP2 + SP and DP2 x CP2."""
    hf = tiny_checkpoint("qwen2_5_vl", dtype=torch.float32)
    convert_weights(hf, tmp_path / "weights")
    out = call(losses_by_source, 4, hf=str(hf), weights=str(tmp_path / "weights"))
    plain = out["plain"]
    assert plain["samples"] == [3, 2, 2] and min(plain["tokens"]) > 0
    for name in ("PP2 x VPP2, decoupled", "TP2 + SP", "CP2"):
        found = out[name]
        assert (found["samples"], found["tokens"]) == (plain["samples"], plain["tokens"])
        assert found["losses"] == pytest.approx(plain["losses"], rel=2e-6)
        assert sum(found["losses"]) == pytest.approx(found["total"], rel=1e-6)
        assert found["alike"]
