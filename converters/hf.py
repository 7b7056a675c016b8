"""Reads Hugging Face folders: which tensors are in which file, their names, and the other files.

Released Qwen2-VL and Qwen2.5-VL checkpoints name their tensors ``model.layers.*`` and ``visual.*``.
``save_pretrained`` of transformers 5.17 uses the same names. In memory, and in folders written with
``save_original_format=False``, transformers names them ``model.language_model.layers.*`` and
``model.visual.*``, which are the released names of Qwen3-VL. Rules use each family's released names. Folders
of all families may use either style.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from megatron_vl.spec.families import ConfigError, ModelSpec, read_spec
from megatron_vl.spec.tensors import EMBEDDING
from megatron_vl.weights.blocks import Block, gather
from megatron_vl.weights.manifest import UNFINISHED
from megatron_vl.weights.run_folder import EXPORTED
from megatron_vl.weights.tensor_files import (
    Region,
    TensorReader,
    WeightsError,
    dtype_name,
    read_header,
    row_regions,
)

from . import rules_for
from .rules import DOWN, GATE_UP, HF_OUTPUT, RELEASED, ExpertStyle, Rule

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CARRIED = {"qwen3_5": "mtp.", "qwen3_5_moe": "mtp."}
"""Family -> prefix of the tensors in its released folders that neither this project nor transformers treats
as part of the model. An export copies them from the original folder."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")


def short_name(name: str) -> str:
    """The name of a tensor in the style ``model.*`` and ``visual.*``.

    ``model.language_model.*`` becomes ``model.*``, and ``model.visual.*`` becomes ``visual.*``.
    """
    for prefix, short in (("model.language_model.", "model."), ("model.visual.", "visual.")):
        if name.startswith(prefix):
            return short + name.removeprefix(prefix)
    return name


class TensorFolder:
    """The safetensors files of a HF folder, with the names that the files use. It needs no config.

    Raises:
        FileNotFoundError: the folder has no safetensors weights.
        WeightsError: index and files disagree; the message names the file or tensor.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.index: dict[str, str] | None = self._read_index()
        names = sorted(set(self.index.values())) if self.index is not None else [SINGLE]
        self.files = {name: TensorReader(self.path / name) for name in names}
        self.where = {tensor: file for file, reader in self.files.items() for tensor in reader.names()}
        self._check_index()

    def _read_index(self) -> dict[str, str] | None:
        if not self.path.is_dir():
            raise FileNotFoundError(f"{self.path} is not a folder")
        if (self.path / UNFINISHED).is_file():
            raise WeightsError(
                f"{self.path} holds an unfinished export; run the same export again to continue it"
            )

        path = self.path / INDEX
        if not path.is_file():
            if not (self.path / SINGLE).is_file():
                raise FileNotFoundError(
                    f"{self.path} holds neither {SINGLE} nor {INDEX}; only safetensors weights are read"
                )
            return None

        try:
            index = json.loads(path.read_text())
        except ValueError as error:
            raise WeightsError(f"{path} is not JSON ({error}); copy it again") from error

        index = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(index, dict) or not index:
            raise WeightsError(f"{path}: field 'weight_map' is missing or empty")
        for tensor, file in index.items():
            # An index may come from an untrusted source, so its names must stay inside its folder.
            if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file):
                raise WeightsError(
                    f"{path} says tensor {tensor!r} is in {file!r}, which is not a file name of weights"
                )

        return index

    def _check_index(self) -> None:
        for file, reader in self.files.items():
            for tensor in reader.names():
                if self.where[tensor] != file:
                    raise WeightsError(
                        f"{self.path}: tensor {tensor!r} is in both {file} and {self.where[tensor]}"
                    )
        if self.index is None or self.index == self.where:
            return

        for tensor in sorted(self.index.keys() | self.where.keys()):
            said = self.index.get(tensor, "no file")
            found = self.where.get(tensor, "no file")
            if said != found:
                raise WeightsError(
                    f"{self.path}: {INDEX} says tensor {tensor!r} is in {said}, but it is in {found}"
                )

    def shape(self, name: str) -> tuple[int, ...]:
        return self.files[self.where[name]].shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self.files[self.where[name]].dtype(name)

    def code(self, name: str) -> str:
        """The data type of a tensor in safetensors' notation."""
        return self.files[self.where[name]].code(name)

    def region(self, name: str, region: Region) -> Tensor:
        return self.files[self.where[name]].region(name, region)

    def companions(self) -> tuple[list[Path], list[Path]]:
        """Relative paths of the checkpoint's other files, and of files with weights that are not read.

        The other files include config, tokenizer, processor, chat templates and the index. Version control
        folders are in neither list.

        Raises:
            WeightsError: one of the other files is a link to a file outside the folder, which an export would
                copy.
        """
        keep: list[Path] = []
        other: list[Path] = []
        for folder, folders, names in os.walk(self.path):
            folders[:] = [name for name in folders if name not in (".git", ".cache")]
            for name in names:
                path = (Path(folder) / name).relative_to(self.path)
                if str(path) == EXPORTED:  # it describes another export
                    continue
                weights = name.endswith((*WEIGHT_SUFFIXES, ".index.json")) and str(path) != INDEX
                (other if weights else keep).append(path)

        self._check_links(keep)
        return sorted(keep), sorted(path for path in other if str(path) not in self.files)

    def _check_links(self, companions: Sequence[Path]) -> None:
        root = self.path.resolve()
        # In the cache of huggingface_hub, a snapshot consists of links to files in a folder blobs.
        roots = (root, root.parent.parent / "blobs") if root.parent.name == "snapshots" else (root,)
        for path in companions:
            target = (root / path).resolve()
            if not any(target.is_relative_to(allowed) for allowed in roots):
                raise WeightsError(
                    f"{self.path / path} is a link to {target}, outside the folder; put the file itself there"
                )


