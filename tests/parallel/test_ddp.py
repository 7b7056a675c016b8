"""Our DDP gathers parameters when Megatron-core's does."""

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_vl.parallel.ddp import ReplicaDDP
from tests.support.ranks import in_ranks
from tests.support.tiny_trainer import join


class Several(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for n in range(6):
            self.register_parameter(f"weight{n}", torch.nn.Parameter(torch.ones(4, 4), requires_grad=n != 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(x @ weight for weight in self.parameters())


def gathers_of(ddp: Any) -> list[tuple[str, int]]:
    """The order in which gathers start in two steps, and how many are pending as each module runs."""
    events: list[tuple[str, int]] = []

    def start(number: int, start_gather: Any, *args: Any, **kwargs: Any) -> Any:
        events.append(("start", number))
        return start_gather(*args, **kwargs)

    def run(forward: Any, x: torch.Tensor) -> torch.Tensor:
        pending = sum(group.param_gather_handle is not None for group in ddp.bucket_groups)
        events.append(("run", pending))
        return forward(x)

    for number, group in enumerate(ddp.bucket_groups):
        group.start_param_sync = partial(start, number, group.start_param_sync)
    for module in ddp.module:
        module.forward = partial(run, module.forward)
    for _ in range(2):
        with ddp.no_sync():
            ddp(torch.ones(2, 4)).sum().backward()
        assert isinstance(ddp, ReplicaDDP) != bool(ddp.remove_forward_pre_hook_handles)
        ddp(torch.ones(2, 4)).sum().backward()
        ddp.finish_grad_sync()
        assert ddp.remove_forward_pre_hook_handles
    return events


@in_ranks()
def test_modules_wait_for_their_parameters_as_in_core() -> None:
    """The same gathers start in the same order, and as many are under way when each module runs."""
    join()
    mpu.initialize_model_parallel()
    core = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, calculate_per_token_loss=True
    )
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True, overlap_param_gather=True, use_distributed_optimizer=True, bucket_size=40
    )
    events = []
    for kind in (DistributedDataParallel, ReplicaDDP):
        ddp = kind(core, config, torch.nn.Sequential(*(Several() for _ in range(3))))
        events.append(gathers_of(ddp))
    assert events[0] == events[1] and len(ddp.bucket_groups) > 3
    assert sum(event[0] == "start" for event in events[1]) == 2 * len(ddp.bucket_groups)
