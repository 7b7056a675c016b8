"""How far a layout may be from ``transformers``."""

LOSS_TOLERANCE = 1e-5
"""Relative, fp32."""
GRADIENT_TOLERANCE = 1e-4
"""Relative L2 per parameter, fp32."""
ACTIVATION_TOLERANCE = 1e-5
"""Relative L2 of what a layer gives, fp32. Rounding makes 1e-6 of it in small models."""
BF16_LOSS_TOLERANCE = 1e-2
"""Relative, against transformers in bf16 on the same samples."""
BF16_GRADIENT_RATIO = 1.5
"""Our bf16 gradient error against the fp32 reference, at most this many times that of transformers in
bf16."""
BF16_ACTIVATION_RATIO = 1.5
"""The same of what each layer gives."""
BF16_ROUNDING = 2.0**-8
"""Half a unit in the last place of bf16: what one rounding may change."""
