"""Runs the Hugging Face model, with or without adapters of ``peft``.

Gradients are returned in canonical form. The converters only permute weights and pad them with zeros, so
they convert gradients as well. The padded rows and columns of the reference are zero, so those of the trained
model must be zero too.
"""

import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from converters.convert import convert_adapter, convert_weights
from converters.peft_folder import ADAPTER_CONFIG_FILE, ADAPTER_FILE, released_matrices, target_settings
from megatron_vl.data.packing.assemble_row import MediaItem, TokenizedSample
from megatron_vl.data.sample.pixel_settings import PixelNorm
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.positions import mrope_positions
from megatron_vl.system.errors import UserError
from megatron_vl.system.json_files import write_json
from toolkit.common.hf_loading import SAFE_LOADING_ARGUMENTS, load_hf_model


def load_hf_for_training(hf_dir: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """Loads the Hugging Face model with SDPA attention, in training mode (Qwen-VL has no dropout)."""
    return load_hf_model(hf_dir, dtype).to(device).train()


def hf_inputs(
    samples: Sequence[TokenizedSample], spec: ModelSpec, pixel_norm: PixelNorm, device: str = "cpu"
) -> dict[str, Any]:
    """Returns the Hugging Face model's keyword arguments for a batch, padded on the right.

    ``mm_token_type_ids`` is required: without it, transformers 5.17 silently uses plain positions. Samples
    with videos also need explicit positions, because transformers 5.3 to 5.24 lets text continue within a
    video, unlike the released models.
    """
    token_ids = [sample.token_ids for sample in samples]
    all_media = [item for sample in samples for item in sample.media_items]
    input_ids = _pad_on_right(token_ids)
    token_type_ids = (input_ids == spec.image_token_id).int() + 2 * (input_ids == spec.video_token_id).int()
    model_inputs: dict[str, Any] = {
        "input_ids": input_ids,
        "attention_mask": _pad_on_right(map(torch.ones_like, token_ids)),
        "mm_token_type_ids": token_type_ids,
    }

    for media_kind, pixels_key, grid_key in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        media_items = [item for item in all_media if item.grid_thw.kind == media_kind]
        kind_grids = [item.grid_thw for item in media_items]
        if media_items:
            model_inputs[pixels_key] = torch.cat([hf_pixels(item, spec, pixel_norm) for item in media_items])
            model_inputs[grid_key] = torch.tensor([[grid.t, grid.h, grid.w] for grid in kind_grids])
            if media_kind == "video" and spec.vision.tokens_per_second:
                grid_seconds = [grid.second_per_grid for grid in kind_grids]
                model_inputs["second_per_grid_ts"] = torch.tensor(grid_seconds)

    if any(item.grid_thw.kind == "video" for item in all_media):  # int64 [3, sample, longest length]
        positions = [
            mrope_positions(sample.token_ids, [item.grid_thw for item in sample.media_items], spec).T
            for sample in samples
        ]
        model_inputs["position_ids"] = _pad_on_right(positions).permute(2, 0, 1)
    return {name: value.to(device) for name, value in model_inputs.items()}


def _pad_on_right(sequences: Iterable[Tensor]) -> Tensor:
    """One tensor [sequence, longest length, ...], with zeros after the shorter sequences."""
    return torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)


def hf_pixels(media_item: MediaItem, spec: ModelSpec, pixel_norm: PixelNorm) -> Tensor:
    """Returns ``pixel_values`` of one medium, as the Hugging Face processor does.

    Shape [patches, channels * time * patch * patch].
    """
    vision, planes, grid_t = spec.vision, media_item.planes, media_item.grid_thw.t
    missing = grid_t * vision.temporal_patch_size - len(planes)
    if missing > 0:  # the last frame is repeated
        planes = torch.cat([planes, planes[-1:].expand(missing, -1, -1)])
    # [grid_t, temporal_patch_size, grid_h * grid_w, channels, patch_size ** 2]
    shape = (grid_t, vision.temporal_patch_size, -1, vision.in_channels, vision.patch_size**2)
    pixels = pixel_norm.normalize_planes(planes).view(shape)
    return pixels.permute(0, 2, 3, 1, 4).reshape(-1, vision.patch_dim)


