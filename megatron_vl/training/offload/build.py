"""Moves a share of an optimizer's state to host memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_vl.parallel.ddp import ReplicaDDP
from megatron_vl.planning.memory import CHUNK_BYTES
from megatron_vl.platform import Platform
from megatron_vl.training.offload.pinned import allocate
from megatron_vl.training.offload.state import Parameter, make_chunks
from megatron_vl.training.offload.step import StreamedStep
from megatron_vl.training.offload.traffic import Traffic
from megatron_vl.training.weight_copy import places_of_shards


@dataclass(eq=False)
class Offload:
    """What of a rank's optimizer is in host memory."""

    parameters: dict[int, Parameter]
    """By the id of their tensor in the optimizer's groups."""
    traffic: Traffic

    @property
    def host_bytes(self) -> int:
        return sum(chunk.bytes for chunk in self.traffic.chunks)

    followed: list[ReplicaDDP] = field(default_factory=list)
    """Chunks of the model whose passes hide copies."""
    hooks: list[Any] = field(default_factory=list)
    """Handles of their modules' hooks."""

    def settle(self) -> None:
        """Waits until host memory holds the state of the last update."""
        self.traffic.settle()

    def follow(self, chunks: list[ReplicaDDP]) -> None:
        """Copies beside the passes of the model: fetches state while the last backward pass of a step
        frees memory, and lets the next forward pass take the memory of what is on its way back."""
        self.followed = list(chunks)
        self.traffic.hides = True
        for chunk in chunks:
            chunk.when_bucket_is_ready = self.traffic.fetch
            for module in chunk.module.modules():
                if isinstance(module, TransformerLayer):
                    self.hooks.append(module.register_forward_pre_hook(lambda *_: self.traffic.release()))


def offload_of(optimizer: ChainedOptimizer) -> Offload | None:
    """What :func:`offload` has moved to host memory; None if it was not called."""
    return getattr(optimizer, "offload", None)


def offload(
    optimizer: ChainedOptimizer, fraction: float, platform: Platform, chunk_bytes: int = CHUNK_BYTES
) -> Offload | None:
    """Moves a share of the optimizer's state to host memory, before its first step.

    Args:
        fraction: of this rank's state; whole parameters whose sizes come nearest to it from below.

    Returns:
        None if nothing is offloaded.

    Raises:
        MemoryError: the host has too little memory that can be pinned.
    """
    parts = [part for part in optimizer.chained_optimizers if not getattr(part, "is_stub_optimizer", False)]
    found = [list(parameters_of(part)) for part in parts]
    chosen = choose([parameter.main.numel() for parameters in found for parameter in parameters], fraction)
    if not chosen:
        return None

    plans = []
    number = 0
    for part, parameters in zip(parts, found, strict=True):
        numbered = enumerate(parameters, number)
        offloaded = [parameter for at, parameter in numbered if at in chosen]
        number += len(parameters)
        plans.append((part, offloaded, make_chunks(offloaded, chunk_bytes)))

    chunks = [chunk for _, _, own in plans for chunk in own]
    allocate(chunks, pinned=platform.name == "cuda")
    traffic = Traffic(chunks, platform.device, platform.memory)
    begin = 0
    for part, offloaded, own in plans:
        numbers = range(begin, begin + len(own))
        part.optimizer.step = StreamedStep(part.optimizer, offloaded, traffic, numbers)
        _leave_to_stream(part, offloaded)
        begin += len(own)

    everything = {id(p.main): p for _, offloaded, _ in plans for p in offloaded}
    for parameter in everything.values():
        parameter.settle = traffic.settle
        if parameter.weight is not None:
            parameter.main.untyped_storage().resize_(0)
    torch.cuda.empty_cache()
    optimizer.offload = Offload(everything, traffic)
    return optimizer.offload


def parameters_of(part: Any) -> Iterator[Parameter]:
    """The parameters of one optimizer of the chain, in the order of its groups."""
    groups = {id(main): group for group in part.optimizer.param_groups for main in group["params"]}
    weights = {id(main): place for place, main in places_of_weights(part)}
    for group in part.optimizer.param_groups:
        for main in group["params"]:
            yield Parameter(main, weights.get(id(main)), groups[id(main)])


def places_of_weights(part: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """(place in the model, master weight) of the parameters whose model's weights are bf16."""
    if isinstance(part, DistributedOptimizer):
        yield from places_of_shards(part, part.shard_fp32_from_float16_groups, part.model_float16_groups)
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        for weights, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            for weight, main in zip(weights, mains, strict=True):
                yield weight.detach().view(-1), main


def _leave_to_stream(part: Any, offloaded: list[Parameter]) -> None:
    """Lets core copy only the other master weights into the model.

    For the distributed optimizer, :mod:`megatron_vl.training.weight_copy` does so.
    """
    if not isinstance(part, Float16OptimizerWithFloat16Params):
        return
    left = {id(parameter.main) for parameter in offloaded}
    model, mains = part._get_model_and_main_params_data_float16()
    kept = [
        (weight, main)
        for (weight, main), (_, whole) in zip(
            zip(model, mains, strict=True), places_of_weights(part), strict=True
        )
        if id(whole) not in left
    ]
    part._get_model_and_main_params_data_float16 = lambda: ([w for w, _ in kept], [m for _, m in kept])


def choose(sizes: list[int], fraction: float) -> set[int]:
    """Indices of the sizes whose sum comes nearest to ``fraction`` of all from below; the largest first."""
    room = round(fraction * sum(sizes))
    chosen = set()
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if 0 < sizes[index] <= room:
            chosen.add(index)
            room -= sizes[index]
    return chosen
