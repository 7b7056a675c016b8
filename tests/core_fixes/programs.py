"""What the tests of this folder run in processes of their own (:func:`tests.support.ranks.call`)."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_vl.core_fixes.expert_swiglu import use_fused_swiglu
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
