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

COMPUTE = ("vision forward", "vision recompute", "vision backward", "language forward", "language backward")
PARTS = ("data wait", "feed", *COMPUTE, "vision exchange", "gradient finalisation", "optimizer", "idle")
DECOUPLED = {
    "forward": "tower forward",
    "again": "vision recompute",
    "backward_call": "tower backward",
    "to_first": "vision exchange",
    "to_owners": "vision exchange",
    "reduce": "gradient finalisation",
}
"""The span of each method of a tower that every rank holds."""


class Marks:
    """Named spans of each step, on the device's own clock."""

    def __init__(self, platform: Platform) -> None:
        self.cuda = platform.name == "cuda"
        self.steps: list[list[tuple[str, Any, Any]]] = []
        self._open: dict[str, Any] = {}

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self, name: str) -> None:
        self._open[name] = self._now()

    def end(self, name: str) -> None:
        """Ends the span ``name``. A span that was not begun is not counted."""
        start = self._open.pop(name, None)
        if start is not None:
            self.steps[-1].append((name, start, self._now()))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        self.begin(name)
        yield
        self.end(name)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function so that each call is a span."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.span(name):
                return function(*args, **kwargs)

        return timed

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measures one step; its whole span is named ``step``."""
        self.steps.append([])
        with self.span("step"):
            yield

    def seconds(self) -> list[dict[str, float]]:
        """The total time of each name in each step. The device must have finished."""
        result = []
        for spans in self.steps:
            sums: dict[str, float] = {}
            for name, start, end in spans:
                took = start.elapsed_time(end) / 1e3 if self.cuda else end - start
                sums[name] = sums.get(name, 0.0) + took
            result.append(sums)
        return result


@contextmanager
def attached(
    marks: Marks, chunks: list[DistributedDataParallel], optimizer: ChainedOptimizer
) -> Iterator[None]:
    """A context in which the hooks are attached to a rank's chunks and optimizer."""
    handles: list[Any] = []
    for chunk in chunks:
        handles += _hook(marks, chunk.module, "chunk")
        tower = getattr(chunk.module, "vision_model", None)
        if tower is not None:
            handles += _hook(
                marks, tower, "vision", until=next((p for p in tower.parameters() if p.requires_grad), None)
            )
    everywhere = chunks[0].module.decoupled
    for method, span in DECOUPLED.items() if everywhere is not None else ():
        setattr(everywhere, method, marks.around(span, getattr(everywhere, method)))

    core = chunks[0].module.config
    finalize = core.finalize_model_grads_func

    def timed_finalize(*args: Any, **kwargs: Any) -> None:
        with marks.span("gradient finalisation"):
            finalize(*args, **kwargs)

    prepare, step = optimizer.prepare_grads, optimizer.step_with_ready_grads

    def timed_prepare(*args: Any, **kwargs: Any) -> Any:
        marks.begin("optimizer")
        return prepare(*args, **kwargs)

    def timed_step(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        marks.end("optimizer")
        return result

    core.finalize_model_grads_func = timed_finalize
    # Only this instance is changed. Deleting the attributes restores the methods of the class.
    optimizer.prepare_grads = timed_prepare
    optimizer.step_with_ready_grads = timed_step
    try:
        yield
    finally:
        core.finalize_model_grads_func = finalize
        del optimizer.prepare_grads, optimizer.step_with_ready_grads
        for handle in handles:
            handle.remove()
        for method in DECOUPLED if everywhere is not None else ():
            delattr(everywhere, method)


def _hook(
    marks: Marks, module: torch.nn.Module, name: str, until: torch.nn.Parameter | None = None
) -> list[Any]:
    """Marks ``name forward`` and ``name backward`` of a module.

    The backward span begins when the gradient of an output arrives. It ends with the gradient of ``until``,
    the module's first parameter, or, without ``until``, when the whole backward pass ends.
    """
    forward, backward = f"{name} forward", f"{name} backward"

    def started(grad: torch.Tensor) -> None:
        if backward in marks._open:  # another output of the same module
            return
        marks.begin(backward)
        if until is None:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: marks.end(backward))

    def after(_module: Any, _args: Any, output: Any) -> None:
        marks.end(forward)
        for tensor in output if isinstance(output, (list, tuple)) else [output]:
            if tensor.requires_grad:
                tensor.register_hook(started)

    handles = [
        module.register_forward_pre_hook(lambda *_: marks.begin(forward)),
        module.register_forward_hook(after),
    ]
    if until is not None:
        handles.append(until.register_post_accumulate_grad_hook(lambda _: marks.end(backward)))
    return handles


