"""Times the parts of a step on each rank.

Marks around the parts are recorded in the order of the device's work, and read when all steps are done, so
that the host never waits for them. Waits for other ranks count for the part that waits:

- ``data``: the wait for rows, their copies and broadcasts.
- ``vision`` and ``language``, ``forward`` and ``backward``: the compute of this rank's chunks, with the
  tensor-parallel collectives and the recomputation inside them.
- ``vision recompute``, ``vision exchange``: a decoupled tower's second forward pass, and its messages.
- ``gradient finalisation``: the part of the gradient reduction that remains after the backward pass.
- ``optimizer``: norm, clipping, update, and the part of the parameter gather that is not overlapped.
- ``idle``: the rest of the step; in a pipeline, mostly the bubble.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_vl.training.trainer import Trainer

MEASURED_PARTS = ("data", "vision recompute", "vision exchange", "gradient finalisation", "optimizer")
CORE_SPANS = {"forward-compute": "chunk forward", "backward-compute": "chunk backward"}
"""The span of each of core's timers; there are others."""
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
        first_chunk = trainer.model_chunks[0].module
        first_chunk.config.timers = self  # core's schedules begin and end the passes of chunks
        self.time_method(first_chunk.config, "finalize_model_grads_func", "gradient finalisation")
        self.time_method(trainer.optimizer, "prepare_grads", "optimizer")
        self.time_method(trainer.optimizer, "step_with_ready_grads", "optimizer")
        for method, name in DECOUPLED_SPANS.items() if first_chunk.decoupled is not None else ():
            self.time_method(first_chunk.decoupled, method, name)
        for chunk in trainer.model_chunks:
            if chunk.module.vision_model is not None:
                self._time_tower(chunk.module.vision_model)

    def __call__(self, name: str, log_level: int = 0) -> SimpleNamespace:
        """The timer that core asks for."""
        span = CORE_SPANS.get(name, "")
        return SimpleNamespace(start=lambda **_: self._begin(span), stop=lambda **_: self._end(span))

    def begin_step(self) -> None:
        """Begins a step on all ranks at once. Collective."""
        dist.barrier()
        self.is_running = True
        self._begin("step")

    def end_step(self) -> None:
        self._end("step")
        self.is_running = False

    def _begin(self, name: str) -> None:
        # A span may have begun already: a tower has several outputs.
        if self.is_running and name and name not in self.open_spans:
            self.open_spans[name] = self._timestamp()

    def _end(self, name: str) -> None:
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

    def _time_tower(self, tower: nn.Module) -> None:
        """Times both passes of a tower. The backward pass ends with the gradient of its first trained
        parameter."""

        def end_forward(_module: Any, _args: Any, output: Any) -> None:
            self._end("vision forward")
            for tensor in output if isinstance(output, (list, tuple)) else [output]:
                if self.is_running and isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: self._begin("vision backward"))

        tower.register_forward_pre_hook(lambda *_: self._begin("vision forward"))
        tower.register_forward_hook(end_forward)
        first_trained = next((weight for weight in tower.parameters() if weight.requires_grad), None)
        if first_trained is not None:
            first_trained.register_post_accumulate_grad_hook(lambda _: self._end("vision backward"))

    def mean_parts(self, stage: int, num_steps: int) -> list[dict[str, float]]:
        """The mean seconds of each part of a step on the ranks of each pipeline stage, of which this rank's
        is ``stage``. The device must have finished. Collective."""
        seconds: Counter[str] = Counter()
        for name, start, end in self.spans:
            seconds[name] += (start.elapsed_time(end) / 1e3 if self.on_cuda else end - start) / num_steps
        self.spans = []
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (stage, split_into_parts(seconds)))
        by_stage = [[parts for at, parts in found if at == n] for n in sorted({at for at, _ in found})]
        return [
            {name: statistics.mean(parts[name] for parts in ranks) for name in ranks[0]} for ranks in by_stage
        ]


def split_into_parts(spans: Counter[str]) -> dict[str, float]:
    """The seconds of each part on one rank. They add up to the step."""
    parts = {name: float(spans[name]) for name in MEASURED_PARTS}
    # A tower inside a chunk is part of the chunk's span; a tower on every rank is not.
    for way in ("forward", "backward"):
        parts[f"language {way}"] = spans[f"chunk {way}"] - spans[f"vision {way}"]
        parts[f"vision {way}"] = spans[f"vision {way}"] + spans[f"tower {way}"]
    return parts | {"idle": spans["step"] - sum(parts.values())}
