"""What the tests of this folder run in processes of their own (:func:`tests.support.ranks.call`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_vl.core_fixes.expert_swiglu import use_fused_swiglu
from megatron_vl.parallel.process_grid import end_distributed, init_distributed
from megatron_vl.platform import get_platform
from tests.support.expert_config import expert_config

HIDDEN, FFN, EXPERTS = 8, 6, 2
COUNTS = [3, 2]


class PlainGroupedLinear(nn.Module):
    """What core asks of Transformer Engine's grouped linears, one product after another."""

    def __init__(self, experts: int, features_in: int, features_out: int, **unused: object) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(features_out, features_in) for _ in range(experts))

    def forward(self, x: Tensor, counts: list[int]) -> tuple[Tensor, None]:
        parts = zip(x.split(counts), self.weights, strict=True)
        return torch.cat([F.linear(rows, weight) for rows, weight in parts]), None


def nodes_of_experts() -> dict[str, Any]:
    """Names in the autograd graph of core's grouped experts before and after the fix, and the largest
    difference to a SwiGLU written out."""
    get_platform("cpu")
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP

    torch.manual_seed(0)
    experts = TEGroupedMLP(
        EXPERTS,
        expert_config(HIDDEN, FFN, EXPERTS, bias_activation_fusion=True),
        submodules=GroupedMLPSubmodules(linear_fc1=PlainGroupedLinear, linear_fc2=PlainGroupedLinear),
        pg_collection=SimpleNamespace(ep=None, expt_tp=None),
    )
    x = torch.randn(sum(COUNTS), HIDDEN)
    probs = torch.rand(sum(COUNTS))

    def run() -> Tensor:
        return experts(x, torch.tensor(COUNTS), probs)[0]

    before = nodes_of(run())
    use_fused_swiglu()
    out = run()

    gate, up = experts.linear_fc1(x, COUNTS)[0].chunk(2, -1)
    want = experts.linear_fc2(F.silu(gate) * up * probs[:, None], COUNTS)[0]
    return {"before": before, "after": nodes_of(out), "error": float((out - want).abs().max().detach())}


def nodes_of(out: Tensor) -> list[str]:
    """Names of the nodes of a tensor's autograd graph."""
    found = []
    left = [out.grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            found.append(node.name())
            left += [following for following, _ in node.next_functions]
    return found


def linear_with_fused_weight_gradients() -> str:
    """What core says when its own linear is asked to add weight gradients into ``main_grad``."""
    init_distributed(get_platform("cpu"))
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    mpu.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, gradient_accumulation_fusion=True
    )
    try:
        ColumnParallelLinear(8, 8, config=config, init_method=config.init_method)
        return ""
    except RuntimeError as error:
        return str(error)
    finally:
        end_distributed()


def counts_brought_to_the_host() -> list[bool]:
    """Whether core's dispatcher moves the counts of experts to the host, and whether ours does."""
    get_platform("cpu")
    from megatron.core.transformer.moe import token_dispatcher

    from megatron_vl.models.moe.dispatch import DeviceCountsDispatcher

    moved: list[Any] = []

    def move(tensor: Any, *args: object, **kwargs: object) -> Any:
        moved.append(tensor)
        return tensor

    token_dispatcher.maybe_move_tensor_to_cpu = move  # nothing moves where there is no device
    counts = torch.tensor([3, 2])
    found = []
    for kind in (token_dispatcher.MoEAlltoAllTokenDispatcher, DeviceCountsDispatcher):
        moved.clear()
        dispatcher = kind.__new__(kind)
        vars(dispatcher).update(
            drop_and_pad=False,
            cuda_dtoh_point="here",
            cuda_sync_point="later",
            cuda_dtoh_stream=torch.cuda.Stream(),
            input_splits=None,
            output_splits=None,
            output_splits_tp=None,
            num_out_tokens=None,
            num_local_experts=1,
        )

        assert dispatcher._maybe_dtoh_and_synchronize("here", counts) is counts
        found.append(any(tensor is counts for tensor in moved))

    return found


def core_here() -> list[str]:
    """The folder and the version of Megatron-core that this process has."""
    import importlib.metadata

    import megatron.core

    return [str(megatron.core.__path__[0]), importlib.metadata.version("megatron-core")]
