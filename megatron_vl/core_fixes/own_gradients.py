"""Gradients divided by the tokens of the batch where they are used (Megatron-core 0.19.2).

With the distributed optimizer a rank has the reduced gradients of its own slice of every bucket, and reads no others. Core
divides the whole buffers all the same: 60 GB of memory traffic a step for a model of 7 B parameters, 14 ms on an H200.
"""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel


class OwnSliceDDP(DistributedDataParallel):
    """Core's DDP, whose :meth:`scale_gradients` leaves other ranks' slices alone."""

    def scale_gradients(self, scaling_factor: torch.Tensor | float) -> None:
        """Multiplies this rank's reduced gradients; after the reduction only."""
        config = self.ddp_config
        buffers = self.buffers + self.expert_parallel_buffers
        simple = config.use_distributed_optimizer and config.num_distributed_optimizer_instances == 1
        if not simple or any(buffer.extra_main_grads for buffer in buffers):
            super().scale_gradients(scaling_factor)
            return
        for buffer in buffers:
            size, rank = buffer.data_parallel_group.size(), buffer.data_parallel_group.rank()
            for bucket in buffer.buckets:
                bucket.grad_data.chunk(size)[rank].mul_(scaling_factor)
