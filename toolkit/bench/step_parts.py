"""Measures where the time of a step goes on one rank.

Marks around the parts of a step are recorded in the order of the device's work (as CUDA events, or as clock
times on CPU). They are read when all steps are done, so that the host never waits for them. The hooks are
attached only for these steps.

The parts of a rank's step do not overlap:

- ``data wait``: the time for which the owner waits for its rows. ``feed``: the other work of bringing rows to
  the device, such as copies and broadcasts.
- ``vision forward``, ``vision backward``, ``language forward``, ``language backward``: the compute of this
  rank's chunks, including the tensor-parallel collectives and the recomputation inside them.
- ``vision recompute``, ``vision exchange``: with a tower on every rank, its second forward pass, and the
  messages with features and their gradients, including the time to wait for slower ranks.
- ``gradient finalisation``: the part of the gradient reduction that remains after the backward pass, and the
  time to wait for slower ranks.
- ``optimizer``: norm, clipping, update, and the part of the parameter gather that is not overlapped.
- ``idle``: the rest of the step. In a pipeline, this is mostly the bubble and the time to wait for messages.
  It also includes launch gaps and the reduction of the loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron_vl.platform import Platform

COMPUTE_PARTS = (
    "vision forward",
    "vision recompute",
    "vision backward",
    "language forward",
    "language backward",
)
STEP_PARTS = (
    "data wait",
    "feed",
    *COMPUTE_PARTS,
    "vision exchange",
    "gradient finalisation",
    "optimizer",
    "idle",
)
DECOUPLED_SPANS = {
    "forward": "tower forward",
    "again": "vision recompute",
    "backward_call": "tower backward",
    "to_first": "vision exchange",
    "to_owners": "vision exchange",
    "reduce": "gradient finalisation",
}
"""The span of each method of a tower that every rank holds."""


class SpanTimer:
    """Named spans of each step, on the device's own clock."""

    def __init__(self, platform: Platform) -> None:
        self.uses_cuda = platform.name == "cuda"
        self.spans_by_step: list[list[tuple[str, Any, Any]]] = []
        self._open_spans: dict[str, Any] = {}

    def _timestamp(self) -> Any:
        if not self.uses_cuda:
            return time.perf_counter()
        cuda_event = torch.cuda.Event(enable_timing=True)
        cuda_event.record()
        return cuda_event

    def begin_span(self, span_name: str) -> None:
        self._open_spans[span_name] = self._timestamp()

    def end_span(self, span_name: str) -> None:
        """Ends the span ``span_name``. A span that was not begun is not counted."""
        start = self._open_spans.pop(span_name, None)
        if start is not None:
            self.spans_by_step[-1].append((span_name, start, self._timestamp()))

    @contextmanager
    def time_span(self, span_name: str) -> Iterator[None]:
        self.begin_span(span_name)
        yield
        self.end_span(span_name)

    def time_calls(self, span_name: str, timed_function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function so that each call is a span."""

        def timed_call(*args: Any, **kwargs: Any) -> Any:
            with self.time_span(span_name):
                return timed_function(*args, **kwargs)

        return timed_call

    @contextmanager
    def time_step(self) -> Iterator[None]:
        """Measures one step; its whole span is named ``time_step``."""
        self.spans_by_step.append([])
        with self.time_span("step"):
            yield

    def seconds_by_step(self) -> list[dict[str, float]]:
        """The total time of each name in each step. The device must have finished."""
        step_seconds = []
        for step_spans in self.spans_by_step:
            seconds_by_span: dict[str, float] = {}
            for name, start, end in step_spans:
                span_seconds = start.elapsed_time(end) / 1e3 if self.uses_cuda else end - start
                seconds_by_span[name] = seconds_by_span.get(name, 0.0) + span_seconds
            step_seconds.append(seconds_by_span)
        return step_seconds


@contextmanager
def timing_hooks(
    span_timer: SpanTimer, ddp_chunks: list[DistributedDataParallel], optimizer: ChainedOptimizer
) -> Iterator[None]:
    """A context in which the hooks are attached to a rank's chunks and optimizer."""
    hook_handles: list[Any] = []
    for ddp_chunk in ddp_chunks:
        hook_handles += _hook_module(span_timer, ddp_chunk.module, "chunk")
        vision_tower = getattr(ddp_chunk.module, "vision_model", None)
        if vision_tower is not None:
            hook_handles += _hook_module(
                span_timer,
                vision_tower,
                "vision",
                last_grad_parameter=next(
                    (
                        tower_parameter
                        for tower_parameter in vision_tower.parameters()
                        if tower_parameter.requires_grad
                    ),
                    None,
                ),
            )
    decoupled_tower = ddp_chunks[0].module.decoupled
    for method_name, span_name in DECOUPLED_SPANS.items() if decoupled_tower is not None else ():
        setattr(
            decoupled_tower,
            method_name,
            span_timer.time_calls(span_name, getattr(decoupled_tower, method_name)),
        )

    core_config = ddp_chunks[0].module.config
    finalize_grads = core_config.finalize_model_grads_func

    def timed_finalize(*args: Any, **kwargs: Any) -> None:
        with span_timer.time_span("gradient finalisation"):
            finalize_grads(*args, **kwargs)

    prepare_grads, step_optimizer = optimizer.prepare_grads, optimizer.step_with_ready_grads

    def timed_prepare(*args: Any, **kwargs: Any) -> Any:
        span_timer.begin_span("optimizer")
        return prepare_grads(*args, **kwargs)

    def timed_step(*args: Any, **kwargs: Any) -> Any:
        step_result = step_optimizer(*args, **kwargs)
        span_timer.end_span("optimizer")
        return step_result

    core_config.finalize_model_grads_func = timed_finalize
    # Only this instance is changed. Deleting the attributes restores the methods of the class.
    optimizer.prepare_grads = timed_prepare
    optimizer.step_with_ready_grads = timed_step
    try:
        yield
    finally:
        core_config.finalize_model_grads_func = finalize_grads
        del optimizer.prepare_grads, optimizer.step_with_ready_grads
        for hook_handle in hook_handles:
            hook_handle.remove()
        for method_name in DECOUPLED_SPANS if decoupled_tower is not None else ():
            delattr(decoupled_tower, method_name)


def _hook_module(
    span_timer: SpanTimer,
    module: torch.nn.Module,
    span_prefix: str,
    last_grad_parameter: torch.nn.Parameter | None = None,
) -> list[Any]:
    """Marks ``name forward`` and ``name backward`` of a module.

    The backward span begins when the gradient of an output arrives. It ends with the gradient of
    ``last_grad_parameter``, the module's first parameter, or, without ``last_grad_parameter``, when the whole
    backward pass ends.
    """
    forward_span, backward_span = f"{span_prefix} forward", f"{span_prefix} backward"

    def begin_backward(output_grad: torch.Tensor) -> None:
        if backward_span in span_timer._open_spans:  # another output of the same module
            return
        span_timer.begin_span(backward_span)
        if last_grad_parameter is None:
            torch.autograd.Variable._execution_engine.queue_callback(
                lambda: span_timer.end_span(backward_span)
            )

    def end_forward(_module: Any, _args: Any, module_output: Any) -> None:
        span_timer.end_span(forward_span)
        for tensor in module_output if isinstance(module_output, (list, tuple)) else [module_output]:
            if tensor.requires_grad:
                tensor.register_hook(begin_backward)

    hook_handles = [
        module.register_forward_pre_hook(lambda *_: span_timer.begin_span(forward_span)),
        module.register_forward_hook(end_forward),
    ]
    if last_grad_parameter is not None:
        hook_handles.append(
            last_grad_parameter.register_post_accumulate_grad_hook(
                lambda _: span_timer.end_span(backward_span)
            )
        )
    return hook_handles


def split_into_parts(span_seconds: dict[str, float], data_wait: float) -> dict[str, float]:
    """Computes the parts of one step of one rank, in seconds, from its spans. They add up to the step."""
    main_spans = {}
    for name in ("step", "feed", "gradient finalisation", "optimizer"):
        main_spans[name] = span_seconds.get(name, 0.0)

    part_seconds = {"data wait": min(data_wait, main_spans["feed"])}
    part_seconds["feed"] = main_spans["feed"] - part_seconds["data wait"]
    for pass_direction in ("forward", "backward"):
        vision_seconds = span_seconds.get(f"vision {pass_direction}", 0.0)
        part_seconds[f"vision {pass_direction}"] = vision_seconds + span_seconds.get(
            f"tower {pass_direction}", 0.0
        )
        part_seconds[f"language {pass_direction}"] = (
            span_seconds.get(f"chunk {pass_direction}", 0.0) - vision_seconds
        )
    part_seconds |= {name: span_seconds.get(name, 0.0) for name in ("vision recompute", "vision exchange")}
    part_seconds |= {name: main_spans[name] for name in ("gradient finalisation", "optimizer")}
    part_seconds["idle"] = main_spans["step"] - sum(part_seconds.values())
    return {name: part_seconds[name] for name in STEP_PARTS}


def profile_communication(platform: Platform, run_step: Callable[[], None]) -> dict[str, float]:
    """Seconds of the collectives in one profiled step and, on CUDA, the part during which nothing else ran.

    A collective lasts until the slowest rank has joined it, so these figures include waiting.
    """
    profiler_activity = (
        torch.profiler.ProfilerActivity.CUDA
        if platform.name == "cuda"
        else torch.profiler.ProfilerActivity.CPU
    )
    with torch.profiler.profile(activities=[profiler_activity], acc_events=True) as step_profile:
        run_step()
        platform.synchronize()

    collective_spans, other_spans = [], []
    for kineto_event in step_profile.profiler.kineto_results.events():
        event_span = (kineto_event.start_ns(), kineto_event.start_ns() + kineto_event.duration_ns())
        if kineto_event.name().startswith(("nccl", "gloo:")):
            collective_spans.append(event_span)
        elif platform.name == "cuda" and kineto_event.device_type() == torch.autograd.DeviceType.CUDA:
            other_spans.append(event_span)

    communication_figures = {"communication_s": covered_time(collective_spans) / 1e9}
    if platform.name == "cuda":
        communication_figures["communication_exposed_s"] = (
            covered_time(collective_spans + other_spans) - covered_time(other_spans)
        ) / 1e9
    return communication_figures


def covered_time(time_spans: list[tuple[int, int]]) -> int:
    """The time that the spans cover together, with overlaps counted once."""
    total = 0
    covered_until = None
    for start, end in sorted(time_spans):
        if covered_until is None or start > covered_until:
            total = total + end - start
            covered_until = end
        elif end > covered_until:
            total = total + end - covered_until
            covered_until = end
    return total


def summarize_parts(
    parts_by_rank: list[list[dict[str, float]]], rank_coordinates: list[tuple[int, int]]
) -> dict[str, Any]:
    """Summarises the parts of all ranks.

    Straggling compares the data-parallel ranks of one stage step by step, because the slowest of them
    determines the time of each step.

    Args:
        parts_by_rank: the parts of each step, for each rank.
        rank_coordinates: (pipeline stage, data-parallel rank) of each rank.
    """
    step_count = len(parts_by_rank[0])
    mean_parts_by_rank = [
        {name: sum(step[name] for step in rank) / step_count for name in STEP_PARTS} for rank in parts_by_rank
    ]
    part_figures = {
        name: {
            "mean_s": sum(mean[name] for mean in mean_parts_by_rank) / len(mean_parts_by_rank),
            "max_s": max(mean[name] for mean in mean_parts_by_rank),
        }
        for name in STEP_PARTS
    }

    ranks_by_stage: dict[int, list[int]] = {}
    for rank, (pipeline_stage, _) in enumerate(rank_coordinates):
        ranks_by_stage.setdefault(pipeline_stage, []).append(rank)

    straggling_by_stage = []
    for stage_ranks in ranks_by_stage.values():
        compute_by_step = []
        for i in range(step_count):
            compute_by_step.append(
                [sum(parts_by_rank[rank][i][name] for name in COMPUTE_PARTS) for rank in stage_ranks]
            )

        max_seconds = sum(max(rank_seconds) for rank_seconds in compute_by_step)
        mean = sum(sum(rank_seconds) / len(rank_seconds) for rank_seconds in compute_by_step)
        straggling_by_stage.append((max_seconds / mean, max_seconds / step_count, mean / step_count))

    max_over_mean, max_seconds, mean = max(straggling_by_stage)
    total_seconds = sum(sum(mean.values()) for mean in mean_parts_by_rank)

    parts_by_stage = []
    for _, stage_ranks in sorted(ranks_by_stage.items()):
        parts_by_stage.append(
            {
                name: sum(mean_parts_by_rank[rank][name] for rank in stage_ranks) / len(stage_ranks)
                for name in STEP_PARTS
            }
        )

    return {
        "parts": part_figures,
        "parts_by_stage": parts_by_stage,
        "straggling": {"max_over_mean": max_over_mean, "compute_max_s": max_seconds, "compute_mean_s": mean},
        "pipeline_idle_share": sum(rank_means["idle"] for rank_means in mean_parts_by_rank) / total_seconds
        if len(ranks_by_stage) > 1
        else 0.0,
    }
