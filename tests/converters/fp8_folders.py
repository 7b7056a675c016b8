"""Folders with FP8 weights, as they are released."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.converters import helpers
from tests.tiny import tiny_checkpoint

QUANTISED = re.compile(
    r"layers\.\d+\.(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)"
    r"|mlp\.[a-z_.]*(gate|up|down|gate_up)_proj)"
)
SIZES: dict[str, Any] = {
    **{"ffn_hidden_size": 192, "expert_ffn_hidden_size": 96, "shared_ffn_hidden_size": 32, "head_dim": 32},
    **{"interleaved_section": (8, 4, 4), "linear_key_dim": 16, "linear_value_dim": 16},
}
"""Sizes of which blocks of 16 x 32 leave no rest: transformers reads no others."""


def quantise(
    values: Tensor, block_size: tuple[int, int], scale_dtype: torch.dtype, peak: float = 448
) -> tuple[Tensor, Tensor]:
    """E4M3 values and scales, in plain loops; the largest value of a block becomes ``peak``."""
    (*lead, rows, cols), (height, width) = values.shape, block_size
    scales = torch.zeros(*lead, -(-rows // height), -(-cols // width), dtype=scale_dtype)
    weight = torch.zeros_like(values, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[-2]):
        for j in range(scales.shape[-1]):
            at = (..., slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
            scales[..., i, j] = values[at].float().abs().amax((-2, -1)) / peak
            block = values[at].float() / scales[..., i, j, None, None].float()
            weight[at] = block.clamp(-448, 448).to(torch.float8_e4m3fn)
    return weight, scales


def dequantise(weight: Tensor, scales: Tensor, block_size: tuple[int, int]) -> Tensor:
    rows = scales.float().repeat_interleave(block_size[0], -2)[..., : weight.shape[-2], :]
    return weight.float() * rows.repeat_interleave(block_size[1], -1)[..., : weight.shape[-1]]


def fp8_folder(
    folder: Path,
    family: str,
    block_size: tuple[int, int] = (16, 32),
    *,
    experts_apart: bool = False,
    mtp_prefix: str = "",
) -> Path:
    """A tiny checkpoint with the matrices of its decoder layers in FP8; with a prefix, of MTP's too."""
    shutil.copytree(tiny_checkpoint(family, **SIZES), folder)
    weight_map = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors: dict[str, Tensor] = {}
        for name, tensor in load_file(path).items():
            is_mtp = name.startswith("mtp.")
            name = mtp_prefix + name.removeprefix("mtp.") if is_mtp and mtp_prefix else name
            if not QUANTISED.search(name) or tensor.dim() < 2 or (is_mtp and not mtp_prefix):
                tensors[name] = tensor
                continue
            matrices = (
                helpers.experts_apart({name: tensor}, input_first=family == "qwen3_vl_moe")
                if experts_apart and ".experts." in name and not is_mtp
                else {name: tensor}
            )
            for matrix_name, matrix in matrices.items():
                quantised = quantise(matrix, block_size, torch.bfloat16, peak=400)  # not as exports do
                tensors[matrix_name], tensors[f"{matrix_name}_scale_inv"] = quantised
        save_file({n: t.contiguous() for n, t in tensors.items()}, path, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, path.name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    form = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    config["quantization_config"] = form | {"weight_block_size": block_size, "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
