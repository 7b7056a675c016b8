"""LoRA adapters between PEFT's folders and canonical factors, and merging them into the model's weights.

The rule of a fused tensor says which of its rows belong to which released matrix. It holds for ``lora_B``
too, which has the same rows. ``lora_A`` has the factors of the released matrices one below another.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Container, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_vl.config import LoraConfig
from megatron_vl.spec.adapters import FusedAdapter, adapter_table, fused_adapters, row_runs
from megatron_vl.spec.families import ModelSpec
from megatron_vl.weights.tensor_files import (
    MatrixRegion,
    WeightsError,
    make_safetensors_header,
    matrix_shape,
    read_safetensors_header,
    whole_matrix_region,
)

from .hf_checkpoint import HfCheckpoint, long_tensor_name
from .peft_folder import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    KEY_PREFIX,
    PEFT_VERSION,
    MatrixFactors,
    PeftFolder,
    released_matrices,
    rules_by_name,
    target_settings,
)


class AdapterSource(Protocol):
    """Canonical factors: a :class:`PeftAdapters`, or a ``WeightReader`` of a checkpoint with LoRA."""

    path: Path
    spec: ModelSpec
    lora: LoraConfig

    def dtype(self, tensor_name: str) -> torch.dtype: ...

    def read_region(self, tensor_name: str, region: MatrixRegion) -> Tensor: ...

    def verify_tensor(self, tensor_name: str) -> None: ...

    def fingerprint(self) -> dict[str, str]: ...


def _module_name(hf_tensor_name: object) -> str:
    """The name of a module in ``transformers`` 5 from the released name of its weight."""
    return long_tensor_name(str(hf_tensor_name)).removesuffix(".weight")


def fuse_factors(
    spec: ModelSpec, adapter: FusedAdapter, factors: Mapping[str, MatrixFactors], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The canonical factors A and B from those of the released matrices."""
    info_a, info_b = adapter.tensor_infos()
    if adapter.base.num_experts:
        stack = factors[adapter.parts[0].hf_name]
        return stack.factor_a.to(dtype).contiguous(), stack.factor_b.to(dtype).contiguous()

    canonical_a = torch.zeros(info_a.shape, dtype=dtype)
    canonical_b = torch.zeros(info_b.shape, dtype=dtype)
    first_row = 0
    for part in adapter.parts:
        if part.rank:
            factor_a = factors[part.hf_name].factor_a
            canonical_a[first_row : first_row + part.rank, : factor_a.shape[1]] = factor_a
        first_row += part.rank

    for block in rules_by_name(spec)[adapter.base.name].blocks:
        part_factors = factors.get(_module_name(block.part_id))
        if part_factors is not None:
            part_rows = part_factors.factor_b[block.part_row : block.part_row + block.rows]
            canonical_b[block.row : block.row + block.rows, : part_factors.rank] = part_rows
    return canonical_a, canonical_b


