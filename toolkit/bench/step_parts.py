"""Times the parts of a step on each rank.

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
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

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
    """Named spans of the steps of a rank, on the device's own clock. It notes them while it is running."""

    def __init__(self, trainer: Trainer) -> None:
        self.on_cuda, self.is_running = trainer.platform.name == "cuda", False
        self.spans_by_step: list[list[tuple[str, Any, Any]]] = []
        self.open_spans: dict[str, Any] = {}
        for chunk in trainer.model_chunks:
            self._time_module(chunk.module, "chunk")
            for name, module in chunk.module.named_modules():
                if name == "vision_model":
                    trained = (weight for weight in module.parameters() if weight.requires_grad)
                    self._time_module(module, "vision", next(trained, None))
                elif name.endswith("output_layer"):
                    self._time_module(module, "output")
                elif hasattr(module, "router"):
                    self._time_module(module, "experts")
        decoupled_tower = trainer.model_chunks[0].module.decoupled
        for method, name in DECOUPLED_SPANS.items() if decoupled_tower is not None else ():
            self.time_method(decoupled_tower, method, name)
        core_config = trainer.model_chunks[0].module.config
        self.time_method(core_config, "finalize_model_grads_func", "gradient finalisation")
        self.time_method(trainer.optimizer, "prepare_grads", "optimizer", ends=False)
        self.time_method(trainer.optimizer, "step_with_ready_grads", "optimizer", begins=False)

    def begin_step(self) -> None:
        """Begins a step on all ranks at once. Collective."""
        dist.barrier()
        self.is_running = True
        self.spans_by_step.append([])
        self._begin("step")

    def end_step(self) -> None:
        self._end("step")
        self.is_running = False

    def _begin(self, name: str) -> None:
        if self.is_running:
            self.open_spans[name] = self._timestamp()

    def _end(self, name: str) -> None:
        """Ends a span. One that was not begun is not counted."""
        if (start := self.open_spans.pop(name, None)) is not None:
            self.spans_by_step[-1].append((name, start, self._timestamp()))

    def _timestamp(self) -> Any:
        if not self.on_cuda:
            return time.perf_counter()
        cuda_event = torch.cuda.Event(enable_timing=True)
        cuda_event.record()
        return cuda_event

    def time_method(
        self, owner: Any, method: str, name: str, *, begins: bool = True, ends: bool = True
    ) -> None:
        """Times the calls of a method of this instance, or only begins or ends a span there."""
        function = getattr(owner, method)

        def timed_call(*args: Any, **keywords: Any) -> Any:
            if begins:
                self._begin(name)
            result = function(*args, **keywords)
            if ends:
                self._end(name)
            return result

        setattr(owner, method, timed_call)

    def _time_module(self, module: nn.Module, name: str, last_gradient: nn.Parameter | None = None) -> None:
        """Times both passes of a module.

        The backward pass ends with the gradient of ``last_gradient``, the module's first parameter; without
        one, with that of its input, and that of a chunk with the whole backward pass.
        """
        forward, backward = f"{name} forward", f"{name} backward"

        def begin_backward(_: Any) -> None:
            if not self.is_running or backward in self.open_spans:  # another output has begun it
                return
            self._begin(backward)
            if name == "chunk":
                torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(backward))

        def begin_forward(_module: Any, args: tuple[Any, ...]) -> None:
            self._begin(forward)
            ends_with_input = self.is_running and name != "chunk" and last_gradient is None
            if ends_with_input and args and args[0].requires_grad:
                args[0].register_hook(lambda _: self._end(backward))

        def end_forward(_module: Any, _args: Any, output: Any) -> None:
            self._end(forward)
            for tensor in output if isinstance(output, (list, tuple)) else [output]:
                if self.is_running and isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(begin_backward)

        module.register_forward_pre_hook(begin_forward)
        module.register_forward_hook(end_forward)
        if last_gradient is not None:
            last_gradient.register_post_accumulate_grad_hook(lambda _: self._end(backward))

    def take_seconds(self) -> list[Counter[str]]:
        """The total time of each name in each step since the last call. The device must have finished."""
        steps, self.spans_by_step = self.spans_by_step, []
        step_seconds: list[Counter[str]] = [Counter() for _ in steps]
        for seconds, spans in zip(step_seconds, steps, strict=True):
            for name, start, end in spans:
                seconds[name] += start.elapsed_time(end) / 1e3 if self.on_cuda else end - start
        return step_seconds


def split_into_parts(spans: Counter[str], data_wait: float) -> list[float]:
    """The seconds of each of ``STEP_PARTS`` in one step of one rank. They add up to the step."""
    parts: dict[str, float] = {name: spans[name] for name in STEP_PARTS}
    parts["data wait"] = min(data_wait, parts["feed"])
    parts["feed"] -= parts["data wait"]
    # A tower inside a chunk is part of the chunk's span; a tower on every rank is not.
    for way in ("forward", "backward"):
        parts[f"language {way}"] = spans[f"chunk {way}"] - parts[f"vision {way}"]
        parts[f"vision {way}"] += spans[f"tower {way}"]
    parts["idle"] = spans["step"] - sum(parts.values())
    return list(parts.values())


def summarize_parts(parts_by_rank: Sequence[list[list[float]]], stages: Sequence[int]) -> dict[str, Any]:
    """Summarises the parts of each step of all ranks, whose pipeline stages are ``stages``.

    Straggling compares the data-parallel ranks of one stage step by step, because the slowest of them
    determines the time of each step.
    """
    seconds = np.array(parts_by_rank)  # [rank, step, part]
    ranks_by_stage = [np.array(stages) == stage for stage in sorted(set(stages))]
    compute = seconds[:, :, [STEP_PARTS.index(name) for name in COMPUTE_PARTS]].sum(2)
    stragglers = [compute[ranks].max(0).sum() / compute[ranks].mean(0).sum() for ranks in ranks_by_stage]
    idle_share = seconds[:, :, -1].sum() / seconds.sum() if len(ranks_by_stage) > 1 else 0.0
    stage_means = [seconds[ranks].mean((0, 1)).tolist() for ranks in ranks_by_stage]
    return {
        "parts": {
            name: {"mean_s": float(times.mean()), "max_s": float(times.max())}
            for name, times in zip(STEP_PARTS, seconds.mean(1).T, strict=True)
        },
        "parts_by_stage": [dict(zip(STEP_PARTS, means, strict=True)) for means in stage_means],
        "slowest_over_mean": float(max(stragglers)),
        "pipeline_idle_share": float(idle_share),
    }


def tflops_by_part(spans: Counter[str], work: Counter[str]) -> dict[str, float]:
    """TFLOP/s that each part of the model reaches in its own time on a rank, counting what training needs.

    Args:
        spans: seconds of all ranks and steps.
        work: FLOPs of the same steps, by part.
    """

    def both(name: str) -> float:
        return spans[f"{name} forward"] + spans[f"{name} backward"]

    seconds = {"tower": both("vision") + both("tower"), "decoder": both("chunk") - both("vision")}
    seconds |= {name: both(name) for name in ("experts", "output")}
    seconds["decoder"] -= both("experts") + both("output")
    return {
        name: work[f"{name} flops"] / part_seconds / 1e12
        for name, part_seconds in seconds.items()
        if work[f"{name} flops"] and part_seconds > 0
    }
