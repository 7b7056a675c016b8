"""Reads Hugging Face folders: which tensors are in which file, their names, and the other files.

Released Qwen2-VL and Qwen2.5-VL checkpoints name their tensors ``model.layers.*`` and ``visual.*``.
``save_pretrained`` of transformers 5.17 uses the same names. In memory, and in folders written with
``save_original_format=False``, transformers names them ``model.language_model.layers.*`` and
``model.visual.*``, which are the released names of Qwen3-VL. Rules use each family's released names. Folders
of all families may use either style.
"""

import re
from functools import cached_property, reduce
from pathlib import Path

import torch
from torch import Tensor

from megatron_vl.config import LoraConfig
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.tensors import EMBEDDING_TENSOR, MTP_PREFIX, tensor_table
from megatron_vl.weights.canonical_weights import CanonicalWeights
from megatron_vl.weights.matrix_blocks import MatrixBlock, gather_region
from megatron_vl.weights.tensor_files import MatrixRegion, WeightsError, dtype_name, row_regions

from . import make_conversion_rules
from .fp8 import Fp8Folder, open_tensor_folder
from .rules import DOWN_STACK, GATE_UP_STACK, HF_OUTPUT, RELEASED_EXPERT_STYLE, ConversionRule, ExpertStyle
from .tensor_folder import TensorFolder

CARRIED_NAMES = re.compile(r"(model\.)?(language_model\.)?mtp\.")
"""Begins the names of multi-token prediction, as released (``mtp.``) and in places where other tools put it.
transformers does not treat it as part of Qwen3.5, nor do we unless a run trains it. An export copies it."""

_NAME_STYLES = (("model.language_model.", "model."), ("model.visual.", "visual."))
"""Prefixes of names in transformers' memory, and those of the first released folders."""


def short_tensor_name(tensor_name: str) -> str:
    """The name of a tensor in the style ``model.*``, ``visual.*`` and ``mtp.*``."""
    if mtp := CARRIED_NAMES.match(tensor_name):
        return MTP_PREFIX + tensor_name[mtp.end() :]
    for long_prefix, short_prefix in _NAME_STYLES:
        if tensor_name.startswith(long_prefix):
            return short_prefix + tensor_name.removeprefix(long_prefix)
    return tensor_name


def long_tensor_name(tensor_name: str) -> str:
    """The name in the style ``model.language_model.*`` and ``model.visual.*``, that of transformers 5."""
    short_name = short_tensor_name(tensor_name)
    for long_prefix, short_prefix in _NAME_STYLES:
        if short_name.startswith(short_prefix):
            return long_prefix + short_name.removeprefix(short_prefix)
    return tensor_name


def detect_expert_style(spec: ModelSpec, tensor_folder: TensorFolder) -> ExpertStyle:
    """Finds out from names and shapes how a folder stores its experts.

    Returns the released style if there are no experts, or if their shapes are wrong.

    Square matrices fit both orientations. At most one of the two stacks is square, but the orientation of the
    other one says nothing about it: transformers 5 looks at each stack on its own, reads a square one as
    output-first, and scrambles it if this is wrong.

    Raises:
        WeightsError: a stack fits both orientations.
    """
    if spec.language.moe is None:
        return "apart"  # any style will do

    released_style = RELEASED_EXPERT_STYLE[spec.family]
    ffn_hidden_size = spec.language.moe.ffn_hidden_size
    hidden_size = spec.language.hidden_size

    names = [name for name in tensor_folder.file_by_tensor if not CARRIED_NAMES.match(name)]
    expert_stacks = {
        name: (2 * ffn_hidden_size, hidden_size) for name in names if name.endswith(GATE_UP_STACK)
    }
    expert_stacks |= {name: (hidden_size, ffn_hidden_size) for name in names if name.endswith(DOWN_STACK)}
    if not expert_stacks:
        return "apart" if any(".mlp.experts." in name for name in names) else released_style
    if released_style == "output_first":
        return released_style  # as in transformers, which supports no other stacks for this family
    for tensor_name, (num_rows, num_cols) in expert_stacks.items():
        if num_rows == num_cols:
            raise WeightsError(
                f"{tensor_folder.path}: tensor {tensor_name!r} holds square matrices, {num_rows} "
                f"by {num_cols}, so it is not known whether their inputs or their outputs come "
                "first. Store each expert's gate_proj, up_proj and down_proj as separate tensors"
            )

    has_output_first = any(
        tensor_folder.shape(tensor_name)[1:] == matrix for tensor_name, matrix in expert_stacks.items()
    )
    return "output_first" if has_output_first else released_style


