"""Measures the parts of a step's time on one rank.

Marks around the parts of a step are recorded in the order of the device's work (as CUDA events, or as clock
times on CPU). They are read when all steps are done, so that the host never waits for them. The hooks are
attached only for these steps.

The parts of a rank's step do not overlap:

- ``data wait``: the time for which the rank that owns the loader waits for its rows. ``feed``: the other work
  of bringing rows to the device, such as copies and broadcasts.
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
    "run_forward_again": "vision recompute",
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
        """Measures one step. Its whole span is named ``step``."""
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
            trained_parameters = (weight for weight in vision_tower.parameters() if weight.requires_grad)
            hook_handles += _hook_module(
                span_timer, vision_tower, "vision", last_grad_parameter=next(trained_parameters, None)
            )

    decoupled_tower = ddp_chunks[0].module.decoupled
    decoupled_spans = DECOUPLED_SPANS if decoupled_tower is not None else {}
    for method_name, span_name in decoupled_spans.items():
        timed_method = span_timer.time_calls(span_name, getattr(decoupled_tower, method_name))
        setattr(decoupled_tower, method_name, timed_method)

    core_config = ddp_chunks[0].module.config
    finalize_grads = core_config.finalize_model_grads_func
    prepare_grads, step_optimizer = optimizer.prepare_grads, optimizer.step_with_ready_grads

    def timed_prepare(*args: Any, **kwargs: Any) -> Any:
        span_timer.begin_span("optimizer")
        return prepare_grads(*args, **kwargs)

    def timed_step(*args: Any, **kwargs: Any) -> Any:
        step_result = step_optimizer(*args, **kwargs)
        span_timer.end_span("optimizer")
        return step_result

    core_config.finalize_model_grads_func = span_timer.time_calls("gradient finalisation", finalize_grads)
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
        for method_name in decoupled_spans:
            delattr(decoupled_tower, method_name)


def _hook_module(
    span_timer: SpanTimer,
    module: torch.nn.Module,
    span_prefix: str,
    last_grad_parameter: torch.nn.Parameter | None = None,
) -> list[Any]:
    """Marks the spans ``PREFIX forward`` and ``PREFIX backward`` of a module.

    The backward span begins when the gradient of an output arrives.

    Args:
        span_prefix: the PREFIX.
        last_grad_parameter: the module's first parameter, whose gradient comes last and ends the backward
            span; None: it ends with the whole backward pass.
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
    feed_seconds = span_seconds.get("feed", 0.0)
    part_seconds = {"data wait": min(data_wait, feed_seconds)}
    part_seconds["feed"] = feed_seconds - part_seconds["data wait"]
    # A tower inside a chunk is part of the chunk's span; a tower on every rank is not.
    for direction in ("forward", "backward"):
        vision_seconds = span_seconds.get(f"vision {direction}", 0.0)
        chunk_seconds = span_seconds.get(f"chunk {direction}", 0.0)
        tower_seconds = span_seconds.get(f"tower {direction}", 0.0)
        part_seconds[f"vision {direction}"] = vision_seconds + tower_seconds
        part_seconds[f"language {direction}"] = chunk_seconds - vision_seconds
    for name in ("vision recompute", "vision exchange", "gradient finalisation", "optimizer"):
        part_seconds[name] = span_seconds.get(name, 0.0)
    part_seconds["idle"] = span_seconds.get("step", 0.0) - sum(part_seconds.values())
    return {name: part_seconds[name] for name in STEP_PARTS}


def profile_communication(platform: Platform, run_step: Callable[[], object]) -> dict[str, float]:
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
        exposed_time = covered_time(collective_spans + other_spans) - covered_time(other_spans)
        communication_figures["communication_exposed_s"] = exposed_time / 1e9
    return communication_figures


def covered_time(time_spans: list[tuple[int, int]]) -> int:
    """The time that the spans cover together, with overlaps counted once."""
    total_time = 0
    covered_until = None
    for start, end in sorted(time_spans):
        if covered_until is None or start > covered_until:
            total_time += end - start
            covered_until = end
        elif end > covered_until:
            total_time += end - covered_until
            covered_until = end
    return total_time


def mean_and_max(seconds_by_rank: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """The mean and the maximum over all ranks of each of the times that they have."""
    figures_by_name = {}
    for name in seconds_by_rank[0]:
        rank_seconds = [seconds_by_name[name] for seconds_by_name in seconds_by_rank]
        figures_by_name[name] = {
            "mean_s": sum(rank_seconds) / len(rank_seconds),
            "max_s": max(rank_seconds),
        }
    return figures_by_name


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
    mean_parts_by_rank = []
    for rank_steps in parts_by_rank:
        mean_parts_by_rank.append(_mean_parts(rank_steps))

    ranks_by_stage: dict[int, list[int]] = {}
    for rank, (pipeline_stage, _) in enumerate(rank_coordinates):
        ranks_by_stage.setdefault(pipeline_stage, []).append(rank)

    straggling_by_stage = []
    for stage_ranks in ranks_by_stage.values():
        slowest_seconds = mean_seconds = 0.0
        for i in range(step_count):
            compute_by_rank = []
            for rank in stage_ranks:
                compute_by_rank.append(sum(parts_by_rank[rank][i][name] for name in COMPUTE_PARTS))
            slowest_seconds += max(compute_by_rank)
            mean_seconds += sum(compute_by_rank) / len(compute_by_rank)
        straggling_by_stage.append(
            (slowest_seconds / mean_seconds, slowest_seconds / step_count, mean_seconds / step_count)
        )

    parts_by_stage = []
    for _, stage_ranks in sorted(ranks_by_stage.items()):
        parts_by_stage.append(_mean_parts([mean_parts_by_rank[rank] for rank in stage_ranks]))

    max_over_mean, compute_max, compute_mean = max(straggling_by_stage)
    pipeline_idle_share = 0.0
    if len(ranks_by_stage) > 1:
        total_seconds = sum(sum(rank_means.values()) for rank_means in mean_parts_by_rank)
        idle_seconds = sum(rank_means["idle"] for rank_means in mean_parts_by_rank)
        pipeline_idle_share = idle_seconds / total_seconds

    return {
        "parts": mean_and_max(mean_parts_by_rank),
        "parts_by_stage": parts_by_stage,
        "straggling": {
            "max_over_mean": max_over_mean,
            "compute_max_s": compute_max,
            "compute_mean_s": compute_mean,
        },
        "pipeline_idle_share": pipeline_idle_share,
    }


def _mean_parts(all_parts: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each part over steps or ranks."""
    return {name: sum(parts[name] for parts in all_parts) / len(all_parts) for name in STEP_PARTS}
