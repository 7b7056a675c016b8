"""Times the parts of a step on each rank.

Marks around the parts are recorded in the order of the device's work, and read when all steps are done, so
that the host never waits for them. The parts do not overlap:

- ``data``: the wait for rows, their copies and broadcasts.
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

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_vl.training.trainer import Trainer

MEASURED_PARTS = ("data", "vision recompute", "vision exchange", "gradient finalisation", "optimizer")
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
        self.spans: list[tuple[str, Any, Any]] = []
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
        first_chunk = trainer.model_chunks[0].module
        if first_chunk.decoupled is not None:
            for method, name in DECOUPLED_SPANS.items():
                self.time_method(first_chunk.decoupled, method, name)
        self.time_method(first_chunk.config, "finalize_model_grads_func", "gradient finalisation")
        self.time_method(trainer.optimizer, "prepare_grads", "optimizer")
        self.time_method(trainer.optimizer, "step_with_ready_grads", "optimizer")

    def begin_step(self) -> None:
        """Begins a step on all ranks at once. Collective."""
        dist.barrier()
        self.is_running = True
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
            self.spans.append((name, start, self._timestamp()))

    def _timestamp(self) -> Any:
        if not self.on_cuda:
            return time.perf_counter()
        cuda_event = torch.cuda.Event(enable_timing=True)
        cuda_event.record()
        return cuda_event

    def time_method(self, owner: Any, method: str, name: str) -> None:
        """Times the calls of a method of this instance."""
        function = getattr(owner, method)

        def timed_call(*args: Any, **keywords: Any) -> Any:
            self._begin(name)
            result = function(*args, **keywords)
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

    def take_seconds(self) -> Counter[str]:
        """The total time of each name since the last call. The device must have finished."""
        seconds: Counter[str] = Counter()
        for name, start, end in self.spans:
            seconds[name] += start.elapsed_time(end) / 1e3 if self.on_cuda else end - start
        self.spans = []
        return seconds


def split_into_parts(spans: Counter[str]) -> Counter[str]:
    """The seconds of each part on one rank. They add up to the step."""
    parts: Counter[str] = Counter({name: spans[name] for name in MEASURED_PARTS})
    # A tower inside a chunk is part of the chunk's span; a tower on every rank is not.
    for way in ("forward", "backward"):
        parts[f"language {way}"] = spans[f"chunk {way}"] - spans[f"vision {way}"]
        parts[f"vision {way}"] = spans[f"vision {way}"] + spans[f"tower {way}"]
    parts["idle"] = spans["step"] - parts.total()
    return parts


def summarize_parts(
    spans_by_rank: Sequence[tuple[Counter[str], int]], num_steps: int, work: Counter[str]
) -> dict[str, Any]:
    """The mean seconds of each part of a step on the ranks of each stage, and TFLOP/s that each part of the
    model reaches in its own time on a rank, counting what training needs.

    Args:
        spans_by_rank: each rank's seconds in ``num_steps`` steps, and its pipeline stage.
        work: FLOPs of the same steps, by part.
    """
    parts_by_stage = []
    for stage in sorted({stage for _, stage in spans_by_rank}):
        on_stage = [split_into_parts(spans) for spans, of_stage in spans_by_rank if of_stage == stage]
        total = {name: sum(parts[name] for parts in on_stage) for name in on_stage[0]}
        parts_by_stage.append({name: seconds / len(on_stage) / num_steps for name, seconds in total.items()})

    spans: Counter[str] = sum((spans for spans, _ in spans_by_rank), Counter())
    both = {
        name: spans[f"{name} forward"] + spans[f"{name} backward"] for name in ("chunk", "vision", "tower")
    }
    seconds = {name: spans[f"{name} forward"] + spans[f"{name} backward"] for name in ("experts", "output")}
    seconds |= {"tower": both["vision"] + both["tower"]}
    seconds["decoder"] = both["chunk"] - both["vision"] - seconds["experts"] - seconds["output"]
    reached = {
        name: work[f"{name} flops"] / part_seconds / 1e12
        for name, part_seconds in seconds.items()
        if work[f"{name} flops"] and part_seconds > 0
    }
    return {"parts_by_stage": parts_by_stage, "tflops_by_part": reached}