def is_carried_tensor(spec: ModelSpec, tensor_name: str) -> bool:
    """Whether a stored tensor is outside the model and only copied (:data:`CARRIED_NAMES`)."""
    has_carried = spec.language.linear_attention is not None and not spec.language.has_mtp
    return has_carried and bool(CARRIED_NAMES.match(tensor_name))


class HfCheckpoint(CanonicalWeights):
    """A HF folder that is read as Megatron weights: the source of a conversion, or the model for an export.

    Args:
        has_mtp: whether multi-token prediction is part of the model.

    Attributes:
        stored_name_by_released: released name -> the name in this folder's files.
        lora: rank 0, as the folder holds a whole model.
        carried_names: stored names of tensors that are not part of the model, in the order of the files.

    Raises:
        FileNotFoundError: the folder has no safetensors weights.
        ConfigError: it has no config, ``model_type`` is unknown, or a field is impossible.
        WeightsError: a tensor is missing, unknown, or of a wrong shape or type. The message names it.
    """

    lora = LoraConfig()

    def __init__(self, hf_dir: str | Path, *, has_mtp: bool = False) -> None:
        self.path = Path(hf_dir)
        self.spec = read_spec(self.path).with_mtp(has_mtp)
        self.tensor_infos = tensor_table(self.spec)
        self.tensor_folder = open_tensor_folder(self.path)
        stored_names = self.tensor_folder.file_by_tensor
        # Released Qwen3.5 stores the experts of multi-token prediction apart, Qwen3.6 in stacks.
        mtp_expert = f"{MTP_PREFIX}layers.0.mlp.experts.0.gate_proj.weight"
        has_mtp_apart = mtp_expert in map(short_tensor_name, stored_names)
        style = detect_expert_style(self.spec, self.tensor_folder)
        rules = make_conversion_rules(self.spec, style, "apart" if has_mtp_apart else "output_first")
        self.rule_by_name: dict[str, ConversionRule] = {rule.name: rule for rule in rules}
        self.carried_names = [name for name in stored_names if is_carried_tensor(self.spec, name)]
        self.stored_name_by_released = self._map_released_names()
        self._check_tensors()

    def _map_released_names(self) -> dict[str, str]:
        """Released name -> stored name, for all tensors of the model."""
        released_by_short = {short_tensor_name(name): name for name in self.expected_shapes}

        stored_by_released: dict[str, str] = {}
        for stored_name in self.tensor_folder.file_by_tensor:
            if is_carried_tensor(self.spec, stored_name):
                continue
            # A tensor that the model does not have keeps its short name; _check_tensors refuses it.
            short_name = short_tensor_name(stored_name)
            released_name = released_by_short.get(short_name, short_name)
            if released_name in stored_by_released:
                raise WeightsError(
                    f"{self.path}: tensors {stored_by_released[released_name]!r} "
                    f"and {stored_name!r} are the same tensor under two names"
                )
            stored_by_released[released_name] = stored_name
        return stored_by_released

    @cached_property
    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for rule in self.rule_by_name.values() for name, shape in rule.hf_shapes.items()}

    @property
    def embedding_name(self) -> str:
        return next(iter(self.rule_by_name[EMBEDDING_TENSOR].hf_shapes))

    @property
    def has_tied_output(self) -> bool:
        """Whether the folder stores an output layer although it is tied to the embedding."""
        return self.spec.language.tied_embeddings and HF_OUTPUT in self.stored_name_by_released

    def _check_tensors(self) -> None:
        """Raises WeightsError unless the folder has exactly the model's tensors, with their shapes."""
        expected_by_name = dict(self.expected_shapes)
        if self.has_tied_output:
            expected_by_name[HF_OUTPUT] = expected_by_name[self.embedding_name]
        for released_name in expected_by_name:
            if released_name not in self.stored_name_by_released:
                advice = ""
                if released_name == HF_OUTPUT:
                    advice = "; tie_word_embeddings at its top says that it is not the embedding"
                elif released_name.startswith(MTP_PREFIX):
                    advice = (
                        "; transformers drops it from what it saves: take the released folder, or set"
                        " mtp.loss to 0"
                    )
                raise WeightsError(
                    f"{self.path}: tensor {released_name!r} is missing, but config.json requires it{advice}"
                )

        for released_name, stored_name in self.stored_name_by_released.items():
            if released_name not in expected_by_name:
                raise WeightsError(
                    f"{self.path}: tensor {stored_name!r} is unknown in a {self.spec.family} model "
                    "with this config.json"
                )
            stored_shape = self.tensor_folder.shape(stored_name)
            if stored_shape != expected_by_name[released_name]:
                raise WeightsError(
                    f"{self.path}: tensor {stored_name!r} has shape {list(stored_shape)};"
                    f" config.json says {list(expected_by_name[released_name])}"
                )
            self.hf_dtype(released_name)

    def rounding_notes(self) -> list[str]:
        """What is rounded when these weights are read."""
        if not isinstance(folder := self.tensor_folder, Fp8Folder):
            return []
        return [
            f"{len(folder.grid_by_tensor)} matrices of {self.path} are in FP8: each value was multiplied by"
            f" the scale of its block in float32 and rounded once to {dtype_name(folder.weight_dtype)}"
        ]

    def check_tied_output(self) -> None:
        """Raises WeightsError if a stored tied output layer differs from the embedding in any bit."""
        if not self.has_tied_output:
            return

        folder = self.tensor_folder
        output_name = self.stored_name_by_released[HF_OUTPUT]
        embedding_name = self.stored_name_by_released[self.embedding_name]

        def region_bytes(tensor_name: str, region: MatrixRegion) -> Tensor:
            return folder.read_region(tensor_name, region).contiguous().view(torch.uint8)

        # In regions, because the vocabulary's matrix may take gigabytes.
        if folder.dtype_code(output_name) != folder.dtype_code(embedding_name) or not all(
            torch.equal(region_bytes(output_name, region), region_bytes(embedding_name, region))
            for region in row_regions(folder.shape(output_name), self.hf_dtype(HF_OUTPUT).itemsize)
        ):
            raise WeightsError(
                f"{self.path}: tensor {output_name!r} differs from {embedding_name!r}, but "
                "config.json ties them; set tie_word_embeddings to false, or remove the tensor"
            )

    def hf_dtype(self, released_name: str) -> torch.dtype:
        """The data type of a stored tensor, from its released name."""
        return self.tensor_folder.dtype(self.stored_name_by_released[released_name])

    # The following methods are the interface of a source of weights, like those of WeightReader.

    def dtype(self, tensor_name: str) -> torch.dtype:
        """The data type of a canonical tensor, which holds the values of all its HF tensors exactly."""
        return reduce(torch.promote_types, map(self.hf_dtype, self.rule_by_name[tensor_name].hf_shapes))

    def read_region(self, tensor_name: str, region: MatrixRegion) -> Tensor:
        return gather_region(
            self.rule_by_name[tensor_name].blocks,
            region,
            lambda name, part: self.tensor_folder.read_region(self.stored_name_by_released[str(name)], part),
            self.dtype(tensor_name),
        )

    def expect_scattered_reads(self, is_scattered: bool) -> None:
        for tensor_reader in self.tensor_folder.reader_by_file.values():
            tensor_reader.expect_scattered_reads(is_scattered)

    @cached_property
    def hf_blocks(self) -> dict[str, list[MatrixBlock]]:
        """The inverse of the rules: released name -> rectangles in canonical tensors, in model order."""
        blocks_by_hf_name: dict[str, list[MatrixBlock]] = {name: [] for name in self.expected_shapes}
        for rule in self.rule_by_name.values():
            for block in rule.blocks:
                blocks_by_hf_name[str(block.part_id)].append(block.inverse_block(rule.name))
        if self.has_tied_output:
            blocks_by_hf_name[HF_OUTPUT] = blocks_by_hf_name[self.embedding_name]
        return blocks_by_hf_name
