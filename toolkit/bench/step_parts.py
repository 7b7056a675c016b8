"""Times the parts of a step on each rank, and its collectives.

Marks around the parts are recorded in the order of the device's work, and read when all steps are done, so
that the host never waits for them. The parts do not overlap:

- ``data wait``: the rank that owns the loader waits for its rows. ``feed``: copies and broadcasts of rows.
- ``vision forward``, ``vision backward``, ``language forward``, ``language backward``: the compute of this
  rank's chunks, including the tensor-parallel collectives and the recomputation inside them.
- ``vision recompute``, ``vision exchange``: with a tower on every rank, its second forward pass, and the
  messages with features and their gradients, including the time to wait for slower ranks.
- ``gradient finalisation``: the part of the gradient reduction that remains after the backward pass, and the
  time to wait for slower ranks.
- ``optimizer``: norm, clipping, update, and the part of the parameter gather that is not overlapped.
- ``idle``: the rest of the step. In a pipeline, this is mostly the bubble and the time to wait for messages.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from megatron_vl.estimate.flops import ModelFlops
from megatron_vl.training.trainer import Trainer

COMPUTE_PARTS = (
    *("vision forward", "vision recompute", "vision backward"),
    *("language forward", "language backward"),
)
STEP_PARTS = (
    *("data wait", "feed", *COMPUTE_PARTS),
    *("vision exchange", "gradient finalisation", "optimizer", "idle"),
)
DECOUPLED_SPANS = {
    "forward": "tower forward",
    "run_forward_again": "vision recompute",
    "backward_call": "tower backward",
    "to_first": "vision exchange",
    "to_owners": "vision exchange",
    "reduce": "gradient finalisation",
}
"""The span of each method of a tower that every rank holds."""


class PartTimer:
    """Named spans of the steps of a rank, on the device's own clock. The constructor attaches it."""

    def __init__(self, trainer: Trainer) -> None:
        self.on_cuda = trainer.platform.name == "cuda"
        self.spans_by_step: list[list[tuple[str, Any, Any]]] = []
        self.open_spans: dict[str, Any] = {}
        self.attached = ExitStack()
        """Detaches the timer when it is closed."""

        self._time_method(trainer.batches, "next_batch", "feed")
        for chunk in trainer.model_chunks:
            self._time_module(chunk.module, "chunk")
            if (tower := getattr(chunk.module, "vision_model", None)) is not None:
                trained = (weight for weight in tower.parameters() if weight.requires_grad)
                self._time_module(tower, "vision", next(trained, None))
        decoupled_tower = trainer.model_chunks[0].module.decoupled
        for method, name in DECOUPLED_SPANS.items() if decoupled_tower is not None else ():
            self._time_method(decoupled_tower, method, name)
        core_config = trainer.model_chunks[0].module.config
        self._time_method(core_config, "finalize_model_grads_func", "gradient finalisation")
        self._time_method(trainer.optimizer, "prepare_grads", "optimizer", ends=False)
        self._time_method(trainer.optimizer, "step_with_ready_grads", "optimizer", begins=False)

    def begin_step(self) -> None:
        """Begins a step on all ranks at once. Collective."""
        dist.barrier()
        self.spans_by_step.append([])
        self.begin("step")

    def begin(self, name: str) -> None:
        self.open_spans[name] = self._timestamp()

    def end(self, name: str) -> None:
        """Ends a span. One that was not begun is not counted."""
        if (start := self.open_spans.pop(name, None)) is not None:
            self.spans_by_step[-1].append((name, start, self._timestamp()))

    def _timestamp(self) -> Any:
        if not self.on_cuda:
            return time.perf_counter()
        cuda_event = torch.cuda.Event(enable_timing=True)
        cuda_event.record()
        return cuda_event

    def _time_method(
        self, owner: Any, method: str, name: str, *, begins: bool = True, ends: bool = True
    ) -> None:
        """Times the calls of a method of this instance, or only begins or ends a span there."""
        function, own_function = getattr(owner, method), vars(owner).get(method)

        def timed_call(*args: Any, **keywords: Any) -> Any:
            if begins:
                self.begin(name)
            result = function(*args, **keywords)
            if ends:
                self.end(name)
            return result

        setattr(owner, method, timed_call)
        if own_function is None:
            self.attached.callback(delattr, owner, method)  # which shows the method of the class again
        else:
            self.attached.callback(setattr, owner, method, own_function)

    def _time_module(self, module: nn.Module, name: str, last_gradient: nn.Parameter | None = None) -> None:
        """Times both passes of a module.

        Args:
            last_gradient: the module's first parameter, whose gradient comes last and ends the backward pass;
                None: it ends with the whole backward pass.
        """
        backward = f"{name} backward"

        def begin_backward(_: Any) -> None:
            if backward in self.open_spans:  # another output has begun it
                return
            self.begin(backward)
            if last_gradient is None:
                torch.autograd.Variable._execution_engine.queue_callback(lambda: self.end(backward))

        def end_forward(_module: Any, _args: Any, output: Any) -> None:
            self.end(f"{name} forward")
            for tensor in output if isinstance(output, (list, tuple)) else [output]:
                if tensor.requires_grad:
                    tensor.register_hook(begin_backward)

        begin_forward = module.register_forward_pre_hook(lambda *_: self.begin(f"{name} forward"))
        self.attached.callback(begin_forward.remove)
        self.attached.callback(module.register_forward_hook(end_forward).remove)
        if last_gradient is not None:
            handle = last_gradient.register_post_accumulate_grad_hook(lambda _: self.end(backward))
            self.attached.callback(handle.remove)

    def seconds_by_step(self) -> list[dict[str, float]]:
        """The total time of each name in each step. The device must have finished."""
        step_seconds: list[dict[str, float]] = []
        for spans in self.spans_by_step:
            step_seconds.append({})
            for name, start, end in spans:
                seconds = start.elapsed_time(end) / 1e3 if self.on_cuda else end - start
                step_seconds[-1][name] = step_seconds[-1].get(name, 0.0) + seconds
        return step_seconds


