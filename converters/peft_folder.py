"""PEFT's folders of LoRA adapters: an adapter's settings, and the factors of each released matrix.

A folder has ``adapter_config.json`` and ``adapter_model.safetensors``. A matrix W [out, in] has the tensors
``base_model.model.NAME.lora_A.weight`` [rank, in] and ``...lora_B.weight`` [out, rank]. The stacks of experts
(PEFT's ``target_parameters``) have their own layout, as peft 0.21 writes it:

* The module ``mlp.experts`` is wrapped once for each of its stacks. The inner wrapper, that of
  ``gate_up_proj`` if both have an adapter, has the keys ``mlp.experts.base_layer.lora_A.weight``.
* A is [experts * rank, in], the experts one below another. B is [out, rank * experts], and column
  ``i * experts + e`` belongs to expert ``e``.
* Up to peft 0.18, the two sides were swapped: A had the outputs, and B the inputs. The shapes tell.
"""

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_vl.config import LoraConfig
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.lora import MixedLora, fused_lora, whole_module
from megatron_vl.weights.tensor_files import MatrixRegion, TensorReader, WeightsError, matrix_shape

from . import make_conversion_rules
from .hf_checkpoint import long_tensor_name, short_tensor_name
from .rules import DOWN_STACK, GATE_UP_STACK, ConversionRule

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
PEFT_VERSION = "0.21.2"
"""The version of peft whose files are written."""
KEY_PREFIX = "base_model.model."
_REFUSED_SETTINGS = (
    *("use_dora", "lora_bias", "fan_in_fan_out", "trainable_token_indices", "alora_invocation_tokens"),
    *("layer_replication", "use_qalora", "use_bdlora"),
    *(f"{name}_config" for name in ("arrow", "kasa", "velora", "monteclora")),
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

    @property
    def dtype(self) -> torch.dtype:
        """The type that holds the values of both factors exactly."""
        return torch.promote_types(self.factor_a.dtype, self.factor_b.dtype)


def is_peft_folder(path: str | Path) -> bool:
    return (Path(path) / ADAPTER_CONFIG_FILE).is_file()


def is_expert_stack(hf_name: str) -> bool:
    """Whether a released matrix is a stack of experts, one of PEFT's ``target_parameters``."""
    return hf_name.endswith((GATE_UP_STACK, DOWN_STACK))


@lru_cache(maxsize=4)
def rules_by_name(spec: ModelSpec) -> dict[str, ConversionRule]:
    """The rules of a model. Stacks of experts are as in transformers 5, and so equal to canonical ones."""
    return {rule.name: rule for rule in make_conversion_rules(spec, "output_first")}


def _module_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name of a module or parameter in ``transformers`` 5 -> shape of its weight."""
    return {
        long_tensor_name(hf_name).removesuffix(".weight"): shape
        for rule in rules_by_name(spec).values()
        for hf_name, shape in rule.hf_shapes.items()
    }


@lru_cache(maxsize=4)
def released_matrices(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The matrices that can have an adapter: name in ``transformers`` 5 -> [out, in] or [E, out, in]."""
    module_shapes = _module_shapes(spec)
    every_matrix = fused_lora(spec, LoraConfig(rank=1, targets=[".*"])).values()
    return {part.hf_name: module_shapes[part.hf_name] for fused in every_matrix for part in fused.parts}


def target_settings(hf_names: Iterable[str], spec: ModelSpec) -> dict[str, Any]:
    """PEFT's ``target_modules`` and ``target_parameters`` for adapters of these matrices."""
    names = list(hf_names)
    return {
        "target_modules": shortest_suffixes([name for name in names if not is_expert_stack(name)], spec),
        "target_parameters": shortest_suffixes(filter(is_expert_stack, names), spec) or None,
    }


def shortest_suffixes(module_names: Iterable[str], spec: ModelSpec) -> list[str]:
    """Ends of names that match these modules and no other one of the model, as PEFT matches them."""
    chosen_names = list(module_names)
    # Modules that contain others count too: "0" is also the end of a layer's name.
    modules = [name.split(".") for name in _module_shapes(spec)]
    other_names = {".".join(words[:count]) for words in modules for count in range(1, len(words) + 1)}
    other_names.difference_update(chosen_names)
    other_suffixes = {suffix for name in other_names for suffix in _name_suffixes(name)}
    # The whole name always stays.
    own_suffixes = ([s for s in _name_suffixes(name) if s not in other_suffixes][:1] for name in chosen_names)
    return list(dict.fromkeys(itertools.chain.from_iterable(own_suffixes)))


def _name_suffixes(module_name: str) -> list[str]:
    """``proj``, ``attn.proj``, ``blocks.0.attn.proj`` ... to the whole name; none begins with a number."""
    words = module_name.split(".")
    return [".".join(words[start:]) for start in reversed(range(len(words))) if not words[start].isdigit()]


# --- Reading ------------------------------------------------------------------------------------------------


class PeftFolder:
    """An adapter in PEFT's files, checked against the model that it is for.

    Attributes:
        config: the content of ``adapter_config.json``.
        tensor_reader: the tensors of the file.
        factors: module name of a released matrix -> its factors, in model order. They are views of the file.
        saved_keys: canonical name of a tensor that was trained whole -> its key in the file.
        lora: the settings of a run with these adapters; their names are compared with the file's.

    Raises:
        FileNotFoundError: a file is missing.
        WeightsError: a setting or tensor cannot be read, or does not fit the model. The message names it.
    """

    def __init__(self, path: str | Path, spec: ModelSpec) -> None:
        self.path = Path(path)
        self.spec = spec
        self.config = self._read_config()
        weights_path = self.path / ADAPTER_FILE
        if not weights_path.is_file() and (self.path / "adapter_model.bin").is_file():
            raise WeightsError(
                f"{self.path / 'adapter_model.bin'} is a pickle, which can execute code and is not read; load"
                f" the adapter with PEFT and save it again with save_pretrained to get {ADAPTER_FILE}"
            )
        if not weights_path.is_file():
            raise FileNotFoundError(f"{weights_path} is missing")
        self.tensor_reader = TensorReader(weights_path)
        self.saved_keys = self._find_saved_keys()
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

    def _find_saved_keys(self) -> dict[str, str]:
        """The tensors of PEFT's ``modules_to_save``, in the order of the file."""
        rules = rules_by_name(self.spec).values()
        rule_by_hf_name = {long_tensor_name(hf_name): rule for rule in rules for hf_name in rule.hf_shapes}
        saved_keys: dict[str, str] = {}
        for key in self.tensor_reader.tensor_names():
            hf_name = long_tensor_name(key.removeprefix(KEY_PREFIX))
            if (saved_rule := rule_by_hf_name.get(hf_name)) is None:
                continue
            if not whole_module(saved_rule.name):
                raise WeightsError(
                    f"{self.path / ADAPTER_FILE}: {hf_name!r} was trained whole (modules_to_save), which is"
                    " not supported for this module"
                )
            [shape] = saved_rule.hf_shapes.values()
            stored_shape = self.tensor_reader.shape(key)
            if stored_shape != shape:
                raise WeightsError(
                    f"{self.path / ADAPTER_FILE}: {hf_name!r} has shape {list(stored_shape)}; the model"
                    f" requires {list(shape)}"
                )
            saved_keys[saved_rule.name] = key
        return saved_keys

    def _read_factors(self) -> dict[str, MatrixFactors]:
        matrix_shapes = released_matrices(self.spec)
        modules = self._tensors_by_module()
        module_names = matrix_shapes.keys() | modules.keys()
        self._pattern_entries = {
            setting: self._resolve_patterns(setting, module_names)
            for setting in ("rank_pattern", "alpha_pattern")
        }
        factors: dict[str, MatrixFactors] = {}
        for hf_name, shape in matrix_shapes.items():
            if is_expert_stack(hf_name):
                experts_name = hf_name.rpartition(".")[0]
                for wrapper_name in (experts_name, f"{experts_name}.base_layer"):
                    if wrapper_name in modules:
                        factors |= self._stack_factors(experts_name, modules.pop(wrapper_name))
            elif hf_name in modules:
                self._check_layer(hf_name)
                pair, (rank, alpha) = modules.pop(hf_name), self._rank_and_alpha(hf_name)
                self._check_shape(hf_name, "A", pair["A"], (rank, shape[1]))
                self._check_shape(hf_name, "B", pair["B"], (shape[0], rank))
                factors[hf_name] = MatrixFactors(pair["A"], pair["B"], alpha)

        for unknown_name in modules:
            raise WeightsError(
                f"{self.path / ADAPTER_FILE}: {unknown_name!r} has an adapter, but {self.spec.family} has no"
                " such matrix that can have one"
            )
        if not factors:
            raise WeightsError(f"{self.path / ADAPTER_FILE} holds no adapter")
        return {hf_name: factors[hf_name] for hf_name in matrix_shapes if hf_name in factors}

    def _tensors_by_module(self) -> dict[str, dict[str, Tensor]]:
        """Module name in ``transformers`` 5 -> {"A": factor, "B": factor}, as stored."""
        modules: dict[str, dict[str, Tensor]] = {}
        self._has_old_names = False
        for key in self.tensor_reader.tensor_names():
            if key in self.saved_keys.values():
                continue
            key_match = re.fullmatch(rf"{re.escape(KEY_PREFIX)}(.+)\.lora_([AB])\.weight", key)
            if not key_match:
                raise WeightsError(
                    f"{self.path / ADAPTER_FILE}: tensor {key!r} is not a factor of an adapter"
                )
            module_name = long_tensor_name(key_match[1])
            self._has_old_names |= module_name != key_match[1]
            self.tensor_reader.dtype(key)  # refuses quantised factors
            rows, columns = matrix_shape(self.tensor_reader.shape(key))
            pair = modules.setdefault(module_name, {})
            if key_match[2] in pair:
                raise WeightsError(f"{self.path / ADAPTER_FILE}: {key!r} is there under two names")
            pair[key_match[2]] = self.tensor_reader.read_region(key, MatrixRegion(0, rows, 0, columns))

        for module_name, pair in modules.items():
            if len(pair) != 2:
                raise WeightsError(
                    f"{self.path / ADAPTER_FILE}: {module_name!r} has only one of lora_A, lora_B"
                )
        return modules

    def _stack_factors(self, experts_name: str, pair: Mapping[str, Tensor]) -> dict[str, MatrixFactors]:
        """The factors of one stack of experts. The shapes tell which one it is, and its orientation."""
        factor_a, factor_b = pair["A"], pair["B"]
        width_a, width_b = factor_a.shape[1], factor_b.shape[0]
        for stack in ("gate_up_proj", "down_proj"):
            hf_name = f"{experts_name}.{stack}"
            expert_count, out_features, in_features = released_matrices(self.spec)[hf_name]
            if {width_a, width_b} == {out_features, in_features}:
                break
        else:
            raise WeightsError(
                f"{self.path / ADAPTER_FILE}: the factors of {experts_name!r} have widths {width_a} and"
                f" {width_b}, which fit none of its stacks"
            )
        rank, alpha = self._rank_and_alpha(hf_name)
        self._check_shape(hf_name, "A", factor_a, (expert_count * rank, width_a))
        self._check_shape(hf_name, "B", factor_b, (width_b, expert_count * rank))
        stack_a = factor_a.view(expert_count, rank, width_a)
        stack_b = factor_b.view(width_b, rank, expert_count).permute(2, 0, 1)
        if out_features == in_features:
            # A may have the outputs, as peft up to 0.18 wrote it. Only its version tells, which versions
            # before 0.18 did not always write.
            version = re.match(r"(\d+)\.(\d+)", str(self.config.get("peft_version")))
            if version is None or tuple(map(int, version.groups())) < (0, 19):
                raise WeightsError(
                    f"{self.path}: {hf_name!r} holds square matrices, and peft_version in"
                    f" {ADAPTER_CONFIG_FILE} is not 0.19 or later, so it is not known which factor has the"
                    " inputs"
                )
        elif width_a != in_features:
            stack_a, stack_b = stack_b.transpose(1, 2), stack_a.transpose(1, 2)
        return {hf_name: MatrixFactors(stack_a, stack_b, alpha)}

    def _resolve_patterns(self, setting: str, module_names: Iterable[str]) -> dict[str, dict[Any, str]]:
        """Name of a matrix -> {value: the entry of ``rank_pattern`` or ``alpha_pattern`` that gives it}.

        PEFT takes the first entry that matches, but its files are sorted and do not keep that order.
        """
        entries_by_name: dict[str, dict[Any, str]] = {}
        for pattern, value in (self.config.get(setting) or {}).items():
            regex = re.compile(rf"(.*\.)?({pattern})")  # as in PEFT
            # Old names may be used if the file's tensors have them.
            matching_names = [
                name
                for name in module_names
                if regex.fullmatch(name) or self._has_old_names and regex.fullmatch(short_tensor_name(name))
            ]
            if not matching_names:
                raise WeightsError(
                    f"{self.path / ADAPTER_CONFIG_FILE}: {setting} {pattern!r} matches no matrix of this"
                    " model, so that PEFT ignores it; remove it, or correct the name"
                )
            for name in matching_names:
                entries_by_name.setdefault(name, {}).setdefault(value, pattern)
        return entries_by_name

    def _rank_and_alpha(self, hf_name: str) -> tuple[int, float]:
        """Rank and alpha of a matrix. Raises WeightsError if two patterns contradict each other."""
        resolved_values: list[Any] = []
        for setting, default in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
            entries = self._pattern_entries[setting].get(hf_name, {self.config.get(default, 8): ""})
            if len(entries) > 1:
                raise WeightsError(
                    f"{self.path / ADAPTER_CONFIG_FILE}: {setting} has {len(entries)} values for {hf_name!r}"
                    f" ({', '.join(map(repr, entries.values()))}), and PEFT's files do not keep their order;"
                    " leave one of these entries"
                )
            resolved_values += entries
        return resolved_values[0], resolved_values[1]

    def _check_layer(self, hf_name: str) -> None:
        """Raises WeightsError if ``layers_to_transform`` leaves a module out: PEFT ignores its adapter."""
        layers = self.config.get("layers_to_transform")
        patterns = self.config.get("layers_pattern") or r"[^.]*"
        patterns = [patterns] if isinstance(patterns, str) else patterns
        if layers is None or layers == [] or isinstance(self.config.get("target_modules"), str):
            return  # PEFT does not apply it to a regular expression
        # As in PEFT, the first number after a part of the name that matches is the layer.
        matches = [re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", hf_name) for pattern in patterns]
        layer = next((int(layer_match[1]) for layer_match in matches if layer_match), None)
        if layer not in (layers if isinstance(layers, list) else [layers]):
            raise WeightsError(
                f"{self.path / ADAPTER_FILE}: {hf_name!r} has an adapter, but layers_to_transform"
                f" in {ADAPTER_CONFIG_FILE} leaves its layer out, so that PEFT ignores it; correct one"
            )

    def _check_shape(self, hf_name: str, letter: str, factor: Tensor, shape: tuple[int, ...]) -> None:
        if factor.shape != shape:
            raise WeightsError(
                f"{self.path / ADAPTER_FILE}: lora_{letter} of {hf_name!r} has shape {list(factor.shape)};"
                f" the model and {ADAPTER_CONFIG_FILE} require {list(shape)}"
            )

    def _make_lora_config(self) -> LoraConfig:
        """The settings that give exactly the matrices, ranks and scales of this folder."""
        lora = LoraConfig(
            rank=self.config.get("r", 8),
            alpha=float(self.config.get("lora_alpha", 8)),
            use_rslora=bool(self.config.get("use_rslora")),
            dropout=float(self.config.get("lora_dropout") or 0.0),
            targets=shortest_suffixes(self.factors, self.spec),
            modules_to_save=list(dict.fromkeys(map(whole_module, self.saved_keys))),
        )
        matrices = {name: (factors.rank, factors.alpha) for name, factors in self.factors.items()}
        if set(matrices.values()) == {(lora.rank, lora.alpha)}:
            return lora
        return MixedLora(**vars(lora), matrices=matrices)


def disjoint_patterns(value_by_name: Mapping[str, Any], default: Any, spec: ModelSpec) -> dict[str, Any]:
    """The patterns of PEFT that give each matrix its rank or alpha, in any order."""
    names_by_value: dict[Any, list[str]] = {}
    for hf_name, value in value_by_name.items():
        names_by_value.setdefault(value, []).append(hf_name)
    return {
        re.escape(suffix): value
        for value, names in names_by_value.items()
        if value != default
        for suffix in shortest_suffixes(names, spec)
    }
