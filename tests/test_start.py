"""A rank starts without what it does not use: on CPU without a compiler, anywhere without scikit-learn.
Both are unchanged for the user afterwards."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.slow

CODE = """
import importlib, json, sys
import torch
compile_ = torch.compile
import megatron_vl.training.loop
from megatron.core.jit import jit_fuser
from megatron.core.fusions.fused_bias_gelu import bias_gelu
facts = {
    "torch.compile is as before": torch.compile is compile_,
    "inductor": "torch._inductor" in sys.modules,
    "core compiles": jit_fuser(len) is not len or hasattr(bias_gelu, "_torchdynamo_orig_callable"),
}

from transformers import AutoTokenizer, utils
from transformers.generation import candidate_generator
facts["scikit-learn"] = "sklearn" in sys.modules
facts["transformers knows that it is there"] = utils.is_sklearn_available()
importlib.reload(candidate_generator)
facts["transformers imports it by itself"] = "sklearn" in sys.modules
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts() -> dict[str, bool]:
    """Of a process that has imported the training loop."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU core's functions are compiled")
def test_core_is_imported_without_inductor(facts: dict[str, bool]) -> None:
    assert facts["torch.compile is as before"]
    assert not facts["inductor"] and not facts["core compiles"]


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")
def test_transformers_is_imported_without_scikit_learn(facts: dict[str, bool]) -> None:
    assert not facts["scikit-learn"] and facts["transformers knows that it is there"]
    assert facts["transformers imports it by itself"], "the fix is no longer needed"
