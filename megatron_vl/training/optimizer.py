"""AdamW through Megatron-core, learning rates for the parts of the model, and their schedules."""

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey

from megatron_vl.config import OptimizerConfig, TrainConfig
from megatron_vl.core_fixes.mixed_dtype_groups import renumber_mixed_groups
from megatron_vl.models.decoupled import tower_process_groups
from megatron_vl.parallel.ddp import ReplicaDDP
from megatron_vl.platform import Platform
from megatron_vl.training.offload.build import DeferredMasterWeights, chunked_state, move_state_to_chunks
from megatron_vl.training.offload.chunked_step import ChunkedStep
from megatron_vl.training.weight_copy import copy_weights_together

PartLearningRates = dict[str, float | None]
"""Learning rate by part of the model: language, vision, merger. None stands for a frozen part."""


def _part_rate_overrides(optimizer_config: OptimizerConfig) -> dict[ParamKey, Any]:
    """Core's overrides for the vision tower and the merger, which may have learning rates of their own."""
    overrides: dict[ParamKey, Any] = {}
    for modules, rate in (
        (("patch_embed", "position_table", "decoder"), optimizer_config.vision_lr),
        (("merger", "deepstack_mergers"), optimizer_config.merger_lr),
    ):
        if rate is not None:
            # Core finds the parameters by name.
            names = (f"{prefix}vision_model.{module}.*" for prefix in ("", "module.") for module in modules)
            overrides[ParamKey(name=tuple(names))] = {
                "max_lr": rate,
                "min_lr": rate * optimizer_config.min_lr_ratio,
            }
    return overrides


def build_optimizer(
    config: TrainConfig, platform: Platform, model_chunks: list[ReplicaDDP]
) -> ChainedOptimizer:
    """The optimizer of this rank's trainable parameters. Biases and norms have no weight decay.

    The weights of a part with a rate of 0 do not change by a bit, because weight decay is scaled by the rate.
    Its moments still follow its gradients, so that a run that continues with another rate finds them up to
    date.
    """
    optimizer_config = config.optimizer
    assert optimizer_config.offload_fraction != "auto", "it is settled before (estimate.memory_check)"
    core_config = CoreOptimizerConfig(
        optimizer="adam",
        lr=optimizer_config.lr,
        min_lr=optimizer_config.lr * optimizer_config.min_lr_ratio,
        weight_decay=optimizer_config.weight_decay,
        adam_beta1=optimizer_config.beta1,
        adam_beta2=optimizer_config.beta2,
        adam_eps=optimizer_config.eps,
        clip_grad=optimizer_config.clip_grad,
        bf16=config.dtype == "bfloat16",
        params_dtype=getattr(torch, config.dtype),
        use_distributed_optimizer=config.parallel.distributed_optimizer,
        overlap_param_gather=model_chunks[0].ddp_config.overlap_param_gather,
    )
    config_overrides = get_standard_config_overrides(core_config) | _part_rate_overrides(optimizer_config)

    # If state moves to chunks, core must not allocate master weights that would only be freed again.
    moments_dtype = getattr(torch, optimizer_config.moments_dtype)
    state_is_chunked = optimizer_config.offload_fraction > 0 or moments_dtype != torch.float32
    with DeferredMasterWeights() if state_is_chunked else contextlib.nullcontext():
        optimizer = _chained_core_optimizer(core_config, model_chunks, config_overrides)

    # Chunks are laid out over the optimizer's groups, so these must be final.
    renumber_mixed_groups(optimizer)
    copy_weights_together(optimizer)
    state_chunks = move_state_to_chunks(optimizer, optimizer_config.offload_fraction, moments_dtype, platform)
    if state_chunks is not None and state_chunks.host_bytes:
        state_chunks.overlap_with_passes(model_chunks)

    model = config.model
    optimizer.trains_model = not (model.freeze_language and model.freeze_vision and model.freeze_merger)
    return optimizer


def _chained_core_optimizer(
    core_config: CoreOptimizerConfig, model_chunks: list[ReplicaDDP], config_overrides: dict[ParamKey, Any]
) -> ChainedOptimizer:
    """Core's optimizers of the chunks, and of a tower that every rank holds, as one chain."""
    optimizer = get_megatron_optimizer(
        core_config, model_chunks, config_overrides=config_overrides, use_gloo_process_groups=False
    )
    if (decoupled_tower := model_chunks[0].module.decoupled) is None or decoupled_tower.ddp is None:
        return optimizer
    tower_optimizer = get_megatron_optimizer(
        core_config,
        [decoupled_tower.ddp],
        config_overrides=config_overrides,
        use_gloo_process_groups=False,
        pg_collection=tower_process_groups(),
    )
    return ChainedOptimizer([*optimizer.chained_optimizers, *tower_optimizer.chained_optimizers])


def scheduled_rate(config: TrainConfig, step: int, peak_rate: float) -> float:
    """The rate at the zero-based ``step`` of a part of the model whose highest rate is ``peak_rate``.

    After a linear warm-up, it is constant, or falls to ``min_lr_ratio`` of the peak: along a cosine, along a
    line, or along a line over the last ``decay_steps`` alone (wsd). The first step of a warm-up of n steps
    has the rate ``peak_rate / n``, and the n-th has ``peak_rate``. The last step of the run has almost the
    final rate. The rate depends on the step alone, so a resumed run needs no state of the schedule.
    """
    schedule, warmup_steps, steps = config.optimizer.schedule, config.warmup_steps, config.steps
    if step < warmup_steps:
        return peak_rate * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak_rate
    final_rate = peak_rate * config.optimizer.min_lr_ratio
    first_step = max(warmup_steps, steps - config.decay_steps) if schedule == "wsd" else warmup_steps
    progress = min(1.0, max(0, step - first_step) / max(1, steps - first_step))
    share_left = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress
    return final_rate + (peak_rate - final_rate) * share_left


