"""Relative errors of tensors, also of those that the ranks hold in parts."""

import math
from collections.abc import Hashable

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor


def relative_error(actual_tensor: Tensor, expected_tensor: Tensor) -> float:
    """The relative L2 error; absolute if zeros are expected, and infinite if it is not finite."""
    sums = ErrorSums[str]()
    sums.add("", actual_tensor, expected_tensor)
    return sums.error("", actual_tensor.numel())


class ErrorSums[Key: Hashable]:
    """The errors of tensors by key. Each rank adds those of its own parts."""

    def __init__(self) -> None:
        # Squared norms of the difference and of what is expected, and number of elements.
        self.sums: dict[Key, NDArray[np.float64]] = {}

    def add(self, key: Key, actual_part: Tensor, expected_part: Tensor, numel: int | None = None) -> None:
        """Adds a part, which stands for ``numel`` elements; None: for its own."""
        expected_part = expected_part.double()
        difference = actual_part.double() - expected_part
        squares = float(difference.square().sum()), float(expected_part.square().sum())
        part = np.array([*squares, actual_part.numel() if numel is None else numel])
        self.sums[key] = self.sums.get(key, 0.0) + part

    def gather(self) -> None:
        """Adds the parts of all other ranks. Collective."""
        sums_by_rank: list[dict[Key, NDArray[np.float64]]] = [{}] * dist.get_world_size()
        dist.all_gather_object(sums_by_rank, self.sums)
        self.sums = {}
        for key, part in (item for sums in sums_by_rank for item in sums.items()):
            self.sums[key] = self.sums.get(key, 0.0) + part

    def error(self, key: Key, numel: int) -> float:
        """The :func:`relative_error` of a tensor of ``numel`` elements; infinite if parts are missing."""
        difference, scale, found_numel = self.sums.get(key, np.zeros(3)).tolist()
        is_whole = found_numel == numel and math.isfinite(difference)
        return math.sqrt(difference / (scale or 1.0)) if is_whole else math.inf
