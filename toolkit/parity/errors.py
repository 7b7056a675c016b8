"""Relative errors of tensors that the ranks hold in parts."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch.distributed as dist
from torch import Tensor


def squared_norms(actual_tensor: Tensor, expected_tensor: Tensor) -> tuple[float, float]:
    """Returns the squared L2 norms of the difference and of ``expected_tensor``, computed in float64."""
    expected_tensor = expected_tensor.double()
    difference = actual_tensor.double() - expected_tensor
    return float(difference.square().sum()), float(expected_tensor.square().sum())


def relative_error(squared_difference: float, squared_scale: float) -> float:
    """The relative L2 error; absolute if zeros are expected, and infinite if it is not finite."""
    if not math.isfinite(squared_difference):
        return math.inf
    return math.sqrt(squared_difference / (squared_scale or 1.0))


class ErrorSums[Key: Hashable]:
    """The errors of tensors by key. Each rank adds those of its own parts."""

    def __init__(self) -> None:
        self.sums: dict[Key, tuple[float, float, int]] = {}
        """Squared norms of the difference and of what is expected, and number of elements."""

    def add(self, key: Key, squares: tuple[float, float], numel: int) -> None:
        """Adds the :func:`squared_norms` of a part of ``numel`` elements."""
        difference, scale, count = self.sums.get(key, (0.0, 0.0, 0))
        self.sums[key] = (difference + squares[0], scale + squares[1], count + numel)

    def gather(self) -> None:
        """Adds the sums of all other ranks. Collective."""
        sums_by_rank: list[dict[Key, tuple[float, float, int]]] = [{}] * dist.get_world_size()
        dist.all_gather_object(sums_by_rank, self.sums)
        self.sums = {}
        for rank_sums in sums_by_rank:
            for key, (difference, scale, count) in rank_sums.items():
                self.add(key, (difference, scale), count)

    def error(self, key: Key, numel: int) -> float:
        """The relative error of a tensor of ``numel`` elements; infinite if parts are missing."""
        difference, scale, count = self.sums.get(key, (0.0, 0.0, 0))
        return relative_error(difference, scale) if count == numel else math.inf
