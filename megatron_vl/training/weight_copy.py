"""Copies the updated weights into the model in a few launches instead of one launch for each.

Megatron-core 0.19.2 copies each parameter's float32 shard into the model's buffers with a launch of its own
(``DistributedOptimizer._copy_main_params_to_model_params``). A rank of a model with experts holds thousands
of parameters: a GPU whose share of Qwen3-VL-30B-A3B is 3.7 billion parameters needs 1,650 launches per step.
One ``torch._foreach_copy_`` makes the same copies with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor


def copy_weights_together(optimizer: ChainedOptimizer) -> int:
    """Makes each part of ``optimizer`` that copies float32 shards copy them all in one call.

    Returns the number of such parts.

    Parts without parameters do not change, nor do those whose weights reach the model in another way
    (precision-aware optimizers, FP8 weights). Offloaded shards are left out.
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
    """The shards of one optimizer and their places in the model's buffers, looked up once."""

    def __init__(self, part: DistributedOptimizer) -> None:
        self.part = part
        self.pairs: tuple[list[Tensor], list[Tensor]] | None = None

    @torch.no_grad()
    def __call__(self) -> None:
        if self.pairs is None:
            # The buffers and the shards live as long as the optimizer: loading a checkpoint writes into them.
            self.pairs = self._find()
        places, shards = self.pairs
        if places:
            torch._foreach_copy_(places, shards)

    def _find(self) -> tuple[list[Tensor], list[Tensor]]:
        part, places, shards = self.part, [], []
        for mains, models in (
            (part.shard_fp32_from_float16_groups, part.model_float16_groups),
            (part.shard_fp32_groups, part.model_fp32_groups),
        ):
            for place, shard in places_of_shards(part, mains, models):
                assert place.numel() == shard.numel(), (place.shape, shard.shape)
                offloaded = not shard.untyped_storage().nbytes()  # it reaches the model in its own way
                if not offloaded and place.data_ptr() != shard.data_ptr():  # float32: the shard is the place
                    places.append(place)
                    shards.append(shard.view(-1))
        return places, shards


def places_of_shards(
    part: DistributedOptimizer, mains: list[list[Tensor]], models: list[list[Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """(place in the model's buffers, shard) of the shards of each group's parameters."""
    for main_group, model_group in zip(mains, models, strict=True):
        for shard, parameter in zip(main_group, model_group, strict=True):
            span = part._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
            buffer, _, bucket = part.model_param_gbuf_map[parameter]
            yield part.buffers[buffer].buckets[bucket].param_data.view(-1)[span.start : span.end], shard
