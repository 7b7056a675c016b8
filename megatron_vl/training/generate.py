"""Greedy decoding of prompts with pictures and videos, in any layout, with the chunks of a training run.

Each prompt goes through the pipeline as one row. After that, each pass adds one token to every prompt, using
stored keys and values (:mod:`megatron_vl.models.kv_cache`). New tokens have the same positions as an answer
in training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.data.packing.training_row import TrainingRow
from megatron_vl.models.batch import DeviceRow, Segments
from megatron_vl.models.kv_cache import CacheAccess, KVCache
from megatron_vl.models.transformer_configs import fp8_row_multiple
from megatron_vl.models.vision_language import VisionLanguageModel
from megatron_vl.parallel import tp_overlap
from megatron_vl.parallel.process_grid import ProcessGrid
from megatron_vl.platform import Platform
from megatron_vl.training.batch_broadcast import BatchBroadcast
from megatron_vl.training.step import run_schedule


@dataclass
class PromptRow:
    """A row that begins with a prompt of ``prompt_length`` tokens. The rest of the row is ignored."""

    row: TrainingRow
    prompt_length: int

    @property
    def next_position(self) -> int:
        """The position of the first new token: one after that of the prompt's last token, which is text."""
        return int(self.row.position_ids[:, self.prompt_length - 1].max()) + 1


@dataclass
class _DecodeRequest:
    """A row, and the indices of its tokens after which a token is predicted."""

    row: DeviceRow
    token_indices: list[int]


@contextmanager
def inference_context(model_chunks: Sequence[VisionLanguageModel]) -> Iterator[None]:
    """A context without gradients, dropout and recomputation."""
    for chunk in model_chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk in model_chunks:
            chunk.train()


def generate_greedily(
    model_chunks: list[VisionLanguageModel],
    grid: ProcessGrid,
    platform: Platform,
    prompt_rows: list[PromptRow] | None,
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int],
) -> list[list[int]]:
    """Decodes an answer to each prompt greedily. Collective over all ranks.

    Args:
        model_chunks: this rank's chunks, not wrapped in DDP, with up-to-date parameters.
        prompt_rows: rows of equal length, on the ranks that own a loader; None elsewhere. Data-parallel
            replicas may have different prompts, but the same number of them.
        stop_token_ids: tokens that end an answer.

    Returns:
        The tokens of each answer, with the stop token that ended it, equal on all ranks of a replica.
    """
    assert grid.cp == 1, "answers are not generated under context parallelism"
    prompt_lengths, next_positions = _share_prompt_lengths(grid, prompt_rows)
    row_iterator = iter([prompt.row for prompt in prompt_rows]) if prompt_rows is not None else None
    kv_cache = KVCache(prompt_lengths, max_new_tokens)
    answer_tokens: list[list[int]] = [[] for _ in prompt_lengths]
    active_prompts = list(range(len(prompt_lengths)))

    with inference_context(model_chunks), tp_overlap.pause_overlap(model_chunks):
        decode_requests = _prompt_requests(
            model_chunks[0], grid, platform, row_iterator, prompt_lengths, kv_cache
        )
        for new_token_count in range(max_new_tokens):
            chosen_tokens = _next_tokens(model_chunks, grid, platform, decode_requests, len(active_prompts))
            if new_token_count:
                kv_cache.advance_lengths(active_prompts)
            for prompt_index, chosen_token in zip(active_prompts, chosen_tokens, strict=True):
                answer_tokens[prompt_index].append(chosen_token)

            # Each further pass has the last token of every prompt that has not ended, in one row.
            active_prompts = [p for p in active_prompts if answer_tokens[p][-1] not in stop_token_ids]
            if new_token_count + 1 == max_new_tokens or not _is_true_on_any_rank(
                bool(active_prompts), platform
            ):
                break
            token_positions = [
                (answer_tokens[p][-1], next_positions[p] + new_token_count) for p in active_prompts
            ]
            device_row = _new_token_row(model_chunks[0], grid, platform, token_positions)
            device_row.cache = CacheAccess(kv_cache, active_prompts, is_prefill=False)
            decode_requests = [_DecodeRequest(device_row, list(range(len(active_prompts))))]
    return answer_tokens


def _share_prompt_lengths(
    grid: ProcessGrid, prompt_rows: list[PromptRow] | None
) -> tuple[list[int], list[int]]:
    """The length of each prompt, and the position after it. Collective over a replica.

    Only the rank that owns the loader has the prompts, so it sends these numbers.
    """
    prompt_lengths = [prompt.prompt_length for prompt in prompt_rows or []]
    next_positions = [prompt.next_position for prompt in prompt_rows or []]
    return grid.from_loader_owner((prompt_lengths, next_positions))


