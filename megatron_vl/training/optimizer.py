"""AdamW through Megatron-core, learning rates for the parts of the model, and their schedules."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey

from megatron_vl.config import TrainConfig
from megatron_vl.core_fixes.mixed_groups import number_as_listed
from megatron_vl.models.decoupled import groups_of_tower
from megatron_vl.parallel.ddp import ReplicaDDP
from megatron_vl.platform import Platform
from megatron_vl.training.offload.build import LaterMasters, chunked_state, keep_in_chunks
from megatron_vl.training.weight_copy import copy_weights_together

VISION = ("patch_embed", "position_table", "decoder")
"""Modules of the vision tower that have the tower's learning rate."""
MERGERS = ("merger", "deepstack_mergers")
"""Modules of the vision tower that have the merger's learning rate."""
Rates = dict[str, float | None]
"""Learning rate by part of the model: language, vision, merger; None: frozen."""


def build_optimizer(config: TrainConfig, platform: Platform, chunks: list[ReplicaDDP]) -> ChainedOptimizer:
    """The optimizer of this rank's trainable parameters. Biases and norms have no weight decay.

    The weights of a part with a rate of 0 do not change by a bit, because weight decay is scaled by the rate.
    Its moments still follow its gradients,
    so that a run that continues with another rate finds them up to date.
    """
    o = config.optimizer
    assert o.offload_fraction != "auto", "it is settled before (planning.offload)"

    core = CoreOptimizerConfig(
        optimizer="adam",
        lr=o.lr,
        min_lr=o.lr * o.min_lr_ratio,
        weight_decay=o.weight_decay,
        adam_beta1=o.beta1,
        adam_beta2=o.beta2,
        adam_eps=o.eps,
        clip_grad=o.clip_grad,
        bf16=config.dtype == "bfloat16",
        params_dtype=getattr(torch, config.dtype),
        use_distributed_optimizer=config.parallel.distributed_optimizer,
        overlap_param_gather=config.parallel.overlap_param_gather,
    )
    overrides: dict[ParamKey, Any] = dict(get_standard_config_overrides(core))

    for modules, rate in ((VISION, o.vision_lr), (MERGERS, o.merger_lr)):
        if rate is not None:
            names = tuple(
                f"{prefix}vision_model.{module}.*" for prefix in ("", "module.") for module in modules
            )
            overrides[ParamKey(name=names)] = {"max_lr": rate, "min_lr": rate * o.min_lr_ratio}

    moments = getattr(torch, o.moments_dtype)
    in_chunks = o.offload_fraction > 0 or moments != torch.float32
    with LaterMasters() if in_chunks else contextlib.nullcontext():
        optimizer = _core_optimizer(core, chunks, overrides)
    number_as_listed(optimizer)
    copy_weights_together(optimizer)
    chunked = keep_in_chunks(optimizer, o.offload_fraction, moments, platform)
    if chunked is not None and chunked.host_bytes and chunks[0].module.decoupled is None:
        # A tower that every rank holds runs around the pipeline, in the memory that copies would take.
        chunked.follow(chunks)

    return optimizer


def _core_optimizer(
    core: CoreOptimizerConfig, chunks: list[ReplicaDDP], overrides: dict[ParamKey, Any]
) -> ChainedOptimizer:
    """Core's optimizers of the chunks, and of a tower that every rank holds, as one chain."""
    optimizer = get_megatron_optimizer(
        core, chunks, config_overrides=overrides, use_gloo_process_groups=False
    )
    tower = chunks[0].module.decoupled
    if tower is None or tower.ddp is None:
        return optimizer
    of_tower = get_megatron_optimizer(
        core,
        [tower.ddp],
        config_overrides=overrides,
        use_gloo_process_groups=False,
        pg_collection=groups_of_tower(),
    )
    parts = (optimizer, of_tower)
    return ChainedOptimizer([part for chain in parts for part in chain.chained_optimizers])


