"""Numbers the parameters of optimizer groups that hold both bfloat16 and float32 ones.

Megatron-core 0.19.2 numbers a group's parameters in the order of its buffers
(``DistributedOptimizer.model_param_group_index_map``), but lists their float32 shards first in the
optimizer's ``param_groups``. Where a group has both types, as Qwen3.5's norms and decays, every look-up is
shifted: state is saved and restored under other parameters' names, silently. A step is not affected.
"""

from __future__ import annotations

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer


def number_as_listed(optimizer: ChainedOptimizer) -> None:
    """Makes the numbers those of the lists. Nothing changes in groups of one type."""
    for part in optimizer.chained_optimizers:
        if not isinstance(part, DistributedOptimizer) or getattr(part, "is_stub_optimizer", False):
            continue
        groups = zip(part.model_fp32_groups, part.model_float16_groups, strict=True)
        for index, (wide, narrow) in enumerate(groups):
            for order, parameter in enumerate((*wide, *narrow)):
                part.model_param_group_index_map[parameter] = (index, order)
