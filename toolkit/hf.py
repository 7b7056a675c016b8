"""Hugging Face folders opened in ``transformers`` so that nothing in them is executed or unpickled.

A checkpoint may come from anybody. What transformers 5.17 would do with one unless it is told otherwise: ask at the
terminal whether to run the code that ``auto_map`` names (``trust_remote_code`` left out), fall back to ``torch.load`` where
there are no safetensors, follow ``adapter_config.json`` to another model, and fetch kernels that ``config.json`` names as
its attention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from converters.hf import TensorFolder
from megatron_vl.models.families import ConfigError, read_spec

SAFE: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
"""For every ``from_pretrained`` in this project."""


def check_folder(folder: str | Path) -> TensorFolder:
    """The weights of a checkpoint folder of a known family, by their safetensors files and index, before anything opens it.

    Raises:
        FileNotFoundError: no config or no safetensors weights.
        ConfigError: an unknown ``model_type``, an impossible field, or one that names other weights.
        WeightsError: index and files do not agree, or a name leaves the folder.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder / 'config.json'} is missing; give a Hugging Face checkpoint folder")
    spec = read_spec(folder)
    if (folder / "adapter_config.json").exists():
        raise ConfigError(f"{folder} holds an adapter (adapter_config.json), which names another model; merge the two")
    if "transformers_weights" in spec.hf_config:
        raise ConfigError(f"{folder / 'config.json'}: field 'transformers_weights' names other weights; remove it")
    return TensorFolder(folder)


def load_processor(folder: str | Path) -> Any:
    """The folder's own tokenizer, image processor and chat template (rendered in transformers' sandbox)."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(folder, **SAFE)


def load_model(folder: str | Path, dtype: torch.dtype, device_map: str | None = None) -> Any:
    """The folder's model in evaluation mode with SDPA attention, from its safetensors only.

    Args:
        device_map: None for this machine's memory; ``auto``: spread over its GPUs (needs accelerate).

    Raises:
        As :func:`check_folder`.
    """
    from transformers import AutoModelForImageTextToText

    check_folder(folder)
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", use_safetensors=True, device_map=device_map, **SAFE
    )
    return model.eval()
