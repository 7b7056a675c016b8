"""LoRA adapters beside the linear layers of a built model (:mod:`megatron_vl.spec.lora`).

An adapter is a child module of its linear layer, and a forward hook adds what it computes to the layer's
output. So every module that holds a linear layer stays as it is, and a layer without an adapter costs
nothing.

Under tensor parallelism, a factor is cut as its base matrix is, along the same dimension, and the other
factor is on all ranks. Only the ``rank`` columns between the two factors are exchanged: gathered or summed
over the ranks, and over tokens under sequence parallelism.
"""

import contextlib
import hashlib
from collections.abc import Iterable
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
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from torch import Tensor, nn

from megatron_vl.config import RunConfigError, TrainConfig
from megatron_vl.models.parameter_names import LiveTensor
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.lora import FusedLora, fused_lora, initial_bound, row_runs
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
    """B of several released matrices, whose rows are in the order of the fused tensor."""

    def __init__(self, initial_value: Tensor, part_ranks: list[int], part_masks: Tensor) -> None:
        super().__init__(initial_value)
        self.part_ranks = part_ranks
        self.part_masks = nn.Buffer(part_masks, persistent=False)

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """[..., sum of the ranks] -> [..., rows]"""
        weight = self.weight if weight is None else weight

        # Each row multiplies only the columns of its own released matrix; the others are zero.
        parts = zip(self.part_ranks, self.part_masks, strict=True)
        return F.linear(x, torch.cat([weight[:, :rank] * mask for rank, mask in parts], 1))


class LinearAdapter(nn.Module):
    """The adapter of one linear layer, or of one expert's.

    Args:
        linear: the layer, whose process group and sequence parallelism are those of its adapter.
    """

    def __init__(
        self, adapter: FusedLora, dropout: float, linear: Any, factor_a: _Factor, factor_b: _Factor
    ) -> None:
        super().__init__()
        self.lora_A = factor_a
        self.lora_B = factor_b
        self.is_column = adapter.base.parallel_style != "row"
        self.is_expert = adapter.base.num_experts > 0
        self.dropout = dropout
        self.tp_group = linear.tp_group
        self.tp_size = self.tp_group.size() if self.tp_group is not None else 1
        self.sequence_parallel = bool(linear.sequence_parallel) and not self.is_expert

        column_scales = [part.scale for part in adapter.parts for _ in range(part.rank)]
        self.uniform_scale = column_scales[0]
        self.has_uniform_scale = len(set(column_scales)) == 1
        self.column_scales = nn.Buffer(torch.tensor(column_scales), persistent=False)

        # The attributes by which Megatron-core finds the groups that reduce a gradient.
        is_expert_parallel = not getattr(next(linear.parameters()), "allreduce", True)
        for parameter in (factor_a.weight, factor_b.weight):
            parameter.allreduce = not is_expert_parallel  # type: ignore[attr-defined]
        whole_factor, cut_factor = (factor_a, factor_b) if self.is_column else (factor_b, factor_a)
        set_tensor_model_parallel_attributes(
            cut_factor.weight, True, dim=0 if self.is_column else 1, stride=1
        )
        # A rank sees the whole factor with its own part of the tokens only.
        whole_factor.weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor, output: Tensor) -> Tensor:
        """The layer's output with what the adapter adds.

        Args:
            x: input of the layer's matrix [..., in], after its norm if it has one.
            output: the layer's output [..., out].
        """
        weight_a = self._summed_weight(self.lora_A, self.is_column)
        weight_b = self._summed_weight(self.lora_B, not self.is_column)
        inner_states = self._exchange(self.lora_A(self._drop(x), weight_a))

        scale = self.uniform_scale if self.has_uniform_scale else self.column_scales
        return output + self.lora_B((inner_states * scale).to(inner_states.dtype), weight_b)

    def _exchange(self, inner_states: Tensor) -> Tensor:
        """Gathers or sums the columns between the factors over the tensor-parallel ranks."""
        if self.tp_size == 1 or self.is_expert:
            return inner_states
        exchange = {
            (True, True): gather_from_sequence_parallel_region,
            (True, False): copy_to_tensor_model_parallel_region,
            (False, True): reduce_scatter_to_sequence_parallel_region,
            (False, False): reduce_from_tensor_model_parallel_region,
        }[self.is_column, self.sequence_parallel]
        return exchange(inner_states, group=self.tp_group)

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
        masks_differ = self.tp_size > 1 and (self.sequence_parallel or not self.is_column)
        with get_cuda_rng_tracker().fork() if masks_differ else contextlib.nullcontext():
            return F.dropout(x, self.dropout)


