"""LoRA adapters of a rank's experts, with one kernel launch per factor.

See :mod:`megatron_vl.models.lora`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from megatron_vl.kernels.experts.grouped_gemm import TilePlan
from megatron_vl.models.moe.experts import PlannedLinear

MIN_RANK_MULTIPLE = 8
"""The kernels read 16 bytes at a time, so that a row of ``rank`` numbers must be a multiple of them."""


class _GroupedFactor(PlannedLinear, nn.Module):
    """One factor of all local experts, with parameters ``weight0``, ``weight1`` and so on."""

    def __init__(self, initial_values: Sequence[Tensor], is_expert_parallel: bool) -> None:
        super().__init__()
        self.num_gemms = len(initial_values)
        # The kernel adds gradients to main_grad, as for the experts' own weights.
        self.fuse_wgrad_accumulation = True
        for expert, initial_value in enumerate(initial_values):
            self.register_parameter(f"weight{expert}", nn.Parameter(initial_value))
        # Core reduces the gradients of experts over other ranks than those of dense parameters.
        for parameter in self.parameters():
            parameter.allreduce = not is_expert_parallel  # type: ignore[attr-defined]


class GroupedAdapter(nn.Module):
    """The adapters of one linear layer of all local experts.

    Args:
        factors_a, factors_b: A [rank, in] and B [out, rank] of each expert.
    """

    def __init__(
        self, factors_a: Sequence[Tensor], factors_b: Sequence[Tensor], scale: float, is_expert_parallel: bool
    ) -> None:
        super().__init__()
        self.scale = scale
        self.lora_A = _GroupedFactor(factors_a, is_expert_parallel)
        self.lora_B = _GroupedFactor(factors_b, is_expert_parallel)

    def forward(self, x: Tensor, output: Tensor, tile_plan: TilePlan) -> Tensor:
        """x [rows, in], sorted by expert (or tokens, see the plan), output [rows, out] -> [rows, out].

        Rows of no expert are ignored.
        """
        inner_states, _ = self.lora_A(x, tile_plan)
        adapter_output, _ = self.lora_B(inner_states * self.scale, tile_plan.without_gather())
        return output + adapter_output
