"""Tells models of one shape apart: a digest of a sample of their values, and the base that adapters record.

The digest depends neither on the layout nor on the type in which values are stored, and is the same for a
Hugging Face folder and the Megatron weights that were converted from it.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_vl.spec.lora import trained_table
from megatron_vl.spec.tensors import MTP_PREFIX, TensorInfo
from megatron_vl.weights.canonical_weights import CanonicalWeights
from megatron_vl.weights.tensor_files import MatrixRegion, matrix_shape

DIGEST_SCHEME = "spread1-"
"""Begins every digest. Digests of other schemes read other values and are not compared."""
RANDOM_DIGEST = DIGEST_SCHEME + "random"
"""Stands for the random weights of a run that only measures: its adapters belong to no other weights."""
DIGEST_ROWS = 16
"""Rows of a tensor, spread from the first one to the last: 40 MB of a model of 7 B parameters."""
SMALL_ELEMENTS = 1 << 16
"""A tensor of up to so many elements is read at once, which takes less time than a read for each row."""
EXPERT_TILE = 4
"""Rows and columns that are read of each expert: four pages, also of stacks that are stored transposed."""


class LoraBase(NamedTuple):
    """The weights that adapters were trained on. Both are empty if nothing records them."""

    digest: str
    path: str
    """Where the weights were at that time."""

    def entry(self) -> dict[str, Any]:
        """The entry for ``run.json``, a manifest's origin or ``megatron_vl.json``; empty if not known."""
        return {"base": {"digest": self.digest, "path": self.path}} if self.digest else {}

    def differs_from(self, digest: str) -> bool:
        """Whether these are known to be other weights than those with this digest."""
        return self.digest.startswith(DIGEST_SCHEME) and self.digest != digest

    def difference_text(self, digest: str, given_dir: str | Path) -> str:
        """What is wrong if adapters of this base meet the weights in ``given_dir``; empty if nothing is."""
        if not self.differs_from(digest):
            return ""
        return (
            f"were trained on other weights ({self.path}) than those in {given_dir}, although the shapes are"
            " the same; give the weights that they were trained on"
        )


def recorded_base(facts: Mapping[str, Any] | None) -> LoraBase:
    """The base that :meth:`LoraBase.entry` recorded."""
    base = (facts or {}).get("base")
    if not isinstance(base, dict):
        return LoraBase("", "")
    return LoraBase(str(base.get("digest", "")), str(base.get("path", "")))


def model_digest(source: CanonicalWeights, *, of_mtp: bool = False) -> str:
    """A digest of values from all over every tensor; a model of 400 B parameters takes seconds.

    It does not depend on whether a run trains multi-token prediction, and ``of_mtp`` is that of it alone.
    """
    digest = hashlib.sha256()
    source.expect_scattered_reads(True)
    for tensor_name, tensor_info in trained_table(source.spec, source.lora).items():
        if tensor_name.startswith(MTP_PREFIX) == of_mtp:
            digest.update(f"{tensor_name} {tensor_info.shape}".encode())
            for values in _sampled_values(source, tensor_name, tensor_info):
                digest.update(values.to(torch.float32).contiguous().numpy().data)
    source.expect_scattered_reads(False)
    return DIGEST_SCHEME + digest.hexdigest()


def _sampled_values(source: CanonicalWeights, tensor_name: str, tensor_info: TensorInfo) -> Iterator[Tensor]:
    num_rows, num_cols = matrix_shape(tensor_info.shape)
    if tensor_info.num_experts or num_rows * num_cols > SMALL_ELEMENTS:
        yield from (source.read_region(tensor_name, region) for region in _sampled_regions(tensor_info))
    else:
        whole = source.read_region(tensor_name, MatrixRegion(0, num_rows, 0, num_cols))
        yield whole[[region.row for region in _sampled_regions(tensor_info)]]


def _sampled_regions(tensor_info: TensorInfo) -> Iterator[MatrixRegion]:
    """Whole rows; of a stack of experts a tile of each, which moves from the first corner to the last."""
    num_rows, num_cols = matrix_shape(tensor_info.shape)
    if not tensor_info.num_experts:
        for row in _spread(num_rows, min(num_rows, DIGEST_ROWS)):
            yield MatrixRegion(row, row + 1, 0, num_cols)
        return

    expert_rows = num_rows // tensor_info.num_experts
    tile_rows, tile_cols = min(EXPERT_TILE, expert_rows), min(EXPERT_TILE, num_cols)
    first_rows = _spread(expert_rows - tile_rows + 1, tensor_info.num_experts)
    first_cols = _spread(num_cols - tile_cols + 1, tensor_info.num_experts)
    for expert_index, (row, col) in enumerate(zip(first_rows, first_cols, strict=True)):
        row += expert_index * expert_rows
        yield MatrixRegion(row, row + tile_rows, col, col + tile_cols)


def _spread(size: int, count: int) -> list[int]:
    """``count`` indices from 0 to ``size - 1``, evenly spread, both ends included."""
    return [i * (size - 1) // max(1, count - 1) for i in range(count)]