def peak_learning_rates(config: TrainConfig) -> PartLearningRates:
    settings = config.optimizer
    own_rates = {"language": settings.lr, "vision": settings.vision_lr, "merger": settings.merger_lr}
    return {
        part: (settings.lr if own_rate is None else own_rate) if config.trains_part(part) else None
        for part, own_rate in own_rates.items()
    }


def set_learning_rates(optimizer: ChainedOptimizer, config: TrainConfig, step: int) -> PartLearningRates:
    """Sets every group's rate and weight decay for ``step``. Returns the rate of each part."""
    for group in optimizer.param_groups:
        group["lr"] = scheduled_rate(config, step, group.get("max_lr", config.optimizer.lr))  # which may be 0
        group["weight_decay"] = config.optimizer.weight_decay * group.get("wd_mult", 1.0)

    return {
        part: None if peak_rate is None else scheduled_rate(config, step, peak_rate)
        for part, peak_rate in peak_learning_rates(config).items()
    }


@torch.no_grad()
def gradient_norms(optimizer: ChainedOptimizer, own_norm_group: str | None) -> list[float]:
    """The norm over the whole model of gradients that are sums over tokens, and that of ``own_norm_group``.

    Collective; the host waits for the device.
    """
    has_overflow = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm() or 0.0)
    norms = [math.nan if has_overflow else norm]
    if own_norm_group is not None:
        norms.append(_group_norm(optimizer, own_norm_group))
    return norms


@torch.no_grad()
def clip_and_update(
    optimizer: ChainedOptimizer,
    token_norms: list[float],
    loss_tokens: int,
    is_loss_finite: bool,
    own_norm_group: str | None,
    before_update: Callable[[], object],
) -> tuple[bool, float]:
    """Divides gradients by the number of loss tokens, clips them, and updates weights. Collective.

    Both are one multiplication: gradients of 7 billion parameters are 28 GB, which an H200 reads and writes
    in 14 ms. Gradients must be sums over tokens before; they may be so afterwards, too.

    Core's own ``step`` computes the norm but continues if it is NaN. Here the norm, which is equal on every
    rank, decides: if it is not finite, or is zero, weights, moments and Adam's step count do not change.

    Args:
        token_norms: what :func:`gradient_norms` returned.
        is_loss_finite: whether the step's loss is finite; equal on all ranks. If not, nothing changes either.
        own_norm_group: the parameters with this ``grad_norm_group`` are clipped by their own norm, so that
            the update of all others is what it is without them.

    Returns:
        (whether the weights were updated, the global norm of the divided gradients before they are clipped).
    """
    gradient_scale = 1.0 / max(1, loss_tokens)
    norms = [norm * gradient_scale for norm in token_norms]
    # Without the group, the model would skip a step without gradients.
    is_skipped_alone = own_norm_group is not None and optimizer.trains_model and not norms[0]
    grad_norm = 0.0 if is_skipped_alone else math.hypot(*norms)
    if not is_loss_finite or not math.isfinite(grad_norm) or not grad_norm:
        if state_chunks := chunked_state(optimizer):
            state_chunks.chunk_streamer.drop_slots()
        return False, grad_norm

    for sub_optimizer in optimizer.chained_optimizers:
        if not getattr(sub_optimizer, "is_stub_optimizer", False):
            # All gradients are clipped by the norm over the whole model, not over the optimizer's own part.
            max_norm = sub_optimizer.config.clip_grad
            model_factor, *group_factors = (
                gradient_scale * (min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0.0 else 1.0)
                for norm in norms
            )
            for group_factor in group_factors:
                members = (
                    p
                    for p in sub_optimizer.get_parameters()
                    if getattr(p, "grad_norm_group", None) == own_norm_group
                )
                _multiply_gradients(members, group_factor / model_factor)
            _scale_gradients(sub_optimizer, model_factor)
    before_update()
    return bool(optimizer.step_with_ready_grads()), grad_norm


def _group_norm(optimizer: ChainedOptimizer, norm_group: str) -> float:
    """The norm of gradients that core's norm leaves out. Collective over the same groups as that."""
    parts = optimizer.chained_optimizers
    chains = [parts] if optimizer.grads_states_parallel_group_is_shared() else [[part] for part in parts]
    norms = []
    for chain in chains:
        gradients = [g for part in chain for g in part.get_grads_for_grad_norm(norm_group)]
        group = chain[0].get_grad_stats_parallel_group()
        norms.append(float(get_grad_norm_fp32(gradients, grad_stats_parallel_group=group)))
    return math.hypot(*norms)


def _scale_gradients(sub_optimizer: Any, factor: float) -> None:
    """Multiplies the gradients of one optimizer of the chain, now or as its own kernel reads them."""
    step_function = sub_optimizer.optimizer.step
    if isinstance(step_function, ChunkedStep) and step_function.runs_own_kernel:
        step_function.gradient_scale = factor
    else:
        _multiply_gradients(sub_optimizer.get_parameters(), factor)


def _multiply_gradients(parameters: Iterable[Any], factor: float) -> None:
    if gradients := [p.grad for p in parameters if p.grad is not None and p.grad.numel()]:
        torch._foreach_mul_(gradients, factor)
