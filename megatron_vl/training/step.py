"""One optimizer step: run the pipeline schedule over the rows, finalise gradients, update weights.

Gradients do not depend on the layout: the loss is a sum over tokens, and gradients are divided once by the
number of loss tokens of the whole global batch. The division is folded into the clipping factor
(:func:`megatron_vl.training.optimizer.clip_and_update`), so gradients in the buffers are sums over tokens.
Core's own scaling by ranks and micro-batches is off (``calculate_per_token_loss``, set in
:mod:`megatron_vl.models.transformer_configs`).
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer.optimizer import MTP_GRAD_NORM_GROUP, ChainedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_vl.config import TrainConfig
from megatron_vl.models.batch import DeviceRow
from megatron_vl.models.embedding import fuse_vocabulary_gradients
from megatron_vl.models.moe.router import expert_load, notify_ddp_directly, reset_router_counts
from megatron_vl.models.mtp import mtp_metrics, set_mtp_loss_scale
from megatron_vl.models.vision_language import VisionLanguageModel
from megatron_vl.parallel.ddp import ReplicaDDP, connect_absent_tower
from megatron_vl.parallel.process_grid import ProcessGrid
from megatron_vl.system import progress
from megatron_vl.training.optimizer import clip_and_update, gradient_norms
from megatron_vl.training.rows.row_shards import pin_memory
from megatron_vl.training.source_counts import SourceCounts

NOT_FINITE, NO_LOSS_TOKENS, NO_GRADIENT = "not_finite", "no_loss_tokens", "no_gradient"
SKIP_TEXTS = {
    NOT_FINITE: "loss or gradient is not finite",
    NO_LOSS_TOKENS: "the step has no loss tokens",
    NO_GRADIENT: "every gradient is zero; parts of the vision tower alone need images",
}
"""The reasons for which a step's update is skipped. Weights, moments and Adam's step count then stay as they
are; data and learning-rate schedules advance."""


@dataclass
class StepResult:
    """Numbers of one step, equal on all ranks."""

    loss: float
    """Mean over the loss tokens of the global batch; NaN if there are none."""
    loss_tokens: int
    grad_norm: float
    skip_reason: str
    """A key of :data:`SKIP_TEXTS`; empty if the weights were updated."""
    expert_load: Tensor | None = None
    """Number of tokens by layer and expert, int64 [layers, experts] on the device; None for a dense model."""
    any_rank_failed: bool = False
    """Whether any rank reported a failure outside the step, such as a checkpoint that cannot be written."""
    stop_requested: bool = False
    source_counts: SourceCounts | None = None
    """Samples, loss tokens and losses by source; None if the data set is not a blend."""
    more_metrics: dict[str, float] = field(default_factory=dict)
    """Numbers beside the loss by name (:func:`split_sums`)."""
    more_text: str = ""
    """The same as a part of a printed line."""

    @property
    def is_updated(self) -> bool:
        return not self.skip_reason


def wrap_in_ddp(
    config: TrainConfig, model_chunks: list[VisionLanguageModel], *, overlap: bool, bucket_size: int | None
) -> list[ReplicaDDP]:
    """Wraps the chunks in Megatron-core's DDP, and sets the schedule's hooks in the model's config.

    Args:
        overlap: whether gradients are reduced, and updated weights gathered, while the passes run.
        bucket_size: number of parameters of a gradient bucket; None: Megatron-core's default.
    """
    distributed_optimizer = config.parallel.distributed_optimizer
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and distributed_optimizer,
        use_distributed_optimizer=distributed_optimizer,
        bucket_size=bucket_size,
    )

    core_config = model_chunks[0].config
    # One bucket is enough for each later virtual stage: its reduction overlaps with the passes of the others.
    ddp_chunks = [
        ReplicaDDP(core_config, ddp_config, chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(model_chunks)
    ]
    for chunk in ddp_chunks:
        fuse_vocabulary_gradients(chunk.module.language_model)
        notify_ddp_directly(chunk)
        connect_absent_tower(chunk)

    if (decoupled_tower := model_chunks[0].decoupled) is not None:
        # The tower's backward passes come after the pipeline's, and its gradients are reduced together then.
        decoupled_tower.wrap(
            dataclasses.replace(ddp_config, overlap_grad_reduce=False, overlap_param_gather=False)
        )

    # Core's schedules find their hooks in the config of the model.
    if overlap:
        no_sync = [chunk.no_sync for chunk in ddp_chunks]
        core_config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    # Without the number of tokens, core leaves gradients as sums: `clip_and_update` divides them.
    core_config.finalize_model_grads_func = lambda model, num_tokens, **options: finalize_model_grads(
        model, None, **options
    )
    core_config.grad_scale_func = None  # no loss scaling: bf16 has the exponent range of float32
    return ddp_chunks


def token_loss(row: DeviceRow, token_losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss of one row from its per-token losses [1, S], or [4, S] with multi-token prediction.

    Returns:
        (loss sum, number of loss tokens, report). The report has both numbers and, with multi-token
        prediction, its three sums: float32 [2] or [5]. For a row of a blend, it also has the loss sum of each
        segment, float64 [segments], and the segments' sources.
    """
    token_losses, *target_numbers = token_losses.float()
    weighted_losses = token_losses * row.loss_mask
    loss_sum = weighted_losses.sum()
    # The mask holds weights of losses: they change the sum, not the number of tokens that it is divided by.
    loss_token_count = (row.loss_mask != 0).sum()
    sums = [loss_sum, loss_token_count, *(each.sum() for each in target_numbers)]
    if row.whole_row is not None:
        loss_sum = loss_sum + row.whole_row.two_ahead_scale * sums[2]
    row_report = {"loss": torch.stack([each.detach().float() for each in sums])}
    if row.segment_sources is not None and len(row.segment_sources):
        # `unsafe` skips bounds checks, which would make the host wait.
        row_report["segments"] = torch.segment_reduce(
            weighted_losses.detach().double(), "sum", offsets=row.local_segments.cu_seqlens, unsafe=True
        )
        row_report["sources"] = row.segment_sources
    return loss_sum, loss_token_count.to(torch.int), row_report