def add_to_output(linear: Any, inputs: tuple[Any, ...], output: Any) -> Any:
    """The forward hook of a linear layer that has an adapter. Layers return (output, bias).

    A layer of Transformer Engine with a norm also returns what comes out of the norm: beside its output, or
    last if it leaves its bias to the caller.
    """
    layer_output, bias, *norm_outputs = output
    if isinstance(layer_output, tuple):
        layer_output, *norm_outputs = layer_output

    layer_input = norm_outputs[0] if norm_outputs else inputs[0]
    # Grouped experts also get the numbers of their rows.
    return linear.adapter(layer_input, layer_output, *inputs[1:]), bias


def seed_dropout(seed: int, step: int) -> None:
    """Seeds the dropout of a step, so that a step has the same masks after a resume.

    Ranks with other tokens draw other masks.
    """
    from megatron.core import parallel_state as mpu

    data_rank = mpu.get_data_parallel_rank(with_context_parallel=True)
    pipeline_rank = mpu.get_pipeline_model_parallel_rank()
    digest = hashlib.sha256(f"{seed} {step} {data_rank} {pipeline_rank}".encode()).digest()
    model_parallel_cuda_manual_seed(int.from_bytes(digest[:4], "little"))


class AdaptedModel:
    """Attaches the adapters of a run to the modules of a built model."""

    def __init__(
        self, spec: ModelSpec, config: TrainConfig, sharding: Sharding, *, tp_rank: int, etp_rank: int
    ) -> None:
        self.spec, self.lora, self.seed = spec, config.lora, config.seed
        self.sharding, self.tp_rank, self.etp_rank = sharding, tp_rank, etp_rank
        self.adapters = fused_lora(spec, config.lora)

        adapter_kinds = {adapter.kind for adapter in self.adapters.values()}
        is_decoupled = config.vision.placement == "decoupled"
        if self.lora.dropout and is_decoupled and adapter_kinds & {"vision", "merger"}:
            raise RunConfigError(
                "lora.dropout: with vision.placement decoupled, the tower runs a second time before its"
                " backward pass, cut into other inputs, and would draw other masks; set dropout to 0, leave"
                " vision and merger out of lora.targets, or use first_stage"
            )

    def attach_adapters(self, module: nn.Module, live_tensors: Iterable[LiveTensor]) -> None:
        """Gives the linear layers within ``module`` their adapters. The module must be on its device.

        Args:
            live_tensors: at least the module's parameters, with canonical names.
        """
        adapted = {id(live.parameter): live for live in live_tensors if live.tensor_name in self.adapters}
        for linear in list(module.modules()):
            parameters = linear.parameters(recurse=False)
            base_tensors = [adapted[id(parameter)] for parameter in parameters if id(parameter) in adapted]
            if base_tensors:
                self._attach(linear, base_tensors)

    def _attach(self, linear: Any, base_tensors: list[LiveTensor]) -> None:
        """Attaches the adapter of a linear layer, whose weight is ``base_tensors``: one for each expert."""
        adapter = self.adapters[base_tensors[0].tensor_name]
        if adapter.kind == "experts" and self.lora.dropout:
            raise RunConfigError("lora.dropout: experts have no dropout, as in PEFT; set it to 0")

        if hasattr(linear, "num_gemms"):
            linear.adapter = self._make_grouped_adapter(adapter, linear, base_tensors)
        else:
            [base_tensor] = base_tensors
            initial_a, initial_b = self._initial_factors(adapter, base_tensor)
            factor_b = self._make_b(adapter, initial_b)
            linear.adapter = LinearAdapter(adapter, self.lora.dropout, linear, _Factor(initial_a), factor_b)
        linear.adapter.to(device=base_tensors[0].parameter.device)

        # A layer of Transformer Engine that begins with a norm returns the norm's output too.
        if hasattr(linear, "return_layernorm_output"):
            linear.return_layernorm_output = True
        linear.register_forward_hook(add_to_output)

    def _make_grouped_adapter(
        self, adapter: FusedLora, linear: Any, base_tensors: list[LiveTensor]
    ) -> nn.Module:
        """The adapter of all experts of a rank, for grouped products on a GPU."""
        from megatron_vl.models.moe.experts import MIN_RANK_MULTIPLE, GroupedAdapter

        [part] = adapter.parts
        if not linear.takes_tile_plan or self.sharding.etp > 1 or part.rank % MIN_RANK_MULTIPLE:
            raise RunConfigError(
                "lora.targets: on GPUs, adapters of experts need bfloat16, parallel.etp 1, and a rank that is"
                f" a multiple of {MIN_RANK_MULTIPLE}; change one of these, or leave out experts"
            )
        factors_a, factors_b = zip(
            *(self._initial_factors(adapter, base) for base in base_tensors), strict=True
        )
        is_expert_parallel = not getattr(base_tensors[0].parameter, "allreduce", True)
        return GroupedAdapter(factors_a, factors_b, part.scale, is_expert_parallel)

    def _initial_factors(self, adapter: FusedLora, base_tensor: LiveTensor) -> tuple[Tensor, Tensor]:
        """This rank's shards of A and B before the first step, in the type of the base."""
        info_a, info_b = adapter.tensor_infos()
        full_a, full_b = (torch.zeros(info.shape[-2:]) for info in (info_a, info_b))
        # A depends only on the seed and its name, so that it is the same in every layout.
        digest = hashlib.sha256(f"{self.seed} {info_a.name} {base_tensor.expert_index}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        bound, real_columns = initial_bound(self.spec, adapter.base)
        full_a[:, :real_columns].uniform_(-bound, bound, generator=generator)
        dtype = base_tensor.parameter.dtype
        return self._cut(full_a, info_a).to(dtype), self._cut(full_b, info_b).to(dtype)

    def _cut(self, factor: Tensor, info: TensorInfo) -> Tensor:
        """This rank's shard of a factor, or of one expert's."""
        sharding = self.sharding
        shard_index = sharding.shard_index(info, tp_rank=self.tp_rank)
        if info.num_experts:
            # The factor is that of one expert, which only expert tensor parallelism cuts.
            info, sharding, shard_index = info.single_expert, Sharding(sharding.etp), self.etp_rank
        return cut_shard(factor, info, shard_index, sharding).contiguous()

    def _make_b(self, adapter: FusedLora, initial_b: Tensor) -> _Factor:
        """The module of B for one released matrix or for several."""
        runs = row_runs(self.spec, adapter.base)
        if len(runs) == 1:
            return _Factor(initial_b)

        # The released matrix of each row is cut among the ranks as the rows are.
        part_of_row = torch.repeat_interleave(*torch.tensor(runs).unbind(1))
        local_parts = self._cut(part_of_row[:, None], adapter.tensor_infos()[1])
        numbered = [(number, part.rank) for number, part in enumerate(adapter.parts) if part.rank]
        part_masks = torch.stack([local_parts == number for number, _ in numbered])
        return _FusedFactor(initial_b, [rank for _, rank in numbered], part_masks)