def split(step: dict[str, float], data_wait: float) -> dict[str, float]:
    """Computes the parts of one step of one rank, in seconds, from its spans. They add up to the step."""
    spans = {name: step.get(name, 0.0) for name in ("step", "feed", "gradient finalisation", "optimizer")}
    parts = {"data wait": min(data_wait, spans["feed"])}
    parts["feed"] = spans["feed"] - parts["data wait"]
    for way in ("forward", "backward"):
        vision = step.get(f"vision {way}", 0.0)
        parts[f"vision {way}"] = vision + step.get(f"tower {way}", 0.0)
        parts[f"language {way}"] = step.get(f"chunk {way}", 0.0) - vision
    parts |= {name: step.get(name, 0.0) for name in ("vision recompute", "vision exchange")}
    parts |= {name: spans[name] for name in ("gradient finalisation", "optimizer")}
    parts["idle"] = spans["step"] - sum(parts.values())
    return {name: parts[name] for name in PARTS}


def communication(platform: Platform, step: Callable[[], None]) -> dict[str, float]:
    """Seconds of the collectives in one profiled step and, on CUDA, the part during which nothing else ran.

    A collective lasts until the slowest rank has joined it, so these figures include waiting.
    """
    activity = (
        torch.profiler.ProfilerActivity.CUDA
        if platform.name == "cuda"
        else torch.profiler.ProfilerActivity.CPU
    )
    with torch.profiler.profile(activities=[activity], acc_events=True) as profile:
        step()
        platform.synchronize()

    collectives, others = [], []
    for event in profile.profiler.kineto_results.events():
        span = (event.start_ns(), event.start_ns() + event.duration_ns())
        if event.name().startswith(("nccl", "gloo:")):
            collectives.append(span)
        elif platform.name == "cuda" and event.device_type() == torch.autograd.DeviceType.CUDA:
            others.append(span)

    result = {"communication_s": length(collectives) / 1e9}
    if platform.name == "cuda":
        result["communication_exposed_s"] = (length(collectives + others) - length(others)) / 1e9
    return result


def length(spans: list[tuple[int, int]]) -> int:
    """The time that the spans cover together, with overlaps counted once."""
    total = 0
    reached = None
    for start, end in sorted(spans):
        if reached is None or start > reached:
            total = total + end - start
            reached = end
        elif end > reached:
            total = total + end - reached
            reached = end
    return total


def summarise(steps: list[list[dict[str, float]]], coordinates: list[tuple[int, int]]) -> dict[str, Any]:
    """Summarises the parts of all ranks.

    Straggling compares the data-parallel ranks of one stage step by step, because the slowest of them
    determines the time of each step.

    Args:
        steps: the parts of each step, for each rank.
        coordinates: (pipeline stage, data-parallel rank) of each rank.
    """
    number = len(steps[0])
    means = [{name: sum(step[name] for step in rank) / number for name in PARTS} for rank in steps]
    parts = {
        name: {
            "mean_s": sum(mean[name] for mean in means) / len(means),
            "max_s": max(mean[name] for mean in means),
        }
        for name in PARTS
    }

    stages: dict[int, list[int]] = {}
    for rank, (stage, _) in enumerate(coordinates):
        stages.setdefault(stage, []).append(rank)

    slowest = []
    for ranks in stages.values():
        compute = [[sum(steps[rank][i][name] for name in COMPUTE) for rank in ranks] for i in range(number)]
        most = sum(max(c) for c in compute)
        mean = sum(sum(c) / len(c) for c in compute)
        slowest.append((most / mean, most / number, mean / number))

    ratio, most, mean = max(slowest)
    whole = sum(sum(mean.values()) for mean in means)
    by_stage = [
        {name: sum(means[rank][name] for rank in ranks) / len(ranks) for name in PARTS}
        for _, ranks in sorted(stages.items())
    ]

    return {
        "parts": parts,
        "parts_by_stage": by_stage,
        "straggling": {"max_over_mean": ratio, "compute_max_s": most, "compute_mean_s": mean},
        "pipeline_idle_share": sum(m["idle"] for m in means) / whole if len(stages) > 1 else 0.0,
    }