def forward_step(row_iterator: Iterator[DeviceRow], model: torch.nn.Module) -> tuple[Tensor, Any]:
    """The function that core's schedules call for each micro-batch of each chunk."""
    row = next(row_iterator)
    progress.note_progress()
    return model(row), partial(token_loss, row)


def run_schedule(
    model_chunks: list[DistributedDataParallel] | list[VisionLanguageModel],
    rows: list[DeviceRow],
    *,
    seq_len: int,
    forward_only: bool = False,
) -> list[Any]:
    """Runs the forward passes (and backward passes) of all rows through this rank's chunks.

    Returns:
        The reports of the rows on the last stage; an empty list on other stages.
    """
    progress.note_progress()
    if not forward_only:
        reset_router_counts(model_chunks, rows)
        if mtp_factor := get_attr_wrapped_model(model_chunks[0], "mtp_config").loss:
            set_mtp_loss_scale(rows, mtp_factor)

    # Each chunk reads all rows, at its own time in the schedule.
    row_iterators = [iter(rows) for _ in model_chunks]

    # Core uses this length only to size its messages, which carry DeepStack's levels after the hidden state.
    states_per_message = 1 + get_attr_wrapped_model(model_chunks[0], "message_levels")

    # A tower that every rank holds encodes the images of all rows before the pipeline starts.
    if (decoupled_tower := get_attr_wrapped_model(model_chunks[0], "decoupled")) is not None:
        decoupled_tower.encode(rows, is_training=not forward_only)

    row_reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=row_iterators if len(model_chunks) > 1 else row_iterators[0],
        model=model_chunks if len(model_chunks) > 1 else model_chunks[0],
        num_microbatches=len(rows),
        seq_length=seq_len * states_per_message,
        micro_batch_size=1,  # a micro-batch is one packed row
        forward_only=forward_only,
    )

    # The tower's backward pass comes last: the pipeline has collected the gradients of its features.
    if decoupled_tower is not None and not forward_only:
        decoupled_tower.backward()
    for row in rows:
        row.vision_features = None  # rows and the images of their step refer to each other
    return row_reports


def replicated_modules(model_chunks: list[ReplicaDDP]) -> list[ReplicaDDP]:
    """The DDP modules of this rank: its chunks, and the trained tower if every rank holds one."""
    decoupled_tower = model_chunks[0].module.decoupled
    tower_ddp = decoupled_tower.ddp if decoupled_tower is not None else None
    return [*model_chunks, tower_ddp] if tower_ddp is not None else list(model_chunks)


