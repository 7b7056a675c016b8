"""Moves an optimizer's state into chunks, in host memory and on the device."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron_vl.kernels.sizes import STATE_CHUNK_BYTES
from megatron_vl.parallel.ddp import ReplicaDDP
from megatron_vl.platform import Platform
from megatron_vl.training.offload.chunked_step import ChunkedStep, ChunkStreamer
from megatron_vl.training.offload.state_chunks import (
    ChunkedParameter,
    StateChunk,
    allocate_device_chunks,
    allocate_host_chunks,
    lay_out_chunks,
)
from megatron_vl.training.weight_copy import shard_destinations


@dataclass(eq=False)
class ChunkedOptimizerState:
    """The part of a rank's optimizer state that is in chunks, in host memory and on the device."""

    parameters_by_id: dict[int, ChunkedParameter]
    """The parameters by the ``id()`` of their tensor in the optimizer's groups."""
    chunk_streamer: ChunkStreamer

    @property
    def host_bytes(self) -> int:
        return sum(chunk.size_bytes for chunk in self.chunk_streamer.state_chunks)

    def overlap_with_passes(self, model_chunks: list[ReplicaDDP]) -> None:
        """Lets copies run during the passes of the model.

        State is fetched while the last backward pass of a step frees memory, and while a tower that every
        rank holds runs backward after the pipeline. The next forward pass takes the memory of chunks that are
        being copied back.
        """
        self.chunk_streamer.overlaps_passes = True
        modules: list[nn.Module] = [chunk.module for chunk in model_chunks]
        for chunk in model_chunks:
            chunk.on_bucket_ready = lambda: self.chunk_streamer.fetch_chunks()
        if (decoupled := model_chunks[0].module.decoupled) is not None:
            decoupled.on_backward_call = lambda: self.chunk_streamer.fetch_chunks()
            modules.append(decoupled.module)
        for module in itertools.chain.from_iterable(each.modules() for each in modules):
            if isinstance(module, TransformerLayer):
                module.register_forward_pre_hook(lambda *_: self.chunk_streamer.release_slots())


def chunked_state(optimizer: ChainedOptimizer) -> ChunkedOptimizerState | None:
    """The optimizer's state that is in chunks; None if no state is (see :func:`move_state_to_chunks`)."""
    return getattr(optimizer, "chunked_state", None)


def move_state_to_chunks(
    optimizer: ChainedOptimizer,
    offload_fraction: float,
    moments_dtype: torch.dtype,
    platform: Platform,
    chunk_bytes: int = STATE_CHUNK_BYTES,
) -> ChunkedOptimizerState | None:
    """Moves an optimizer's state into chunks before its first step.

    The state of a share of the parameters goes to host memory. If moments are not fp32, the optimizer itself
    cannot hold them, and all other state goes into chunks on the device. Master weights that
    :class:`DeferredMasterWeights` has left without storage get it here if they stay in the optimizer.

    Args:
        offload_fraction: share of this rank's state that goes to host memory. Parameters are moved whole, so
            the share that is moved is at most this.
        moments_dtype: type of Adam's moments; float32 or bfloat16.
        chunk_bytes: largest size of a chunk.

    Returns:
        None if nothing is in chunks.
    """
    plans = _plan_parameters(optimizer, offload_fraction, moments_dtype)
    parameters = [parameter for _, on_host, on_device in plans for parameter in (*on_host, *on_device)]
    if not parameters:
        return None

    # A master weight is the model's bf16 weight and 16 bits in the chunk, so its own storage is freed first.
    for parameter in parameters:
        if parameter.model_weight is not None:
            parameter.main_param.untyped_storage().resize_(0)
    torch.cuda.empty_cache()

    # All optimizers of the chain share one streamer, in which each owns a range of chunk numbers.
    streamed_chunks: list[StateChunk] = []
    chunk_numbers = []
    for _, on_host, _ in plans:
        first_number = len(streamed_chunks)
        streamed_chunks += lay_out_chunks(on_host, chunk_bytes, moments_dtype)
        chunk_numbers.append(range(first_number, len(streamed_chunks)))
    allocate_host_chunks(streamed_chunks, is_pinned=platform.name == "cuda")
    streamer = ChunkStreamer(streamed_chunks, platform.device, platform.memory_usage)

    for (sub_optimizer, on_host, on_device), numbers in zip(plans, chunk_numbers, strict=True):
        device_chunks = lay_out_chunks(on_device, chunk_bytes, moments_dtype)
        allocate_device_chunks(device_chunks, platform.device)
        adam = sub_optimizer.optimizer
        adam.step = ChunkedStep(adam, [*on_host, *on_device], device_chunks, streamer, numbers)
        _skip_in_core_copy(sub_optimizer, [*on_host, *on_device])
    for parameter in parameters:
        parameter.wait_for_host_state = streamer.wait_for_host_state
    optimizer.chunked_state = ChunkedOptimizerState({id(p.main_param): p for p in parameters}, streamer)
    return optimizer.chunked_state


