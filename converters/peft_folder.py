"""PEFT's folders of LoRA adapters: an adapter's settings, and the factors of each released matrix.

A folder has ``adapter_config.json`` and ``adapter_model.safetensors``. A matrix W [out, in] has the tensors
``base_model.model.NAME.lora_A.weight`` [rank, in] and ``...lora_B.weight`` [out, rank]. The stacks of experts
(PEFT's ``target_parameters``) have their own layout, as peft 0.21 writes it:

* The module ``mlp.experts`` is wrapped once for each of its stacks. The inner wrapper, that of
  ``gate_up_proj`` if both have an adapter, has the keys ``mlp.experts.base_layer.lora_A.weight``.
* A is [experts * rank, in], the experts one below another. B is [out, rank * experts], and column
  ``i * experts + e`` belongs to expert ``e``.
* Up to peft 0.18, the two sides were swapped: A had the outputs, and B the inputs. The shapes tell.

Older adapters have two-dimensional factors for each expert (``mlp.experts.3.gate_proj``). They are stacked as
PEFT does: gate and up get one A with the rows of both.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_vl.config import LoraConfig
from megatron_vl.spec.adapters import fused_adapters
from megatron_vl.spec.families import ModelSpec
from megatron_vl.weights.tensor_files import TensorReader, WeightsError, whole_matrix_region

from . import make_conversion_rules
from .hf_checkpoint import long_tensor_name
from .rules import DOWN_STACK, GATE_UP_STACK, ConversionRule

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
PEFT_VERSION = "0.21.2"
"""The version of peft whose files are written."""
KEY_PREFIX = "base_model.model."
_REFUSED_SETTINGS = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "layer_replication",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
)
"""Settings of PEFT that change what an adapter computes and that are not supported here."""
_UNCHANGED_BASE_INITS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` that leave the base weights as they are."""


@dataclass(frozen=True)
class MatrixFactors:
    """The adapter of one released matrix, or of a stack of experts."""

    factor_a: Tensor
    """[rank, in], or [experts, rank, in]."""
    factor_b: Tensor
    """[out, rank], or [experts, out, rank]."""
    alpha: float

    @property
    def rank(self) -> int:
        return self.factor_b.shape[-1]


