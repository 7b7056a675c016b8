"""The packed vision tower of Qwen2-VL and Qwen2.5-VL as a Megatron-core TransformerBlock.

All images and video frames of a row go through in one call, in window order (the loader has arranged them), tensor
parallel over the group that is handed in. Reference: ``Qwen2VisionTransformerPretrainedModel`` and
``Qwen2_5_VisionTransformerPretrainedModel`` of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_vl.models.families import VisionSpec
from megatron_vl.platform import Platform

from .attention import Segments, packed_row
from .modules import block_spec, linears, norm
from .rotary import vision_angles


@dataclass
class VisionInput:
    """Device side of :class:`megatron_vl.data.row.VisionBatch`, segments ready."""

    planes: Tensor
    plane_index: Tensor
    position_hw: Tensor
    full: Segments
    window: Segments


class PatchEmbed(nn.Module):
    """Conv3d with kernel = stride written as a matrix product (10x faster), from uint8 planes.

    Pixels are normalised here, on the device, with the checkpoint's own mean and standard deviation.
    """

    def __init__(self, vision: VisionSpec, mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.vision = vision
        self.proj = nn.Linear(vision.patch_dim, vision.hidden_size, bias=False, dtype=dtype)
        # The statistics apply to pixels from 0 to 255: HF folds the factor 1/255 into them in the same way.
        self._mean = torch.tensor(mean, dtype=torch.float32) * 255.0
        self._std = torch.tensor(std, dtype=torch.float32) * 255.0

    def forward(self, planes: Tensor, plane_index: Tensor) -> Tensor:
        """planes uint8 [Q, C * p * p], plane_index int [P, T] -> [P, hidden]."""
        v = self.vision
        if self._mean.device != planes.device:
            self._mean, self._std = self._mean.to(planes.device), self._std.to(planes.device)
        pixels = planes.view(-1, v.in_channels, v.patch_size**2).float()
        pixels = ((pixels - self._mean[:, None]) / self._std[:, None]).to(self.proj.weight.dtype)
        patches = pixels[plane_index.long()]  # [P, T, C, p * p]
        return self.proj(patches.transpose(1, 2).reshape(patches.shape[0], -1))


class Merger(nn.Module):
    """Norm, then each merge unit's patches side by side through a two-layer GELU MLP to the language width."""

    def __init__(
        self, platform: Platform, vision: VisionSpec, config: TransformerConfig, tp_group: torch.distributed.ProcessGroup
    ) -> None:
        super().__init__()
        self.width = vision.merge_unit * vision.hidden_size
        column, row = linears(platform)
        shared = {"config": config, "init_method": config.init_method, "bias": True, "is_expert": False, "tp_group": tp_group}
        self.norm = norm(platform, config, vision.hidden_size)
        self.linear_fc1 = column(self.width, self.width, gather_output=False, skip_bias_add=False, **shared)
        self.linear_fc2 = row(self.width, vision.out_hidden_size, input_is_parallel=True, skip_bias_add=False, **shared)

    def forward(self, x: Tensor) -> Tensor:
        """[P, 1, hidden] -> [P / merge_unit, 1, out_hidden]"""
        x = self.norm(x).view(-1, 1, self.width)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)[0]))[0]


class VisionTower(nn.Module):
    """Patches of a whole row in, merged features out.

    Args:
        pixel_mean, pixel_std: per channel, for pixels scaled to 0..1.
        pg: process groups of the tower; only ``tp`` and ``cp`` matter.
        frozen: the blocks and the patch embedding take no gradient; the merger may.
    """

    def __init__(
        self,
        platform: Platform,
        vision: VisionSpec,
        config: TransformerConfig,
        pg: ProcessGroupCollection,
        *,
        pixel_mean: tuple[float, ...],
        pixel_std: tuple[float, ...],
        attention_backend: str,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.vision, self.frozen = vision, frozen
        self.patch_embed = PatchEmbed(vision, pixel_mean, pixel_std, config.params_dtype)
        nn.init.normal_(self.patch_embed.proj.weight, std=config.init_method_std)
        spec = block_spec(
            platform,
            config,
            vision.num_layers,
            attention_backend=attention_backend,
            causal=False,
            windowed=lambda layer: not vision.is_full_attention(layer),
        )
        self.decoder = TransformerBlock(config, spec, post_layer_norm=False, pg_collection=pg)
        self.merger = Merger(platform, vision, config, pg.tp)

    def forward(self, batch: VisionInput) -> Tensor:
        """[merged features, out_hidden], in tower order."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            hidden = self.patch_embed(batch.planes, batch.plane_index)[:, None]
            angles = vision_angles(batch.position_hw, self.vision.head_dim)
            hidden = self.decoder(
                hidden_states=hidden,
                attention_mask=None,
                rotary_pos_emb=angles,
                packed_seq_params=packed_row(batch.full, batch.window),
            )
        return self.merger(hidden)[:, 0]
