"""One optimizer step: run the pipeline schedule over the rows, finalise gradients, update weights.

Gradients do not depend on the layout: the loss is a sum over tokens, and gradients are divided once by the
number of loss tokens of the whole global batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_vl import progress
from megatron_vl.config import TrainConfig
from megatron_vl.models.batch import DeviceRow
from megatron_vl.models.decoupled import DecoupledTower
from megatron_vl.models.moe.router import begin_step, expert_load, report_directly
from megatron_vl.models.vision_language import VisionLanguageModel
from megatron_vl.parallel.ddp import ReplicaDDP, connect_tower
from megatron_vl.parallel.grid import ProcessGrid
from megatron_vl.training.optimizer import update
from megatron_vl.training.source_counts import SourceCounts

NOT_FINITE, NO_LOSS_TOKENS = "not_finite", "no_loss_tokens"
SKIPPED = {NOT_FINITE: "loss or gradient is not finite", NO_LOSS_TOKENS: "no token of the step bears loss"}
"""The reasons for which a step's update is skipped. Weights, moments and Adam's step count then stay as they
are; data and learning-rate schedules advance."""


@dataclass
class StepResult:
    """Numbers of one step, equal on all ranks."""

    loss: float
    """Mean over the loss tokens of the global batch; NaN if there are none."""
    loss_tokens: int
    grad_norm: float
    skipped: str
    """A key of :data:`SKIPPED`; empty if the weights were updated."""
    expert_load: Tensor | None = None
    """Number of tokens by layer and expert, int64 [layers, experts] on the device; None for a dense model."""
    failed: bool = False
    """Whether any rank reported a failure outside the step, such as a checkpoint that cannot be written."""
    stop: bool = False
    """Whether any rank was asked to stop."""
    sources: SourceCounts | None = None
    """Samples, loss tokens and losses by source; None if the data set is no blend."""

    @property
    def updated(self) -> bool:
        return not self.skipped


def wrap(config: TrainConfig, chunks: list[VisionLanguageModel]) -> list[ReplicaDDP]:
    """Wraps the chunks in Megatron-core's DDP and sets the schedule's hooks in the language config."""
    p = config.parallel
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=p.overlap_grad_reduce,
        overlap_param_gather=p.overlap_param_gather,
        use_distributed_optimizer=p.distributed_optimizer,
        bucket_size=p.bucket_size,
    )

    core = chunks[0].config
    wrapped = [ReplicaDDP(core, ddp_config, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
    # Delayed scaling reduces the maxima of all layers over all ranks, so every rank must run all layers in
    # every row.
    tower_may_rest = not (config.fp8.recipe == "delayed" and config.fp8.vision)
    for chunk in wrapped:
        report_directly(chunk)
        if tower_may_rest:
            connect_tower(chunk)

    if p.overlap_grad_reduce:
        hooks = [chunk.no_sync for chunk in wrapped]
        core.no_sync_func = hooks if len(hooks) > 1 else hooks[0]
    core.finalize_model_grads_func = finalize_model_grads

    tower = chunks[0].decoupled
    if tower is not None:
        # The tower's gradients are reduced together, after the pipeline, when the number of loss tokens is
        # known.
        alone = dataclasses.replace(ddp_config, overlap_grad_reduce=False, overlap_param_gather=False)
        tower.wrap(alone)
        core.finalize_model_grads_func = partial(_finalize_and_pass_on, tower)
    core.grad_scale_func = None
    return wrapped


def _finalize_and_pass_on(tower: DecoupledTower, model: Any, num_tokens: Tensor, **options: Any) -> None:
    """Completes the gradients of the language model, and passes the number of loss tokens on to the tower.

    Core sums ``num_tokens`` over the ranks in place. The tower's gradients are completed later.
    """
    finalize_model_grads(model, num_tokens, **options)
    tower.tokens = num_tokens


def token_loss(row: DeviceRow, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(loss sum, loss tokens, report) of one row from its per-token losses [1, S].

    The report of a row of a blend also has the loss sum of each segment, float64, and the segments' sources.
    """
    weighted = losses.view(-1).float() * row.loss_mask
    total = weighted.sum()
    # Weights change the sum of the losses, not the number of tokens by which it is divided.
    tokens = (row.loss_mask != 0).sum()
    report = {"loss": torch.stack((total.detach(), tokens.float()))}
    if row.sources is not None and len(row.sources):
        # `unsafe` leaves out checks of the bounds, for which the host would wait.
        report["segments"] = torch.segment_reduce(
            weighted.detach().double(), "sum", offsets=row.local_segments.cu_seqlens, unsafe=True
        )
        report["sources"] = row.sources
    return total, tokens.to(torch.int), report


def forward_step(rows: Iterator[DeviceRow], model: torch.nn.Module) -> tuple[Tensor, Any]:
    """The function that core's schedules call for each micro-batch of each chunk."""
    row = next(rows)
    progress.tick()
    return model(row), partial(token_loss, row)