def split_into_parts(spans: dict[str, float], data_wait: float) -> dict[str, float]:
    """The parts of one step of one rank, in seconds, from its spans. They add up to the step."""
    parts = dict.fromkeys(STEP_PARTS, 0.0) | {name: spans[name] for name in STEP_PARTS if name in spans}
    parts["data wait"] = min(data_wait, parts["feed"])
    parts["feed"] -= parts["data wait"]
    # A tower inside a chunk is part of the chunk's span; a tower on every rank is not.
    for way in ("forward", "backward"):
        parts[f"language {way}"] = spans.get(f"chunk {way}", 0.0) - parts[f"vision {way}"]
        parts[f"vision {way}"] += spans.get(f"tower {way}", 0.0)
    parts["idle"] = spans["step"] - sum(parts.values())
    return parts


def summarize_parts(
    parts_by_rank: list[list[dict[str, float]]],
    stages: list[int],
    flops_by_rank: list[ModelFlops],
    peak_tflops: float,
) -> dict[str, Any]:
    """Summarises the parts of each step of all ranks, whose pipeline stages are ``stages``.

    Straggling compares the data-parallel ranks of one stage step by step, because the slowest of them
    determines the time of each step. Efficiency is the share of the peak that each half of the model reaches
    in its own time.
    """
    # [rank, step, part]
    seconds = np.array([[[step[name] for name in STEP_PARTS] for step in steps] for steps in parts_by_rank])
    ranks_by_stage = [np.array(stages) == stage for stage in sorted(set(stages))]
    compute = seconds[:, :, [STEP_PARTS.index(name) for name in COMPUTE_PARTS]].sum(2)
    efficiency = {}
    for half in ("language", "vision"):
        columns = [STEP_PARTS.index(f"{half} {way}") for way in ("forward", "backward")]
        half_seconds = seconds[:, :, columns].sum() * peak_tflops * 1e12
        half_flops = sum(getattr(flops, half) for flops in flops_by_rank)
        efficiency[half] = float(half_flops / half_seconds) if half_seconds and half_flops else None
    return {
        "parts": mean_and_max(STEP_PARTS, seconds.mean(1)),
        "parts_by_stage": [
            dict(zip(STEP_PARTS, seconds[ranks].mean((0, 1)).tolist(), strict=True))
            for ranks in ranks_by_stage
        ],
        "slowest_over_mean": max(
            float(compute[ranks].max(0).sum() / compute[ranks].mean(0).sum()) for ranks in ranks_by_stage
        ),
        "pipeline_idle_share": float(seconds[:, :, -1].sum() / seconds.sum())
        if len(ranks_by_stage) > 1
        else 0.0,
        "efficiency": efficiency,
    }


def mean_and_max(names: tuple[str, ...], seconds: np.ndarray) -> dict[str, dict[str, float]]:
    """The mean and the maximum over all ranks of each time of ``seconds`` [rank, name]."""
    columns = zip(names, seconds.mean(0).tolist(), seconds.max(0).tolist(), strict=False)
    return {name: {"mean_s": mean, "max_s": largest} for name, mean, largest in columns}


def collective_seconds(profile: torch.profiler.profile) -> list[float]:
    """Seconds of the collectives of a profile and, on GPUs, the part during which nothing else ran.

    A collective lasts until the slowest rank has joined it, so these figures include waiting.
    """
    collectives, others = [], []
    kineto_events: list[Any] = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in kineto_events:
        span = (event.start_ns(), event.start_ns() + event.duration_ns())
        if event.name().startswith(("nccl", "gloo:")):
            collectives.append(span)
        elif event.device_type() == torch.autograd.DeviceType.CUDA:
            others.append(span)
    exposed_time = covered_time(collectives + others) - covered_time(others)
    return [covered_time(collectives) / 1e9, *([exposed_time / 1e9] if others else [])]


def covered_time(spans: list[tuple[int, int]]) -> int:
    """The time that spans cover together, with overlaps counted once."""
    total_time = covered_until = 0
    for start, end in sorted(spans):
        total_time += max(0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return total_time
