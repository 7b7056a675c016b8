"""The packed vision tower as a Megatron-core TransformerBlock.

All images and video frames of a row are processed in one call, in the window order that the loader chose,
with tensor parallelism over the given group. Reference: ``Qwen2VisionTransformerPretrainedModel``,
``Qwen2_5_VisionTransformerPretrainedModel`` and ``Qwen3VLVisionModel`` of transformers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_vl.models.attention import packed_row
from megatron_vl.models.batch import VisionInput
from megatron_vl.models.layer_specs import block_spec, linears, norm
from megatron_vl.models.rotary_embedding import vision_angles
from megatron_vl.models.transformer_configs import fp8_rows
from megatron_vl.platform import Platform
from megatron_vl.spec.families import VisionSpec


class PatchEmbed(nn.Module):
    """The patch embedding of uint8 planes.

    It is a Conv3d whose kernel equals its stride, written as a matrix product, which is 10x faster. Pixels
    are normalised here, on the device, with the checkpoint's mean and standard deviation.

    Args:
        mean, std: statistics per channel, for pixels scaled to 0..1.
    """

    def __init__(
        self, vision: VisionSpec, mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.vision = vision
        self.proj = nn.Linear(vision.patch_dim, vision.hidden_size, bias=vision.patch_bias, dtype=dtype)
        # The factor 1/255 is folded into the statistics, as in HF.
        self._mean = torch.tensor(mean, dtype=torch.float32) * 255.0
        self._std = torch.tensor(std, dtype=torch.float32) * 255.0

    def forward(self, planes: Tensor, plane_index: Tensor) -> Tensor:
        """planes uint8 [Q, C * p * p], plane_index int [P, T] -> [P, hidden].

        Patch i consists of the T planes ``plane_index[i]``.
        """
        v = self.vision
        if self._mean.device != planes.device:
            self._mean, self._std = self._mean.to(planes.device), self._std.to(planes.device)

        pixels = planes.view(-1, v.in_channels, v.patch_size**2).float()
        pixels = ((pixels - self._mean[:, None]) / self._std[:, None]).to(self.proj.weight.dtype)
        patches = pixels[plane_index.long()]  # [P, T, C, p * p]
        return self.proj(patches.transpose(1, 2).reshape(patches.shape[0], -1))


class PositionTable(nn.Module):
    """A square table of learned position embeddings, interpolated to the size of each frame.

    The interpolation is bilinear with aligned corners. Reference:
    ``get_vision_interpolation_indices_and_weights`` of transformers.
    """

    def __init__(self, side: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.side = side
        self.weight = nn.Parameter(torch.empty(side**2, width, dtype=dtype))

    def forward(self, position_hw: Tensor, frame_hw: Tensor) -> Tensor:
        """The position embedding of each patch, fp32 [P, width].

        Args:
            position_hw: int [P, 2], row and column of each patch within its frame.
            frame_hw: int [P, 2], height and width of the patch's frame in patches.
        """
        coordinates = position_hw.float() * (self.side - 1) / (frame_hw - 1).clamp(min=1)
        low = coordinates.floor()
        part = coordinates - low
        near = low.long()
        far = (near + 1).clamp(max=self.side - 1)

        rows = torch.stack((near[:, 0], far[:, 0]), 1)
        columns = torch.stack((near[:, 1], far[:, 1]), 1)
        row_weight = torch.stack((1 - part[:, 0], part[:, 0]), 1)
        column_weight = torch.stack((1 - part[:, 1], part[:, 1]), 1)

        index = (rows[:, :, None] * self.side + columns[:, None, :]).flatten(1)
        weight = (row_weight[:, :, None] * column_weight[:, None, :]).flatten(1)
        return F.embedding_bag(index, self.weight.float(), per_sample_weights=weight, mode="sum")


class Merger(nn.Module):
    """A norm, and a two-layer GELU MLP from each merge unit's concatenated patches to the language width.

    Args:
        norm_unit: whether the norm is over a whole merge unit, as in DeepStack's mergers, or over each patch.
    """

    def __init__(
        self,
        platform: Platform,
        vision: VisionSpec,
        config: TransformerConfig,
        tp_group: torch.distributed.ProcessGroup,
        norm_unit: bool = False,
    ) -> None:
        super().__init__()
        self.width = vision.merge_unit * vision.hidden_size
        column, row = linears(platform)
        shared = {
            "config": config,
            "init_method": config.init_method,
            "bias": True,
            "is_expert": False,
            "tp_group": tp_group,
        }

        self.norm_width = self.width if norm_unit else vision.hidden_size
        self.norm = norm(platform, config, self.norm_width)
        self.linear_fc1 = column(self.width, self.width, gather_output=False, skip_bias_add=False, **shared)
        self.linear_fc2 = row(
            self.width, vision.out_hidden_size, input_is_parallel=True, skip_bias_add=False, **shared
        )

    def forward(self, x: Tensor) -> Tensor:
        """[P, 1, hidden] -> [P / merge_unit, 1, out_hidden]"""
        x = self.norm(x.view(-1, 1, self.norm_width)).view(-1, 1, self.width)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)[0]))[0]


class VisionTower(nn.Module):
    """Computes merged features from the patches of a whole row.

    Args:
        pg: process groups of the tower; only ``tp`` and ``cp`` are used.
        pixel_mean, pixel_std: statistics per channel, for pixels scaled to 0..1.
        attention_backend, fused_windows, recompute_activation: see
            :func:`megatron_vl.models.layer_specs.block_spec`.
        frozen: whether the layers, the patch embedding and the position table get no gradients. The mergers
            still get them.
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
        fused_windows: bool = False,
        recompute_activation: bool = False,
    ) -> None:
        super().__init__()
        self.vision, self.frozen = vision, frozen
        self.rotating_kernels = fused_windows or attention_backend == "triton"
        # Products in FP8 need whole tiles of patches. One more segment of zeros pads the patches to whole
        # tiles and is removed at the end.
        self.padded_to = fp8_rows(config)

        self.patch_embed = PatchEmbed(vision, pixel_mean, pixel_std, config.params_dtype)
        nn.init.normal_(self.patch_embed.proj.weight, std=config.init_method_std)
        if vision.patch_bias:
            nn.init.zeros_(self.patch_embed.proj.bias)

        self.position_table = None
        if vision.position_table_side:
            self.position_table = PositionTable(
                vision.position_table_side, vision.hidden_size, config.params_dtype
            )
            nn.init.normal_(self.position_table.weight, std=config.init_method_std)

        spec = block_spec(
            platform,
            config,
            vision.num_layers,
            attention_backend=attention_backend,
            causal=False,
            windowed=lambda layer: not vision.is_full_attention(layer),
            fused_windows=fused_windows,
            recompute_activation=recompute_activation,
        )
        self.decoder = TransformerBlock(config, spec, post_layer_norm=False, pg_collection=pg)
        self.merger = Merger(platform, vision, config, pg.tp)
        self.deepstack_mergers = nn.ModuleList(
            Merger(platform, vision, config, pg.tp, norm_unit=True) for _ in vision.deepstack_layers
        )

    def forward(self, batch: VisionInput) -> list[Tensor]:
        """The features of the last layer, then of each DeepStack layer.

        Each is [N, out_hidden], for the row's N merge units in tower order.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            hidden = self.patch_embed(batch.planes, batch.plane_index)
            if self.position_table is not None:
                hidden = hidden + self.position_table(batch.position_hw, batch.frame_hw).to(hidden.dtype)

            angles = vision_angles(batch.position_hw, self.vision.head_dim)
            full, window = batch.full, batch.window
            if self.padded_to > 1:
                extra = -hidden.shape[0] % self.padded_to
                hidden = F.pad(hidden, (0, 0, 0, extra))
                angles = F.pad(angles, (0, 0, 0, 0, 0, 0, 0, extra))
                full = full.padded(hidden.shape[0], extra)
                window = window.padded(hidden.shape[0], extra)

            hidden = hidden[:, None]
            half = angles[:, 0, 0, : self.vision.head_dim // 2]
            cos_sin = (half.cos().contiguous(), half.sin().contiguous()) if self.rotating_kernels else None
            hidden = self.decoder(
                hidden_states=hidden,
                attention_mask=None,
                rotary_pos_emb=angles,
                packed_seq_params=packed_row(full, window, cos_sin),
                extract_layer_indices=set(self.vision.deepstack_layers),
            )

        # The block returns a pair if it extracts inner layers.
        last, inner = hidden if self.deepstack_mergers else (hidden, [])
        patches = batch.position_hw.shape[0]
        deepstack = [
            merger(x[:patches])[:, 0] for merger, x in zip(self.deepstack_mergers, inner, strict=True)
        ]
        return [self.merger(last[:patches])[:, 0], *deepstack]
