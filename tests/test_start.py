"""A rank starts without a compiler, wandb, TensorBoard and scikit-learn, which stay as they were."""

import errno
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from megatron_vl.core_fixes.faster_imports import _compile_at_first_call, _keeping_kernels
from tests.support.tiny_run import environment
from toolkit.common.launch import single_rank_variables

pytestmark = pytest.mark.slow

CODE = """
import importlib, json, sys
import torch
import importlib.metadata
from importlib.metadata import packages_distributions
compile_ = torch.compile
import megatron_vl.training.trainer
from megatron.core.jit import jit_fuser
from megatron.core.fusions.fused_bias_gelu import bias_gelu
facts = {
    "torch.compile is as before": torch.compile is compile_,
    "inductor": "torch._inductor" in sys.modules,
    "core compiles": jit_fuser(len) is not len or hasattr(bias_gelu, "_torchdynamo_orig_callable"),
    "sinks": "wandb" in sys.modules or "torch.utils.tensorboard" in sys.modules,
}

from transformers import AutoTokenizer, utils
from transformers.generation import candidate_generator
facts["scikit-learn"] = "sklearn" in sys.modules
facts["transformers knows that it is there"] = utils.is_sklearn_available()
importlib.reload(candidate_generator)
facts["transformers imports it by itself"] = "sklearn" in sys.modules
from transformers.utils.import_utils import PACKAGE_DISTRIBUTION_MAPPING as found
facts["listed"] = bool(found) or importlib.metadata.packages_distributions is not packages_distributions
from transformers.utils.import_utils import create_import_structure_from_path as read
models = importlib.import_module("transformers.models")
facts["read twice"] = read(models.__path__[0]) is not read(models.__file__)
packages = packages_distributions()
facts["packages"] = [n for n in ("torch", "PIL", "flash_attn") if found.get(n, []) != packages.get(n, [])]
import torch.utils.tensorboard
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts() -> dict[str, bool]:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_core_is_imported_without_inductor_sinks_and_a_list_of_all_packages(facts: dict[str, bool]) -> None:
    assert not facts["sinks"] and not facts["listed"] and not facts["packages"] and not facts["read twice"]
    assert facts["torch.compile is as before"]
    if not torch.cuda.is_available():  # with a GPU, core's functions are compiled
        assert not facts["inductor"] and not facts["core compiles"]


def test_core_compiles_at_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU; a function that another compiled one calls is compiled with it."""
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(str(graph.graph))
        return graph.forward

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        double = _compile_at_first_call(backend=backend)(lambda x: x * 2)
        call = _compile_at_first_call(lambda x: double(x) + 1, backend=backend)
    assert not compiled
    assert call(torch.ones(2)).tolist() == call(torch.ones(2)).tolist() == [3, 3]
    assert len(compiled) == 1 and "mul" in compiled[0] and "add" in compiled[0]


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")
def test_transformers_is_imported_without_scikit_learn(facts: dict[str, bool]) -> None:
    assert not facts["scikit-learn"] and facts["transformers knows that it is there"]
    assert facts["transformers imports it by itself"], "the fix is no longer needed"


TRANSFORMER_ENGINE = """
import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch

__version__ = "2.20.2"
__path__ = []

class Refusing(torch.autograd.Function):
    def __init__(self, *args, **kwargs):
        raise RuntimeError("Transformer Engine was called without a GPU")

class Submodules:
    def find_spec(self, name, path, target=None):
        if name.startswith("transformer_engine."):
            return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__file__ = __file__
        module.__getattr__ = lambda name: type(name, (Refusing,), {})
        # These work on a CPU too.
        module.get_cpu_offload_context = lambda *args, **kwargs: (nullcontext(), None)
        module.SplitAlongDim = SimpleNamespace(apply=lambda tensor, dim, sizes: tensor.split(sizes, dim))
        module._SplitAlongDim = module.SplitAlongDim
        return module

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Submodules())
import transformer_engine.common.recipe, transformer_engine.pytorch.module.base
"""


def test_run_on_cpu_calls_no_kernel_of_transformer_engine(tmp_path: Path, tiny_checkpoint) -> None:
    """Of an installed one, whose kernels and modules need a GPU."""
    (tmp_path / "transformer_engine.py").write_text(TRANSFORMER_ENGINE)
    variables = environment() | single_rank_variables()
    variables["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    words = f"-m megatron_vl.train --model.hf {tiny_checkpoint('qwen3_vl_moe')} --model.checkpoint random"
    words += " --data.path synthetic:images --data.seq_len 256 --global_batch_size 1 --steps 1 --platform cpu"
    words += " --dtype float32 --optimizer.clip_grad 1e-3 --optimizer.warmup_steps 0"
    run_command = [sys.executable, *words.split()]
    done = subprocess.run(run_command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(("mode", "can_lock"), [(0o700, True), (0o777, True), (0o700, False)])
def test_attention_kernels_are_kept_in_a_private_folder_with_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, can_lock: bool
) -> None:
    variable = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
    for each in (variable, "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"):
        monkeypatch.setenv(each, "")  # so that it is restored
        monkeypatch.delenv(each)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if not can_lock:
        monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOSYS, "no locks here")))
    folder = tmp_path / f"megatron-vl-kernels-{os.getuid()}"
    folder.mkdir()
    folder.chmod(mode)
    with _keeping_kernels():
        assert (os.environ.get(variable) == "1") == (mode == 0o700 and can_lock)
