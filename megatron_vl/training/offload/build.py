"""Moves an optimizer's state into chunks, in host memory and on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_vl.kernels.sizes import STATE_CHUNK_BYTES
from megatron_vl.parallel.ddp import ReplicaDDP
from megatron_vl.platform import Platform
from megatron_vl.training.offload.pinned import allocate, allocate_on_device
from megatron_vl.training.offload.state import Parameter, make_chunks
from megatron_vl.training.offload.step import ChunkedStep
from megatron_vl.training.offload.traffic import Traffic
from megatron_vl.training.weight_copy import places_of_shards


@dataclass(eq=False)
class ChunkedState:
    """What of a rank's optimizer is in chunks, in host memory and on the device."""

    parameters: dict[int, Parameter]
    """By the id of their tensor in the optimizer's groups."""
    traffic: Traffic
    """Of the chunks in host memory."""

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


def chunked_state(optimizer: ChainedOptimizer) -> ChunkedState | None:
    """What :func:`keep_in_chunks` has made; None if it was not called, or nothing is in chunks."""
    return getattr(optimizer, "chunked_state", None)


def keep_in_chunks(
    optimizer: ChainedOptimizer,
    fraction: float,
    moments: torch.dtype,
    platform: Platform,
    chunk_bytes: int = STATE_CHUNK_BYTES,
) -> ChunkedState | None:
    """Moves an optimizer's state into chunks, before its first step: the share of host memory, and all other
    state too if its moments are not fp32, which the optimizer itself cannot hold.

    Master weights that :class:`LaterMasters` has left without storage get it here if they stay in the
    optimizer.

    Args:
        fraction: of this rank's state, in host memory; whole parameters whose sizes come nearest to it
            from below.

    Returns:
        None if nothing is in chunks.

    Raises:
        MemoryError: the host has too little memory that can be pinned.
    """
    parts = [part for part in optimizer.chained_optimizers if not getattr(part, "is_stub_optimizer", False)]
    found = [list(parameters_of(part)) for part in parts]
    everything = [parameter for parameters in found for parameter in parameters]
    chosen = choose([parameter.main.numel() for parameter in everything], fraction)
    offloaded = {id(everything[index]) for index in chosen}
    kept = everything if moments == torch.float32 else []
    for parameter in kept:
        if id(parameter) not in offloaded:
            fill(parameter)
    if not chosen and (kept or not everything):
        return None

    plans = []
    for part, parameters in zip(parts, found, strict=True):
        away = [parameter for parameter in parameters if id(parameter) in offloaded]
        here = [p for p in parameters if id(p) not in offloaded and p.main.numel()] if not kept else []
        plans.append((part, away, here, make_chunks(away, chunk_bytes, moments)))

    for _, away, here, _ in plans:
        for parameter in (*away, *here):
            if parameter.weight is not None:
                parameter.main.untyped_storage().resize_(0)
    torch.cuda.empty_cache()

    chunks = [chunk for _, _, _, own in plans for chunk in own]
    allocate(chunks, pinned=platform.name == "cuda")
    traffic = Traffic(chunks, platform.device, platform.memory)
    held: dict[int, Parameter] = {}
    begin = 0
    for part, away, here, own in plans:
        numbers = range(begin, begin + len(own))
        begin += len(own)
        staying = make_chunks(here, chunk_bytes, moments)
        allocate_on_device(staying, platform.device)
        parameters = [*away, *here]
        part.optimizer.step = ChunkedStep(part.optimizer, parameters, staying, traffic, numbers)
        _leave_to_chunks(part, parameters)
        for parameter in parameters:
            parameter.settle = traffic.settle
            held[id(parameter.main)] = parameter

    optimizer.chunked_state = ChunkedState(held, traffic)
    return optimizer.chunked_state


class LaterMasters(TorchFunctionMode):
    """Within it, ``Tensor.float`` of a bf16 tensor gives an fp32 tensor without storage.

    Core's optimizers make master weights so. Without it, all of them are on the device before the first is
    moved to a chunk, and the memory at the start is more than that of a step.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.float or args[0].dtype != torch.bfloat16:
            return func(*args, **(kwargs or {}))
        master = torch.empty_like(args[0], dtype=torch.float32)
        master.untyped_storage().resize_(0)
        return master


def fill(parameter: Parameter) -> None:
    """Gives a master weight without storage the model's weight, as core does at the start."""
    main, weight = parameter.main, parameter.weight
    if weight is not None and main.numel() and not main.untyped_storage().nbytes():
        main.untyped_storage().resize_(main.numel() * main.itemsize)
        main.copy_(weight.view_as(main))


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


def _leave_to_chunks(part: Any, chunked: list[Parameter]) -> None:
    """Lets core copy only the other master weights into the model.

    For the distributed optimizer, :mod:`megatron_vl.training.weight_copy` does so.
    """
    if not isinstance(part, Float16OptimizerWithFloat16Params):
        return
    left = {id(parameter.main) for parameter in chunked}
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
