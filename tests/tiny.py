"""Small checkpoints for the tests, written once per session for each set of options."""

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from toolkit.common.tiny_checkpoint import write_tiny_checkpoint

SHORT_TOWER: dict[str, Any] = dict(vision_layers=2, full_attention_layers=(1,), deepstack_layers=(0, 1))
TWO_LAYERS = SHORT_TOWER | {"layers": 2, "full_attention_layers_of": 2}
"""Sizes of a model whose tower (or also decoder) has one layer of each kind, or two of its only one."""


@cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="megatron_vl_tiny_"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@cache
def tiny_checkpoint(family: str = "qwen2_5_vl", **options: Any) -> Path:
    """The shared, read-only folder of a tiny checkpoint; options as in :func:`write_tiny_checkpoint`."""
    return write_tiny_checkpoint(
        _root() / f"{family}_{tiny_checkpoint.cache_info().currsize}", family, **options
    )


def replace_tensor(folder: Path, name: str, change: Callable[[Tensor], Tensor]) -> Path:
    """Changes one tensor of a folder's safetensors files."""
    file = next(file for file in folder.glob("*.safetensors") if name in load_file(file))
    tensors = load_file(file)
    save_file(tensors | {name: change(tensors[name])}, file, metadata={"format": "pt"})
    return folder