def expert_style(spec: ModelSpec, folder: TensorFolder) -> ExpertStyle:
    """Finds out from names and shapes how a folder stores its experts.

    Returns the released style if there are no experts, or if their shapes are wrong.

    Square matrices fit both orientations. Only one of the two stacks can be square, but the other one does
    not decide for it: transformers 5 decides for each stack separately, reads a square stack as output-first,
    and scrambles it if this is wrong.

    Raises:
        WeightsError: a stack fits both orientations.
    """
    if spec.language.moe is None:
        return "apart"  # any style will do

    released = RELEASED[spec.family]
    f = spec.language.moe.ffn_hidden_size
    h = spec.language.hidden_size
    names = [name for name in folder.where if not is_carried(spec, name)]
    stacks = {
        name: (2 * f, h) if name.endswith(GATE_UP) else (h, f)
        for name in names
        if name.endswith((GATE_UP, DOWN))
    }

    if not stacks:
        return "apart" if any(".mlp.experts." in name for name in names) else released
    if released == "output_first":
        return released  # as in transformers, which supports no other stacks for this family
    for name, (rows, cols) in stacks.items():
        if rows == cols:
            raise WeightsError(
                f"{folder.path}: tensor {name!r} holds square matrices, {rows} by {cols}, so it is not known "
                "whether their inputs or their outputs come first. Store each expert's gate_proj, up_proj "
                "and down_proj as separate tensors"
            )

    output_first = any(folder.shape(name)[1:] == matrix for name, matrix in stacks.items())
    return "output_first" if output_first else released


def is_carried(spec: ModelSpec, name: str) -> bool:
    """Whether a stored tensor is not part of the model and is copied unchanged (:data:`CARRIED`)."""
    prefix = CARRIED.get(spec.family)
    return prefix is not None and name.startswith(prefix)


