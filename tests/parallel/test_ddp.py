"""Our DDP gathers parameters when Megatron-core's does."""

from __future__ import annotations

from tests.training.process import run_single

GATHERS = """
import torch
from megatron_vl.platform import get_platform
platform = get_platform("cpu")
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_vl.parallel.ddp import ReplicaDDP
from megatron_vl.parallel.grid import init_distributed

class Several(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for number in range(6):
            self.register_parameter(f"weight{number}", torch.nn.Parameter(torch.ones(4, 4), requires_grad=number != 3))
    def forward(self, x):
        return sum(x @ weight for weight in self.parameters())

init_distributed(platform)
mpu.initialize_model_parallel()
core = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, calculate_per_token_loss=True)
overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
config = DistributedDataParallelConfig(**overlap, use_distributed_optimizer=True, bucket_size=40)
RESULT = {}
for kind in (DistributedDataParallel, ReplicaDDP):
    ddp = kind(core, config, torch.nn.Sequential(*(Several() for _ in range(3))))
    happened = RESULT[kind.__name__] = []
    for number, group in enumerate(ddp.bucket_groups):
        def start(*args, number=number, original=group.start_param_sync, **kwargs):
            happened.append(["start", number])
            return original(*args, **kwargs)
        group.start_param_sync = start
    for module in ddp.module:
        module.register_forward_pre_hook(
            lambda *_: happened.append(["run", sum(g.param_gather_handle is not None for g in ddp.bucket_groups)])
        )
    for step in range(2):
        for group in ddp.bucket_groups:
            group.param_gather_dispatched = False
        for _ in range(2):
            ddp(torch.ones(2, 4))
    happened.append(["groups", len(ddp.bucket_groups)])
"""


def test_modules_wait_for_their_parameters_as_in_core() -> None:
    """The same gathers start in the same order, and as many are under way when each module runs."""
    out = run_single(GATHERS)
    assert out["ReplicaDDP"] == out["DistributedDataParallel"]
    starts = [event for event in out["ReplicaDDP"] if event[0] == "start"]
    groups = out["ReplicaDDP"][-1][1]
    assert groups > 3
    assert len(starts) == 2 * groups
