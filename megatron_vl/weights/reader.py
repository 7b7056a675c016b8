"""Reads tensors, or any parts of them, from weights of any layout."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import torch
from torch import Tensor

from megatron_vl.spec.families import ConfigError, read_spec
from megatron_vl.spec.tensors import WHOLE, Cut, LayoutError, check_cut, tensor_table
from megatron_vl.weights import run_folder
from megatron_vl.weights.blocks import gather, part_blocks, shard_blocks
from megatron_vl.weights.manifest import (
    MANIFEST,
    UNFINISHED,
    _check_tensor_table,
    _part,
    _rank,
    _read_layout,
    read_manifest,
)
from megatron_vl.weights.tensor_files import (
    NAMES,
    Region,
    TensorReader,
    WeightsError,
    matrix_shape,
    row_regions,
)


def find_weights(path: str | Path) -> Path:
    """Finds the folder of weights for ``path``, which may be that folder, a step folder, or a run folder.

    For a run folder, it is the folder of the latest checkpoint.

    Raises:
        FileNotFoundError: there is no folder of weights. The message says which files were looked for.
        WeightsError: it is not known which checkpoint of a run is the latest.
    """
    path = Path(path)
    for folder in (path, path / "weights"):
        if (folder / MANIFEST).is_file():
            return folder

    if (path / UNFINISHED).is_file() and not (path / run_folder.LATEST).is_file():
        raise FileNotFoundError(
            f"{path} holds a conversion that is not finished; run it again to continue it"
        )

    try:
        saved = run_folder.latest(path)
    except run_folder.StepMissingError as error:
        raise FileNotFoundError(str(error)) from error
    except run_folder.CheckpointError as error:
        raise WeightsError(str(error)) from error

    if saved is None:
        looks = f"holds no weights: looked for {MANIFEST}, weights/{MANIFEST} and {run_folder.LATEST}"
        if (path / "config.json").is_file():
            looks = (
                "is a Hugging Face folder, not a folder of Megatron weights; write one with"
                f" `megatron-vl convert --hf {path} --out DIR`"
            )
        raise FileNotFoundError(f"{path} {looks}")

    weights = saved.path / "weights"
    if not (weights / MANIFEST).is_file():
        raise FileNotFoundError(
            f"{weights / MANIFEST} is missing, although step {saved.step} is the latest of {path}"
        )

    return weights


class WeightReader:
    """Reads weights of any layout as if they had any other layout.

    Args:
        verify: whether to compare each stored tensor with its SHA-256 before any part of it is first
            returned. This reads the whole stored tensor, even for a slice (1 to 2 GB/s per core).

    Attributes:
        path: the folder of weights, found from a run or step folder.
        manifest: the content of the manifest.
        spec: the model.
        layout: the layout of the weights; None for unsplit weights.
        cut: how the layout cuts the tensors of a stage.
        table: canonical name -> :class:`TensorInfo`.

    Raises:
        FileNotFoundError: there are no weights.
        WeightsError: the manifest or a file is invalid. The message names it.
    """

    def __init__(self, path: str | Path, *, verify: bool = True) -> None:
        self.path = find_weights(path)
        self.manifest = read_manifest(self.path / MANIFEST)
        try:
            self.spec = read_spec(self.manifest["hf_config"])
            self.layout = _read_layout(self.spec, self.manifest)
            self.cut = self.layout.cut if self.layout else WHOLE
            self.table = tensor_table(self.spec)
            self._where = self._locate_parts()
            self._check_step()
        except (WeightsError, FileNotFoundError):
            raise
        except (ConfigError, LayoutError) as error:
            raise WeightsError(f"{self.path / MANIFEST}: {error}") from error
        except (KeyError, TypeError, AttributeError, ValueError) as error:  # a field has an unexpected type
            raise WeightsError(
                f"{self.path / MANIFEST} is damaged: {type(error).__name__}: {error}"
            ) from error

        self._verify = verify
        self._files: dict[str, TensorReader] = {}
        self._checked: set[tuple[str, str]] = set()
        self._checks: dict[tuple[str, str], threading.Lock] = {}
        self._lock = threading.Lock()

    def _locate_parts(self) -> dict[tuple[int, str], str]:
        """(part, tensor) -> file, after checking that the manifest describes the whole model."""
        path = self.path / MANIFEST
        _check_tensor_table(path, self.manifest, self.table)
        where: dict[tuple[int, str], str] = {}
        for file, entry in self.manifest["files"].items():
            # A manifest may come from an untrusted source, so its names must stay inside its folder.
            if not re.fullmatch(r"[\w.-]+\.safetensors", file):
                raise WeightsError(f"{path}: {file!r} is not a file name of weights")
            if not (self.path / file).is_file():
                raise WeightsError(f"{self.path / file} is missing, although {MANIFEST} names it")

            for name in entry["tensors"]:
                if name not in self.table or self._stage(name) != entry["pp"]:
                    raise WeightsError(
                        f"{path}: tensor {name!r} does not belong in {file}, pipeline rank {entry['pp']}"
                    )
                part = _part(self.table[name], entry, self.layout)
                if part is None:
                    raise WeightsError(f"{path}: tensor {name!r} does not belong in {file}")
                if where.setdefault((part, name), file) != file:
                    raise WeightsError(
                        f"{path}: tensor {name!r} of {_rank(self.table[name], part, self.cut)} is in two"
                        " files"
                    )

        for name, info in self.table.items():
            for part in range(self.cut.parts(info)):
                if (part, name) not in where:
                    raise WeightsError(
                        f"{path}: no file holds tensor {name!r} ({info.split}) of"
                        f" {_rank(info, part, self.cut)}"
                    )

        if len(where) != sum(self.cut.parts(info) for info in self.table.values()):
            raise WeightsError(f"{path} names files of more ranks than its layout {self.cut} has")
        return where

    def _stage(self, name: str) -> int:
        """The pipeline rank that holds a tensor."""
        return self.layout.stage_of(self.table[name]) if self.layout else 0

    def _check_step(self) -> None:
        """Checks that the step in the weights' origin, if there is one, is the step of their folder."""
        step = (self.manifest.get("origin") or {}).get("step")
        folder = self.path.parent
        if (
            step is not None
            and self.path.name == "weights"
            and run_folder.folder_step(folder) not in (None, step)
        ):
            raise WeightsError(
                f"{self.path / MANIFEST}: the weights belong to step {step}, but they are in {folder.name}"
            )

    def names(self) -> list[str]:
        """Canonical names, in model order."""
        return list(self.table)

    def dtype(self, name: str) -> torch.dtype:
        """The type of a stored tensor."""
        return NAMES[self.manifest["tensors"][name]["dtype"]]

    def _open(self, part: int, name: str) -> TensorReader:
        """The file that holds one part of a tensor.

        Each file is opened and checked once, and each tensor in it is verified once.
        """
        file = self._where[part, name]
        with self._lock:
            if file not in self._files:
                self._files[file] = self.open_file(file)
            check = self._checks.setdefault((file, name), threading.Lock())

        reader = self._files[file]
        if self._verify and (file, name) not in self._checked:
            with check:  # only threads that read this tensor wait
                written = self.manifest["files"][file]["tensors"][name]
                if (file, name) not in self._checked and reader.sha256(name) != written:
                    raise WeightsError(
                        f"{reader.path} is damaged: tensor {name!r} is not what was written (SHA-256 differs"
                        f" from {MANIFEST}); fetch or write the weights again"
                    )
                self._checked.add((file, name))

        return reader

    def open_file(self, file: str) -> TensorReader:
        """Opens one of the manifest's files and checks that it holds the manifest's tensors.

        Raises:
            WeightsError: the file is damaged, or a tensor is missing or has another shape or type.
        """
        reader = TensorReader(self.path / file)
        held = set(reader.names())
        for tensor in self.manifest["files"][file]["tensors"]:
            shape = self.table[tensor].shard_shape(self.cut)
            if (
                tensor not in held
                or reader.shape(tensor) != shape
                or reader.dtype(tensor) != self.dtype(tensor)
            ):
                raise WeightsError(f"{reader.path}: tensor {tensor!r} is missing or differs from {MANIFEST}")
        return reader

    def verify(self, name: str) -> None:
        """Verifies now all parts of this tensor that :meth:`region` reads.

        Raises:
            WeightsError: the tensor is damaged.
        """
        for part in {block.part for block in shard_blocks(self.table[name], self.cut)}:
            self._open(int(part), name)

    def fingerprint(self) -> dict[str, str]:
        """A value that changes if any of these weights changes."""
        return {MANIFEST: self.manifest["digest"]}

    def region(self, name: str, region: Region) -> Tensor:
        """A region of the full tensor as a matrix. It may be a view of a file: do not write to it."""
        blocks = shard_blocks(self.table[name], self.cut)
        return gather(
            blocks, region, lambda part, w: self._open(int(part), name).region(name, w), self.dtype(name)
        )

    def get(self, name: str, part: int = 0, cut: Cut = WHOLE, expert: int | None = None) -> Tensor:
        """Reads a copy of one part of a tensor, whatever layout is on disk.

        Args:
            part: number of the part, out of ``cut.parts(info)`` (see :meth:`Cut.part`).
            cut: how to cut the model. By default, the part is the full tensor.
            expert: for an expert tensor, the index within the part of the only expert to return, without the
                leading dimension; None: all experts of the part.

        Raises:
            LayoutError: the model cannot be cut in this way.
            WeightsError: the stored tensor is damaged.
        """
        check_cut(self.spec, cut)
        info = self.table[name]
        dtype = self.dtype(name)
        shape = info.shard_shape(cut)
        first = 0
        if expert is not None:
            first = range(shape[0])[expert] * shape[1]
            shape = shape[1:]

        as_stored = cut[1:3] == self.cut[1:3] if info.experts else cut.ways(info) == self.cut.ways(info)
        blocks = part_blocks(info, part, cut)
        out = torch.empty(matrix_shape(shape), dtype=dtype)
        for region in row_regions(shape, dtype.itemsize):
            wanted = region._replace(row=region.row + first, row_end=region.row_end + first)
            if as_stored:
                data = self._open(part, name).region(name, wanted)
            else:
                data = gather(blocks, wanted, lambda _, full: self.region(name, full), dtype)
            out[region.row : region.row_end] = data
        return out.view(shape)
