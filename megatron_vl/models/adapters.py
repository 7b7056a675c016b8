"""LoRA adapters beside the linear layers of a built model (:mod:`megatron_vl.spec.adapters`).

An adapter is a child module of its linear layer, and a forward hook adds what it computes to the layer's
output. So every module that holds a linear layer stays as it is, and a layer without an adapter costs
nothing.

Under tensor parallelism, a factor is cut as its base matrix is, along the same dimension, and the other
factor is on all ranks. Only the ``rank`` columns between the two factors are exchanged: gathered or summed
over the ranks, and over tokens under sequence parallelism.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor, nn

from megatron_vl.config import RunConfigError, TrainConfig
from megatron_vl.models.parameter_names import LiveTensor
from megatron_vl.spec.adapters import FusedAdapter, fused_adapters, initial_bound, row_runs
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.tensors import Sharding, TensorInfo
from megatron_vl.weights.matrix_blocks import cut_shard


class _Factor(nn.Module):
    """One factor: a module of its own, so that DDP's hooks wait for its gathered weight when it runs."""

    def __init__(self, initial_value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(initial_value)

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """[..., in] -> [..., out], with ``weight`` in place of the factor's own, if it is given."""
        return F.linear(x, self.weight if weight is None else weight)


class _FusedFactor(_Factor):
    """B of several released matrices, whose rows are in the order of the fused tensor.

    Args:
        part_masks: for each released matrix with an adapter, its rank and its rows (bool [rows, 1]).
    """

    def __init__(self, initial_value: Tensor, part_masks: list[tuple[int, Tensor]]) -> None:
        super().__init__(initial_value)
        self.row_masks: Tensor
        self.ranks = [rank for rank, _ in part_masks]
        self.register_buffer("row_masks", torch.stack([mask for _, mask in part_masks]), persistent=False)

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """[..., sum of the ranks] -> [..., rows]"""
        weight = self.weight if weight is None else weight
        # Each row multiplies only the columns of its own released matrix; the others are zero.
        columns = [weight[:, :rank] * mask for rank, mask in zip(self.ranks, self.row_masks, strict=True)]
        return F.linear(x, torch.cat(columns, 1))


class LinearAdapter(nn.Module):
    """The adapter of one linear layer, or of one expert's.

    Args:
        linear: the layer, whose process group and sequence parallelism are those of its adapter.
        factor_a, factor_b: this rank's shards of the factors.
    """

    def __init__(
        self, adapter: FusedAdapter, dropout: float, linear: Any, factor_a: _Factor, factor_b: _Factor
    ) -> None:
        super().__init__()
        self.lora_A, self.lora_B = factor_a, factor_b
        self.is_column = adapter.base.parallel_style != "row"
        self.is_expert = adapter.base.num_experts > 0
        self.dropout = dropout
        self.tp_group = linear.tp_group
        self.tp_size = self.tp_group.size() if self.tp_group is not None else 1
        self.sequence_parallel = bool(linear.sequence_parallel) and not self.is_expert

        scales = [part.scale for part in adapter.parts for _ in range(part.rank)]
        self.column_scales: Tensor
        self.uniform_scale = scales[0] if len(set(scales)) == 1 else None
        if self.uniform_scale is None:
            self.register_buffer("column_scales", torch.tensor(scales), persistent=False)
        self._mark_parameters(linear)

    def _mark_parameters(self, linear: Any) -> None:
        """Sets the attributes by which Megatron-core finds the groups that reduce a gradient."""
        is_expert_parallel = not getattr(next(linear.parameters()), "allreduce", True)
        for parameter in (self.lora_A.weight, self.lora_B.weight):
            parameter.allreduce = not is_expert_parallel  # type: ignore[attr-defined]

        whole_factor, cut_factor = (
            (self.lora_A, self.lora_B) if self.is_column else (self.lora_B, self.lora_A)
        )
        set_tensor_model_parallel_attributes(cut_factor.weight, True, 0 if self.is_column else 1, 1)
        # A rank sees the whole factor with its own part of the tokens only.
        whole_factor.weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor, output: Tensor) -> Tensor:
        """The layer's output with what the adapter adds.

        Args:
            x: input of the layer's matrix [..., in], after its norm if it has one.
            output: the layer's output [..., out].
        """
        hidden = self._exchange(self.lora_A(self._drop(x), self._summed_weight(self.lora_A, self.is_column)))
        scaled = hidden * (self.column_scales if self.uniform_scale is None else self.uniform_scale)
        return output + self.lora_B(
            scaled.to(hidden.dtype), self._summed_weight(self.lora_B, not self.is_column)
        )

    def _exchange(self, hidden: Tensor) -> Tensor:
        """Gathers or sums the columns between the factors over the tensor-parallel ranks."""
        if self.tp_size == 1 or self.is_expert:
            return hidden
        if self.is_column and self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        if self.is_column:
            return copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(hidden, group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(hidden, group=self.tp_group)

    def _summed_weight(self, factor: _Factor, is_whole: bool) -> Tensor | None:
        """For experts, the weight of a factor that all tensor ranks hold, whose gradient is summed over them.

        The dispatcher sums the outputs and the input gradients of an expert's ranks, so an adapter's parts
        may stay apart like the expert's own. Only this weight needs the sum.
        """
        if not (self.is_expert and is_whole and self.tp_size > 1):
            return None
        return copy_to_tensor_model_parallel_region(factor.weight, group=self.tp_group)

    def _drop(self, x: Tensor) -> Tensor:
        if not self.dropout or not self.training:
            return x
        # Ranks with the same input need the same mask, ranks with their own part of it another one.
        if self.tp_size > 1 and (self.sequence_parallel or not self.is_column):
            with get_cuda_rng_tracker().fork():
                return F.dropout(x, self.dropout)
        return F.dropout(x, self.dropout)


def add_to_output(linear: Any, inputs: tuple[Any, ...], output: Any) -> Any:
    """The forward hook of a linear layer that has an adapter. Layers return (output, bias)."""
    result, bias = output
    layer_input = inputs[0]
    # A layer of Transformer Engine with a norm also returns what comes out of the norm.
    if isinstance(result, tuple):
        result, layer_input = result
    return linear.adapter(layer_input, result), bias


class AdaptedModel:
    """Attaches the adapters of a run to the modules of a built model.

    Args:
        sharding: how the layout cuts tensors.
        tp_rank, etp_rank: this rank's numbers in tensor and expert tensor parallelism.
    """

    def __init__(
        self, spec: ModelSpec, config: TrainConfig, sharding: Sharding, *, tp_rank: int, etp_rank: int
    ) -> None:
        self.spec, self.lora, self.seed = spec, config.lora, config.seed
        self.sharding, self.tp_rank, self.etp_rank = sharding, tp_rank, etp_rank
        self.adapters = fused_adapters(spec, config.lora)

    def attach_adapters(self, module: nn.Module, live_tensors: Iterable[LiveTensor]) -> None:
        """Gives the linear layers within ``module`` their adapters. The module must be on its device.

        Args:
            live_tensors: at least the module's parameters, with canonical names.

        Raises:
            RunConfigError: something that the run's ``lora`` asks for cannot be done.
        """
        tensor_by_parameter = {id(live_tensor.parameter): live_tensor for live_tensor in live_tensors}
        for linear in list(module.modules()):
            for parameter in list(linear.parameters(recurse=False)):
                live_tensor = tensor_by_parameter.get(id(parameter))
                if live_tensor is not None and live_tensor.tensor_name in self.adapters:
                    self._attach(linear, self.adapters[live_tensor.tensor_name], live_tensor)

    def _attach(self, linear: Any, adapter: FusedAdapter, live_tensor: LiveTensor) -> None:
        """Attaches one adapter to a linear layer."""
        if hasattr(linear, "num_gemms"):
            raise RunConfigError(
                "lora.targets: adapters of experts are not supported on CUDA yet; leave out experts"
            )
        if adapter.kind == "experts" and self.lora.dropout:
            raise RunConfigError("lora.dropout: experts have no dropout, as in PEFT; set it to 0")

        base_weight = live_tensor.parameter
        info_a, info_b = adapter.tensor_infos()
        factor_a = self._cut(self._draw_a(adapter, info_a, live_tensor.expert_index), info_a)
        factor_b = self._cut(torch.zeros(info_b.shape[-2:]), info_b)

        part_masks = self._row_masks(adapter, info_b)
        module_b = _FusedFactor(factor_b, part_masks) if part_masks else _Factor(factor_b)
        linear.adapter = LinearAdapter(adapter, self.lora.dropout, linear, _Factor(factor_a), module_b)
        linear.adapter.to(device=base_weight.device)
        for factor in (linear.adapter.lora_A, module_b):
            factor.weight.data = factor.weight.data.to(base_weight.dtype)

        # A layer of Transformer Engine that begins with a norm returns the norm's output too.
        if hasattr(linear, "return_layernorm_output"):
            linear.return_layernorm_output = True
        linear.register_forward_hook(add_to_output)

    def _draw_a(self, adapter: FusedAdapter, info_a: TensorInfo, expert_index: int | None) -> Tensor:
        """The first value of A [rank, columns], of one expert in a stack. Padded columns are zero.

        It depends only on the seed and the tensor's name, so that it is the same in every layout.
        """
        seed_text = f"{self.seed} {info_a.name} {expert_index}"
        tensor_seed = int.from_bytes(hashlib.sha256(seed_text.encode()).digest()[:7], "little")
        generator = torch.Generator().manual_seed(tensor_seed)

        bound, real_columns = initial_bound(self.spec, adapter.base)
        factor = torch.zeros(info_a.shape[-2:])
        factor[:, :real_columns].uniform_(-bound, bound, generator=generator)
        return factor

    def _cut(self, factor: Tensor, info: TensorInfo) -> Tensor:
        """This rank's shard of a factor, or of one expert's."""
        sharding, shard_index = self.sharding, self.sharding.shard_index(info, tp_rank=self.tp_rank)
        if info.num_experts:
            info = replace(info, shape=info.shape[1:], num_experts=0)
            sharding, shard_index = Sharding(sharding.etp), self.etp_rank
        return cut_shard(factor, info, shard_index, sharding).contiguous()

    def _row_masks(self, adapter: FusedAdapter, info_b: TensorInfo) -> list[tuple[int, Tensor]]:
        """(rank, this rank's rows) of each part with an adapter; empty for a single released matrix."""
        runs = row_runs(self.spec, adapter.base)
        if len(runs) == 1:
            return []
        part_numbers = torch.tensor([part for part, _ in runs])
        part_of_row = part_numbers.repeat_interleave(torch.tensor([rows for _, rows in runs]))
        local_parts = self._cut(part_of_row[:, None], info_b)
        return [(part.rank, local_parts == number) for number, part in enumerate(adapter.parts) if part.rank]
