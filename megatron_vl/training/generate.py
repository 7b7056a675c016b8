"""Greedy decoding of prompts with pictures and videos, in any layout, with the chunks of a training run.

Each prompt goes through the pipeline as one row. After that, each pass adds one token to every prompt, using
stored keys and values (:mod:`megatron_vl.models.kv_cache`). New tokens have the same positions as an answer
in training.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.data.packing.row import Row
from megatron_vl.models.batch import DeviceRow, Segments
from megatron_vl.models.kv_cache import CacheUse, KVCache
from megatron_vl.models.transformer_configs import fp8_rows
from megatron_vl.models.vision_language import VisionLanguageModel
from megatron_vl.parallel import tp_overlap
from megatron_vl.parallel.grid import ProcessGrid
from megatron_vl.platform import Platform
from megatron_vl.training.feed import Feed
from megatron_vl.training.step import run_schedule


@dataclass
class Prompt:
    """A row that begins with a prompt of ``length`` tokens. The rest of the row is ignored."""

    row: Row
    length: int

    @property
    def next_position(self) -> int:
        """The position of the first new token: one after that of the prompt's last token, which is text."""
        return int(self.row.position_ids[:, self.length - 1].max()) + 1


@dataclass
class _Request:
    """A row, and the indices of its tokens whose successors are to be predicted."""

    row: DeviceRow
    tokens: list[int]


@contextmanager
def inference(chunks: Sequence[VisionLanguageModel]) -> Iterator[None]:
    """A context without gradients, dropout and recomputation."""
    for chunk in chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk in chunks:
            chunk.train()


def generate(
    chunks: list[VisionLanguageModel],
    grid: ProcessGrid,
    platform: Platform,
    prompts: list[Prompt] | None,
    *,
    max_new_tokens: int,
    stop: Collection[int],
) -> list[list[int]]:
    """Decodes an answer to each prompt greedily. Collective over all ranks.

    Args:
        chunks: this rank's chunks, not wrapped in DDP, with up-to-date parameters.
        prompts: rows of equal length, on the ranks that own a loader; None elsewhere. Data-parallel replicas
            may have different prompts, but the same number of them.
        stop: tokens that end an answer.

    Returns:
        The tokens of each prompt's answer, including the stop token that ended it. They are equal on all
        ranks of a replica.
    """
    facts: list[Any] = [[(p.length, p.next_position) for p in prompts] if prompts is not None else None]
    assert grid.cp == 1, "answers are not generated under context parallelism"
    if grid.replica_ranks > 1:
        dist.broadcast_object_list(facts, src=grid.replica_source, group=grid.replica_gloo)
    lengths = [length for length, _ in facts[0]]
    positions = [position for _, position in facts[0]]

    rows = iter([p.row for p in prompts]) if prompts is not None else None
    cache = KVCache(lengths, max_new_tokens)
    answers: list[list[int]] = [[] for _ in lengths]

    with inference(chunks), tp_overlap.paused(chunks):
        requests = []
        tower = chunks[0].decoupled
        vision = None if tower is None else tower.vision
        data = Feed(grid, platform, rows, len(lengths), vision=vision).next_step()
        for i, row in enumerate(data.rows):
            row.cache = CacheUse(cache, [i], filling=True)
            requests.append(_Request(row, [lengths[i] - 1]))
        chosen = _successors(chunks, grid, platform, requests, len(lengths))

        active = list(range(len(lengths)))
        for count in range(max_new_tokens):
            for prompt, token in zip(active, chosen, strict=True):
                answers[prompt].append(token)
            active = [p for p in active if answers[p][-1] not in stop]
            if count + 1 == max_new_tokens or not _any_rank(bool(active), platform):
                break

            tokens = [(answers[p][-1], positions[p] + count) for p in active]
            row = _new_tokens(chunks[0], grid, platform, tokens)
            row.cache = CacheUse(cache, active, filling=False)
            request = _Request(row, list(range(len(active))))
            chosen = _successors(chunks, grid, platform, [request], len(active))
            cache.advance(active)
    return answers


def _any_rank(here: bool, platform: Platform) -> bool:
    """Whether ``here`` is true on any rank. Collective over all ranks.

    All ranks must make the same number of passes, because experts exchange tokens between ranks.
    """
    flag = torch.tensor([int(here)], device=platform.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def _new_tokens(
    chunk: VisionLanguageModel, grid: ProcessGrid, platform: Platform, tokens: list[tuple[int, int]]
) -> DeviceRow:
    """A row of (token, position) pairs, padded to a length that sequence parallelism and FP8 support."""
    multiple = (grid.tp if chunk.config.sequence_parallel else 1) * fp8_rows(chunk.config)
    length = -(-max(len(tokens), 1) // multiple) * multiple
    filled = tokens + [(0, 0)] * (length - len(tokens))
    ids, positions = torch.tensor(filled, device=platform.device).unbind(1)
    segments = Segments(torch.tensor([0, length], dtype=torch.int32, device=platform.device), length)
    return DeviceRow(
        tokens=ids,
        labels=torch.zeros_like(ids),
        loss_mask=torch.zeros(length, device=platform.device),
        real_tokens=len(tokens),
        position_ids=positions.expand(3, -1),
        segments=segments,
        vision=None,
        feature_index=None,
    )


def _successors(
    chunks: list[VisionLanguageModel],
    grid: ProcessGrid,
    platform: Platform,
    requests: list[_Request],
    count: int,
) -> list[int]:
    """The most likely successor of each requested token, on every rank of the replica.

    Args:
        count: number of requested tokens.
    """
    # The interleaved schedule needs a multiple of the number of stages. Results of this padding are not used.
    padded = list(requests)
    while grid.vpp > 1 and len(padded) % grid.pp:
        row = requests[0].row
        padded.append(_Request(DeviceRow(**{**vars(row), "cache": None}), []))

    length = requests[0].row.tokens.numel()
    found = run_schedule(
        chunks,
        padded,
        seq_len=length,
        forward_only=True,
        step=partial(_choose_step, grid=grid),
        collect_non_loss_data=True,
    )

    chosen = torch.cat(found) if found else torch.zeros(count, dtype=torch.int64, device=platform.device)
    if grid.pp > 1:
        last = max(dist.get_process_group_ranks(grid.replica_group))
        dist.broadcast(chosen, src=last, group=grid.replica_group)
    return chosen.tolist()


def _choose_step(
    requests: Iterator[_Request], model: torch.nn.Module, *, grid: ProcessGrid
) -> tuple[Tensor, Any]:
    """The function that core's schedules call for each micro-batch of each chunk."""
    request = next(requests)
    return model(request.row, labels=False), partial(_choose, request=request, grid=grid)


def _choose(logits: Tensor, non_loss_data: bool, *, request: _Request, grid: ProcessGrid) -> Tensor:
    """The most likely tokens, int64 [requested tokens], from logits [1, S, V / tp].

    Among equal logits, the first one is chosen, as in ``argmax``.
    """
    best = logits[0, request.tokens].float().max(-1)
    if grid.tp == 1:
        return best.indices

    mine = torch.stack((best.values.double(), (best.indices + grid.tp_rank * logits.shape[-1]).double()))
    everyone = [torch.empty_like(mine) for _ in range(grid.tp)]
    dist.all_gather(everyone, mine, group=grid.tp_group)
    values, indices = torch.stack(everyone).unbind(1)
    return indices.gather(0, values.argmax(0, keepdim=True))[0].long()
