"""Compares checkpoints bit for bit, and weights with the hashes in their manifest."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_vl.weights.manifest import MANIFEST_FILE
from megatron_vl.weights.run_folder import LATEST_FILE
from megatron_vl.weights.tensor_files import (
    CODE_BY_DTYPE,
    MatrixRegion,
    WeightsError,
    matrix_shape,
    row_regions,
)
from megatron_vl.weights.weight_reader import WeightReader

from .copy_jobs import ProgressBar, default_worker_count
from .hf_checkpoint import TensorFolder, short_tensor_name

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
class _CheckpointTensors:
    """The tensors of a folder: their shapes, types (safetensors' codes), and a function to read them."""

    shape_by_name: dict[str, tuple[int, ...]]
    code_by_name: dict[str, str]
    read_region: Callable[[str, MatrixRegion], Tensor]
    is_hf: bool

    def with_new_names(self, current_by_new: dict[str, str]) -> _CheckpointTensors:
        """The same tensors, some of them with new names (new name -> current name)."""
        new_by_current = {current: name for name, current in current_by_new.items()}
        shapes = {new_by_current.get(name, name): shape for name, shape in self.shape_by_name.items()}
        renamed_codes = {new_by_current.get(name, name): code for name, code in self.code_by_name.items()}
        return _CheckpointTensors(
            shapes,
            renamed_codes,
            lambda name, region: self.read_region(current_by_new.get(name, name), region),
            self.is_hf,
        )


def _open_checkpoint(checkpoint_path: Path) -> _CheckpointTensors:
    """Opens a HF folder with its stored names, or Megatron weights of any layout as full tensors."""
    marker_files = (MANIFEST_FILE, LATEST_FILE, f"weights/{MANIFEST_FILE}")
    has_marker = any((checkpoint_path / name).exists() for name in marker_files)
    if has_marker or any(checkpoint_path.glob("step_*")):
        # The reader must not refuse damaged tensors: a comparison shows the differences.
        weight_reader = WeightReader(checkpoint_path, should_verify=False)
        shape_by_name = {name: info.shape for name, info in weight_reader.tensor_infos.items()}
        return _CheckpointTensors(
            shape_by_name,
            {name: CODE_BY_DTYPE[weight_reader.dtype(name)] for name in shape_by_name},
            weight_reader.read_region,
            is_hf=False,
        )

    tensor_folder = TensorFolder(checkpoint_path)
    shape_by_name = {name: tensor_folder.shape(name) for name in tensor_folder.file_by_tensor}
    return _CheckpointTensors(
        shape_by_name,
        {name: tensor_folder.dtype_code(name) for name in shape_by_name},
        tensor_folder.read_region,
        is_hf=True,
    )


def _open_both(first_path: Path, second_path: Path) -> tuple[_CheckpointTensors, _CheckpointTensors]:
    first_checkpoint, second_checkpoint = _open_checkpoint(first_path), _open_checkpoint(second_path)
    if first_checkpoint.is_hf != second_checkpoint.is_hf:
        kind_names = ("a folder of Megatron weights", "a Hugging Face folder")
        raise WeightsError(
            f"{first_path} is {kind_names[first_checkpoint.is_hf]}, but {second_path} is "
            f"{kind_names[second_checkpoint.is_hf]}: their names and shapes differ. Compare two folders "
            "of the same kind; `megatron-vl export` makes a Hugging Face folder from Megatron weights"
        )
    return first_checkpoint, second_checkpoint


def _match_renamed_tensors(
    first_checkpoint: _CheckpointTensors, second_checkpoint: _CheckpointTensors
) -> dict[str, str]:
    """Matches tensors of two HF folders whose names differ only in style: first name -> second name.

    A tensor that one folder has under both names is left out, because the match would be ambiguous.
    """
    if not (first_checkpoint.is_hf and second_checkpoint.is_hf):
        return {}

    first_by_short: dict[str, list[str]] = {}
    second_by_short: dict[str, list[str]] = {}
    for names_by_short, checkpoint in (
        (first_by_short, first_checkpoint),
        (second_by_short, second_checkpoint),
    ):
        for tensor_name in checkpoint.shape_by_name:
            names_by_short.setdefault(short_tensor_name(tensor_name), []).append(tensor_name)

    renamed_tensors: dict[str, str] = {}
    for short_name, first_names in first_by_short.items():
        second_names = second_by_short.get(short_name, [])
        if len(first_names) == len(second_names) == 1 and first_names != second_names:
            renamed_tensors[first_names[0]] = second_names[0]
    return renamed_tensors


def _element_bytes(dtype_code: str) -> int:
    """Bytes of an element. The first number in a code such as ``BF16`` or ``F8_E4M3`` is the number of bits;
    ``BOOL`` has none."""
    bits_match = re.search(r"\d+", dtype_code)
    return int(bits_match[0]) // 8 if bits_match else 1


def compare_weights(
    first_path: str | Path, second_path: str | Path, *, worker_count: int = 0
) -> CheckpointComparison:
    """Compares all tensors of two folders bit for bit: HF folders, or Megatron weights of any layouts.

    Tensors of two HF folders whose names differ only in style are compared with each other. Differences are
    sorted by name. They are tensors that only one folder has, other types, other shapes, or other bits.

    Raises:
        WeightsError: one folder is a Hugging Face folder, and the other holds Megatron weights.
    """
    first_checkpoint, second_checkpoint = _open_both(Path(first_path), Path(second_path))
    # transformers saves one model under two styles of names. Such tensors are still the same tensor.
    other_names = _match_renamed_tensors(first_checkpoint, second_checkpoint)
    second_checkpoint = second_checkpoint.with_new_names(other_names)
    tensor_names = sorted(first_checkpoint.shape_by_name.keys() | second_checkpoint.shape_by_name.keys())

    # Tensors that only one folder has are reported without being read.
    compared_bytes = 0
    for name, shape in first_checkpoint.shape_by_name.items():
        if name in second_checkpoint.shape_by_name:
            compared_bytes += math.prod(shape) * _element_bytes(first_checkpoint.code_by_name[name])

    progress_bar = ProgressBar("verify", compared_bytes)
    compare_tensor = partial(
        _compare_tensor,
        first_checkpoint=first_checkpoint,
        second_checkpoint=second_checkpoint,
        progress_bar=progress_bar,
    )
    try:
        with ThreadPoolExecutor(worker_count or default_worker_count()) as thread_pool:
            # Results are in the order of the names, whichever thread is first.
            tensor_differences = list(thread_pool.map(compare_tensor, tensor_names))
    finally:
        progress_bar.clear_line()

    renamed_example = ""
    if other_names:
        first_name = min(other_names)
        renamed_example = f"{first_name} is {other_names[first_name]} in the second folder"
    return CheckpointComparison(
        len(tensor_names),
        compared_bytes,
        [difference for difference in tensor_differences if difference],
        len(other_names),
        renamed_example,
    )


def _compare_tensor(
    tensor_name: str,
    first_checkpoint: _CheckpointTensors,
    second_checkpoint: _CheckpointTensors,
    progress_bar: ProgressBar,
) -> TensorDifference | None:
    """The difference between two tensors of one name; None if they are equal bit for bit."""
    for checkpoint, ordinal in ((first_checkpoint, "first"), (second_checkpoint, "second")):
        if tensor_name not in checkpoint.shape_by_name:
            return TensorDifference(tensor_name, f"missing in the {ordinal} folder")

    if first_checkpoint.code_by_name[tensor_name] != second_checkpoint.code_by_name[tensor_name]:
        return TensorDifference(
            tensor_name,
            f"type {first_checkpoint.code_by_name[tensor_name]} "
            f"against {second_checkpoint.code_by_name[tensor_name]}",
        )
    if first_checkpoint.shape_by_name[tensor_name] != second_checkpoint.shape_by_name[tensor_name]:
        return TensorDifference(
            tensor_name,
            f"shape {list(first_checkpoint.shape_by_name[tensor_name])} "
            f"against {list(second_checkpoint.shape_by_name[tensor_name])}",
        )
    return _compare_bits(tensor_name, first_checkpoint, second_checkpoint, progress_bar)


def _compare_bits(
    tensor_name: str,
    first_checkpoint: _CheckpointTensors,
    second_checkpoint: _CheckpointTensors,
    progress_bar: ProgressBar,
) -> TensorDifference | None:
    differing_elements = 0
    first_difference = -1
    largest_difference = 0.0
    col_count = matrix_shape(first_checkpoint.shape_by_name[tensor_name])[1]
    for region in row_regions(
        first_checkpoint.shape_by_name[tensor_name],
        _element_bytes(first_checkpoint.code_by_name[tensor_name]),
    ):
        first_values = first_checkpoint.read_region(tensor_name, region).contiguous()
        second_values = second_checkpoint.read_region(tensor_name, region).contiguous()
        integer_dtype = INTEGER_DTYPE_BY_SIZE[first_values.element_size()]
        # As integers, two NaNs with the same bits are equal, and 0.0 and -0.0 are not.
        differs_mask = (first_values.view(integer_dtype) != second_values.view(integer_dtype)).flatten()
        if differs_mask.any():
            differing_elements += int(differs_mask.sum())
            if first_difference < 0:
                first_difference = region.row * col_count + int(differs_mask.nonzero()[0])
            largest_difference = max(
                largest_difference,
                float((first_values.double() - second_values.double()).abs().nan_to_num(float("inf")).max()),
            )
        progress_bar.add_bytes(first_values.nbytes)

    if not differing_elements:
        return None
    return TensorDifference(
        tensor_name,
        f"{differing_elements} of {math.prod(first_checkpoint.shape_by_name[tensor_name])} "
        f"elements differ, the first at {first_difference}, by at most {largest_difference:.3g}",
    )


def verify_checkpoint_hashes(checkpoint_path: str | Path, *, worker_count: int = 0) -> CheckpointComparison:
    """Compares every stored tensor of Megatron weights with its SHA-256 in the manifest."""
    weight_reader = WeightReader(checkpoint_path, should_verify=False)
    reader_by_file = {file: weight_reader.open_file(file) for file in weight_reader.manifest["files"]}
    stored_tensors = []
    total_bytes = 0
    for file_name, tensor_reader in reader_by_file.items():
        for name, digest in weight_reader.manifest["files"][file_name]["tensors"].items():
            stored_tensors.append((file_name, name, digest))
            total_bytes += math.prod(tensor_reader.shape(name)) * tensor_reader.dtype(name).itemsize

    progress_bar = ProgressBar("verify", total_bytes)

    def check(stored_tensor: tuple[str, str, str]) -> TensorDifference | None:
        file, name, expected_digest = stored_tensor
        if reader_by_file[file].sha256(name, progress_bar.add_bytes) == expected_digest:
            return None
        return TensorDifference(name, f"differs in {file} from the manifest")

    try:
        with ThreadPoolExecutor(worker_count or default_worker_count()) as thread_pool:
            tensor_differences = list(thread_pool.map(check, stored_tensors))
    finally:
        progress_bar.clear_line()
    return CheckpointComparison(
        len(stored_tensors), total_bytes, [difference for difference in tensor_differences if difference]
    )
