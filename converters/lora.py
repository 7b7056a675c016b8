"""LoRA's factors between PEFT's folders and canonical tensors, and merging them into the model's weights.

The rule of a fused tensor says which of its rows belong to which released matrix. It holds for ``lora_B``
too, which has the same rows. ``lora_A`` has the factors of the released matrices one below another.
"""

from collections.abc import Container, Iterator, Mapping
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_vl.config import LoraConfig
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.lora import (
    FusedLora,
    fused_lora,
    is_lora_tensor,
    row_runs,
    saved_modules,
    trained_table,
)
from megatron_vl.weights.canonical_weights import CanonicalWeights
from megatron_vl.weights.model_digest import LoraBase, recorded_base
from megatron_vl.weights.tensor_files import MatrixRegion, WeightsError, matrix_shape
from megatron_vl.weights.trained_media import ROPE_KEY, read_export_facts
from megatron_vl.weights.weight_reader import WeightReader, read_lora

from .hf_checkpoint import HfCheckpoint, long_tensor_name
from .peft_folder import (
    ADAPTER_FILE,
    KEY_PREFIX,
    PEFT_VERSION,
    MatrixFactors,
    PeftFolder,
    disjoint_patterns,
    is_expert_stack,
    is_peft_folder,
    released_matrices,
    rules_by_name,
    target_settings,
)


def _part_views(
    spec: ModelSpec, adapter: FusedLora, canonical_a: Tensor, canonical_b: Tensor
) -> Iterator[tuple[str, Tensor, list[tuple[slice, Tensor]]]]:
    """The parts of canonical factors, as views of them, for each released matrix with an adapter.

    Yields:
        Name of the matrix, its A [rank, in], and its B in pieces: (rows of the matrix, [rows, rank]).
    """
    matrix_shapes = released_matrices(spec)
    base_blocks = rules_by_name(spec)[adapter.base.name].blocks
    first_row = 0
    for part in adapter.parts:
        if not part.rank:
            continue
        # The columns of a tower's matrix may be padded.
        part_a = canonical_a[first_row : first_row + part.rank, : matrix_shapes[part.hf_name][1]]
        first_row += part.rank
        weight_name = f"{part.hf_name}.weight"
        pieces_b = [
            (slice(b.part_row, b.part_row + b.rows), canonical_b[b.row : b.row + b.rows, : part.rank])
            for b in base_blocks
            if long_tensor_name(str(b.part_id)) == weight_name
        ]
        yield part.hf_name, part_a, pieces_b


