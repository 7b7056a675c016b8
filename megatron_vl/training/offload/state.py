"""State in chunks: parameters, the pieces of them, and the chunks that pieces lie in."""

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
    """A rank's shard of a parameter, whose optimizer state is in chunks."""

    main: Tensor
    """The fp32 tensor in the optimizer's groups. Without storage, unless it is the model's weight itself."""
    weight: Tensor | None
    """bf16 [N], its place in the model; None if ``main`` is the model's weight."""
    group: dict[str, Any]
    steps: int = 0
    """Adam's step count."""
    pieces: list[Piece] = field(default_factory=list)
    settle: Callable[[], None] = lambda: None
    """Waits until the chunks hold the state of the last update."""

    def read(self, kind: str) -> Tensor | None:
        """A host copy [N] of ``main``, in fp32, or of ``exp_avg`` or ``exp_avg_sq``, in the moments' dtype.

        None for moments before the first step, when there are none.
        """
        if kind != "main" and not self.steps:
            return None
        if kind == "main" and self.weight is None:
            return self.main.detach().to("cpu", copy=True).view(-1)

        self.settle()
        dtype = torch.float32 if kind == "main" else self.pieces[0].chunk.moments
        out = torch.empty(self.main.numel(), dtype=dtype)
        for piece in self.pieces:
            state = piece.at_home()
            part = out[piece.start : piece.end]
            if kind == "main":
                weight = piece.of_shard(self.weight).cpu()  # type: ignore[arg-type]
                join_master(weight, state.low.cpu(), float32_copy(state.exp_avg_sq), part)
            elif kind == "exp_avg":
                part.copy_(state.exp_avg)
            else:
                part.copy_(state.exp_avg_sq).abs_()  # its sign belongs to the master weight
        return out

    def write(self, kind: str, value: Tensor) -> None:
        """Replaces ``main``, ``exp_avg`` or ``exp_avg_sq`` with fp32 [N] in host memory.

        Moments are rounded to the nearest number of their dtype. With ``main``, this rank's shard of the
        model's weight is replaced too.
        """
        value = value.view(-1)
        if kind == "main" and self.weight is None:
            self.main.copy_(value.view_as(self.main))
            return

        self.settle()
        for piece in self.pieces:
            state = piece.at_home()
            part = value[piece.start : piece.end]
            if kind == "main":
                weight, low = (torch.empty(len(part), dtype=dtype) for dtype in (torch.bfloat16, torch.int16))
                second = float32_copy(state.exp_avg_sq).abs_()
                split_master(part.contiguous(), weight, low, second)
                piece.of_shard(self.weight).copy_(weight)  # type: ignore[arg-type]
                state.low.copy_(low)
                state.exp_avg_sq.copy_(second)
            elif kind == "exp_avg":
                state.exp_avg.copy_(part)
            else:
                state.exp_avg_sq.copy_(torch.copysign(part, float32_copy(state.exp_avg_sq)))


def float32_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory."""
    return tensor.to("cpu", torch.float32, copy=True)


@dataclass(frozen=True, eq=False)
class State:
    """The state of some elements; views of a chunk's bytes."""

    exp_avg: Tensor
    """fp32 or bf16 [N]."""
    exp_avg_sq: Tensor
    """fp32 or bf16 [N]."""
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

    def at_home(self) -> State:
        """The state of these elements where it lies between two updates."""
        return self.of(self.chunk.state(self.chunk.home))


@dataclass(eq=False)
class Chunk:
    """State that is copied and updated at once: uint8 bytes of ``size`` elements."""

    halves: bool
    """Whether it holds halves of master weights."""
    moments: torch.dtype
    size: int = 0
    home: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    """Where it lies between two updates: host memory if it is offloaded, otherwise the device's."""
    pieces: list[Piece] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return self.size * bytes_per_element(self.halves, self.moments)

    def state(self, buffer: Tensor) -> State:
        """Views of a buffer that begins with this chunk's bytes."""
        n = self.size
        both = n * bytes_per_element(False, self.moments)
        low = buffer[both : both + 2 * n] if self.halves else buffer[:0]
        moments = buffer[:both].view(self.moments)
        return State(moments[:n], moments[n:], low.view(torch.int16))


def bytes_per_element(halves: bool, moments: torch.dtype) -> int:
    return 2 * moments.itemsize + (2 if halves else 0)


def make_chunks(parameters: list[Parameter], chunk_bytes: int, moments: torch.dtype) -> list[Chunk]:
    """Lays the parameters out in chunks of up to ``chunk_bytes``, one after the other."""
    chunks: list[Chunk] = []
    for halves in (True, False):
        most = chunk_bytes // bytes_per_element(halves, moments) // ALIGNED * ALIGNED
        for parameter in parameters:
            if (parameter.weight is not None) != halves:
                continue
            at = 0
            while at < parameter.main.numel():
                if not chunks or chunks[-1].halves != halves or chunks[-1].size == most:
                    chunks.append(Chunk(halves, moments))
                chunk = chunks[-1]
                end = min(parameter.main.numel(), at + most - chunk.size)
                piece = Piece(parameter, at, end, chunk, chunk.size)
                chunk.pieces.append(piece)
                parameter.pieces.append(piece)
                chunk.size += -(-(end - at) // ALIGNED) * ALIGNED
                at = end

    return chunks
