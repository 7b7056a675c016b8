"""Megatron-core based 3D-parallel training for Qwen-VL models."""

import warnings

__version__ = "0.1.0"

# Megatron-core says these on every import, on every rank; none of them is a finding here: without Transformer Engine
# (on CPU) the fallbacks are what is wanted.
for _message in (".*Apex (are|is) not installed.*", ".*full scope is deprecated.*", ".*MimoModelConfig is experimental.*"):
    warnings.filterwarnings("ignore", message=_message)