def learning_rate(step: int, *, peak: float, final: float, steps: int, warmup: int, schedule: str) -> float:
    """The rate of the zero-based ``step``:
    linear warm-up to ``peak``, then constant or cosine down to ``final``.

    The first step of a warm-up of n steps has rate peak / n, the n-th has the peak; the last step of the run
    has (almost) the final rate. A pure function of the step, so a resumed run needs no schedule state.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    progress = (step - warmup) / max(1, steps - warmup)
    return final + (peak - final) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def rate_of(config: TrainConfig, step: int, peak: float) -> float:
    """The rate at the zero-based ``step`` of a part whose highest rate is ``peak``."""
    o = config.optimizer
    final = peak * o.min_lr_ratio
    return learning_rate(
        step, peak=peak, final=final, steps=config.steps, warmup=o.warmup_steps, schedule=o.schedule
    )


SCHEDULE = "schedule"
"""The entry of a checkpoint's ``run.json`` with :func:`schedule_facts`."""


def schedule_facts(config: TrainConfig) -> dict[str, Any]:
    """The fields of a run that decide the learning rate of each step."""
    o = config.optimizer
    fields = {name: getattr(o, name) for name in ("lr", "min_lr_ratio", "schedule", "warmup_steps")}
    return {"steps": config.steps, **{f"optimizer.{name}": value for name, value in fields.items()}}


def changed_schedule(config: TrainConfig, saved: dict[str, Any], step: int) -> str:
    """A note if other fields than the saved ones give the next step another learning rate; otherwise empty.

    Args:
        saved: the result of :func:`schedule_facts` when the checkpoint was saved; empty: it is not known.
        step: the next step, zero-based.
    """
    now = schedule_facts(config)
    if any(type(saved.get(name)) is not type(value) for name, value in now.items()):
        return ""

    before, after = (
        learning_rate(
            step,
            peak=facts["optimizer.lr"],
            final=facts["optimizer.lr"] * facts["optimizer.min_lr_ratio"],
            steps=facts["steps"],
            warmup=facts["optimizer.warmup_steps"],
            schedule=facts["optimizer.schedule"],
        )
        for facts in (saved, now)
    )
    if before == after:
        return ""
    changed = [f"{name} was {saved[name]}, is {value}" for name, value in now.items() if saved[name] != value]
    return f"the learning rate goes on at {after:.3e}, and was to be {before:.3e}: {', '.join(changed)}"


def set_learning_rates(optimizer: ChainedOptimizer, config: TrainConfig, step: int) -> Rates:
    """Sets every group's rate and weight decay for ``step``. Returns the rate of each part."""
    for group in optimizer.param_groups:
        group["lr"] = rate_of(config, step, group.get("max_lr", config.optimizer.lr))  # which may be 0
        group["weight_decay"] = config.optimizer.weight_decay * group.get("wd_mult", 1.0)

    o, model = config.optimizer, config.model
    peaks = {"language": o.lr, "vision": o.vision_lr, "merger": o.merger_lr}
    frozen = {"language": model.freeze_language, "vision": model.freeze_vision, "merger": model.freeze_merger}
    rates = {part: rate_of(config, step, o.lr if peak is None else peak) for part, peak in peaks.items()}
    return {part: None if frozen[part] else rate for part, rate in rates.items()}


@torch.no_grad()
def update(optimizer: ChainedOptimizer, wanted: bool) -> tuple[bool, float]:
    """Clips gradients and updates weights. Collective.

    Returns (whether the weights were updated, the global gradient norm).

    Core's own ``step`` computes the norm but continues if it is NaN.
    Here the norm, which is equal on every rank, decides.

    Args:
        wanted: whether the step's loss allows an update; equal on all ranks. If not, weights, moments and
            Adam's step count do not change.
    """
    overflow = optimizer.prepare_grads()
    norm = optimizer.get_grad_norm()
    norm = float(norm) if norm is not None else 0.0
    if overflow or not wanted or not math.isfinite(norm):
        if chunked := chunked_state(optimizer):
            chunked.traffic.drop()
        return False, norm
    for part in optimizer.chained_optimizers:
        if getattr(part, "is_stub_optimizer", False) or part.config.clip_grad <= 0.0:
            continue
        parameters = part.get_parameters()
        if parameters:
            clip_grad_by_total_norm_fp32(parameters, max_norm=part.config.clip_grad, total_norm=norm)
    return bool(optimizer.step_with_ready_grads()), norm
