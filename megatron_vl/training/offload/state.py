"""Offloaded state in host memory: parameters, the pieces of them, and the chunks that pieces lie in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_vl.kernels.master_halves import join_master, split_master

ALIGNED = 64
"""Elements of which each piece of a chunk begins at a multiple."""


@dataclass(eq=False)
class Parameter:
    """A rank's shard of a parameter, whose optimizer state is in host memory."""

    main: Tensor
    """The fp32 tensor in the optimizer's groups. Without storage, unless it is the model's weight itself."""
    weight: Tensor | None
    """bf16 [N], its place in the model; None if ``main`` is the model's weight."""
    group: dict[str, Any]
    steps: int = 0
    """Adam's step count."""
    pieces: list[Piece] = field(default_factory=list)
    settle: Callable[[], None] = lambda: None
    """Waits until host memory holds the state of the last update."""

    def read(self, kind: str) -> Tensor | None:
        """A host copy of ``main``, ``exp_avg`` or ``exp_avg_sq``, fp32 [N].

        None for moments before the first step, when there are none.
        """
        if kind != "main" and not self.steps:
            return None
        if kind == "main" and self.weight is None:
            return self.main.detach().to("cpu", copy=True).view(-1)

        self.settle()
        out = torch.empty(self.main.numel())
        for piece in self.pieces:
            state = piece.in_host_memory()
            part = out[piece.start : piece.end]
            if kind == "main":
                weight = piece.of_shard(self.weight).cpu()  # type: ignore[arg-type]
                join_master(weight, state.low, state.exp_avg_sq.clone(), part)
            elif kind == "exp_avg":
                part.copy_(state.exp_avg)
            else:
                torch.abs(state.exp_avg_sq, out=part)  # its sign belongs to the master weight
        return out

    def write(self, kind: str, value: Tensor) -> None:
        """Replaces ``main``, ``exp_avg`` or ``exp_avg_sq`` with fp32 [N] in host memory.

        With ``main``, this rank's shard of the model's weight is replaced too.
        """
        value = value.view(-1)
        if kind == "main" and self.weight is None:
            self.main.copy_(value.view_as(self.main))
            return

        self.settle()
        for piece in self.pieces:
            state = piece.in_host_memory()
            part = value[piece.start : piece.end]
            if kind == "main":
                state.exp_avg_sq.abs_()
                weight = torch.empty(len(part), dtype=torch.bfloat16)
                split_master(part.contiguous(), weight, state.low, state.exp_avg_sq)
                piece.of_shard(self.weight).copy_(weight)  # type: ignore[arg-type]
            elif kind == "exp_avg":
                state.exp_avg.copy_(part)
            else:
                torch.copysign(part, state.exp_avg_sq, out=state.exp_avg_sq)


@dataclass(frozen=True, eq=False)
class State:
    """The offloaded state of some elements; views of a chunk's bytes."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    low: Tensor
    """int16 [N]; empty if the model's weights are fp32."""

    def cut(self, start: int, end: int) -> State:
        return State(self.exp_avg[start:end], self.exp_avg_sq[start:end], self.low[start:end])


@dataclass(frozen=True, eq=False)
class Piece:
    """Elements ``start:end`` of a parameter's shard, in a chunk from ``offset`` on."""

    parameter: Parameter
    start: int
    end: int
    chunk: Chunk
    offset: int

    def of(self, state: State) -> State:
        """The state of these elements in that of their chunk."""
        return state.cut(self.offset, self.offset + self.end - self.start)

    def of_shard(self, tensor: Tensor) -> Tensor:
        """These elements of a tensor that has those of the parameter's shard."""
        return tensor.detach().view(-1)[self.start : self.end]

    def in_host_memory(self) -> State:
        return self.of(self.chunk.state(self.chunk.host))


@dataclass(eq=False)
class Chunk:
    """State that is copied at once: uint8 bytes of ``size`` elements."""

    halves: bool
    """Whether it holds halves of master weights."""
    size: int = 0
    host: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    pieces: list[Piece] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return self.size * bytes_per_element(self.halves)

    def state(self, buffer: Tensor) -> State:
        """Views of a buffer that begins with this chunk's bytes."""
        n = self.size
        low = buffer[8 * n : 10 * n] if self.halves else buffer[:0]
        moments = buffer[: 8 * n].view(torch.float32)
        return State(moments[:n], moments[n:], low.view(torch.int16))


def bytes_per_element(halves: bool) -> int:
    return 10 if halves else 8


def make_chunks(parameters: list[Parameter], chunk_bytes: int) -> list[Chunk]:
    """Lays the parameters out in chunks of up to ``chunk_bytes``, one after the other."""
    chunks: list[Chunk] = []
    for halves in (True, False):
        most = chunk_bytes // bytes_per_element(halves) // ALIGNED * ALIGNED
        for parameter in parameters:
            if (parameter.weight is not None) != halves:
                continue
            at = 0
            while at < parameter.main.numel():
                if not chunks or chunks[-1].halves != halves or chunks[-1].size == most:
                    chunks.append(Chunk(halves))
                chunk = chunks[-1]
                end = min(parameter.main.numel(), at + most - chunk.size)
                piece = Piece(parameter, at, end, chunk, chunk.size)
                chunk.pieces.append(piece)
                parameter.pieces.append(piece)
                chunk.size += -(-(end - at) // ALIGNED) * ALIGNED
                at = end
    return chunks
