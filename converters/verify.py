"""Compares checkpoints bit for bit, and weights with the hashes in their manifest."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_vl.weights.manifest import MANIFEST
from megatron_vl.weights.reader import WeightReader
from megatron_vl.weights.run_folder import LATEST
from megatron_vl.weights.tensor_files import CODES, Region, WeightsError, matrix_shape, row_regions

from .hf import TensorFolder, short_name
from .stream import Progress, default_workers

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """One tensor (or file) that differs, and how."""

    name: str
    how: str


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison. Names are those of the first folder."""

    tensors: int
    bytes: int
    differences: list[Difference]
    renamed: int = 0
    """Number of tensors that the second folder names in transformers' other style (see
    :mod:`converters.hf`)."""
    example: str = ""
    """One of these tensors with both names, for a message."""


@dataclass(frozen=True)
class _Tensors:
    """The tensors of a folder: their shapes, types (safetensors' codes), and a function to read them."""

    shapes: dict[str, tuple[int, ...]]
    codes: dict[str, str]
    region: Callable[[str, Region], Tensor]
    is_hf: bool

    def renamed(self, names: dict[str, str]) -> _Tensors:
        """The same tensors, some of them with new names (new name -> current name)."""
        new = {current: name for name, current in names.items()}
        shapes = {new.get(name, name): shape for name, shape in self.shapes.items()}
        codes = {new.get(name, name): code for name, code in self.codes.items()}
        return _Tensors(
            shapes, codes, lambda name, region: self.region(names.get(name, name), region), self.is_hf
        )


def _open(path: Path) -> _Tensors:
    """Opens a HF folder with its stored names, or Megatron weights of any layout as full tensors."""
    if any((path / name).exists() for name in (MANIFEST, LATEST, f"weights/{MANIFEST}")) or any(
        path.glob("step_*")
    ):
        weights = WeightReader(path, verify=False)  # differences are to be shown, not refused
        shapes = {name: info.shape for name, info in weights.table.items()}
        return _Tensors(
            shapes, {name: CODES[weights.dtype(name)] for name in shapes}, weights.region, is_hf=False
        )

    folder = TensorFolder(path)
    shapes = {name: folder.shape(name) for name in folder.where}
    return _Tensors(shapes, {name: folder.code(name) for name in shapes}, folder.region, is_hf=True)


def _same_under_other_names(a: _Tensors, b: _Tensors) -> dict[str, str]:
    """Maps names in ``a`` to names in ``b`` for tensors of two HF folders that differ only in naming style.

    A tensor that one folder has under both names is left out, because the match would be ambiguous.
    """
    if not (a.is_hf and b.is_hf):
        return {}

    sides: list[dict[str, list[str]]] = [{}, {}]
    for side, folder in zip(sides, (a, b), strict=True):
        for name in folder.shapes:
            side.setdefault(short_name(name), []).append(name)
    pairs = ((names, sides[1].get(short, [])) for short, names in sides[0].items())
    return {
        names[0]: others[0] for names, others in pairs if len(names) == len(others) == 1 and names != others
    }


def _elements(shape: tuple[int, ...]) -> int:
    rows, cols = matrix_shape(shape)
    return rows * cols


def _itemsize(code: str) -> int:
    """Bytes of an element. The first number in a code such as ``BF16`` or ``F8_E4M3`` is the number of bits;
    ``BOOL`` has none."""
    bits = re.search(r"\d+", code)
    return int(bits[0]) // 8 if bits else 1


def compare(a: str | Path, b: str | Path, *, workers: int = 0) -> Comparison:
    """Compares all tensors of two folders bit for bit: HF folders, or Megatron weights of any layouts.

    Tensors of two HF folders whose names differ only in style are compared with each other. Differences are
    sorted by name. They are tensors that only one folder has, other types, other shapes, or other bits.

    Raises:
        WeightsError: one folder is a Hugging Face folder, and the other holds Megatron weights.
    """
    left, right = _open(Path(a)), _open(Path(b))
    if left.is_hf != right.is_hf:
        kinds = ("a folder of Megatron weights", "a Hugging Face folder")
        raise WeightsError(
            f"{a} is {kinds[left.is_hf]}, but {b} is {kinds[right.is_hf]}: their names and shapes differ. "
            "Compare two folders of the same kind; `megatron-vl export` makes a Hugging Face folder from "
            "Megatron weights"
        )

    other_names = _same_under_other_names(left, right)
    right = right.renamed(other_names)
    names = sorted(left.shapes.keys() | right.shapes.keys())
    size = sum(
        _elements(shape) * _itemsize(left.codes[name])
        for name, shape in left.shapes.items()
        if name in right.shapes
    )

    progress = Progress("verify", size)
    try:
        with ThreadPoolExecutor(workers or default_workers()) as pool:
            found = list(pool.map(lambda name: _difference(name, left, right, progress), names))
    finally:
        progress.close()

    example = next(
        (f"{name} is {other} in the second folder" for name, other in sorted(other_names.items())), ""
    )
    return Comparison(
        len(names), size, [difference for difference in found if difference], len(other_names), example
    )


def _difference(name: str, a: _Tensors, b: _Tensors, progress: Progress) -> Difference | None:
    for folder, which in ((a, "first"), (b, "second")):
        if name not in folder.shapes:
            return Difference(name, f"missing in the {which} folder")
    if a.codes[name] != b.codes[name]:
        return Difference(name, f"type {a.codes[name]} against {b.codes[name]}")
    if a.shapes[name] != b.shapes[name]:
        return Difference(name, f"shape {list(a.shapes[name])} against {list(b.shapes[name])}")
    return _different_bits(name, a, b, progress)


def _different_bits(name: str, a: _Tensors, b: _Tensors, progress: Progress) -> Difference | None:
    count, first, largest = 0, -1, 0.0
    cols = matrix_shape(a.shapes[name])[1]
    for region in row_regions(a.shapes[name], _itemsize(a.codes[name])):
        x = a.region(name, region).contiguous()
        y = b.region(name, region).contiguous()
        bits = BITS[x.element_size()]
        # As integers, two NaNs with the same bits are equal, and 0.0 and -0.0 are not.
        other = (x.view(bits) != y.view(bits)).flatten()
        if other.any():
            count += int(other.sum())
            first = first if first >= 0 else region.row * cols + int(other.nonzero()[0])
            largest = max(largest, float((x.double() - y.double()).abs().nan_to_num(float("inf")).max()))
        progress.add(x.nbytes)

    if not count:
        return None
    return Difference(
        name,
        f"{count} of {_elements(a.shapes[name])} elements differ, the first at {first}, "
        f"by at most {largest:.3g}",
    )


def check_hashes(path: str | Path, *, workers: int = 0) -> Comparison:
    """Compares every stored tensor of Megatron weights with its SHA-256 in the manifest."""
    reader = WeightReader(path, verify=False)
    work = [
        (file, name, digest)
        for file, entry in reader.manifest["files"].items()
        for name, digest in entry["tensors"].items()
    ]
    files = {file: reader.open_file(file) for file in reader.manifest["files"]}
    size = sum(
        _elements(files[file].shape(name)) * files[file].dtype(name).itemsize for file, name, _ in work
    )
    progress = Progress("verify", size)

    def check(item: tuple[str, str, str]) -> Difference | None:
        file, name, expected = item
        if files[file].sha256(name, progress.add) == expected:
            return None
        return Difference(name, f"differs in {file} from the manifest")

    try:
        with ThreadPoolExecutor(workers or default_workers()) as pool:
            found = list(pool.map(check, work))
    finally:
        progress.close()
    return Comparison(len(work), size, [difference for difference in found if difference])
