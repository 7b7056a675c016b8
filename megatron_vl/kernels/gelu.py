"""GELU in its tanh form, and quick-GELU, for the MLPs of towers.

Both are x * sigmoid(a x + b x^3). On a GPU, each direction is one Triton kernel (:mod:`.gelu_triton`), which
is limited by memory; torch's kernel for the tanh form is limited by arithmetic. Elsewhere, torch code runs.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

TANH_COEFFICIENTS = (math.sqrt(8 / math.pi), 0.044715 * math.sqrt(8 / math.pi))
"""a and b of the tanh form: (1 + tanh(z)) / 2 is sigmoid(2 z)."""
QUICK_COEFFICIENTS = (1.702, 0.0)


def gelu_tanh(x: Tensor) -> Tensor:
    """``torch.nn.functional.gelu`` with ``approximate="tanh"``, of any shape."""
    if not x.is_cuda:
        return F.gelu(x, approximate="tanh")
    from megatron_vl.kernels.gelu_triton import sigmoid_gelu

    return sigmoid_gelu(x, *TANH_COEFFICIENTS)


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), of any shape; ``QuickGELUActivation`` of transformers."""
    if not x.is_cuda:
        return x * torch.sigmoid(1.702 * x)
    from megatron_vl.kernels.gelu_triton import sigmoid_gelu

    return sigmoid_gelu(x, *QUICK_COEFFICIENTS)
