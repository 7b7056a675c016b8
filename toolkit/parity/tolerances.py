"""The largest errors that a layout may have against ``transformers``."""

LOSS_TOLERANCE = 1e-5
"""Relative, fp32."""
GRADIENT_TOLERANCE = 1e-4
"""Relative L2 per parameter, fp32."""
ACTIVATION_TOLERANCE = 1e-5
"""Relative L2 of a layer's output, fp32. In small models, rounding alone reaches 1e-6."""
BF16_LOSS_TOLERANCE = 1e-2
"""Relative, compared with transformers in bf16 on the same samples."""
BF16_GRADIENT_RATIO = 1.5
"""Our bf16 gradient error against the fp32 reference is at most this many times that of transformers."""
BF16_ACTIVATION_RATIO = 1.5
"""The same for each layer's output."""
BF16_ROUNDING = 2.0**-8
"""Half a unit in the last place of bf16: the largest relative change that one rounding causes."""
NORM_TOLERANCE = 1e-4
"""Relative, of a step's gradient norm in a training in fp32."""
STATE_TOLERANCE = 2.5e-4
"""Relative L2 of a tensor's weights or moments after some steps. Adam turns rounding errors of tiny gradients
into whole steps of tiny weights: ``transformers`` in fp32 departs by up to 1.2e-4 from the same training in
fp64 (small Qwen3-VL; 4e-5 for Qwen2.5-VL)."""
PIXEL_TOLERANCE = 1e-5
"""Absolute, of a normalised pixel. Tokens and grids must be equal."""
