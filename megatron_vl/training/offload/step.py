"""The step of an optimizer, some of whose state is in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_vl.kernels.adam import Launch, Rates, StepRates, Stretch, adam_step
from megatron_vl.kernels.master_halves import join_master, split_master
from megatron_vl.kernels.sizes import STATE_CHUNKS_ON_GPU
from megatron_vl.training.offload.state import Chunk, Parameter, Piece, State
from megatron_vl.training.offload.traffic import Traffic


class ChunkedStep:
    """Replaces ``step`` of one optimizer, some of whose parameters have their state in chunks.

    Chunks whose moments are fp32 take the optimizer's own step, so that they have the bits of a run without
    chunks. The optimizers know no moments in bf16; :mod:`megatron_vl.kernels.adam` does.

    Args:
        adam: Transformer Engine's FusedAdam, or torch's AdamW.
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
        self._launches: dict[int, Launch] = {}
        """By the id of a chunk."""

    @torch.no_grad()
    def __call__(self) -> None:
        groups = self.adam.param_groups
        everything = [group["params"] for group in groups]
        counts = [group.get("step", 0) for group in groups]
        self.traffic.fetch(STATE_CHUNKS_ON_GPU)
        try:
            others = [[p for p in one if id(p) not in self._chunked] for one in everything]
            self._step(groups, others, counts)
            rates = self._rates()
            for chunk in self.here:
                self._update(groups, counts, rates, chunk, chunk.state(chunk.home))
            for number in self.numbers:
                with self.traffic.on_device(number) as state:
                    self._update(groups, counts, rates, self.traffic.chunks[number], state)
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

    def _rates(self) -> StepRates | None:
        """The rates of all parameters by group and step count; None if no moments are bf16."""
        narrow = [p for p in self.parameters if p.pieces and p.pieces[0].chunk.moments != torch.float32]
        rates = {(id(p.group), p.steps): Rates.of_group(p.group, p.steps + 1) for p in narrow}
        return StepRates(rates, self.traffic.device) if rates else None

    def _update(
        self,
        groups: list[dict[str, Any]],
        counts: list[int],
        rates: StepRates | None,
        chunk: Chunk,
        state: State,
    ) -> None:
        """Updates a chunk on the device."""
        if rates is None:
            self._update_by_optimizer(groups, counts, chunk, state)
            return
        stretches = [stretch_of(piece, rates) for piece in chunk.pieces]
        launch = self._launches.setdefault(id(chunk), Launch())
        adam_step(stretches, rates, state.exp_avg, state.exp_avg_sq, state.low, launch)

    def _update_by_optimizer(
        self, groups: list[dict[str, Any]], counts: list[int], chunk: Chunk, state: State
    ) -> None:
        """Joins a chunk's master weights, takes the optimizer's step, and splits them again."""
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


def stretch_of(piece: Piece, rates: StepRates) -> Stretch:
    """A piece with its weight and gradient."""
    parameter = piece.parameter
    weight = parameter.main if parameter.weight is None else parameter.weight
    assert parameter.main.grad is not None
    index = rates.index[id(parameter.group), parameter.steps]
    return Stretch(weight, parameter.main.grad, piece.start, piece.end - piece.start, piece.offset, index)


def counts_by_group(adam: Any) -> bool:
    """Whether an optimizer counts its steps for each group, as Transformer Engine's does, and not for each
    parameter, as torch's do."""
    return type(adam).__name__ == "FusedAdam"
