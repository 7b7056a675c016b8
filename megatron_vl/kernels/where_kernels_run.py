"""Where Triton kernels run; torch code runs elsewhere. This file imports no Triton."""

from __future__ import annotations

import os

from torch import Tensor


def runs_on_kernels(tensor: Tensor) -> bool:
    """Whether Triton kernels can take ``tensor``: it is on a GPU, or Triton interprets its kernels."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
