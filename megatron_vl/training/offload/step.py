"""The step of an optimizer, some of whose state is streamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_vl.kernels.master_halves import join_master, split_master
from megatron_vl.planning.memory import SLOTS
from megatron_vl.training.offload.state import Chunk, Parameter, State
from megatron_vl.training.offload.traffic import Traffic


class StreamedStep:
    """Replaces ``step`` of one optimizer, some of whose parameters are offloaded.

    Args:
        adam: Transformer Engine's FusedAdam, or torch's AdamW.
        numbers: of this optimizer's chunks.
    """

    def __init__(self, adam: Any, parameters: list[Parameter], traffic: Traffic, numbers: range) -> None:
        self.adam, self.parameters, self.traffic, self.numbers = adam, parameters, traffic, numbers
        self.step: Callable[[], Any] = adam.step
        self.counts_by_group = counts_by_group(adam)
        self._offloaded = {id(parameter.main) for parameter in parameters}

    @torch.no_grad()
    def __call__(self) -> None:
        groups = self.adam.param_groups
        everything = [group["params"] for group in groups]
        counts = [group.get("step", 0) for group in groups]
        self.traffic.fetch(SLOTS)
        try:
            resident = [[p for p in one if id(p) not in self._offloaded] for one in everything]
            self._step(groups, resident, counts)
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
        scratch = torch.empty(chunk.size if chunk.halves else 0, device=state.exp_avg.device)
        numbers = {id(group): number for number, group in enumerate(groups)}
        chosen: list[list[Tensor]] = [[] for _ in groups]
        masters = []
        for piece in chunk.pieces:
            parameter, own = piece.parameter, piece.of(state)
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
                own = piece.of(state)
                split_master(master, piece.of_shard(piece.parameter.weight), own.low, own.exp_avg_sq)


def counts_by_group(adam: Any) -> bool:
    """Whether an optimizer counts its steps for each group, as Transformer Engine's does, and not for each
    parameter, as torch's do."""
    return type(adam).__name__ == "FusedAdam"
