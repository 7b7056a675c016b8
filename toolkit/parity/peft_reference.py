"""The reference for adapters: ``peft`` on ``transformers``, with random factors of every matrix.

Gradients of factors have the names and shapes of the factors, so they become canonical as a PEFT folder does.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from converters.adapters import MergedWeights, PeftAdapters, read_factor
from converters.hf_checkpoint import HfCheckpoint, long_tensor_name
from converters.peft_folder import ADAPTER_CONFIG_FILE, ADAPTER_FILE, adapter_targets, rules_by_name
from megatron_vl.errors import UserError
from megatron_vl.spec.families import ModelSpec
from megatron_vl.weights.tensor_files import MatrixRegion, matrix_shape
from toolkit.hf_loading import SAFE_LOADING_ARGUMENTS, load_hf_model

RANDOM_B_SCALE = 0.1
"""Size of what adapters add, relative to what their matrices compute. New adapters would add nothing."""


def import_peft() -> Any:
    """Imports ``peft``, which only this comparison needs.

    Raises:
        UserError: it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise UserError(f"--lora compares with peft ({error}): pip install peft") from error
    return peft


def add_random_adapter(model: torch.nn.Module, spec: ModelSpec, rank: int, adapter_dir: Path) -> Any:
    """Adds the adapter of ``adapter_dir`` to a model. If there is none yet, a random one is written there.

    Returns:
        The ``PeftModel``, in which only the factors have gradients.
    """
    peft = import_peft()
    if not adapter_dir.exists():
        lora_config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, **adapter_targets(spec))
        peft_model = peft.get_peft_model(model, lora_config)
        generator = torch.Generator().manual_seed(0)
        b_scale = RANDOM_B_SCALE / rank**0.5
        for name, parameter in peft_model.named_parameters():
            if ".lora_B." in name:
                random_values = torch.randn(parameter.shape, generator=generator)
                random_values *= b_scale
                parameter.data.copy_(random_values)
        peft_model.save_pretrained(adapter_dir)
        return peft_model
    return peft.PeftModel.from_pretrained(model, adapter_dir, is_trainable=True, **SAFE_LOADING_ARGUMENTS)


def adapter_gradients(peft_model: Any, spec: ModelSpec, adapter_dir: Path) -> dict[str, Tensor]:
    """The gradients of all factors, in fp32 by canonical name."""
    gradient_by_name: dict[str, Tensor] = {}
    for name, parameter in peft_model.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            gradient_by_name[name] = gradient.float().cpu().contiguous()

    gradient_dir = adapter_dir.with_name(f"{adapter_dir.name}-gradients")
    gradient_dir.mkdir(exist_ok=True)
    shutil.copy(adapter_dir / ADAPTER_CONFIG_FILE, gradient_dir)
    peft = import_peft()
    stored_gradients = peft.get_peft_model_state_dict(peft_model, state_dict=gradient_by_name)
    save_file(stored_gradients, gradient_dir / ADAPTER_FILE)

    gradient_source = PeftAdapters(gradient_dir, spec)
    canonical_gradients: dict[str, Tensor] = {}
    for name, tensor_info in gradient_source.tensor_infos.items():
        canonical_gradients[name] = read_factor(gradient_source, tensor_info).clone()
    return canonical_gradients


def merge_error(hf_dir: Path, adapter_dir: Path) -> float:
    """The largest difference between our merged weights and those of peft, both in float32.

    It is relative to the largest weight of each matrix.
    """
    hf_checkpoint = HfCheckpoint(hf_dir)
    merged_weights = MergedWeights(hf_checkpoint, PeftAdapters(adapter_dir, hf_checkpoint.spec))
    base_model = load_hf_model(hf_dir, torch.float32)
    peft_class = import_peft().PeftModel
    peft_model = peft_class.from_pretrained(base_model, adapter_dir, **SAFE_LOADING_ARGUMENTS)
    expected_weights = peft_model.merge_and_unload().state_dict()
    conversion_rules = rules_by_name(hf_checkpoint.spec)

    largest_error = 0.0
    for tensor_name in merged_weights.adapters:
        for block in conversion_rules[tensor_name].blocks:
            expected = expected_weights[long_tensor_name(str(block.part_id))]
            expected_matrix = expected.reshape(matrix_shape(expected.shape))
            # All blocks span the columns of their matrices, apart from padding.
            expected_region = expected_matrix.narrow(0, block.part_row, block.rows)
            block_region = MatrixRegion(block.row, block.row + block.rows, 0, block.cols)
            merged_region = merged_weights.read_region(tensor_name, block_region)

            region_error = (merged_region - expected_region).abs().max() / expected_region.abs().max()
            largest_error = max(largest_error, float(region_error))
    return largest_error


def are_equal_adapters(first_dir: Path, second_dir: Path) -> bool:
    """Whether two PEFT folders have the same tensors, bit for bit."""
    first_tensors = load_file(first_dir / ADAPTER_FILE)
    second_tensors = load_file(second_dir / ADAPTER_FILE)
    if first_tensors.keys() != second_tensors.keys():
        return False

    for tensor_key, first_tensor in first_tensors.items():
        if not torch.equal(first_tensor, second_tensors[tensor_key]):
            return False
    return True