def split_factors(
    spec: ModelSpec, adapter: FusedAdapter, canonical_a: Tensor, canonical_b: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """The factors of the released matrices from the canonical ones: the inverse of :func:`fuse_factors`.

    Raises:
        WeightsError: elements that no released matrix has are not zero, so they would be lost.
    """
    if adapter.base.num_experts:
        return {adapter.parts[0].hf_name: (canonical_a, canonical_b)}

    base_rule = rules_by_name(spec)[adapter.base.name]
    shape_by_name = {_module_name(name): shape for name, shape in base_rule.hf_shapes.items()}
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    first_row = 0
    for part in adapter.parts:
        if part.rank:
            row_count, col_count = shape_by_name[part.hf_name]
            factor_a = canonical_a[first_row : first_row + part.rank, :col_count].contiguous()
            factors[part.hf_name] = factor_a, canonical_b.new_zeros(row_count, part.rank)
        first_row += part.rank

    for block in base_rule.blocks:
        if _module_name(block.part_id) in factors:
            factor_b = factors[_module_name(block.part_id)][1]
            block_rows = canonical_b[block.row : block.row + block.rows, : factor_b.shape[1]]
            factor_b[block.part_row : block.part_row + block.rows] = block_rows

    for i, canonical in enumerate((canonical_a, canonical_b)):
        kept_count = sum(int(pair[i].count_nonzero()) for pair in factors.values())
        if kept_count != int(canonical.count_nonzero()):
            raise WeightsError(
                f"the adapter of {adapter.base.name!r} holds values where no released matrix has any; they"
                " cannot be exported"
            )
    return factors


# --- PEFT's folders -----------------------------------------------------------------------------------------


class PeftAdapters(PeftFolder):
    """A PEFT folder that is read as canonical factors.

    Attributes:
        tensor_infos: canonical name of a factor -> its description, in model order.
    """

    def __init__(self, path: str | Path, spec: ModelSpec) -> None:
        super().__init__(path, spec)
        self.tensor_infos = adapter_table(spec, self.lora)
        self._adapter_by_name: dict[str, FusedAdapter] = {}
        for adapter in fused_adapters(spec, self.lora).values():
            self._adapter_by_name |= {adapter.name_a: adapter, adapter.name_b: adapter}
        self._fused_factors = lru_cache(maxsize=4)(self._fuse_factors)

    def _fuse_factors(self, base_name: str) -> tuple[Tensor, Tensor]:
        adapter = next(found for found in self._adapter_by_name.values() if found.base.name == base_name)
        return fuse_factors(self.spec, adapter, self.factors, self._common_dtype(adapter))

    def _common_dtype(self, adapter: FusedAdapter) -> torch.dtype:
        """The type that holds the values of all factors of a canonical tensor exactly."""
        common_dtype: torch.dtype | None = None
        for part in adapter.parts:
            if part.rank:
                factors = self.factors[part.hf_name]
                for dtype in (factors.factor_a.dtype, factors.factor_b.dtype):
                    common_dtype = torch.promote_types(common_dtype or dtype, dtype)
        assert common_dtype is not None
        return common_dtype

    def dtype(self, tensor_name: str) -> torch.dtype:
        return self._common_dtype(self._adapter_by_name[tensor_name])

    def read_region(self, tensor_name: str, region: MatrixRegion) -> Tensor:
        """A region of a canonical factor as a matrix."""
        adapter = self._adapter_by_name[tensor_name]
        factor = self._fused_factors(adapter.base.name)[tensor_name == adapter.name_b]
        matrix = factor.view(matrix_shape(factor.shape))
        return matrix[region.row : region.row_end, region.col : region.col_end]

    def verify_tensor(self, tensor_name: str) -> None:
        """Does nothing, because PEFT's folders have no hashes. Names and shapes were checked earlier."""

    def fingerprint(self) -> dict[str, str]:
        """The settings, and the weights' header, size and modification time."""
        weights_path = self.path / ADAPTER_FILE
        file_stat = weights_path.stat()
        header = hashlib.sha256(read_safetensors_header(weights_path)).hexdigest()
        return {
            ADAPTER_CONFIG_FILE: json.dumps(self.config, sort_keys=True),
            ADAPTER_FILE: f"{file_stat.st_size} bytes of {file_stat.st_mtime_ns}, header {header[:16]}",
        }


def peft_key(hf_name: str, letter: str, names: Container[str]) -> str:
    """The key of a factor in PEFT's files.

    Args:
        hf_name: name of the released matrix.
        letter: A or B.
        names: all matrices with an adapter. PEFT wraps experts once for each stack: gate and up first, so
            that they are inside if there is an adapter of down as well.
    """
    experts_name, _, stack = hf_name.rpartition(".")
    if experts_name.endswith(".mlp.experts"):
        is_inner = stack == "gate_up_proj" and f"{experts_name}.down_proj" in names
        hf_name = f"{experts_name}.base_layer" if is_inner else experts_name
    return f"{KEY_PREFIX}{hf_name}.lora_{letter}.weight"


def peft_tensors(source: AdapterSource, adapter: FusedAdapter, names: Container[str]) -> dict[str, Tensor]:
    """The tensors of PEFT's file for one canonical tensor."""
    canonical_factors = []
    for info in adapter.tensor_infos():
        source.verify_tensor(info.name)
        stored_region = source.read_region(info.name, whole_matrix_region(info.shape))
        canonical_factors.append(stored_region.reshape(info.shape))

    stored_tensors: dict[str, Tensor] = {}
    for hf_name, (factor_a, factor_b) in split_factors(source.spec, adapter, *canonical_factors).items():
        if adapter.base.num_experts:
            factor_a = factor_a.flatten(0, 1)
            factor_b = factor_b.permute(1, 2, 0).flatten(1)  # the experts are the last index of B's columns
        stored_tensors[peft_key(hf_name, "A", names)] = factor_a
        stored_tensors[peft_key(hf_name, "B", names)] = factor_b
    return stored_tensors


def peft_header(source: AdapterSource) -> bytes:
    """The header of PEFT's file."""
    adapters = fused_adapters(source.spec, source.lora)
    shape_by_name = released_matrices(source.spec)
    names = adapted_matrices(source)
    types: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for adapter in adapters.values():
        for part in adapter.parts:
            if part.rank:
                *experts, row_count, col_count = shape_by_name[part.hf_name]
                expert_ranks = part.rank * math.prod(experts)
                key_a, key_b = (peft_key(part.hf_name, letter, names) for letter in "AB")
                types[key_a] = source.dtype(adapter.name_a), (expert_ranks, col_count)
                types[key_b] = source.dtype(adapter.name_b), (row_count, expert_ranks)
    return make_safetensors_header(types, {"format": "pt"})


def adapted_matrices(source: AdapterSource) -> list[str]:
    """The released matrices with an adapter, in model order."""
    return [
        part.hf_name
        for adapter in fused_adapters(source.spec, source.lora).values()
        for part in adapter.parts
        if part.rank
    ]


def peft_config(source: AdapterSource, base_name: str) -> dict[str, Any]:
    """The content of ``adapter_config.json``.

    Args:
        base_name: name or folder of the model that the adapter belongs to.
    """
    spec, lora = source.spec, source.lora
    alpha_pattern = {pattern: _plain_number(alpha) for pattern, alpha in lora.alpha_pattern.items()}
    return {
        "peft_type": "LORA",
        "peft_version": PEFT_VERSION,
        "base_model_name_or_path": base_name,
        "auto_mapping": {
            "base_model_class": spec.hf_config["architectures"][0],
            "parent_library": f"transformers.models.{spec.family}.modeling_{spec.family}",
        },
        "task_type": None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": _plain_number(lora.alpha),
        "lora_dropout": lora.dropout,
        "use_rslora": lora.use_rslora,
        **target_settings(adapted_matrices(source), spec),
        "rank_pattern": lora.rank_pattern,
        "alpha_pattern": alpha_pattern,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
    }


def _plain_number(number: float) -> float:
    """The same number, as an integer if it is one: some loaders take no other."""
    return int(number) if number == int(number) else number


# --- Merging ------------------------------------------------------------------------------------------------


class MergedWeights:
    """The canonical tensors of a model with an adapter added to them.

    A tensor with an adapter is the sum in float32, which a writer rounds once. The others are those of the
    base, bit for bit.
    """

    lora = LoraConfig()

    def __init__(self, base: HfCheckpoint, source: AdapterSource) -> None:
        self.base, self.source, self.spec, self.path = base, source, base.spec, source.path
        self.adapters = fused_adapters(source.spec, source.lora)
        self._wide_factors = lru_cache(maxsize=16)(self._read_wide_factors)

    def dtype(self, tensor_name: str) -> torch.dtype:
        return torch.float32 if tensor_name in self.adapters else self.base.dtype(tensor_name)

    def verify_tensor(self, tensor_name: str) -> None:
        if tensor_name in self.adapters:
            for info in self.adapters[tensor_name].tensor_infos():
                self.source.verify_tensor(info.name)

    def fingerprint(self) -> dict[str, str]:
        return {**self.base.fingerprint(), **self.source.fingerprint()}

    def read_region(self, tensor_name: str, region: MatrixRegion) -> Tensor:
        """A region of a full canonical tensor as a matrix."""
        base_region = self.base.read_region(tensor_name, region)
        if tensor_name not in self.adapters:
            return base_region

        merged_region = base_region.to(torch.float32, copy=True)
        factor_a, factor_b, row_scales = self._wide_factors(tensor_name)
        expert_rows = factor_b.shape[1]
        for expert_index, matrix_a in enumerate(factor_a):
            first_row = max(region.row, expert_index * expert_rows)
            end_row = min(region.row_end, (expert_index + 1) * expert_rows)
            if first_row >= end_row:
                continue
            expert_slice = slice(first_row - expert_index * expert_rows, end_row - expert_index * expert_rows)
            delta = factor_b[expert_index, expert_slice] @ matrix_a[:, region.col : region.col_end]
            merged_region[first_row - region.row : end_row - region.row] += delta * row_scales[expert_slice]
        return merged_region

    def _read_wide_factors(self, tensor_name: str) -> tuple[Tensor, Tensor, Tensor]:
        """A [E, ranks, columns], B [E, rows, ranks] and the scale of each row [rows, 1], in float32.

        The columns of B are those of all released matrices, side by side, so that B A is right in every row.
        Without experts, E is 1.
        """
        adapter = self.adapters[tensor_name]
        info_a, info_b = adapter.tensor_infos()
        factor_a, narrow_b = (
            self.source.read_region(info.name, whole_matrix_region(info.shape)).float()
            for info in (info_a, info_b)
        )
        experts = max(1, adapter.base.num_experts)
        narrow_b = narrow_b.view(experts, -1, adapter.max_rank)
        wide_b = narrow_b.new_zeros(*narrow_b.shape[:2], adapter.rank_sum)
        row_scales = narrow_b.new_zeros(narrow_b.shape[1], 1)

        first_columns = [0, *itertools.accumulate(part.rank for part in adapter.parts)]
        row = 0
        for part_number, row_count in row_runs(self.spec, adapter.base):
            part, rows = adapter.parts[part_number], slice(row, row + row_count)
            columns = slice(first_columns[part_number], first_columns[part_number + 1])
            wide_b[:, rows, columns] = narrow_b[:, rows, : part.rank]
            row_scales[rows] = part.scale
            row += row_count
        return factor_a.view(experts, adapter.rank_sum, -1), wide_b, row_scales
