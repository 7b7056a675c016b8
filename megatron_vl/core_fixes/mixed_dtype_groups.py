"""Corrects the parameter numbers in optimizer groups that hold both bfloat16 and float32 parameters.

Megatron-core 0.19.2 numbers a group's parameters in the order of its buffers
(``DistributedOptimizer.model_param_group_index_map``), but the optimizer's ``param_groups`` list the float32
shards first. If a group has both types, like Qwen3.5's norms and decays, every look-up by number is wrong:
state is saved and restored under other parameters' names, without a message. Steps are not affected.
"""

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer


def renumber_mixed_groups(optimizer: ChainedOptimizer) -> None:
    """Numbers parameters in the order of ``param_groups``. Groups of one type do not change."""
    for sub_optimizer in optimizer.chained_optimizers:
        if not isinstance(sub_optimizer, DistributedOptimizer) or getattr(
            sub_optimizer, "is_stub_optimizer", False
        ):
            continue

        groups = zip(sub_optimizer.model_fp32_groups, sub_optimizer.model_float16_groups, strict=True)
        for index, (float32_params, bfloat16_params) in enumerate(groups):
            for param_index, parameter in enumerate((*float32_params, *bfloat16_params)):
                sub_optimizer.model_param_group_index_map[parameter] = (index, param_index)
