"""Runs experts' SwiGLU without torch.compile (Megatron-core 0.19.2).

The grouped experts call core's jitted SwiGLU. Its backward pass is several times slower than memory bandwidth
allows (see :mod:`megatron_vl.kernels.layers.swiglu`), and it is compiled again when the number of routed
tokens changes. This fix can go when core has its own kernel on this path.
"""

from megatron.core.transformer.moe import experts
from torch import Tensor


def use_fused_swiglu() -> None:
    """Makes core's grouped experts use our kernel. Idempotent."""
    experts.weighted_bias_swiglu_impl = _weighted_swiglu


def _weighted_swiglu(
    x: Tensor, bias: Tensor | None, weights: Tensor, fp8_input_store: bool = False
) -> Tensor:
    """SwiGLU with core's signature: x [T, 2 * F], weights [T, 1] -> [T, F]."""
    from megatron_vl.kernels.layers.swiglu import swiglu

    if bias is not None or fp8_input_store:
        raise NotImplementedError("experts have no bias and keep no fp8 input here")
    return swiglu(x, weights)