def run_schedule(
    chunks: list[DistributedDataParallel] | list[VisionLanguageModel],
    rows: list[Any],
    *,
    seq_len: int,
    forward_only: bool = False,
    step: Callable[[Iterator[Any], torch.nn.Module], tuple[Tensor, Any]] = forward_step,
    collect_non_loss_data: bool = False,
) -> list[Any]:
    """Runs the forward passes (and backward passes) of all rows through this rank's chunks.

    Args:
        rows: the inputs of ``step``, one for each micro-batch.
        forward_only: whether to leave out the backward passes.
        step: the function that core's schedules call, as :func:`forward_step`.
        collect_non_loss_data: whether the function that ``step`` returns gives only a report and no loss.

    Returns:
        The reports of the rows on the last stage; an empty list on other stages.
    """
    progress.tick()
    if not forward_only:
        begin_step(chunks, rows)

    iterators = [iter(rows) for _ in chunks]
    # Core uses the length only for the size of its messages, in which DeepStack's levels follow the hidden
    # state.
    parts = 1 + get_attr_wrapped_model(chunks[0], "message_levels")
    tower = get_attr_wrapped_model(chunks[0], "decoupled")
    if tower is not None:
        tower.encode(rows, train=not forward_only)

    reports = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(rows),
        seq_length=seq_len * parts,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
    )

    if tower is not None and not forward_only:
        tower.backward()
    return reports


def replicated_modules(chunks: list[ReplicaDDP]) -> list[ReplicaDDP]:
    """The DDP modules of this rank: its chunks, and the trained tower if every rank holds one."""
    tower = chunks[0].module.decoupled
    return [*chunks, tower.ddp] if tower is not None and tower.ddp is not None else list(chunks)


def train_step(
    chunks: list[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    rows: list[DeviceRow],
    grid: ProcessGrid,
    seq_len: int,
    failed: bool = False,
    stop: bool = False,
    learnt: SourceCounts | None = None,
) -> StepResult:
    """Runs one step over this rank's micro-batches. Collective over all ranks.

    Args:
        failed: whether this rank has failed outside the step. All ranks receive this flag with the loss.
        stop: whether this rank was asked to stop. All ranks receive this flag too.
        learnt: samples and loss tokens of this rank's rows by source; None if the data set is no blend.
    """
    progress.enter(progress.COMPUTING)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    reports = run_schedule(chunks, rows, seq_len=seq_len)
    progress.enter(progress.UPDATING)
    device = rows[0].tokens.device
    loss_sum, tokens, raised, sources = reduce_losses(reports, grid, device, (failed, stop), learnt)
    loss = loss_sum / tokens if tokens else math.nan
    # Without loss tokens, the gradient is zero, but an update would still decay moments and weights.
    updated, norm = update(optimizer, wanted=math.isfinite(loss))
    finite = math.isfinite(loss_sum) and math.isfinite(norm)
    skipped = "" if updated else NO_LOSS_TOKENS if finite and not tokens else NOT_FINITE

    core = chunks[0].config
    load = (
        expert_load(chunks, core.num_layers, core.num_moe_experts, device) if core.num_moe_experts else None
    )
    any_failed, any_stop = raised
    return StepResult(loss, tokens, norm, skipped, load, any_failed, any_stop, sources)


def reduce_losses(
    reports: list[dict[str, Tensor]],
    grid: ProcessGrid,
    device: torch.device,
    flags: tuple[bool, ...] = (),
    learnt: SourceCounts | None = None,
) -> tuple[float, int, list[bool], SourceCounts | None]:
    """Adds up the losses of the global batch over all ranks. Collective.

    This is the only host synchronisation of a step.

    Args:
        learnt: samples and loss tokens of this rank's rows by source; None if the data set is no blend.

    Returns:
        (loss sum, loss tokens, whether any rank set each flag, numbers by source), equal on every rank.
    """
    counts = learnt.flat() if learnt is not None else []
    has_loss = grid.is_last_stage and grid.tp_rank == 0
    if not has_loss or grid.cp_rank:  # the counts of a replica are added once
        counts = [0.0] * len(counts)
    mine = torch.tensor([0.0, 0.0, *map(float, flags), *counts], dtype=torch.float64, device=device)
    if has_loss:
        for report in reports:
            mine[:2] += report["loss"].double()
        if learnt is not None:
            sources = len(learnt.losses)
            mine[-sources:] += _loss_by_source(reports, sources)
    dist.all_reduce(mine)

    total, tokens, *rest = mine.tolist()
    raised = [count > 0 for count in rest[: len(flags)]]
    by_source = SourceCounts.from_flat(rest[len(flags) :]) if learnt is not None else None
    return total, int(tokens), raised, by_source


def _loss_by_source(reports: list[dict[str, Tensor]], sources: int) -> Tensor:
    """Sums the losses of the reports' segments by source, float64 [sources].

    This sums over a table. An addition by index has no fixed order on a GPU, so its bits vary. Segments of
    other sources are masked, not multiplied by 0, so that a NaN shows only in its own source.
    """
    losses = torch.cat([report["segments"] for report in reports])
    source = torch.cat([report["sources"] for report in reports])
    own = source == torch.arange(sources, device=source.device)[:, None]
    return torch.where(own, losses, 0.0).sum(1)