def fuse_factors(
    spec: ModelSpec, adapter: FusedLora, factors: Mapping[str, MatrixFactors], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The canonical factors A and B from those of the released matrices."""
    if adapter.base.num_experts:
        stack = factors[adapter.parts[0].hf_name]
        return stack.factor_a.to(dtype).contiguous(), stack.factor_b.to(dtype).contiguous()

    info_a, info_b = adapter.tensor_infos()
    canonical_a = torch.zeros(info_a.shape, dtype=dtype)
    canonical_b = torch.zeros(info_b.shape, dtype=dtype)
    for hf_name, part_a, pieces_b in _part_views(spec, adapter, canonical_a, canonical_b):
        part_a.copy_(factors[hf_name].factor_a)
        for rows, piece in pieces_b:
            piece.copy_(factors[hf_name].factor_b[rows])
    return canonical_a, canonical_b


def split_factors(
    spec: ModelSpec, adapter: FusedLora, canonical_a: Tensor, canonical_b: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """The factors of the released matrices from the canonical ones: the inverse of :func:`fuse_factors`.

    Raises:
        WeightsError: elements that no released matrix has are not zero, so they would be lost.
    """
    if adapter.base.num_experts:
        return {adapter.parts[0].hf_name: (canonical_a, canonical_b)}

    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for hf_name, part_a, pieces_b in _part_views(spec, adapter, canonical_a, canonical_b):
        factor_b = canonical_b.new_zeros(released_matrices(spec)[hf_name][0], len(part_a))
        for rows, piece in pieces_b:
            factor_b[rows] = piece
        factors[hf_name] = (part_a.contiguous(), factor_b)

    canonical_count = int(canonical_a.count_nonzero() + canonical_b.count_nonzero())
    if canonical_count != sum(int(factor.count_nonzero()) for pair in factors.values() for factor in pair):
        raise WeightsError(
            f"the adapter of {adapter.base.name!r} holds values where no released matrix has any; they"
            " cannot be exported"
        )
    return factors


# --- PEFT's folders -----------------------------------------------------------------------------------------


class PeftAdapters(PeftFolder, CanonicalWeights):
    """A PEFT folder that is read as canonical factors.

    Attributes:
        spec: the given one, with the rotary positions of the training if the folder names them.
        tensor_infos: canonical name of a factor -> its description, in model order.
    """

    def __init__(self, path: str | Path, spec: ModelSpec) -> None:
        super().__init__(path, spec)
        if isinstance(rope := read_export_facts(self.path).get(ROPE_KEY), dict):
            self.spec = read_spec(spec.hf_config, rope)
        self.tensor_infos = trained_table(spec, self.lora)
        for tensor_name in self.tensor_infos:
            if not is_lora_tensor(tensor_name) and tensor_name not in self.saved_keys:
                raise WeightsError(
                    f"{self.path / ADAPTER_FILE}: {tensor_name!r} is missing in a whole module"
                )
        adapters = fused_lora(spec, self.lora).values()
        self._adapter_by_factor = {name: a for a in adapters for name in (a.name_a, a.name_b)}
        self._cached_factors = lru_cache(maxsize=4)(
            lambda adapter: fuse_factors(spec, adapter, self.factors, self.dtype(adapter.name_a))
        )

    def dtype(self, tensor_name: str) -> torch.dtype:
        """The type that holds the values of all released parts of a canonical tensor exactly."""
        if tensor_name in self.saved_keys:
            return self.tensor_reader.dtype(self.saved_keys[tensor_name])
        parts = self._adapter_by_factor[tensor_name].parts
        return reduce(torch.promote_types, [self.factors[part.hf_name].dtype for part in parts if part.rank])

    def read_region(self, tensor_name: str, region: MatrixRegion) -> Tensor:
        if tensor_name in self.saved_keys:
            return self.tensor_reader.read_region(self.saved_keys[tensor_name], region)
        adapter = self._adapter_by_factor[tensor_name]
        factor = self._cached_factors(adapter)[tensor_name == adapter.name_b]
        matrix = factor.view(matrix_shape(factor.shape))
        return matrix[region.row : region.row_end, region.col : region.col_end]

    @property
    def lora_base(self) -> LoraBase:
        """The weights that the adapter was trained on. Only folders that this project exported name them."""
        return recorded_base(read_export_facts(self.path))


def open_lora(path: str | Path, spec: ModelSpec) -> WeightReader | PeftAdapters:
    """Opens a PEFT folder, or a checkpoint of a run with LoRA in any layout.

    Raises:
        FileNotFoundError: there is neither.
        WeightsError: it holds no LoRA weights, or a PEFT folder does not fit the model.
    """
    # PEFT's files have no multi-token prediction.
    return PeftAdapters(path, spec.with_mtp(False)) if is_peft_folder(path) else read_lora(path)


def peft_key(hf_name: str, letter: str, names: Container[str]) -> str:
    """The key of a factor in PEFT's files.

    Args:
        hf_name: name of the released matrix.
        letter: A or B.
        names: all matrices with an adapter. PEFT wraps experts once for each stack: gate and up first, so
            that they are inside if there is an adapter of down as well.
    """
    module_name = hf_name
    if is_expert_stack(hf_name):
        module_name, _, stack_name = hf_name.rpartition(".")
        if stack_name == "gate_up_proj" and f"{module_name}.down_proj" in names:
            module_name += ".base_layer"
    return f"{KEY_PREFIX}{module_name}.lora_{letter}.weight"


def read_whole(source: CanonicalWeights, tensor_name: str) -> Tensor:
    """A whole canonical tensor, after it was verified."""
    source.verify_tensor(tensor_name)
    return source.read_shard(tensor_name)


def peft_tensors(source: CanonicalWeights) -> dict[str, Tensor]:
    """All tensors of PEFT's file, in model order; last those that were trained whole."""
    stored_tensors: dict[str, Tensor] = {}
    adapters = fused_lora(source.spec, source.lora).values()
    adapted_names = {part.hf_name for adapter in adapters for part in adapter.parts if part.rank}
    for adapter in adapters:
        canonical_factors = (read_whole(source, info.name) for info in adapter.tensor_infos())
        for hf_name, (factor_a, factor_b) in split_factors(source.spec, adapter, *canonical_factors).items():
            if adapter.base.num_experts:
                # In B, the expert is the last index of a column.
                factor_a, factor_b = factor_a.flatten(0, 1), factor_b.permute(1, 2, 0).flatten(1)
            stored_tensors[peft_key(hf_name, "A", adapted_names)] = factor_a
            stored_tensors[peft_key(hf_name, "B", adapted_names)] = factor_b

    for tensor_name in saved_modules(source.spec, source.lora):
        [(hf_name, shape)] = rules_by_name(source.spec)[tensor_name].hf_shapes.items()
        stored_tensors[KEY_PREFIX + long_tensor_name(hf_name)] = read_whole(source, tensor_name).view(shape)
    return stored_tensors


def peft_config(source: CanonicalWeights, base_name: str) -> dict[str, Any]:
    """The content of ``adapter_config.json``.

    Args:
        base_name: name or folder of the model that the adapter belongs to.
    """
    spec, lora = source.spec, source.lora
    parts = [part for adapter in fused_lora(spec, lora).values() for part in adapter.parts if part.rank]
    ranks = {part.hf_name: part.rank for part in parts}
    alphas = {part.hf_name: _plain_number(part.alpha) for part in parts}
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
        **target_settings(ranks, spec),
        # PEFT sorts them when it saves them again, so no two may match one matrix.
        "rank_pattern": disjoint_patterns(ranks, lora.rank, spec),
        "alpha_pattern": disjoint_patterns(alphas, lora.alpha, spec),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": sorted(set(saved_modules(spec, lora).values())) or None,
        "use_dora": False,
    }


