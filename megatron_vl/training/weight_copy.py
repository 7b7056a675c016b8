"""Copies the updated weights into the model in a few launches instead of one launch per parameter.

Megatron-core 0.19.2 copies each parameter's float32 shard into the model's buffers in a separate launch
(``DistributedOptimizer._copy_main_params_to_model_params``). A rank of a model with experts holds many
parameters: a GPU that holds 3.7 billion weights of Qwen3-VL-30B-A3B needs 1,650 launches per step. One
``torch._foreach_copy_`` makes the same copies with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor


def copy_weights_together(optimizer: ChainedOptimizer) -> int:
    """Makes each part of ``optimizer`` that copies float32 shards copy all of them in one call.

    Parts without parameters do not change, nor do parts whose weights reach the model in another way
    (precision-aware optimizers, FP8 weights). Offloaded shards are not copied here.

    Returns:
        The number of parts that were changed.
    """
    parts = [part for part in optimizer.chained_optimizers if _copies_shards(part)]
    for part in parts:
        part._copy_main_params_to_model_params = _Copy(part)
    return len(parts)


def _copies_shards(part: object) -> bool:
    return (
        isinstance(part, DistributedOptimizer)
        and not part.is_stub_optimizer
        and not part.config.use_precision_aware_optimizer
        and not (
            part.ddp_config.use_megatron_fsdp
            or part.ddp_config.fp8_param_gather
            or part.ddp_config.fp4_param_gather
        )
    )


class _Copy:
    """The shards of one optimizer and the slices of the model's buffers that they are copied to."""

    def __init__(self, part: DistributedOptimizer) -> None:
        self.part = part
        self.pairs: tuple[list[Tensor], list[Tensor]] | None = None

    @torch.no_grad()
    def __call__(self) -> None:
        if self.pairs is None:
            # They are looked up only once, because buffers and shards live as long as the optimizer: loading
            # a checkpoint writes into them.
            self.pairs = self._find()
        slices, shards = self.pairs
        if slices:
            torch._foreach_copy_(slices, shards)

    def _find(self) -> tuple[list[Tensor], list[Tensor]]:
        part, slices, shards = self.part, [], []
        for mains, models in (
            (part.shard_fp32_from_float16_groups, part.model_float16_groups),
            (part.shard_fp32_groups, part.model_fp32_groups),
        ):
            for target, shard in places_of_shards(part, mains, models):
                assert target.numel() == shard.numel(), (target.shape, shard.shape)
                offloaded = not shard.untyped_storage().nbytes()  # it reaches the model in another way
                if not offloaded and target.data_ptr() != shard.data_ptr():  # equal for float32 parameters
                    slices.append(target)
                    shards.append(shard.view(-1))
        return slices, shards


def places_of_shards(
    part: DistributedOptimizer, mains: list[list[Tensor]], models: list[list[Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """(slice of the model's buffers, shard) for the shards of each group's parameters.

    Args:
        mains, models: for each group, the shards and the parameters of the model.
    """
    for main_group, model_group in zip(mains, models, strict=True):
        for shard, parameter in zip(main_group, model_group, strict=True):
            span = part._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
            buffer, _, bucket = part.model_param_gbuf_map[parameter]
            yield part.buffers[buffer].buckets[bucket].param_data.view(-1)[span.start : span.end], shard
