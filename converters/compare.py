"""Compares checkpoints bit for bit, and weights with the hashes in their manifest."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_vl.spec.families.hf_folder import read_config
from megatron_vl.spec.tensors import MTP_PREFIX, tensor_table
from megatron_vl.system.processes import available_cores
from megatron_vl.system.progress_bar import progress
from megatron_vl.weights.canonical_weights import CanonicalWeights
from megatron_vl.weights.manifest import MANIFEST_FILE
from megatron_vl.weights.tensor_files import ANY_DTYPE_BY_CODE, CODE_BY_DTYPE, MatrixRegion, row_regions
from megatron_vl.weights.weight_reader import WeightReader

from .fp8 import is_fp8_folder, open_tensor_folder
from .hf_checkpoint import HfCheckpoint, short_tensor_name
from .tensor_folder import TensorFolder

INTEGER_DTYPE_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorDifference:
    """One tensor (or file) that differs, and how."""

    name: str
    how: str


@dataclass(frozen=True)
class CheckpointComparison:
    """The result of a comparison. Names are those of the first folder."""

    tensors: int
    bytes: int
    differences: list[TensorDifference]
    renamed: int = 0
    """Number of tensors that the second folder names in transformers' other style (see
    :mod:`converters.hf_checkpoint`)."""
    example: str = ""
    """One of these tensors with both names, for a message."""


@dataclass(frozen=True)
class _StoredTensor:
    shape: tuple[int, ...]
    dtype_code: str
    read_region: Callable[[MatrixRegion], Tensor]


def _open_checkpoint(checkpoint_path: Path, *, as_stored: bool) -> tuple[dict[str, _StoredTensor], bool]:
    """Opens a HF folder with its stored names, or Megatron weights of any layout as full tensors. Returns
    also whether it is a HF folder."""
    markers = (MANIFEST_FILE, f"weights/{MANIFEST_FILE}", "step_*")
    if any(path for marker in markers for path in checkpoint_path.glob(marker)):
        # The reader must not refuse damaged tensors: a comparison shows the differences.
        return _canonical_tensors(WeightReader(checkpoint_path, should_verify=False)), False

    if (checkpoint_path / "config.json").is_file():
        read_config(checkpoint_path / "config.json")  # which alone may say that a model is quantised
    folder = TensorFolder(checkpoint_path) if as_stored else open_tensor_folder(checkpoint_path)
    return {
        name: _StoredTensor(folder.shape(name), folder.dtype_code(name), partial(folder.read_region, name))
        for name in folder.file_by_tensor
    }, True


def _canonical_tensors(source: CanonicalWeights) -> dict[str, _StoredTensor]:
    return {
        name: _StoredTensor(info.shape, CODE_BY_DTYPE[source.dtype(name)], partial(source.read_region, name))
        for name, info in tensor_table(source.spec).items()
    }


def _element_bytes(dtype_code: str) -> int:
    """Bytes of an element; of a type that is not read, which the reader reports, 1."""
    return ANY_DTYPE_BY_CODE.get(dtype_code, torch.uint8).itemsize


def compare_weights(first_path: str | Path, second_path: str | Path) -> CheckpointComparison:
    """Compares all tensors of two folders bit for bit: HF folders, or Megatron weights of any layouts.

    A HF folder and Megatron weights are compared as `convert` would write the HF folder. FP8 weights are
    dequantised if only one of two HF folders has them.

    Tensors of two HF folders whose names differ only in style are compared with each other. Differences are
    sorted by name. They are tensors that only one folder has, other types, other shapes, or other bits.

    Raises:
        WeightsError: a folder cannot be read, or not as Megatron weights.
    """
    as_stored = is_fp8_folder(first_path) == is_fp8_folder(second_path)
    first_tensors, first_is_hf = _open_checkpoint(Path(first_path), as_stored=as_stored)
    second_tensors, second_is_hf = _open_checkpoint(Path(second_path), as_stored=as_stored)
    if first_is_hf != second_is_hf:
        canonical_names = second_tensors if first_is_hf else first_tensors
        has_mtp = any(name.startswith(MTP_PREFIX) for name in canonical_names)
        hf_checkpoint = HfCheckpoint(first_path if first_is_hf else second_path, has_mtp=has_mtp)
        hf_checkpoint.check_tied_output()  # Megatron weights do not have it
        if first_is_hf:
            first_tensors, first_is_hf = _canonical_tensors(hf_checkpoint), False
        else:
            second_tensors = _canonical_tensors(hf_checkpoint)

    # transformers saves one model under two styles of names. Such tensors are still the same tensor.
    renamed_examples = []
    if first_is_hf:
        first_by_short = {short_tensor_name(name): name for name in first_tensors}
        for second_name in list(second_tensors):
            first_name = first_by_short.get(short_tensor_name(second_name), second_name)
            if second_name not in first_tensors and first_name not in second_tensors:
                second_tensors[first_name] = second_tensors.pop(second_name)
                renamed_examples.append(f"{first_name} is {second_name} in the second folder")
    tensor_names = sorted(first_tensors.keys() | second_tensors.keys())

    # Tensors that only one folder has are reported without being read.
    compared = [first_tensors[name] for name in first_tensors.keys() & second_tensors.keys()]
    compared_bytes = sum(math.prod(tensor.shape) * _element_bytes(tensor.dtype_code) for tensor in compared)
    with progress(compared_bytes, "bytes", "verify") as advance:
        tensor_differences = _find_differences(
            lambda name: _describe_difference(first_tensors.get(name), second_tensors.get(name), advance),
            tensor_names,
            tensor_names,
        )

    return CheckpointComparison(
        len(tensor_names),
        compared_bytes,
        tensor_differences,
        len(renamed_examples),
        min(renamed_examples, default=""),
    )


def _find_differences[Item](
    describe: Callable[[Item], str], items: Sequence[Item], names: Sequence[str]
) -> list[TensorDifference]:
    """The items whose description, of how they differ, is not empty."""
    with ThreadPoolExecutor(available_cores()) as pool:
        found = zip(names, pool.map(describe, items), strict=True)
        return [TensorDifference(name, how) for name, how in found if how]


def _describe_difference(
    first: _StoredTensor | None, second: _StoredTensor | None, advance: Callable[[int], None]
) -> str:
    """How two tensors of one name differ; empty if they are equal bit for bit."""
    if first is None or second is None:
        return f"missing in the {'first' if first is None else 'second'} folder"
    if first.dtype_code != second.dtype_code:
        return f"type {first.dtype_code} against {second.dtype_code}"
    if first.shape != second.shape:
        return f"shape {list(first.shape)} against {list(second.shape)}"

    differing_elements = 0
    first_difference = -1
    largest_difference = 0.0
    for region in row_regions(first.shape, _element_bytes(first.dtype_code)):
        first_values = first.read_region(region).contiguous()
        second_values = second.read_region(region).contiguous()
        # As integers, two NaNs with the same bits are equal, and 0.0 and -0.0 are not.
        integers = INTEGER_DTYPE_BY_SIZE[first_values.element_size()]
        differs_mask = (first_values.view(integers) != second_values.view(integers)).flatten()
        if differs_mask.any():
            differing_elements += int(differs_mask.sum())
            if first_difference < 0:
                first_difference = region.row * first_values.shape[1] + int(differs_mask.nonzero()[0])
            distances = (first_values.double() - second_values.double()).abs().nan_to_num(float("inf"))
            largest_difference = max(largest_difference, float(distances.max()))
        advance(first_values.nbytes)

    if not differing_elements:
        return ""
    return (
        f"{differing_elements} of {math.prod(first.shape)} elements differ, "
        f"the first at {first_difference}, by at most {largest_difference:.3g}"
    )


def verify_checkpoint_hashes(checkpoint_path: str | Path) -> CheckpointComparison:
    """Compares every stored tensor of Megatron weights with its SHA-256 in the manifest."""
    weight_reader = WeightReader(checkpoint_path, should_verify=False, takes_lora=True)
    files = weight_reader.manifest["files"]
    readers = {file: weight_reader.open_file(file) for file in files}
    stored_tensors = [(file, *item) for file, entry in files.items() for item in entry["tensors"].items()]
    total_bytes = sum(
        math.prod(readers[file].shape(name)) * readers[file].dtype(name).itemsize
        for file, name, _ in stored_tensors
    )
    with progress(total_bytes, "bytes", "verify") as advance:

        def describe(stored_tensor: tuple[str, str, str]) -> str:
            file, name, expected_digest = stored_tensor
            is_equal = readers[file].sha256(name, advance) == expected_digest
            return "" if is_equal else f"differs in {file} from the manifest"

        names = [name for _, name, _ in stored_tensors]
        tensor_differences = _find_differences(describe, stored_tensors, names)
    return CheckpointComparison(len(stored_tensors), total_bytes, tensor_differences)
