"""Copies the updated weights into the model in a few launches instead of one launch per parameter.

Megatron-core 0.19.2 copies each parameter's float32 shard into the model's buffers in a separate launch
(``DistributedOptimizer._copy_main_params_to_model_params``). A rank of a model with experts holds many
parameters: a GPU that holds 3.7 billion weights of Qwen3-VL-30B-A3B needs 1,650 launches per step. One
``torch._foreach_copy_`` makes the same copies with the same bits.
"""

import functools
from collections.abc import Callable, Iterator

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor


def copy_weights_together(optimizer: ChainedOptimizer) -> None:
    """Makes each part of ``optimizer`` that copies float32 shards copy all of them in one call.

    Parts without parameters do not change. Offloaded shards are not copied here.
    """
    for part in optimizer.chained_optimizers:
        if isinstance(part, DistributedOptimizer) and not part.is_stub_optimizer:
            # They are listed once: buffers and shards live as long as the optimizer, and loading a checkpoint
            # writes into them. Not here, because shards in chunks lose their storage later.
            list_once = functools.cache(functools.partial(_slices_and_shards, part))
            part._copy_main_params_to_model_params = functools.partial(_copy_weights, list_once)


@torch.no_grad()
def _copy_weights(list_slices_and_shards: Callable[[], tuple[list[Tensor], list[Tensor]]]) -> None:
    model_slices, shards = list_slices_and_shards()
    if model_slices:
        torch._foreach_copy_(model_slices, shards)


def _slices_and_shards(part: DistributedOptimizer) -> tuple[list[Tensor], list[Tensor]]:
    """The slices of the model's buffers, and the shards that are copied to them."""
    model_slices, shards = [], []
    for main_groups, model_groups in (
        (part.shard_fp32_from_float16_groups, part.model_float16_groups),
        (part.shard_fp32_groups, part.model_fp32_groups),
    ):
        for model_slice, shard in shard_destinations(part, main_groups, model_groups):
            assert model_slice.numel() == shard.numel(), (model_slice.shape, shard.shape)
            # Shards in chunks have no storage. Shards of float32 parameters are the model's own memory.
            if shard.untyped_storage().nbytes() and model_slice.data_ptr() != shard.data_ptr():
                model_slices.append(model_slice)
                shards.append(shard.view(-1))
    return model_slices, shards


def shard_destinations(
    sub_optimizer: DistributedOptimizer, main_groups: list[list[Tensor]], model_groups: list[list[Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """(slice of the model's buffers, shard) for the shards of each group's parameters."""
    for main_group, model_group in zip(main_groups, model_groups, strict=True):
        for shard, parameter in zip(main_group, model_group, strict=True):
            bucket_range = sub_optimizer._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
            buffer_index, _, bucket_index = sub_optimizer.model_param_gbuf_map[parameter]
            yield (
                sub_optimizer.buffers[buffer_index]
                .buckets[bucket_index]
                .param_data.view(-1)[bucket_range.start : bucket_range.end],
                shard,
            )
