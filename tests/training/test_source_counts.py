"""Losses and counts by source: in a printed line, and in layouts of several ranks."""

import math

import pytest
import torch

from megatron_vl.data.packing.assemble_row import TokenizedSample, pack_row
from megatron_vl.data.source.blend import read_blend_sources
from megatron_vl.training.report.sinks import scalar_metrics
from megatron_vl.training.rows.batch_broadcast import BatchBroadcast
from megatron_vl.training.rows.row_message import make_device_row, serialize_row, unpack_tensors
from megatron_vl.training.source_counts import SourceCounts, SourceMeter, count_sources
from megatron_vl.training.step import _loss_by_source, reduce_losses, run_schedule, token_loss
from megatron_vl.training.trainer import Trainer
from tests.data.helpers import spec_of
from tests.data.test_blend import mixed, part
from tests.support.ranks import in_ranks
from tests.support.tiny_trainer import gather, trainer_of
from toolkit.parity.case import draw_samples


def test_loss_that_is_not_finite_shows_in_its_own_source_alone():
    """A label is the next token, so the mask of a sample moves forward by one."""
    weights = ([0, 1, 1, 0], [0, 0, 0.5], [0, 1])
    samples = [TokenizedSample(torch.arange(len(each)) + 5, torch.tensor(each)) for each in weights]
    row = pack_row(samples, spec_of("qwen2_5_vl"), 12)
    row.source_indices, row.sample_keys = [2, 0, 2], ["0", "1", "2"]
    header, buffers = serialize_row(row)
    device_row = make_device_row(header, unpack_tensors(header, buffers))
    losses = torch.tensor([[1.0, 2, 3, 4, 5, math.nan, 7, 8, 9, 10, 11, 12]])
    _, tokens, report = token_loss(device_row, losses)
    source0, source1, source2 = _loss_by_source([report], 3).tolist()
    assert math.isnan(source0) and (source1, source2) == (0, 1 + 2 + 8) and tokens == 4


def counts_of(*numbers: list[float]) -> SourceCounts:
    return SourceCounts(*torch.tensor(numbers, dtype=torch.float64))


def meter_of(*weights: float) -> SourceMeter:
    return SourceMeter(read_blend_sources(mixed(*(part(f"s{i}", weight=w) for i, w in enumerate(weights)))))


def test_line_has_means_since_the_last_one_and_counts_of_the_whole_run():
    meter = meter_of(3, 1, 0)
    meter.add(counts_of([2, 1, 0], [10, 5, 0], [20.0, 2.5, 0.0]))
    meter.add(counts_of([1, 0, 0], [30, 0, 0], [40.0, 0.0, 0.0]))
    numbers, words = meter.take_line({})
    assert numbers["source/s0/loss"] == 1.5 and numbers["source/s1/loss"] == 0.5
    assert words == "s0 1.5000 (3, 40) | s1 0.5000 (1, 5) | s2 - (0, 0)"

    meter.add(counts_of([1000, 0, 0], [2000, 0, 0], [500.0, 0.0, 0.0]))
    passes = dict(zip(meter.totals, (1.254, 0.5, 0.0), strict=True))
    numbers, words = meter.take_line(passes)
    expected = "s0 0.2500 (1.0k, 2.0k, 1.25 passes) | s1 - (1, 5, 0.50 passes) | s2 - (0, 0, 0.00 passes)"
    assert words == expected
    assert numbers["source/s1/loss"] is None and numbers["source/s0/samples_seen"] == 1003
    assert numbers["source/s0/loss_tokens_seen"] == 2040 and numbers["source/s0/passes"] == 1.254
    assert len(numbers) == 3 * 4
    assert "source/s1/loss" not in scalar_metrics(numbers)
    assert scalar_metrics(numbers)["source/s0/loss"] == 0.25


def test_counts_of_a_source_that_was_moved_go_on_under_its_new_name():
    meter = meter_of(3, 1)
    meter.add(counts_of([2, 1], [10, 5], [0.0, 0.0]))
    again = SourceMeter(read_blend_sources(mixed(part("s1") | {"name": "elsewhere/ships"})))
    again.load_state_dict(meter.state_dict())
    again.add(counts_of([1], [1], [0.0]))
    assert {one["name"]: one["samples"] for one in again.totals.values()} == {"s0": 2, "ships": 2}


KINDS = [["image", "text"], ["two_images", "short_text"], ["text", "short_text"], ["short_text"]]
"""With two data-parallel ranks, all images are in the rows of the first."""
SOURCES = [[0, 1], [2, 0], [1, 2], [0]]
WEIGHTS = [[1.0, 0.5], [1.0, 1.0], [2.0, 1.0], [0.25]]
"""Of the losses of each sample."""


def weighted_samples(trainer: Trainer) -> list[list[TokenizedSample]]:
    rows = draw_samples(KINDS, trainer.spec, 0)
    for samples, weights in zip(rows, WEIGHTS, strict=True):
        for sample, weight in zip(samples, weights, strict=True):
            sample.loss_mask = sample.loss_mask * weight
    return rows


@in_ranks(4)
def test_losses_by_source_equal_those_of_each_sample_alone(hf) -> None:
    """Under DP2 x PP2 x VPP2 with the tower on every rank, and under DP2 x TP2 + SP and DP2 x CP2."""
    whole = trainer_of(hf, 128, optimizer=False)
    alone = count_sources([], 3)
    for sample, source in zip(sum(weighted_samples(whole), []), sum(SOURCES, []), strict=True):
        row = pack_row([sample], whole.spec, 128)
        batches = BatchBroadcast(whole.grid, whole.platform, iter([row]), 1, spec=whole.spec)
        with torch.no_grad():
            losses = whole.model_chunks[0].module(batches.next_batch().rows[0]).view(-1)
        alone.samples[source] += 1
        alone.tokens[source] += int((row.loss_mask != 0).sum())
        alone.losses[source] += float((losses * row.loss_mask).double().sum())
    assert alone.samples.tolist() == [3, 2, 2] and alone.tokens.min() > 0

    decoupled = {"pp": 2, "vpp": 2, "decoupled": True}
    for layout in (decoupled, {"tp": 2, "sequence_parallel": True}, {"cp": 2}):
        trainer = trainer_of(hf, 128, optimizer=False, **layout)
        grid, rows = trainer.grid, []
        for samples, sources in zip(weighted_samples(trainer), SOURCES, strict=True):
            rows.append(pack_row(samples, trainer.spec, 128))
            rows[-1].source_indices, rows[-1].sample_keys = sources, [str(i) for i in range(len(sources))]
        share = len(rows) // grid.dp
        own = iter(rows[grid.dp_rank * share :]) if grid.owns_loader else None
        batches = BatchBroadcast(grid, trainer.platform, own, share, spec=trainer.spec)
        step_batch = batches.next_batch()
        reports = run_schedule(trainer.model_chunks, step_batch.rows, seq_len=128, forward_only=True)
        local = count_sources((header["source_loss_tokens"] for header in step_batch.headers), 3)
        sums, _, found = reduce_losses(reports, step_batch.rows, grid, (), local).read()
        assert found is not None
        assert torch.equal(found.samples, alone.samples) and torch.equal(found.tokens, alone.tokens)
        assert found.losses.tolist() == pytest.approx(alone.losses.tolist(), rel=2e-6)
        assert float(found.losses.sum()) == pytest.approx(float(sums[0]), rel=1e-6)
        assert len({str(losses) for losses in gather(found.losses.tolist())}) == 1
