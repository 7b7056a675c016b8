"""Adapters made by peft itself, for tiny models."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from converters.peft_folder import released_matrices, target_settings
from megatron_vl.spec.families import read_spec
from toolkit.common.hf_loading import load_hf_model

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
MOE_FAMILIES = ("qwen3_vl_moe", "qwen3_5_moe")

SAVED: dict[str, Any] = {
    "target_modules": r".*(language_model\.layers|visual\.blocks)\..*(q_proj|o_proj|attn\.proj)",
    "modules_to_save": ["visual.merger", "patch_embed", "lm_head", "embed_tokens", "layernorm", "model.norm"],
}
"""Modules of PEFT that are trained whole."""


def all_targets(hf: Path) -> dict[str, Any]:
    return target_settings(released_matrices(read_spec(hf)), read_spec(hf))


def peft_model(hf: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A model with a random adapter in float32."""
    import peft

    settings = {"r": 4, "lora_alpha": 6, **settings}
    model = peft.get_peft_model(load_hf_model(hf, dtype), peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def peft_folder(folder: Path, hf: Path, **settings: Any) -> Path:
    peft_model(hf, **settings).save_pretrained(folder)
    return folder


def merged_by_peft(hf: Path, folder: Path) -> dict[str, Tensor]:
    """The state dict of the model in float32 after peft has loaded the adapter and merged it."""
    return load_peft(hf, folder).merge_and_unload().state_dict()


def load_peft(hf: Path, folder: Path) -> Any:
    """The model in float32 with the adapter, as peft loads it. A warning about missing keys is an error."""
    import warnings

    import peft

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*adapter keys.*")
        return peft.PeftModel.from_pretrained(load_hf_model(hf, torch.float32), folder).eval()


def logits(model: Any) -> Tensor:
    tokens = torch.arange(40, 72).unsqueeze(0)
    with torch.no_grad():
        return model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
