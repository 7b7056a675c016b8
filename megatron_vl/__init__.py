"""Megatron-core based 3D-parallel training for Qwen-VL models."""

import logging
import warnings

from megatron_vl.core_fixes import compile_on_cpu

__version__ = "0.1.0"

# Megatron-core prints these warnings on every import, on every rank. None of them matters here: without
# Transformer Engine (on CPU) the fallbacks are intended.
for _message in (
    ".*Apex (are|is) not installed.*",
    ".*full scope is deprecated.*",
    ".*MimoModelConfig is experimental.*",
    ".*attribute of a Tensor that is not a leaf.*",
    # This one concerns experts' layers, which are cut by etp.
    # validate() refuses sequence_parallel without tp.
    ".*`sequence_parallel` is set to `True`, but tensor model parallel size is 1.*",
):
    warnings.filterwarnings("ignore", message=_message)
# Core's imports look for a CUDA toolkit. Without a GPU there is none, and nothing needs to be compiled.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
compile_on_cpu.install()
