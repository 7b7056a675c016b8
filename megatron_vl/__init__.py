"""Megatron-core based 3D-parallel training for Qwen-VL models."""

import logging
import warnings

from megatron_vl.core_fixes import compile_on_cpu

__version__ = "0.1.0"

# Megatron-core says these on every import, on every rank; none of them is a finding here: without Transformer
# Engine (on CPU) the fallbacks are what is wanted.
for _message in (
    ".*Apex (are|is) not installed.*",
    ".*full scope is deprecated.*",
    ".*MimoModelConfig is experimental.*",
    ".*attribute of a Tensor that is not a leaf.*",
    # Of experts' layers, which are cut by etp: parallel.sequence_parallel without parallel.tp is refused
    # before.
    ".*`sequence_parallel` is set to `True`, but tensor model parallel size is 1.*",
):
    warnings.filterwarnings("ignore", message=_message)
# Core's imports look for a CUDA toolkit to compile with; without a GPU there is none, and nothing is
# compiled.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
compile_on_cpu.install()
