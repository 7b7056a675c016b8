"""What the ranks of :mod:`tests.training.test_source_counts` run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_vl.data.packing.assemble_row import pack_row
from megatron_vl.data.packing.training_row import TrainingRow
from megatron_vl.parallel.process_grid import init_distributed
from megatron_vl.platform import Platform, get_platform
from megatron_vl.training.rows.batch_broadcast import BatchBroadcast
from megatron_vl.training.source_counts import SourceCounts
from megatron_vl.training.step import reduce_losses, run_schedule
from megatron_vl.training.trainer import Trainer
from toolkit.parity.case import ParityCase, build_case, draw_samples

KINDS = [["image", "text"], ["two_images", "short_text"], ["text", "short_text"], ["short_text"]]
"""With two data-parallel ranks, all pictures are in the rows of the first."""
SOURCES = [[0, 1], [2, 0], [1, 2], [0]]
WEIGHTS = [[1.0, 0.5], [1.0, 1.0], [2.0, 1.0], [0.25]]
"""Of the losses of each sample."""
SEQ_LEN = 128
LAYOUTS: dict[str, dict[str, Any]] = {
    "PP2 x VPP2, decoupled": {"pp": 2, "vpp": 2, "decoupled": True},
    "TP2 + SP": {"tp": 2, "sequence_parallel": True},
    "CP2": {"cp": 2},
}


def losses_by_source(hf: str, weights: str) -> dict[str, Any]:
    """Counts and losses by source in several layouts, and of each sample alone in a whole model."""
    platform = get_platform("cpu")
    torch.set_num_threads(1)
    init_distributed(platform)
    out: dict[str, Any] = {}
    for name, layout in {"plain": {}, **LAYOUTS}.items():
        case = ParityCase(name, hf, weights, [], seq_len=SEQ_LEN, optimizer=False, **layout)
        live = build_case(case, platform)
        out[name] = _one_by_one(live, platform) if name == "plain" else _in_rows(live, platform, out)
    return out


def _rows(live: Trainer) -> list[TrainingRow]:
    rows = []
    for samples, sources, weights in zip(draw_samples(KINDS, live.spec, 0), SOURCES, WEIGHTS, strict=True):
        for sample, weight in zip(samples, weights, strict=True):
            sample.loss_mask = sample.loss_mask * weight
        rows.append(pack_row(samples, live.spec, SEQ_LEN))
        rows[-1].source_indices, rows[-1].sample_keys = (
            sources,
            [str(number) for number in range(len(sources))],
        )
    return rows


def _one_by_one(live: Trainer, platform: Platform) -> dict[str, Any]:
    found = SourceCounts.all_zero(3)
    model = live.model_chunks[0].module
    for samples, sources, weights in zip(draw_samples(KINDS, live.spec, 0), SOURCES, WEIGHTS, strict=True):
        for sample, source, weight in zip(samples, sources, weights, strict=True):
            row = pack_row([sample], live.spec, SEQ_LEN)
            [given] = BatchBroadcast(live.grid, platform, iter([row]), 1).next_batch().rows
            with torch.no_grad():
                losses = model(given).view(-1)
            found.samples[source] += 1
            found.tokens[source] += int((row.loss_mask != 0).sum())
            found.losses[source] += weight * float((losses * row.loss_mask).double().sum())
    return vars(found)


def _in_rows(live: Trainer, platform: Platform, out: dict[str, Any]) -> dict[str, Any]:
    grid, rows = live.grid, _rows(live)
    share = len(rows) // grid.dp
    mine = iter(rows[grid.dp_rank * share : (grid.dp_rank + 1) * share]) if grid.owns_loader else None
    data = BatchBroadcast(grid, platform, mine, share, vision_spec=live.spec.vision).next_batch()
    reports = run_schedule(live.model_chunks, data.rows, seq_len=SEQ_LEN, forward_only=True)
    learnt = SourceCounts.from_rows(data.source_loss_tokens, 3)
    total, _, _, found = reduce_losses(reports, grid, platform.device, (), learnt)

    everyone: list[Any] = [None] * grid.world_size
    dist.all_gather_object(everyone, vars(found))
    return {**vars(found), "total": total, "alike": all(one == everyone[0] for one in everyone)}
