"""The step of an optimizer, some of whose state is in chunks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_vl.kernels.master_halves import join_master, split_master
from megatron_vl.kernels.moments import round_moments
from megatron_vl.planning.memory import SLOTS
from megatron_vl.training.offload.state import Chunk, Parameter, State
from megatron_vl.training.offload.traffic import Traffic


class ChunkedStep:
    """Replaces ``step`` of one optimizer, some of whose parameters have their state in chunks.

    Args:
        adam: Transformer Engine's FusedAdam, or torch's AdamW. It computes in fp32, whatever the moments'
            dtype.
        here: this optimizer's chunks that stay on the device.
        numbers: of this optimizer's chunks that are streamed.
    """

    def __init__(
        self, adam: Any, parameters: list[Parameter], here: list[Chunk], traffic: Traffic, numbers: range
    ) -> None:
        self.adam, self.parameters, self.here = adam, parameters, here
        self.traffic, self.numbers = traffic, numbers
        self.step: Callable[[], Any] = adam.step
        self.counts_by_group = counts_by_group(adam)
        self._chunked = {id(parameter.main) for parameter in parameters}

    @torch.no_grad()
    def __call__(self) -> None:
        groups = self.adam.param_groups
        everything = [group["params"] for group in groups]
        counts = [group.get("step", 0) for group in groups]
        self.traffic.fetch(SLOTS)
        try:
            others = [[p for p in one if id(p) not in self._chunked] for one in everything]
            self._step(groups, others, counts)
            for chunk in self.here:
                self._update(groups, counts, chunk, chunk.state(chunk.home))
            for number in self.numbers:
                with self.traffic.on_device(number) as state:
                    self._update(groups, counts, self.traffic.chunks[number], state)
        finally:
            self.adam.param_groups = groups
            for group, parameters in zip(groups, everything, strict=True):
                group["params"] = parameters

        for parameter in self.parameters:
            parameter.steps += 1
        if self.counts_by_group:
            for group, count in zip(groups, counts, strict=True):
                if group["params"]:
                    group["step"] = count + 1

    def _step(self, groups: list[dict[str, Any]], chosen: list[list[Tensor]], counts: list[int]) -> None:
        """One step of the optimizer for some tensors of each group."""
        for group, tensors, count in zip(groups, chosen, counts, strict=True):
            group["params"] = tensors
            if self.counts_by_group and tensors:
                group["step"] = count
        self.adam.param_groups = [group for group in groups if group["params"]]
        if self.adam.param_groups:
            self.step()

    def _update(self, groups: list[dict[str, Any]], counts: list[int], chunk: Chunk, state: State) -> None:
        """Updates a chunk on the device: joins its master weights, takes Adam's step, splits them again."""
        wide = state.in_float32()
        scratch = torch.empty(chunk.size if chunk.halves else 0, device=state.exp_avg.device)
        numbers = {id(group): number for number, group in enumerate(groups)}
        chosen: list[list[Tensor]] = [[] for _ in groups]
        masters = []
        for piece in chunk.pieces:
            parameter, own = piece.parameter, piece.of(wide)
            if parameter.weight is None:
                master = piece.of_shard(parameter.main)
            else:
                master = scratch[piece.offset : piece.offset + piece.end - piece.start]
                join_master(piece.of_shard(parameter.weight), own.low, own.exp_avg_sq, master)

            assert parameter.main.grad is not None
            master.grad = piece.of_shard(parameter.main.grad)
            self.adam.state[master] = {"exp_avg": own.exp_avg, "exp_avg_sq": own.exp_avg_sq}
            if not self.counts_by_group:
                self.adam.state[master]["step"] = torch.tensor(float(parameter.steps))
            chosen[numbers[id(parameter.group)]].append(master)
            masters.append(master)

        self._step(groups, chosen, counts)
        for piece, master in zip(chunk.pieces, masters, strict=True):
            del self.adam.state[master]
            if piece.parameter.weight is not None:
                own = piece.of(wide)
                split_master(master, piece.of_shard(piece.parameter.weight), own.low, own.exp_avg_sq)
        if chunk.moments != torch.float32:
            round_chunk(chunk, wide, state)


def round_chunk(chunk: Chunk, wide: State, state: State) -> None:
    """Writes the moments after a step to ``state``: one call for neighbours with the same step count."""
    for steps, same in itertools.groupby(chunk.pieces, lambda piece: piece.parameter.steps):
        pieces = list(same)
        start, end = pieces[0].offset, pieces[-1].offset + pieces[-1].end - pieces[-1].start
        new, kept = wide.cut(start, end), state.cut(start, end)
        round_moments(new.exp_avg, new.exp_avg_sq, steps + 1, kept.exp_avg, kept.exp_avg_sq)


def counts_by_group(adam: Any) -> bool:
    """Whether an optimizer counts its steps for each group, as Transformer Engine's does, and not for each
    parameter, as torch's do."""
    return type(adam).__name__ == "FusedAdam"
