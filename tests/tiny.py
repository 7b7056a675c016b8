"""Small checkpoints for the tests, written once per session for each set of options."""

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_vl.spec.families.rope import with_rope_scaling
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


def with_released_template(folder: Path, model: str = "Qwen3.5-9B") -> Path:
    """Gives a tiny checkpoint, which is not shared, the chat template of a released model."""
    (folder / "chat_template.json").unlink()
    template = Path(__file__).parent / "hf_configs" / f"{model}.chat_template.jinja"
    shutil.copy(template, folder / "chat_template.jinja")
    return folder


def with_yarn(hf: Path, copied: Path, yarn: dict[str, Any]) -> Path:
    """A copy of a folder whose config has YaRN, which transformers then reads too."""
    if not copied.exists():
        shutil.copytree(hf, copied)
        config = json.loads((hf / "config.json").read_text())
        (copied / "config.json").write_text(json.dumps(with_rope_scaling(config, yarn)))
    return copied


def replace_tensor(folder: Path, name: str, change: Callable[[Tensor], Tensor]) -> Path:
    """Changes one tensor of a folder's safetensors files."""
    file = next(file for file in folder.glob("*.safetensors") if name in load_file(file))
    tensors = load_file(file)
    save_file(tensors | {name: change(tensors[name])}, file, metadata={"format": "pt"})
    return folder
