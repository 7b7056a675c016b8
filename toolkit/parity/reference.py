"""Runs samples one by one through the Hugging Face model.

Gradients are returned in canonical form. The converters only permute weights and pad them with zeros, so
they convert gradients as well. The padded rows and columns of the reference are zero, so those of the trained
model must be zero too.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from converters.convert import convert_weights
from megatron_vl.data.packing.assemble_row import MediaItem, TokenizedSample
from megatron_vl.data.sample.pixels import PixelNorm
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.positions import mrope_positions
from megatron_vl.weights.weight_reader import WeightReader
from toolkit.hf_loading import load_hf_model


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
    token_ids: list[Tensor] = []
    all_media: list[MediaItem] = []
    for sample in samples:
        token_ids.append(sample.token_ids)
        all_media += sample.media_items

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

    if any(item.grid_thw.kind == "video" for item in all_media):
        model_inputs["position_ids"] = _batch_positions(samples, spec)
    return {name: value.to(device) for name, value in model_inputs.items()}


def _batch_positions(samples: Sequence[TokenizedSample], spec: ModelSpec) -> Tensor:
    """The released models' positions, int64 [3, sample, longest length]."""
    sample_positions = []
    for sample in samples:
        media_grids = [item.grid_thw for item in sample.media_items]
        sample_positions.append(mrope_positions(sample.token_ids, media_grids, spec).T)
    return _pad_on_right(sample_positions).permute(2, 0, 1)


def _pad_on_right(sequences: Iterable[Tensor]) -> Tensor:
    """One tensor [sequence, longest length, ...], with zeros after the shorter sequences."""
    return torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)


def hf_pixels(media_item: MediaItem, spec: ModelSpec, pixel_norm: PixelNorm) -> Tensor:
    """Returns ``pixel_values`` of one medium, as the Hugging Face processor does.

    Shape [patches, channels * time * patch * patch].
    """
    vision_spec = spec.vision
    frame_planes = media_item.planes
    frame_count = media_item.grid_thw.t * vision_spec.temporal_patch_size
    missing_count = frame_count - frame_planes.shape[0]
    if missing_count > 0:  # the last frame is repeated
        frame_planes = torch.cat([frame_planes, frame_planes[-1:].expand(missing_count, -1, -1)])

    # [grid_t, temporal_patch_size, grid_h * grid_w, channels, patch_size ** 2]
    pixel_values = pixel_norm.normalize_planes(frame_planes).view(
        media_item.grid_thw.t,
        vision_spec.temporal_patch_size,
        -1,
        vision_spec.in_channels,
        vision_spec.patch_size**2,
    )
    return pixel_values.permute(0, 2, 3, 1, 4).reshape(-1, vision_spec.patch_dim)


def canonical_gradients(model: torch.nn.Module, hf_dir: str | Path) -> dict[str, Tensor]:
    """The gradients of a Hugging Face model, like :func:`to_canonical`; zeros where there is none."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    return to_canonical(gradients, hf_dir)


def backward_mean_loss(
    model: torch.nn.Module,
    samples: list[TokenizedSample],
    spec: ModelSpec,
    pixel_norm: PixelNorm,
    inputs_by_sample: list[dict[str, Tensor]] | None = None,
    batch_size: int = 1,
) -> float:
    """Computes gradients of the mean loss over all loss tokens, batch by batch. Returns the loss.

    Args:
        inputs_by_sample: the model's keyword arguments for each sample, if a processor made them. Batches
            then have one sample.
        batch_size: number of samples in a batch, which is padded.
    """
    device = str(next(model.parameters()).device)
    model.zero_grad(set_to_none=True)
    loss_token_count = sum(int(sample.loss_mask[1:].sum()) for sample in samples)
    total_loss = 0.0

    for first_sample in range(0, len(samples), batch_size):
        batch = samples[first_sample : first_sample + batch_size]
        if inputs_by_sample:
            processor_inputs = inputs_by_sample[first_sample]
            model_inputs = {name: tensor.to(device) for name, tensor in processor_inputs.items()}
        else:
            model_inputs = hf_inputs(batch, spec, pixel_norm, device)

        logits = model(**model_inputs, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        labels = model_inputs["input_ids"][:, 1:].flatten()
        loss_mask = _pad_on_right([sample.loss_mask for sample in batch])[:, 1:].flatten()
        token_losses = F.cross_entropy(logits, labels, reduction="none")
        batch_loss = (token_losses * loss_mask.to(device)).sum()
        (batch_loss / loss_token_count).backward()
        total_loss += float(batch_loss.detach())

    return total_loss / loss_token_count


def to_canonical(hf_tensors: dict[str, Tensor], hf_dir: str | Path) -> dict[str, Tensor]:
    """Converts tensors of the Hugging Face model (weights, gradients, moments) to canonical form.

    Args:
        hf_tensors: one tensor for each parameter, by its name in ``transformers``.

    Returns:
        fp32 host tensors by canonical name.
    """
    # The converter itself does it: the tensors are written as if they were a checkpoint's weights.
    temporary_dir = Path(tempfile.mkdtemp(prefix="parity-gradients-"))
    try:
        hf_input_dir = temporary_dir / "hf"
        hf_input_dir.mkdir()
        shutil.copy(Path(hf_dir) / "config.json", hf_input_dir / "config.json")
        is_tied = read_spec(hf_dir).language.tied_embeddings

        stored_tensors = {}
        for name, tensor in hf_tensors.items():
            if not (is_tied and name == "lm_head.weight"):
                stored_tensors[name] = tensor.detach().float().cpu().contiguous()

        save_file(stored_tensors, hf_input_dir / "model.safetensors", metadata={"format": "pt"})
        convert_weights(hf_input_dir, temporary_dir / "full")
        weight_reader = WeightReader(temporary_dir / "full")
        return {name: weight_reader.read_shard(name).clone() for name in weight_reader.tensor_names()}
    finally:
        shutil.rmtree(temporary_dir)