def _prompt_requests(
    model_chunk: VisionLanguageModel,
    grid: ProcessGrid,
    platform: Platform,
    row_iterator: Iterator[TrainingRow] | None,
    prompt_lengths: list[int],
    kv_cache: KVCache,
) -> list[_DecodeRequest]:
    """The requests of the first pass, which reads each prompt as one row and fills the cache."""
    vision_spec = None if model_chunk.decoupled is None else model_chunk.decoupled.vision
    step_batch = BatchBroadcast(
        grid, platform, row_iterator, len(prompt_lengths), vision_spec=vision_spec
    ).next_batch()
    decode_requests = []
    for i, device_row in enumerate(step_batch.rows):
        device_row.cache = CacheAccess(kv_cache, [i], is_prefill=True)
        decode_requests.append(_DecodeRequest(device_row, [prompt_lengths[i] - 1]))
    return decode_requests


def _is_true_on_any_rank(local_flag: bool, platform: Platform) -> bool:
    """Whether ``local_flag`` is true on any rank. Collective over all ranks.

    All ranks must make the same number of passes, because experts exchange tokens between ranks.
    """
    reduced_flag = torch.tensor([int(local_flag)], device=platform.device)
    dist.all_reduce(reduced_flag, op=dist.ReduceOp.MAX)
    return bool(reduced_flag.item())


def _new_token_row(
    model_chunk: VisionLanguageModel,
    grid: ProcessGrid,
    platform: Platform,
    token_positions: list[tuple[int, int]],
) -> DeviceRow:
    """A row of (token, position) pairs, padded to a length that sequence parallelism and FP8 support."""
    length_multiple = (grid.tp if model_chunk.config.sequence_parallel else 1) * fp8_row_multiple(
        model_chunk.config
    )
    padded_length = -(-max(len(token_positions), 1) // length_multiple) * length_multiple
    padded_tokens = token_positions + [(0, 0)] * (padded_length - len(token_positions))
    token_ids, position_ids = torch.tensor(padded_tokens, device=platform.device).unbind(1)
    segments = Segments(
        torch.tensor([0, padded_length], dtype=torch.int32, device=platform.device), padded_length
    )
    return DeviceRow(
        tokens=token_ids,
        labels=torch.zeros_like(token_ids),
        loss_mask=torch.zeros(padded_length, device=platform.device),
        num_real_tokens=len(token_positions),
        position_ids=position_ids.expand(3, -1),
        segments=segments,
        vision_input=None,
        feature_index=None,
    )


def _next_tokens(
    model_chunks: list[VisionLanguageModel],
    grid: ProcessGrid,
    platform: Platform,
    decode_requests: list[_DecodeRequest],
    token_count: int,
) -> list[int]:
    """The most likely successor of each of ``token_count`` requested tokens, on all ranks of a replica."""
    # The interleaved schedule needs a multiple of the number of stages. Results of this padding are not used.
    padded_requests = list(decode_requests)
    while grid.vpp > 1 and len(padded_requests) % grid.pp:
        padded_requests.append(_DecodeRequest(dataclasses.replace(decode_requests[0].row, cache=None), []))

    chosen_by_request = run_schedule(
        model_chunks,
        padded_requests,
        seq_len=decode_requests[0].row.tokens.numel(),
        forward_only=True,
        forward_step_func=partial(_argmax_forward_step, grid=grid),
        collect_non_loss_data=True,
    )
    chosen_tokens = (
        torch.cat(chosen_by_request)
        if chosen_by_request
        else torch.zeros(token_count, dtype=torch.int64, device=platform.device)
    )
    if grid.pp > 1:
        last_rank = max(dist.get_process_group_ranks(grid.replica_group))
        dist.broadcast(chosen_tokens, src=last_rank, group=grid.replica_group)
    return chosen_tokens.tolist()


def _argmax_forward_step(
    request_iterator: Iterator[_DecodeRequest], model: torch.nn.Module, *, grid: ProcessGrid
) -> tuple[Tensor, Any]:
    """The function that core's schedules call for each micro-batch of each chunk."""
    decode_request = next(request_iterator)
    return model(decode_request.row, labels=False), partial(
        _argmax_tokens, decode_request=decode_request, grid=grid
    )


def _argmax_tokens(
    logits: Tensor, non_loss_data: bool, *, decode_request: _DecodeRequest, grid: ProcessGrid
) -> Tensor:
    """The most likely tokens, int64 [requested tokens], from logits [1, S, V / tp].

    Among equal logits, the first one is chosen, as in ``argmax``.
    """
    local_best = logits[0, decode_request.token_indices].float().max(-1)
    if grid.tp == 1:
        return local_best.indices

    local_candidates = torch.stack(
        (local_best.values.double(), (local_best.indices + grid.tp_rank * logits.shape[-1]).double())
    )
    all_candidates = [torch.empty_like(local_candidates) for _ in range(grid.tp)]
    dist.all_gather(all_candidates, local_candidates, group=grid.tp_group)
    candidate_logits, candidate_tokens = torch.stack(all_candidates).unbind(1)
    return candidate_tokens.gather(0, candidate_logits.argmax(0, keepdim=True))[0].long()
