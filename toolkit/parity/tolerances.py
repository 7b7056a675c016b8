"""The largest errors that a layout may have against ``transformers``."""

LOSS_TOLERANCE = 1e-5
"""Relative, fp32."""
GRADIENT_TOLERANCE = 1e-4
"""Relative L2 per parameter, fp32."""
ACTIVATION_TOLERANCE = 1e-5
"""Relative L2 of a layer's output, fp32. In small models, rounding alone reaches 1e-6."""
BF16_LOSS_TOLERANCE = 1e-2
"""Relative, compared with transformers in bf16 on the same samples."""
BF16_RATIO = 1.5
"""Our bf16 error against the fp32 reference, of gradients and of each layer's output, is at most this many
times that of transformers."""
BF16_ROUNDING = 2.0**-8
"""Half a unit in the last place of bf16: the largest relative change that one rounding causes."""
PIXEL_TOLERANCE = 1e-5
"""Absolute, of a normalised pixel. Tokens and grids must be equal."""