def released_matrices(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The matrices that can have an adapter: name in ``transformers`` 5 -> [out, in] or [E, out, in]."""
    shape_by_name = _module_shapes(spec)
    return {
        part.hf_name: shape_by_name[part.hf_name]
        for adapter in fused_adapters(spec, LoraConfig(rank=1, targets=[".*"])).values()
        for part in adapter.parts
    }


def is_peft_folder(path: str | Path) -> bool:
    return (Path(path) / ADAPTER_CONFIG_FILE).is_file()


def adapter_targets(spec: ModelSpec) -> dict[str, Any]:
    """PEFT's ``target_modules`` and ``target_parameters`` for every matrix that can have an adapter."""
    return target_settings(released_matrices(spec), spec)


def target_settings(hf_names: Iterable[str], spec: ModelSpec) -> dict[str, Any]:
    """PEFT's ``target_modules`` and ``target_parameters`` for adapters of these matrices."""
    module_names: list[str] = []
    stack_names: list[str] = []
    for hf_name in hf_names:
        is_stack = hf_name.endswith((GATE_UP_STACK, DOWN_STACK))
        (stack_names if is_stack else module_names).append(hf_name)
    return {
        "target_modules": shortest_suffixes(module_names, spec),
        "target_parameters": shortest_suffixes(stack_names, spec) or None,
    }


@lru_cache(maxsize=4)
def rules_by_name(spec: ModelSpec) -> dict[str, ConversionRule]:
    """The rules of a model. Stacks of experts are as in transformers 5, and so equal to canonical ones."""
    return {rule.name: rule for rule in make_conversion_rules(spec, "output_first")}


def _module_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name of a module or parameter in ``transformers`` 5 -> shape of its weight."""
    module_shapes: dict[str, tuple[int, ...]] = {}
    for rule in rules_by_name(spec).values():
        for hf_name, shape in rule.hf_shapes.items():
            module_shapes[long_tensor_name(hf_name).removesuffix(".weight")] = shape
    return module_shapes


def shortest_suffixes(module_names: Iterable[str], spec: ModelSpec) -> list[str]:
    """Ends of names that match these modules and no other one of the model, as PEFT matches them."""
    chosen_names = dict.fromkeys(module_names)
    # Modules that contain others count too: "0" is also the end of a layer's name.
    other_names: set[str] = set()
    for name in _module_shapes(spec):
        words = name.split(".")
        other_names.update(".".join(words[:count]) for count in range(1, len(words) + 1))
    forbidden_suffixes: set[str] = set()
    for name in other_names - chosen_names.keys():
        forbidden_suffixes.update(_name_suffixes(name))

    suffixes: dict[str, None] = {}
    for name in chosen_names:
        suffixes[next(suffix for suffix in _name_suffixes(name) if suffix not in forbidden_suffixes)] = None
    return list(suffixes)


def _name_suffixes(module_name: str) -> list[str]:
    """``proj``, ``attn.proj``, ... up to the whole name."""
    words = module_name.split(".")
    return [".".join(words[first:]) for first in reversed(range(len(words)))]


# --- Reading ------------------------------------------------------------------------------------------------


class PeftFolder:
    """An adapter in PEFT's files, checked against the model that it is for.

    Attributes:
        config: the content of ``adapter_config.json``.
        factors: module name of a released matrix -> its factors, in model order. They are views of the file.
        lora: the settings of a run with these adapters; their names are compared with the file's.

    Raises:
        FileNotFoundError: a file is missing.
        WeightsError: a setting or tensor cannot be read, or does not fit the model. The message names it.
    """

    def __init__(self, path: str | Path, spec: ModelSpec) -> None:
        self.path = Path(path)
        self.spec = spec
        self.config = self._read_config()
        self._reader = TensorReader(self._weights_file())
        self.factors = self._read_factors()
        self.lora = self._make_lora_config()

    def _read_config(self) -> dict[str, Any]:
        config_path = self.path / ADAPTER_CONFIG_FILE
        if not config_path.is_file():
            raise FileNotFoundError(f"{config_path} is missing; give the folder of a PEFT adapter")
        try:
            config = json.loads(config_path.read_text())
        except ValueError as error:
            raise WeightsError(f"{config_path} is not JSON ({error}); copy it again") from error
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            raise WeightsError(f"{config_path}: peft_type is not LORA; only LoRA adapters are read")

        for name in _REFUSED_SETTINGS:
            if config.get(name):
                raise WeightsError(f"{config_path}: {name} is set, and adapters with it are not supported")
        if config.get("bias", "none") != "none":
            raise WeightsError(f"{config_path}: bias is {config['bias']!r}; only none is supported")
        if config.get("init_lora_weights", True) not in _UNCHANGED_BASE_INITS:
            raise WeightsError(
                f"{config_path}: init_lora_weights is {config['init_lora_weights']!r}, which changes the base"
                " weights; save the adapter with PEFT's path_initial_model_for_weight_conversion"
            )
        return config

    def _weights_file(self) -> Path:
        weights_path = self.path / ADAPTER_FILE
        if not weights_path.is_file() and (self.path / "adapter_model.bin").is_file():
            raise WeightsError(
                f"{self.path / 'adapter_model.bin'} is a pickle, which can execute code and is not read; load"
                f" the adapter with PEFT and save it again with save_pretrained to get {ADAPTER_FILE}"
            )
        if not weights_path.is_file():
            raise FileNotFoundError(f"{weights_path} is missing")
        return weights_path

    def _read_factors(self) -> dict[str, MatrixFactors]:
        """The factors of all matrices, in model order."""
        matrices = released_matrices(self.spec)
        modules = self._tensors_by_module()
        factors: dict[str, MatrixFactors] = {}
        for hf_name, shape in matrices.items():
            if len(shape) == 2 and hf_name in modules:
                factors[hf_name] = self._matrix_factors(hf_name, shape, modules.pop(hf_name))
        for experts_name in dict.fromkeys(
            hf_name.rpartition(".")[0] for hf_name, shape in matrices.items() if len(shape) == 3
        ):
            for tensors in (modules.pop(experts_name, None), modules.pop(f"{experts_name}.base_layer", None)):
                if tensors:
                    factors |= self._stack_factors(experts_name, matrices, tensors)
            factors |= self._separate_experts(experts_name, matrices, modules)

        if modules:
            raise WeightsError(
                f"{self.path / ADAPTER_FILE}: {next(iter(modules))!r} has an adapter, but"
                f" {self.spec.family} has no such matrix that can have one"
            )
        if not factors:
            raise WeightsError(f"{self.path / ADAPTER_FILE} holds no adapter")
        return {hf_name: factors[hf_name] for hf_name in matrices if hf_name in factors}

    def _tensors_by_module(self) -> dict[str, dict[str, Tensor]]:
        """Module name in ``transformers`` 5 -> {"A": factor, "B": factor}, as stored."""
        modules: dict[str, dict[str, Tensor]] = {}
        for key in self._reader.tensor_names():
            key_match = re.fullmatch(rf"{re.escape(KEY_PREFIX)}(.+)\.lora_([AB])\.weight", key)
            if not key_match:
                raise WeightsError(
                    f"{self.path / ADAPTER_FILE}: tensor {key!r} is not a factor of an adapter"
                )
            module_name = long_tensor_name(key_match[1])
            self._reader.dtype(key)  # refuses quantised factors
            stored_region = whole_matrix_region(self._reader.shape(key))
            pair = modules.setdefault(module_name, {})
            if key_match[2] in pair:
                raise WeightsError(f"{self.path / ADAPTER_FILE}: {key!r} is there under two names")
            pair[key_match[2]] = self._reader.read_region(key, stored_region)

        for module_name, pair in modules.items():
            if len(pair) != 2:
                raise WeightsError(
                    f"{self.path / ADAPTER_FILE}: {module_name!r} has only one of lora_A, lora_B"
                )
        return modules

    def _matrix_factors(
        self, hf_name: str, shape: tuple[int, ...], pair: Mapping[str, Tensor], rank_name: str = ""
    ) -> MatrixFactors:
        """The factors of one matrix. ``rank_name``: its name in the settings, if it is another one."""
        rank = self._setting("rank_pattern", rank_name or hf_name, self.config.get("r", 8))
        alpha = self._setting("alpha_pattern", rank_name or hf_name, self.config.get("lora_alpha", 8))
        out_features, in_features = shape
        self._check_shape(hf_name, "A", pair["A"], (rank, in_features))
        self._check_shape(hf_name, "B", pair["B"], (out_features, rank))
        return MatrixFactors(pair["A"], pair["B"], alpha)

    def _stack_factors(
        self, experts_name: str, matrices: Mapping[str, tuple[int, ...]], pair: Mapping[str, Tensor]
    ) -> dict[str, MatrixFactors]:
        """The factors of one stack of experts. The shapes tell which one it is, and its orientation."""
        widths = {pair["A"].shape[1], pair["B"].shape[0]}
        for stack in (GATE_UP_STACK, DOWN_STACK):
            hf_name = f"{experts_name}.{stack.rpartition('.')[2]}"
            expert_count, out_features, in_features = matrices[hf_name]
            if widths == {out_features, in_features}:
                break
        else:
            raise WeightsError(
                f"{self.path / ADAPTER_FILE}: the factors of {experts_name!r} have widths {sorted(widths)},"
                " which fit none of its stacks"
            )

        rank = self._setting("rank_pattern", hf_name, self.config.get("r", 8))
        self._check_shape(hf_name, "A", pair["A"], (expert_count * rank, pair["A"].shape[1]))
        self._check_shape(hf_name, "B", pair["B"], (pair["B"].shape[0], expert_count * rank))
        factor_a = pair["A"].view(expert_count, rank, -1)
        factor_b = pair["B"].view(-1, rank, expert_count).permute(2, 0, 1)
        if self._has_swapped_sides(hf_name, out_features, in_features, pair):
            factor_a, factor_b = factor_b.transpose(1, 2), factor_a.transpose(1, 2)
        alpha = self._setting("alpha_pattern", hf_name, self.config.get("lora_alpha", 8))
        return {hf_name: MatrixFactors(factor_a, factor_b, alpha)}

    def _has_swapped_sides(
        self, hf_name: str, out_features: int, in_features: int, pair: Mapping[str, Tensor]
    ) -> bool:
        """Whether A has the outputs, as peft up to 0.18 wrote it."""
        if out_features != in_features:
            return pair["A"].shape[1] == out_features
        version_match = re.match(r"(\d+)\.(\d+)", str(self.config.get("peft_version")))
        if version_match and (int(version_match[1]), int(version_match[2])) >= (0, 19):
            return False
        raise WeightsError(
            f"{self.path}: {hf_name!r} holds square matrices, and peft_version in {ADAPTER_CONFIG_FILE} is"
            " not 0.19 or later, so it is not known which factor has the inputs"
        )

    def _separate_experts(
        self,
        experts_name: str,
        matrices: Mapping[str, tuple[int, ...]],
        modules: dict[str, dict[str, Tensor]],
    ) -> dict[str, MatrixFactors]:
        """The factors of a layer's stacks from those of each expert, which are taken out of ``modules``."""
        stacks: dict[str, MatrixFactors] = {}
        for stack, words in ((GATE_UP_STACK, ("gate_proj", "up_proj")), (DOWN_STACK, ("down_proj",))):
            hf_name = f"{experts_name}.{stack.rpartition('.')[2]}"
            expert_count, out_features, in_features = matrices[hf_name]
            word_shape = (out_features // len(words), in_features)

            columns: list[list[MatrixFactors]] = []
            for word in words:
                columns.append([])
                for expert_index in range(expert_count):
                    expert_name = f"{experts_name}.{expert_index}.{word}"
                    if expert_name in modules:
                        pair = modules.pop(expert_name)
                        columns[-1].append(self._matrix_factors(expert_name, word_shape, pair))
                if columns[-1] and len(columns[-1]) < expert_count:
                    raise WeightsError(
                        f"{self.path}: only {len(columns[-1])} of {expert_count} experts of {experts_name!r}"
                        f" have an adapter of {word}; a stack of experts cannot hold that"
                    )
            if any(columns):
                stacks[hf_name] = self._join_experts(hf_name, word_shape[0], columns)
        return stacks

    def _join_experts(
        self, hf_name: str, word_rows: int, columns: list[list[MatrixFactors]]
    ) -> MatrixFactors:
        """Stacks the factors of single experts.

        Args:
            word_rows: rows of one expert's gate, up or down projection.
            columns: for gate and up, or for down: the factors of all experts, or none.
        """
        present_columns = [column for column in columns if column]
        kinds = {(factors.rank, factors.alpha) for column in present_columns for factors in column}
        if len(kinds) > 1:
            raise WeightsError(f"{self.path}: the experts of {hf_name!r} differ in rank or alpha")
        [(rank, alpha)] = kinds

        # The factors A of gate and up lie one below the other, and B is zero outside its diagonal blocks.
        stacked_a: list[Tensor] = []
        stacked_b: list[Tensor] = []
        for column in columns:
            zero_b = torch.zeros(len(present_columns[0]), word_rows, rank * len(present_columns))
            if column:
                first_column = rank * len(stacked_a)
                factor_b = torch.stack([factors.factor_b for factors in column])
                stacked_a.append(torch.stack([factors.factor_a for factors in column]))
                zero_b = zero_b.to(factor_b.dtype)
                zero_b[..., first_column : first_column + rank] = factor_b
            stacked_b.append(zero_b)

        # The rank has grown, and the product must be scaled as before.
        growth = len(present_columns)
        scaled_alpha = alpha * (math.sqrt(growth) if self.config.get("use_rslora") else growth)
        return MatrixFactors(torch.cat(stacked_a, dim=1), torch.cat(stacked_b, dim=1), scaled_alpha)

    def _setting(self, pattern_field: str, hf_name: str, default: Any) -> Any:
        """A rank or alpha: that of the first pattern that matches, as PEFT does it."""
        for pattern, value in (self.config.get(pattern_field) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", hf_name):
                return value
        return default

    def _check_shape(self, hf_name: str, letter: str, factor: Tensor, shape: tuple[int, ...]) -> None:
        if factor.shape != shape:
            raise WeightsError(
                f"{self.path / ADAPTER_FILE}: lora_{letter} of {hf_name!r} has shape {list(factor.shape)};"
                f" the model and {ADAPTER_CONFIG_FILE} require {list(shape)}"
            )

    def _make_lora_config(self) -> LoraConfig:
        """The settings that give exactly the matrices, ranks and scales of this folder."""
        default_rank = self.config.get("r", 8)
        default_alpha = self.config.get("lora_alpha", 8)
        names_by_rank: dict[int, list[str]] = {}
        names_by_alpha: dict[float, list[str]] = {}
        for hf_name, factors in self.factors.items():
            names_by_rank.setdefault(factors.rank, []).append(hf_name)
            names_by_alpha.setdefault(factors.alpha, []).append(hf_name)
        return LoraConfig(
            rank=default_rank,
            alpha=float(default_alpha),
            use_rslora=bool(self.config.get("use_rslora")),
            dropout=float(self.config.get("lora_dropout") or 0.0),
            targets=shortest_suffixes(self.factors, self.spec),
            rank_pattern=_patterns(names_by_rank, default_rank, self.spec),
            alpha_pattern=_patterns(names_by_alpha, default_alpha, self.spec),
        )


def _patterns(names_by_value: Mapping[Any, list[str]], default: Any, spec: ModelSpec) -> dict[str, Any]:
    """The patterns of PEFT that give each matrix its rank or alpha."""
    return {
        re.escape(suffix): value
        for value, names in names_by_value.items()
        if value != default
        for suffix in shortest_suffixes(names, spec)
    }
