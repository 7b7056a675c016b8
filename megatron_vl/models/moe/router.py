"""Mixture of experts: the layer that replaces a decoder layer's MLP, and the token counts of its routers.

A token goes to the ``top_k`` experts with the highest router probability; no token is dropped. Experts are
distributed over expert-parallel ranks, which exchange tokens (:mod:`megatron_vl.models.moe.dispatch`). On
CUDA, a rank's experts run as one grouped GEMM. The router computes in float32.

The load-balancing loss uses the formula of ``transformers`` within each layer, averaged over the layers::

    L = coefficient / layers * sum over layers of  E * sum over experts i of f_i * P_i

``E`` is the number of experts. ``f_i`` is the fraction of a row's real tokens that goes to expert ``i``, and
``P_i`` is the mean probability of ``i`` over these tokens. ``transformers`` averages ``f`` and ``P`` over all
layers before it multiplies them, so that one layer's preferred experts can make up for another layer's. For
one layer, both formulas are equal. Rows are weighted by their real tokens, so the loss does not depend on how
rows are distributed over ranks.

A row's padded tail goes to no expert: its part of the layer's output is zero, and it counts neither in this
loss nor in the experts' load. Each row comes with a mask of its padding (``padding_mask``); a row without
padding has no mask.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor, nn

from megatron_vl.core_fixes.expert_swiglu import use_fused_swiglu
from megatron_vl.models.batch import DeviceRow
from megatron_vl.models.moe.dispatch import ExpertsLayer
from megatron_vl.parallel.ddp import ReplicaDDP
from megatron_vl.platform import Platform
from megatron_vl.spec.families import LanguageSpec
from megatron_vl.spec.layout import Layout


def moe_core_settings(
    platform: Platform, language_spec: LanguageSpec, layout: Layout, *, aux_loss_coefficient: float
) -> dict[str, Any]:
    """Megatron-core's settings for the experts."""
    moe_spec, is_cuda = language_spec.moe, platform.name == "cuda"
    assert moe_spec is not None
    num_expert_layers = sum(map(language_spec.has_experts, range(language_spec.num_layers)))
    return {
        "num_moe_experts": moe_spec.num_experts,
        "moe_shared_expert_intermediate_size": moe_spec.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": moe_spec.shared_ffn_hidden_size > 0,
        "moe_router_topk": moe_spec.top_k,
        "moe_ffn_hidden_size": moe_spec.ffn_hidden_size,
        "moe_router_dtype": "fp32",
        # A softmax over the chosen logits equals a softmax over all, divided by the sum over the chosen ones.
        "moe_router_pre_softmax": False,
        "moe_router_load_balancing_type": "aux_loss" if aux_loss_coefficient else "none",
        # Core divides f by top_k; transformers does not.
        "moe_aux_loss_coeff": aux_loss_coefficient * moe_spec.top_k / num_expert_layers,
        # With alltoall, ranks that share an expert's matrices gather tensors of different lengths, which gloo
        # cannot do.
        "moe_token_dispatcher_type": "alltoall" if is_cuda or layout.etp == 1 else "allgather",
        "moe_grouped_gemm": is_cuda,
        "moe_permute_fusion": is_cuda,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


class CountingRouter(TopKRouter):
    """Core's router. It also counts the tokens of each expert and scales its load-balancing loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.load: Tensor
        """Number of this rank's tokens in the current step by expert, int64 [experts]."""
        self.register_buffer("load", torch.zeros(self.num_experts, dtype=torch.int64), persistent=False)
        self.loss_scale: Tensor | float = 1.0
        """Loss tokens per real token of the global batch. Later, gradients are divided by the loss tokens."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Core's routing, except that padding has no expert.

        From logits [S, 1, experts] and padding_mask bool [S, 1] (true for padding; None: there is none) to
        probabilities and the routing map (bool), [T, experts] each, where T = S.
        """
        probs, routing_map = super().routing(logits, padding_mask)
        if padding_mask is not None:
            is_padding = padding_mask.reshape(-1, 1)
            probs = probs.masked_fill(is_padding, 0.0)
            routing_map = routing_map & ~is_padding

        if self.training and torch.is_grad_enabled():  # only once if the layer is recomputed
            self.load += routing_map.sum(dim=0)
        return probs, routing_map

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """Attaches this row's loss, times its real tokens, to ``probs``.

        Core 0.19.2 assumes that gradients are divided by all tokens of the batch, and that the ranks of a row
        hold the same number of real tokens. Here gradients are divided by the loss tokens, and the last rank
        holds the padded tail.
        """
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if not coefficient:
            return probs

        # Rows without padding are counted as if they had a mask, so that all rows are rounded alike.
        tokens_per_expert, _, num_tokens = get_tokens_per_expert_and_token_count(
            routing_map, self.tp_cp_group, topk=self.topk, with_padding_mask=True
        )
        counts = tokens_per_expert, num_tokens, self.topk, self.num_experts
        aux_loss = switch_load_balancing_loss_func(
            scores_for_aux_loss, *counts, coefficient, fused=self.config.moe_router_fusion
        )
        return MoEAuxLossAutoScaler.apply(probs, aux_loss * num_tokens * self.loss_scale)


def moe_layer(
    platform: Platform, column_linear: Any, row_linear: Any, *, recompute_activation: bool = False
) -> Any:
    """The constructor of a decoder layer's mixture of experts, which replaces its MLP."""
    dense_submodules = MLPSubmodules(linear_fc1=column_linear, linear_fc2=row_linear)
    experts_builder: Any = partial(SequentialMLP, submodules=dense_submodules)
    if platform.has_transformer_engine:
        from megatron.core.extensions.transformer_engine import (
            TEColumnParallelGroupedLinear,
            TERowParallelGroupedLinear,
        )
        from megatron.core.transformer.moe.experts import GroupedMLPSubmodules

        from megatron_vl.models.moe.experts import GroupedExperts, PlannedLinear

        class ColumnLinear(PlannedLinear, TEColumnParallelGroupedLinear):
            pass

        class RowLinear(PlannedLinear, TERowParallelGroupedLinear):
            pass

        use_fused_swiglu()
        grouped_submodules = GroupedMLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
        experts_builder = partial(
            GroupedExperts, submodules=grouped_submodules, recompute_activation=recompute_activation
        )

    # Core calls the constructor of the shared expert if the model has one.
    shared_builder = partial(SharedExpertMLP, submodules=dense_submodules)
    return partial(
        ExpertsLayer,
        submodules=MoESubmodules(
            experts=experts_builder, router=CountingRouter, shared_experts=shared_builder
        ),
    )


def iterate_routers(chunks: Iterable[nn.Module]) -> Iterator[CountingRouter]:
    modules = (module for chunk in chunks for module in chunk.modules())
    return (module for module in modules if isinstance(module, CountingRouter))


def notify_ddp_directly(ddp: ReplicaDDP) -> None:
    """Makes the grouped experts of a wrapped chunk notify DDP directly, instead of by one hook per weight.

    See :mod:`megatron_vl.models.moe.experts`.
    """
    for module in ddp.module.modules():
        if isinstance(module, MoELayer) and hasattr(module.experts, "report_to"):
            module.experts.report_to(ddp)


def reset_router_counts(chunks: Iterable[nn.Module], device_rows: Sequence[DeviceRow]) -> None:
    """Sets the routers' counts to zero and the scale of their load-balancing loss.

    Collective over the data-parallel and context-parallel ranks, without host synchronisation.
    """
    if not (local_routers := list(iterate_routers(chunks))):
        return

    loss_tokens = torch.stack([(row.loss_mask != 0).sum() for row in device_rows]).sum(dtype=torch.float64)
    real_tokens = torch.full_like(loss_tokens, sum(row.num_real_tokens for row in device_rows))
    token_counts = torch.stack((loss_tokens, real_tokens))
    dist.all_reduce(token_counts, group=mpu.get_data_parallel_group(with_context_parallel=True))
    for router in local_routers:
        router.load.zero_()
        router.loss_scale = (token_counts[0] / token_counts[1]).float()


def expert_load(
    chunks: Sequence[nn.Module], num_layers: int, num_experts: int, device: torch.device
) -> Tensor:
    """Number of real tokens in the step by layer and expert, int64 [layers, experts] on ``device``.

    Collective over all ranks.

    Every rank routes different tokens (tensor-parallel ranks hold different parts of the sequence), so the
    sum counts each token once. Layers without experts are zero. A rank may have no layers, or chunks without
    parameters.
    """
    load_by_layer = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
    for router in iterate_routers(chunks):
        load_by_layer[router.layer_number - 1] = router.load
    dist.all_reduce(load_by_layer)  # over pipeline stages too, which hold other layers
    return load_by_layer
