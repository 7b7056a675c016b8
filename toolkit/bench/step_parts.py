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

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_vl.parallel.process_grid import ProcessGrid
from megatron_vl.training.trainer import Trainer

MEASURED_PARTS = ("data", "vision recompute", "vision exchange", "gradient finalisation", "optimizer")
CORE_SPANS = {"forward-compute": "chunk forward", "backward-compute": "chunk backward"}
DECOUPLED_SPANS = {
    "forward": "vision forward",
    "run_forward_again": "vision recompute",
    "backward_call": "vision backward",
    "to_first": "vision exchange",
    "to_owners": "vision exchange",
    "reduce": "gradient finalisation",
}


class PartTimer:
    """Named spans of a rank on the device's own clock. They are noted while the span ``step`` is open."""

    def __init__(self, trainer: Trainer) -> None:
        self.on_cuda = trainer.platform.name == "cuda"
        self.spans: list[tuple[str, Any, Any]] = []
        self.open_spans: dict[str, Any] = {}
        first_chunk = trainer.model_chunks[0].module
        first_chunk.config.timers = self  # core's schedules begin and end the passes of chunks
        self.time_method(first_chunk.config, "finalize_model_grads_func", "gradient finalisation")
        self.time_method(trainer.optimizer, "prepare_grads", "optimizer")
        self.time_method(trainer.optimizer, "step_with_ready_grads", "optimizer")
        self.runs_in_chunk = first_chunk.decoupled is None
        for method, name in () if self.runs_in_chunk else DECOUPLED_SPANS.items():
            self.time_method(first_chunk.decoupled, method, name)
        if first_chunk.vision_model is not None:
            self._time_tower(first_chunk.vision_model)

    def __call__(self, name: str, log_level: int = 0) -> SimpleNamespace:
        """The timer that core asks for."""
        span = CORE_SPANS.get(name, "")
        return SimpleNamespace(start=lambda **_: self.begin(span), stop=lambda **_: self.end(span))

    def begin(self, name: str) -> None:
        # A span may have begun already: a tower has several outputs.
        if name and name not in self.open_spans and (name == "step" or "step" in self.open_spans):
            self.open_spans[name] = self._timestamp()

    def end(self, name: str) -> None:
        if (start := self.open_spans.pop(name, None)) is not None:
            self.spans.append((name, start, self._timestamp()))

    def _timestamp(self) -> Any:
        stream = torch.cuda.current_stream() if self.on_cuda else None
        return stream.record_event(torch.cuda.Event(enable_timing=True)) if stream else time.perf_counter()

    @contextlib.contextmanager
    def _span(self, name: str) -> Iterator[None]:
        self.begin(name)
        yield
        self.end(name)

    def time_method(self, owner: Any, method: str, name: str) -> None:
        setattr(owner, method, self._span(name)(getattr(owner, method)))

    def _time_tower(self, tower: nn.Module) -> None:
        """Times both passes of a tower, the second up to the gradient of its first trained parameter."""

        def time_backward(_module: Any, _args: Any, output: Any) -> None:
            for tensor in output if isinstance(output, (list, tuple)) else [output]:
                if "step" in self.open_spans and isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: self.begin("vision backward"))

        self.time_method(tower, "forward", "vision forward")
        tower.register_forward_hook(time_backward)
        first_trained = next((weight for weight in tower.parameters() if weight.requires_grad), None)
        if first_trained is not None:
            first_trained.register_post_accumulate_grad_hook(lambda _: self.end("vision backward"))

    def mean_parts(self, grid: ProcessGrid, num_steps: int) -> list[dict[str, float]]:
        """The mean seconds of each part of a step on the ranks of each pipeline stage; they add up to the
        step. The device must have finished. Collective."""
        spans: Counter[str] = Counter()
        for name, start, end in self.spans:
            spans[name] += (start.elapsed_time(end) / 1e3 if self.on_cuda else end - start) / num_steps
        parts = {name: float(spans[name]) for name in MEASURED_PARTS}
        for way in ("forward", "backward"):
            # A tower inside a chunk is part of the chunk's span; a tower on every rank is not.
            parts[f"language {way}"] = spans[f"chunk {way}"] - self.runs_in_chunk * spans[f"vision {way}"]
            parts[f"vision {way}"] = float(spans[f"vision {way}"])
        parts["idle"] = spans["step"] - sum(parts.values())
        self.spans.clear()
        found: list[Any] = [None] * grid.world_size
        dist.all_gather_object(found, (grid.pp_rank, parts))
        ranks_of_stage = [[each for at, each in found if at == stage] for stage in range(grid.pp)]
        return [{name: sum(each[name] for each in of) / len(of) for name in parts} for of in ranks_of_stage]