_Plan = tuple[Any, list[ChunkedParameter], list[ChunkedParameter]]
"""An optimizer of the chain, its parameters with state in host memory, and those with state on the device."""


def _plan_parameters(
    optimizer: ChainedOptimizer, offload_fraction: float, moments_dtype: torch.dtype
) -> list[_Plan]:
    """Chooses the parameters whose state moves to chunks, and fills the master weights of all others."""
    plans: list[_Plan] = []
    parameters: list[tuple[ChunkedParameter, _Plan]] = []
    for sub_optimizer in optimizer.chained_optimizers:
        if not getattr(sub_optimizer, "is_stub_optimizer", False):
            plans.append((sub_optimizer, [], []))
            weights_by_id = {id(main): weight for weight, main in weight_destinations(sub_optimizer)}
            parameters += [
                (ChunkedParameter(main_param, weights_by_id.get(id(main_param)), group), plans[-1])
                for group in sub_optimizer.optimizer.param_groups
                for main_param in group["params"]
            ]

    sizes = [parameter.main_param.numel() for parameter, _ in parameters]
    offloaded = choose_offloaded(sizes, offload_fraction)
    for i, (parameter, (_, on_host, on_device)) in enumerate(parameters):
        if i in offloaded:
            on_host.append(parameter)
        elif moments_dtype == torch.float32:
            fill_master_weight(parameter)
        elif sizes[i]:
            on_device.append(parameter)
    return plans


class DeferredMasterWeights(TorchFunctionMode):
    """A context in which ``Tensor.float`` of a bf16 tensor gives an fp32 tensor without storage.

    Core's optimizers make their master weights with this call. Outside of the context, all master weights
    are on the device before the first one is moved to a chunk, and the start needs more memory than a step.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.float or args[0].dtype != torch.bfloat16:
            return func(*args, **(kwargs or {}))
        master_weight = torch.empty_like(args[0], dtype=torch.float32)
        master_weight.untyped_storage().resize_(0)
        return master_weight


def fill_master_weight(chunked_parameter: ChunkedParameter) -> None:
    """Fills a master weight that has no storage from the model's weight, as core does at the start."""
    main_param, weight = chunked_parameter.main_param, chunked_parameter.model_weight
    if weight is not None and main_param.numel() and not main_param.untyped_storage().nbytes():
        main_param.untyped_storage().resize_(main_param.numel() * main_param.itemsize)
        main_param.copy_(weight.view_as(main_param))


def weight_destinations(sub_optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """(weight in the model, master weight) of the parameters whose weights in the model are bf16.

    Both are flat; the first is this rank's shard of it.
    """
    if isinstance(sub_optimizer, DistributedOptimizer):
        yield from shard_destinations(
            sub_optimizer, sub_optimizer.shard_fp32_from_float16_groups, sub_optimizer.model_float16_groups
        )
    elif isinstance(sub_optimizer, Float16OptimizerWithFloat16Params):
        groups = (sub_optimizer.float16_groups, sub_optimizer.fp32_from_float16_groups)
        weights, main_params = (itertools.chain.from_iterable(each) for each in groups)
        for weight, main_param in zip(weights, main_params, strict=True):
            yield weight.detach().view(-1), main_param


def _skip_in_core_copy(sub_optimizer: Any, chunked_parameters: list[ChunkedParameter]) -> None:
    """Lets core copy only the master weights into the model that are not in chunks.

    For the distributed optimizer, :mod:`megatron_vl.training.weight_copy` leaves them out.
    """
    if not isinstance(sub_optimizer, Float16OptimizerWithFloat16Params):
        return
    chunked_ids = {id(parameter.main_param) for parameter in chunked_parameters}
    weights, masters = sub_optimizer._get_model_and_main_params_data_float16()
    kept = [id(main_param) not in chunked_ids for _, main_param in weight_destinations(sub_optimizer)]
    assert len(kept) == len(weights) == len(masters)
    copied = list(itertools.compress(weights, kept)), list(itertools.compress(masters, kept))
    sub_optimizer._get_model_and_main_params_data_float16 = lambda: copied


def choose_offloaded(parameter_sizes: list[int], offload_fraction: float) -> set[int]:
    """Indices of the largest sizes that together are at most ``offload_fraction`` of the sum of all.

    Sizes are taken from the largest on; one that is too large for the rest is left out.
    """
    remaining_size = round(offload_fraction * sum(parameter_sizes))
    chosen_indices = set()
    for index in sorted(range(len(parameter_sizes)), key=lambda index: -parameter_sizes[index]):
        if 0 < parameter_sizes[index] <= remaining_size:
            chosen_indices.add(index)
            remaining_size -= parameter_sizes[index]
    return chosen_indices