def backward_mean_loss(
    model: torch.nn.Module,
    samples: list[TokenizedSample],
    spec: ModelSpec,
    pixel_norm: PixelNorm,
    batch_size: int = 1,
) -> float:
    """Computes gradients of the mean loss over all loss tokens, batch by batch. Returns the loss.

    Args:
        batch_size: number of samples in a batch, which is padded.
    """
    device = str(next(model.parameters()).device)
    model.zero_grad(set_to_none=True)
    loss_token_count = sum(int(sample.loss_mask[1:].sum()) for sample in samples)
    total_loss = 0.0

    for first_sample in range(0, len(samples), batch_size):
        batch = samples[first_sample : first_sample + batch_size]
        model_inputs = hf_inputs(batch, spec, pixel_norm, device)
        logits = model(**model_inputs, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        labels = model_inputs["input_ids"][:, 1:].flatten()
        loss_mask = _pad_on_right([sample.loss_mask for sample in batch])[:, 1:].flatten()
        batch_loss = (F.cross_entropy(logits, labels, reduction="none") * loss_mask.to(device)).sum()
        (batch_loss / loss_token_count).backward()
        total_loss += float(batch_loss.detach())

    return total_loss / loss_token_count


def gradients_by_name(model: torch.nn.Module) -> dict[str, Tensor]:
    """The gradient of each parameter that has one to compute; zeros where no sample reached it."""
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }


def write_canonical(hf_tensors: dict[str, Tensor], hf_dir: str | Path, weights_dir: Path) -> None:
    """Converts tensors of the Hugging Face model (weights, gradients, moments) to Megatron weights in fp32.

    Args:
        hf_tensors: one tensor for each parameter, by its name in ``transformers``.
    """
    # The converter itself does it: the tensors are written as if they were a checkpoint's weights.
    stored = {name: tensor.detach().float().cpu().contiguous() for name, tensor in hf_tensors.items()}
    if read_spec(hf_dir).language.tied_embeddings:
        stored.pop("lm_head.weight", None)
    with tempfile.TemporaryDirectory(prefix="parity-tensors-") as folder:
        write_json(Path(folder) / "config.json", read_spec(hf_dir).hf_config)  # says nothing of FP8
        save_file(stored, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        convert_weights(folder, weights_dir)


# --- Adapters -----------------------------------------------------------------------------------------------


def add_random_adapter(model: torch.nn.Module, spec: ModelSpec, rank: int, adapter_dir: Path) -> Any:
    """Adds the adapter of ``adapter_dir`` to a model. If there is none yet, a random one is written there.

    Returns the ``PeftModel``, in which only what is trained has gradients. Raises UserError without ``peft``.
    """
    try:
        import peft
    except ImportError as error:
        raise UserError(f"--lora compares with peft ({error}): pip install peft") from error
    if not adapter_dir.exists():
        targets = target_settings(released_matrices(spec), spec)
        peft_model = peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, **targets))
        # They add a tenth of what their matrices compute; new ones would add nothing.
        generator, b_scale = torch.Generator().manual_seed(0), 0.1 / rank**0.5
        for name, parameter in peft_model.named_parameters():
            if ".lora_B." in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * b_scale)
        peft_model.save_pretrained(adapter_dir)
        return peft_model
    return peft.PeftModel.from_pretrained(model, adapter_dir, is_trainable=True, **SAFE_LOADING_ARGUMENTS)


def write_adapter_gradients(
    peft_model: Any, adapter_dir: Path, hf_dir: str | Path, weights_dir: Path
) -> None:
    """Converts the gradients of all factors, in fp32, as if they were the adapters of a PEFT folder."""
    from peft import get_peft_model_state_dict

    gradients = {n: tensor.float().cpu().contiguous() for n, tensor in gradients_by_name(peft_model).items()}
    with tempfile.TemporaryDirectory(prefix="parity-gradients-") as folder:
        shutil.copy(adapter_dir / ADAPTER_CONFIG_FILE, folder)
        save_file(get_peft_model_state_dict(peft_model, state_dict=gradients), Path(folder) / ADAPTER_FILE)
        convert_adapter(folder, hf_dir, weights_dir)