def _plain_number(number: float) -> float:
    """The same number, as an integer if it is one: some loaders take no other."""
    return int(number) if int(number) == number else number


# --- Merging ------------------------------------------------------------------------------------------------


class MergedWeights(CanonicalWeights):
    """The canonical tensors of a model with LoRA's products added to them.

    A tensor with factors is the sum in float32, which a writer rounds once. One that was trained whole is
    LoRA's. The others are those of the base, bit for bit.
    """

    lora = LoraConfig()

    def __init__(self, base: HfCheckpoint, source: CanonicalWeights) -> None:
        self.base = base
        self.source = source
        self.spec, self.tensor_infos = base.spec, base.tensor_infos
        self.path = source.path
        self.fused = fused_lora(source.spec, source.lora)
        self.whole_tensors = {name for name in source.tensor_infos if not is_lora_tensor(name)}
        self._cached_factors = lru_cache(maxsize=16)(self._read_wide_factors)

    def dtype(self, tensor_name: str) -> torch.dtype:
        if tensor_name in self.fused:
            return torch.float32
        return (self.source if tensor_name in self.whole_tensors else self.base).dtype(tensor_name)

    def read_region(self, tensor_name: str, region: MatrixRegion) -> Tensor:
        if tensor_name in self.whole_tensors:
            self.source.verify_tensor(tensor_name)
            return self.source.read_region(tensor_name, region)
        base_region = self.base.read_region(tensor_name, region)
        if tensor_name not in self.fused:
            return base_region

        merged_region = base_region.to(torch.float32, copy=True)
        factor_a, factor_b, row_scales = self._cached_factors(tensor_name)
        num_rows = factor_b.shape[1]
        for expert, expert_a in enumerate(factor_a):
            # The rows of this expert within the region, counted from the expert's first row.
            start = region.row - expert * num_rows
            rows = slice(max(0, start), min(num_rows, region.row_end - expert * num_rows))
            if rows.start < rows.stop:
                product = factor_b[expert, rows] @ expert_a[:, region.col : region.col_end]
                merged_region[rows.start - start : rows.stop - start] += product * row_scales[rows]
        return merged_region

    def _read_wide_factors(self, tensor_name: str) -> tuple[Tensor, Tensor, Tensor]:
        """A [E, ranks, columns], B [E, rows, ranks] and the scale of each row [rows, 1], in float32.

        The columns of B are those of all released matrices, side by side, so that B A is right in every row.
        Without experts, E is 1.
        """
        adapter = self.fused[tensor_name]
        factor_a = read_whole(self.source, adapter.name_a).float()
        narrow_b = read_whole(self.source, adapter.name_b).float()
        if not adapter.base.num_experts:
            factor_a, narrow_b = factor_a[None], narrow_b[None]

        expert_count, num_rows, _ = narrow_b.shape
        wide_b = narrow_b.new_zeros(expert_count, num_rows, sum(adapter.ranks))
        row_scales = narrow_b.new_zeros(num_rows, 1)
        first_row = 0
        for part_number, run_length in row_runs(self.spec, adapter.base):
            part = adapter.parts[part_number]
            first_column = sum(adapter.ranks[:part_number])
            rows = slice(first_row, first_row + run_length)
            wide_b[:, rows, first_column : first_column + part.rank] = narrow_b[:, rows, : part.rank]
            row_scales[rows] = part.scale
            first_row += run_length
        return factor_a, wide_b, row_scales
