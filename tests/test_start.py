"""A rank on CPU starts without a compiler, and ``torch.compile`` is unchanged for the user afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

CODE = """
import sys
import torch
compile_ = torch.compile
import megatron_vl.training.loop
from megatron.core.jit import jit_fuser
from megatron.core.fusions.fused_bias_gelu import bias_gelu
assert torch.compile is compile_
assert "torch._inductor" not in sys.modules
assert jit_fuser(len) is len and not hasattr(bias_gelu, "_torchdynamo_orig_callable")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU core's functions are compiled")
def test_core_is_imported_without_inductor() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
