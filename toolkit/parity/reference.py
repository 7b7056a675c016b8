"""Computes the reference: runs samples one by one through the Hugging Face model.

Gradients are returned in canonical form. The converters only permute weights and pad them with zeros, so
they convert gradients as well. The padded rows and columns of the reference are zero, so those of the trained
model must be zero too.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from converters.convert import convert
from megatron_vl.data.packing.assemble import MediaItem, Sample
from megatron_vl.data.sample.pixels import PixelNorm, read_pixel_norm
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.positions import mrope_positions
from megatron_vl.weights.reader import WeightReader
from toolkit.hf import load_model


def load_hf(hf_dir: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.nn.Module:
    """Loads the Hugging Face model with SDPA attention, in training mode (Qwen-VL has no dropout)."""
    return load_model(hf_dir, dtype).to(device).train()


def hf_inputs(sample: Sample, spec: ModelSpec, norm: PixelNorm, device: str = "cpu") -> dict[str, Any]:
    """Returns the Hugging Face model's keyword arguments for one sample.

    ``mm_token_type_ids`` is required: without it, transformers 5.17 silently uses plain positions. Samples
    with videos also need explicit positions, because transformers 5.3 to 5.23 lets text continue within a
    video, unlike the released models.
    """
    ids = sample.token_ids[None]
    types = (ids == spec.image_token_id).int() + 2 * (ids == spec.video_token_id).int()
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": types,
    }

    for kind, pixels, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        items = [item for item in sample.media if item.grid.kind == kind]
        if items:
            inputs[pixels] = torch.cat([hf_pixels(item, spec, norm) for item in items])
            inputs[grid] = torch.tensor([[item.grid.t, item.grid.h, item.grid.w] for item in items])
            if kind == "video" and spec.vision.tokens_per_second:
                inputs["second_per_grid_ts"] = torch.tensor([item.grid.second_per_grid for item in items])

    grids = [item.grid for item in sample.media]
    if any(grid.kind == "video" for grid in grids):
        inputs["position_ids"] = mrope_positions(sample.token_ids, grids, spec)[:, None]
    return {name: value.to(device) for name, value in inputs.items()}


def hf_pixels(item: MediaItem, spec: ModelSpec, norm: PixelNorm) -> Tensor:
    """Returns ``pixel_values`` of one medium, as the Hugging Face processor does.

    Shape [patches, channels * time * patch * patch].
    """
    v = spec.vision
    frames = item.planes
    wanted = item.grid.t * v.temporal_patch_size
    if frames.shape[0] < wanted:  # repeat the last frame
        frames = torch.cat([frames, frames[-1:].expand(wanted - frames.shape[0], -1, -1)])

    # [t, T, hw, C, pp]
    pixels = norm.apply(frames).view(item.grid.t, v.temporal_patch_size, -1, v.in_channels, v.patch_size**2)
    return pixels.permute(0, 2, 3, 1, 4).reshape(-1, v.patch_dim)


def reference(
    hf_dir: str | Path, samples: list[Sample], model: torch.nn.Module
) -> tuple[float, dict[str, Tensor]]:
    """Returns (mean loss over all loss tokens, canonical gradients) of samples run one by one."""
    spec = read_spec(hf_dir)
    norm = read_pixel_norm(hf_dir)
    loss = backward(model, samples, spec, norm)
    grads = {
        name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()
    }
    return loss, canonical(grads, hf_dir)


def backward(
    model: torch.nn.Module,
    samples: list[Sample],
    spec: ModelSpec,
    norm: PixelNorm,
    inputs: list[dict[str, Tensor]] | None = None,
) -> float:
    """Computes gradients of the mean loss over all loss tokens, sample by sample; returns the loss.

    Args:
        inputs: the model's keyword arguments for each sample, if a processor made them.
    """
    device = str(next(model.parameters()).device)
    model.zero_grad(set_to_none=True)
    count = sum(int(s.loss_mask[1:].sum()) for s in samples)
    total = 0.0

    for number, sample in enumerate(samples):
        given = (
            {n: t.to(device) for n, t in inputs[number].items()}
            if inputs
            else hf_inputs(sample, spec, norm, device)
        )
        logits = model(**given, use_cache=False).logits[0, :-1].float()
        losses = F.cross_entropy(logits, sample.token_ids[1:].to(device), reduction="none")
        loss = (losses * sample.loss_mask[1:].to(device)).sum()
        (loss / count).backward()
        total += float(loss)

    return total / count


def fingerprint(samples: list[Sample]) -> str:
    """A digest of tokens, loss mask and media; equal if :func:`backward` gives equal results."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(repr([(item.grid, tuple(item.planes.shape)) for item in sample.media]).encode())
        for tensor in (sample.token_ids, sample.loss_mask, *(item.planes for item in sample.media)):
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


KEPT = 12
"""Number of references to remember; those of small models take a few megabytes each."""
_known: dict[tuple[str, ...], Any] = {}


def remembered(key: tuple[str, ...], compute: Callable[[], Any]) -> Any:
    """Returns the cached result for ``key``, or computes it.

    Many layouts of one model share a batch, and thus a result. The last :data:`KEPT` results used are kept.
    """
    value = _known.pop(key) if key in _known else compute()
    _known[key] = value
    while len(_known) > KEPT:
        _known.pop(next(iter(_known)))
    return value


def canonical(tensors: dict[str, Tensor], hf_dir: str | Path) -> dict[str, Tensor]:
    """Converts tensors of the Hugging Face model (weights, gradients, moments) to canonical form.

    Args:
        tensors: one tensor for each parameter, by its name in ``transformers``.

    Returns:
        fp32 host tensors by canonical name.
    """
    folder = Path(tempfile.mkdtemp(prefix="parity-gradients-"))
    try:
        hf = folder / "hf"
        hf.mkdir()
        shutil.copy(Path(hf_dir) / "config.json", hf / "config.json")
        tied = read_spec(hf_dir).language.tied_embeddings
        stored = {
            name: tensor.detach().float().cpu().contiguous()
            for name, tensor in tensors.items()
            if not (tied and name == "lm_head.weight")
        }

        save_file(stored, hf / "model.safetensors", metadata={"format": "pt"})
        convert(hf, folder / "full")
        reader = WeightReader(folder / "full")
        return {name: reader.get(name).clone() for name in reader.names()}
    finally:
        shutil.rmtree(folder)