def train_step(
    model_chunks: list[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    rows: list[DeviceRow],
    grid: ProcessGrid,
    seq_len: int,
    has_failed: bool = False,
    stop_requested: bool = False,
    local_source_counts: SourceCounts | None = None,
    before_update: Callable[[], object] = lambda: None,
) -> StepResult:
    """Runs one step over this rank's micro-batches. Collective over all ranks.

    Args:
        has_failed: whether this rank has failed outside the step. All ranks receive this flag with the loss.
        local_source_counts: samples and loss tokens of this rank's rows by source; None if the data set is
            not a blend.
        before_update: called before weights and optimizer state change.
    """
    progress.enter_phase(progress.FORWARD_BACKWARD)
    for chunk in model_chunks:  # a decoupled tower sets its own to zero, as it encodes
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    # The schedule also reduces the gradients (`finalize_model_grads_func`, set in `wrap_in_ddp`).
    row_reports = run_schedule(model_chunks, rows, seq_len=seq_len)

    # The flags travel with the losses, so that they need no collective of their own.
    progress.enter_phase(progress.UPDATING_WEIGHTS)
    device_sums = reduce_losses(row_reports, rows, grid, (has_failed, stop_requested), local_source_counts)
    mtp_config = get_attr_wrapped_model(model_chunks[0], "mtp_config")
    own_norm_group = MTP_GRAD_NORM_GROUP if mtp_config.loss and mtp_config.trains == "head" else None
    # The host waits for the device here, after it has launched what the norm needs.
    norms = gradient_norms(optimizer, own_norm_group)
    sums, (any_failed, any_stop), source_counts = device_sums.read()
    loss_sum, loss_tokens, more_metrics, more_text = split_sums(sums)
    mean_loss = loss_sum / loss_tokens if loss_tokens else math.nan

    is_updated, grad_norm = clip_and_update(
        optimizer, norms, loss_tokens, math.isfinite(mean_loss), own_norm_group, before_update
    )
    # `clip_and_update` has decided, also on a zero gradient, whose update would still decay moments and
    # weights. This finds the reason. Without loss tokens, the mean is NaN, but the sum is zero.
    is_finite = math.isfinite(loss_sum) and math.isfinite(grad_norm)
    skip_reason = "" if is_updated else NOT_FINITE
    if is_finite and not (loss_tokens and grad_norm):
        skip_reason = NO_GRADIENT if loss_tokens else NO_LOSS_TOKENS

    # The routers have counted the tokens of each expert during the passes. This sums the counts over ranks.
    core_config = model_chunks[0].config
    tokens_per_expert = None
    if num_experts := core_config.num_moe_experts:
        num_layers = core_config.num_layers + bool(mtp_config.loss)
        tokens_per_expert = expert_load(model_chunks, num_layers, num_experts, rows[0].tokens.device)
    return StepResult(
        mean_loss,
        loss_tokens,
        grad_norm,
        skip_reason,
        expert_load=tokens_per_expert,
        any_rank_failed=any_failed,
        stop_requested=any_stop,
        source_counts=source_counts,
        more_metrics=more_metrics,
        more_text=more_text,
    )


class DeviceSums(NamedTuple):
    """Sums of losses, flags, and samples, loss tokens and losses by source, in one tensor on the device."""

    values: Tensor
    num_sums: int
    num_flags: int

    def read(self) -> tuple[Tensor, list[bool], SourceCounts | None]:
        """Waits for the device.

        Returns:
            (sums, float64 [2] or [5] on the host, for :func:`split_sums`; for each flag whether any rank has
            set it; numbers by source, if the data set is a blend), equal on every rank.
        """
        bounds = [self.num_sums, self.num_sums + self.num_flags]
        loss_sums, flags, counts = self.values.cpu().tensor_split(bounds)
        return loss_sums, (flags > 0).tolist(), SourceCounts(*counts.view(3, -1)) if len(counts) else None


def reduce_losses(
    row_reports: list[dict[str, Tensor]],
    rows: list[DeviceRow],
    grid: ProcessGrid,
    local_flags: tuple[bool, ...] = (),
    local_source_counts: SourceCounts | None = None,
) -> DeviceSums:
    """Adds up the losses of the global batch over all ranks. Collective; the host does not wait.

    Args:
        row_reports: what :func:`run_schedule` returned for ``rows``, those of this rank.
        local_source_counts: samples and loss tokens of this rank's rows by source; None if the data set is
            not a blend.
    """
    # The losses of a row lie in equal copies on all tensor-parallel ranks of the last stage, and in parts on
    # its context-parallel ranks. All ranks of a replica know the counts of its rows, so only one of them adds
    # them.
    num_sums = 5 if rows[0].whole_row is not None else 2  # 5 with multi-token prediction
    sums = torch.tensor([0.0] * num_sums + [*local_flags], dtype=torch.float64)
    has_loss = grid.pp_rank == grid.pp - 1 and grid.tp_rank == 0
    if local_source_counts is not None:
        counts = torch.cat(local_source_counts)
        sums = torch.cat((sums, counts if has_loss and not grid.cp_rank else torch.zeros_like(counts)))
    sums = pin_memory(sums).to(rows[0].tokens.device, non_blocking=True)
    if has_loss:
        for report in row_reports:
            sums[:num_sums] += report["loss"].double()
        if local_source_counts is not None:
            num_sources = len(local_source_counts.losses)
            sums[-num_sources:] += _loss_by_source(row_reports, num_sources)
    dist.all_reduce(sums)  # one for all numbers of the step
    return DeviceSums(sums, num_sums, len(local_flags))


def split_sums(sums: Tensor) -> tuple[float, int, dict[str, float], str]:
    """(Loss sum, loss tokens, and of multi-token prediction the numbers by name and as text)."""
    loss_sum, loss_tokens, *of_targets = sums.tolist()
    return loss_sum, int(loss_tokens), *(mtp_metrics(*of_targets) if of_targets else ({}, ""))


def _loss_by_source(row_reports: list[dict[str, Tensor]], num_sources: int) -> Tensor:
    """Sums the losses of the reports' segments by source, float64 [sources].

    The sum runs over a table of sources and segments, because ``index_add`` is not deterministic on a GPU.
    Segments of other sources are masked, not multiplied by 0, so that a NaN shows only in its own source.
    """
    losses, source = (torch.cat([report[name] for report in row_reports]) for name in ("segments", "sources"))
    is_from_source = source == torch.arange(num_sources, device=source.device)[:, None]
    return torch.where(is_from_source, losses, 0.0).sum(1)