class HfCheckpoint:
    """A HF folder that is read as Megatron weights: the source of a conversion, or the model for an export.

    Attributes:
        stored: released name -> the name in this folder's files.
        carried: stored names of tensors that are not part of the model, in the order of the files.

    Raises:
        FileNotFoundError: the folder has no config or no safetensors weights.
        ConfigError: ``model_type`` is unknown, or a field is impossible.
        WeightsError: a tensor is missing, unknown, or of a wrong shape or type. The message names it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / "config.json").is_file():
            raise FileNotFoundError(
                f"{self.path / 'config.json'} is missing; --hf must be a Hugging Face checkpoint folder"
            )
        self.spec = _read_spec(self.path / "config.json")
        self.folder = TensorFolder(self.path)
        self.rules: dict[str, Rule] = {
            rule.name: rule for rule in rules_for(self.spec, expert_style(self.spec, self.folder))
        }
        self.carried = [name for name in self.folder.where if is_carried(self.spec, name)]
        self.stored = self._released_names()
        self._check_tensors()

    def _released_names(self) -> dict[str, str]:
        """Released name -> stored name, for all tensors of the model."""
        stored: dict[str, str] = {}
        rules = {short_name(name): name for name in self.expected}
        for name in self.folder.where:
            if is_carried(self.spec, name):
                continue
            released = rules.get(short_name(name), short_name(name))
            if released in stored:
                raise WeightsError(
                    f"{self.path}: tensors {stored[released]!r} and {name!r} are the same tensor "
                    "under two names"
                )
            stored[released] = name
        return stored

    @cached_property
    def expected(self) -> dict[str, tuple[int, ...]]:
        """Released name -> shape, for all tensors that the config requires."""
        return {name: shape for rule in self.rules.values() for name, shape in rule.hf.items()}

    @property
    def embedding(self) -> str:
        """The released name of the embedding."""
        return next(iter(self.rules[EMBEDDING].hf))

    def in_order(self) -> list[str]:
        """The released names of this folder's tensors, in model order."""
        return [*self.expected, *([HF_OUTPUT] if self.has_tied_output else [])]

    @property
    def has_tied_output(self) -> bool:
        """Whether the folder stores an output layer although it is tied to the embedding."""
        return self.spec.language.tied_embeddings and HF_OUTPUT in self.stored

    def _check_tensors(self) -> None:
        expected = dict(self.expected)
        if self.has_tied_output:
            expected[HF_OUTPUT] = expected[self.embedding]
        for name in expected:
            if name not in self.stored:
                raise WeightsError(f"{self.path}: tensor {name!r} is missing, but config.json requires it")

        for name, stored in self.stored.items():
            if name not in expected:
                raise WeightsError(
                    f"{self.path}: tensor {stored!r} is unknown in a {self.spec.family} model "
                    "with this config.json"
                )
            if self.folder.shape(stored) != expected[name]:
                shapes = f"{list(self.folder.shape(stored))}; config.json says {list(expected[name])}"
                raise WeightsError(f"{self.path}: tensor {stored!r} has shape {shapes}")
            self.hf_dtype(name)

    def rounded_decays(self) -> str:
        """A note if the decay rates of linear attention (``A_log``) were rounded; otherwise empty.

        Released Qwen3.5 stores them in float32, like the norm within these layers. Qwen3.6 and 3.8 store them
        in bfloat16. They are recognised by the ``bos_token_id`` in their text config.
        """
        names = [name for name in self.expected if name.endswith(".linear_attn.A_log")]
        text = self.spec.hf_config.get("text_config") or {}
        if not names or text.get("bos_token_id") is not None:
            return ""

        narrow = [name for name in names if self.hf_dtype(name) != torch.float32]
        if narrow:
            how = f"{len(narrow)} of {len(names)} A_log are stored as {dtype_name(self.hf_dtype(narrow[0]))}"
        else:
            files = self.folder.files
            stored = [self.stored[name] for name in names]
            values = [files[self.folder.where[name]].tensor(name) for name in stored]
            if not all(torch.equal(value, value.bfloat16().float()) for value in values):
                return ""
            how = "every A_log is stored as float32 but holds only values of bfloat16"

        return (
            f"{self.path}: {how}; released Qwen3.5 has them in float32. They were rounded, as transformers "
            "does when it loads the model as bfloat16 (or auto) and saves it: decays are up to 1.6 % off. "
            "Start from the released folder if you can"
        )

    def check_tied_output(self) -> None:
        """Raises WeightsError if a stored tied output layer differs from the embedding in any bit."""
        if not self.has_tied_output:
            return

        names = [self.stored[HF_OUTPUT], self.stored[self.embedding]]
        same_type = self.folder.code(names[0]) == self.folder.code(names[1])
        regions = (
            row_regions(self.folder.shape(names[0]), self.hf_dtype(HF_OUTPUT).itemsize) if same_type else ()
        )
        if not same_type or any(
            not _same_bits(*(self.folder.region(name, w) for name in names)) for w in regions
        ):
            raise WeightsError(
                f"{self.path}: tensor {names[0]!r} differs from {names[1]!r}, but config.json ties them; "
                "set tie_word_embeddings to false, or remove the tensor"
            )

    def hf_dtype(self, released: str) -> torch.dtype:
        """The data type of a stored tensor, from its released name."""
        return self.folder.dtype(self.stored[released])

    # The following methods are the interface of a source of weights, like those of WeightReader.

    def dtype(self, name: str) -> torch.dtype:
        """The data type of a canonical tensor, which holds the values of all its HF tensors exactly."""
        dtypes = [self.hf_dtype(hf) for hf in self.rules[name].hf]
        common = dtypes[0]
        for dtype in dtypes[1:]:
            common = torch.promote_types(common, dtype)
        return common

    def verify(self, name: str) -> None:
        """Does nothing, because HF folders have no hashes. Shapes, types and lengths were checked earlier."""

    def fingerprint(self) -> dict[str, str]:
        """The config, and each file's header, size and modification time, which are known without reading the
        weights."""
        facts = {"config.json": _sha256((self.path / "config.json").read_bytes())}
        for name in self.folder.files:
            stat = (self.path / name).stat()
            facts[name] = (
                f"{stat.st_size} bytes of {stat.st_mtime_ns}, "
                f"header {_sha256(read_header(self.path / name))[:16]}"
            )
        return facts

    def region(self, name: str, region: Region) -> Tensor:
        """Reads a region of a full canonical tensor as a matrix."""
        read = lambda hf, w: self.folder.region(self.stored[str(hf)], w)  # noqa: E731
        return gather(self.rules[name].blocks, region, read, self.dtype(name))

    def hf_blocks(self, released: str) -> Sequence[Block]:
        """The rectangles of a HF tensor in the canonical tensors: the inverse of the rules."""
        return self._hf_blocks[self.embedding if released == HF_OUTPUT and self.has_tied_output else released]

    @cached_property
    def _hf_blocks(self) -> dict[str, list[Block]]:
        blocks: dict[str, list[Block]] = {}
        for rule in self.rules.values():
            for block in rule.blocks:
                blocks.setdefault(str(block.part), []).append(block.inverted(rule.name))
        return blocks


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_spec(path: Path) -> ModelSpec:
    try:
        return read_spec(path)
    except ConfigError as error:
        raise ConfigError(f"{path.parent}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        # The file is not JSON, or a field has an unexpected type.
        raise ConfigError(f"{path} is invalid: {type(error).__name__}: {error}") from error


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
