"""What the checks of linear attention share: rates of decays, and relative errors."""

from torch import Tensor

RATES = {"as initialised": (0.01, 16.0), "slow": (0.001, 0.02), "mixed": (0.001, 4.0)}
"""The lowest and the highest rate of the heads' decays."""


def relative(a: Tensor, b: Tensor) -> float:
    """The relative error (L2) of ``a``. A first token's gradient of its decay is exactly 0."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))
