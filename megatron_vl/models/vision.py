"""The packed vision tower as a Megatron-core TransformerBlock.

All images and video frames of a row are processed in one call, in the window order that the loader chose,
with tensor parallelism over the given group. Reference: ``Qwen2VisionTransformerPretrainedModel``,
``Qwen2_5_VisionTransformerPretrainedModel`` and ``Qwen3VLVisionModel`` of transformers.
"""

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_vl.models.attention import PackedRow
from megatron_vl.models.batch import VisionInput
from megatron_vl.models.layer_specs import linear_classes, make_norm, transformer_block_spec
from megatron_vl.models.rotary_embedding import vision_rope_angles
from megatron_vl.platform import Platform
from megatron_vl.spec.families import VisionSpec


class PatchEmbed(nn.Module):
    """The patch embedding of uint8 planes.

    It is a Conv3d whose kernel equals its stride. Written as a matrix product, it is 10x faster. Pixels are
    normalised here, on the device, with the checkpoint's mean and standard deviation.
    """

    def __init__(
        self,
        vision_spec: VisionSpec,
        pixel_mean: tuple[float, ...],
        pixel_std: tuple[float, ...],
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.vision_spec = vision_spec
        self.proj = nn.Linear(
            vision_spec.patch_dim, vision_spec.hidden_size, bias=vision_spec.patch_bias, dtype=dtype
        )
        # The factor 1/255 is folded into the statistics, as in HF.
        self._pixel_mean = torch.tensor(pixel_mean, dtype=torch.float32) * 255.0
        self._pixel_std = torch.tensor(pixel_std, dtype=torch.float32) * 255.0

    def forward(self, planes: Tensor, plane_index: Tensor) -> Tensor:
        """planes uint8 [Q, p * p * C], plane_index int [P, T] -> [P, hidden].

        Patch i consists of the T planes ``plane_index[i]``.
        """
        if self._pixel_mean.device != planes.device:
            self._pixel_mean = self._pixel_mean.to(planes.device)
            self._pixel_std = self._pixel_std.to(planes.device)

        # Planes are normalised before they are gathered, because an image uses each of its planes twice.
        plane_pixels = planes.view(-1, self.vision_spec.patch_size**2, self.vision_spec.in_channels).float()
        plane_pixels = (plane_pixels - self._pixel_mean) / self._pixel_std
        plane_pixels = plane_pixels.to(self.proj.weight.dtype)

        patches = plane_pixels[plane_index.long()]  # [P, T, p * p, C]
        return self.proj(patches.permute(0, 3, 1, 2).reshape(patches.shape[0], -1))


class PositionTable(nn.Module):
    """A square table of learned position embeddings, interpolated to the size of each frame.

    The interpolation is bilinear with aligned corners. Reference:
    ``get_vision_interpolation_indices_and_weights`` of transformers.
    """

    def __init__(self, table_side: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.table_side = table_side
        self.weight = nn.Parameter(torch.empty(table_side**2, hidden_size, dtype=dtype))

    def forward(self, position_hw: Tensor, frame_hw: Tensor) -> Tensor:
        """The position embedding of each patch, fp32 [P, width].

        Args:
            position_hw: int [P, 2], row and column of each patch within its frame.
            frame_hw: int [P, 2], height and width of the patch's frame in patches.
        """
        coordinates = position_hw.float() * (self.table_side - 1) / (frame_hw - 1).clamp(min=1)
        floor_coordinates = coordinates.floor()
        fraction = coordinates - floor_coordinates
        low_index = floor_coordinates.long()
        high_index = (low_index + 1).clamp(max=self.table_side - 1)

        # [P, 2] each: of the lower and the upper neighbour.
        row_index, column_index = torch.stack((low_index, high_index), 1).unbind(2)
        row_weight, column_weight = torch.stack((1 - fraction, fraction), 1).unbind(2)
        table_index = (row_index[:, :, None] * self.table_side + column_index[:, None, :]).flatten(1)
        corner_weight = (row_weight[:, :, None] * column_weight[:, None, :]).flatten(1)
        return F.embedding_bag(table_index, self.weight.float(), per_sample_weights=corner_weight, mode="sum")


class Merger(nn.Module):
    """A norm, and a two-layer GELU MLP from each merge unit's concatenated patches to the language width.

    Args:
        norm_over_unit: whether the norm is over a whole merge unit, as in DeepStack's mergers, or over each
            patch.
    """

    def __init__(
        self,
        platform: Platform,
        vision_spec: VisionSpec,
        config: TransformerConfig,
        tp_group: torch.distributed.ProcessGroup,
        norm_over_unit: bool = False,
    ) -> None:
        super().__init__()
        self.merged_width = vision_spec.merge_unit * vision_spec.hidden_size
        column_linear, row_linear = linear_classes(platform)
        shared_arguments = {
            "config": config,
            "init_method": config.init_method,
            "bias": True,
            "is_expert": False,
            "tp_group": tp_group,
        }

        self.norm_width = self.merged_width if norm_over_unit else vision_spec.hidden_size
        self.norm = make_norm(platform, config, self.norm_width)
        self.linear_fc1 = column_linear(
            self.merged_width, self.merged_width, gather_output=False, skip_bias_add=False, **shared_arguments
        )
        self.linear_fc2 = row_linear(
            self.merged_width,
            vision_spec.out_hidden_size,
            input_is_parallel=True,
            skip_bias_add=False,
            **shared_arguments,
        )

    def forward(self, x: Tensor) -> Tensor:
        """[P, 1, hidden] -> [P / merge_unit, 1, out_hidden]"""
        x = self.norm(x.view(-1, 1, self.norm_width)).view(-1, 1, self.merged_width)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)[0]))[0]


class VisionTower(nn.Module):
    """Computes merged features from the patches of a whole row.

    Args:
        attention_backend, fused_windows, fp8_rows, recompute_activation: see
            :func:`megatron_vl.models.layer_specs.transformer_block_spec`.
        is_frozen: whether the layers, the patch embedding and the position table get no gradients. The
            mergers still get them.
    """

    def __init__(
        self,
        platform: Platform,
        vision_spec: VisionSpec,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        *,
        pixel_mean: tuple[float, ...],
        pixel_std: tuple[float, ...],
        attention_backend: str,
        is_frozen: bool = False,
        fused_windows: bool = False,
        fp8_rows: bool = False,
        recompute_activation: bool = False,
    ) -> None:
        super().__init__()
        self.vision_spec, self.is_frozen = vision_spec, is_frozen
        self.kernels_apply_rope = fused_windows or attention_backend == "triton"

        self.patch_embed = PatchEmbed(vision_spec, pixel_mean, pixel_std, config.params_dtype)
        nn.init.normal_(self.patch_embed.proj.weight, std=config.init_method_std)
        if vision_spec.patch_bias:
            nn.init.zeros_(self.patch_embed.proj.bias)

        self.position_table = None
        if vision_spec.position_table_side:
            self.position_table = PositionTable(
                vision_spec.position_table_side, vision_spec.hidden_size, config.params_dtype
            )
            nn.init.normal_(self.position_table.weight, std=config.init_method_std)

        layers_spec = transformer_block_spec(
            platform,
            config,
            vision_spec.num_layers,
            attention_backend=attention_backend,
            causal=False,
            is_windowed_layer=lambda layer: not vision_spec.is_full_attention(layer),
            fused_windows=fused_windows,
            fp8_rows=fp8_rows,
            recompute_activation=recompute_activation,
        )
        self.decoder = TransformerBlock(
            config, layers_spec, post_layer_norm=False, pg_collection=pg_collection
        )
        self.merger = Merger(platform, vision_spec, config, pg_collection.tp)
        self.deepstack_mergers = nn.ModuleList(
            Merger(platform, vision_spec, config, pg_collection.tp, norm_over_unit=True)
            for _ in vision_spec.deepstack_layers
        )

    def forward(self, vision_input: VisionInput) -> list[Tensor]:
        """The features of the last layer, then of each DeepStack layer.

        Each is [N, out_hidden], for the row's N merge units in tower order.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_frozen):
            hidden_states = self.patch_embed(vision_input.planes, vision_input.plane_index)
            if self.position_table is not None:
                hidden_states = hidden_states + self.position_table(
                    vision_input.position_hw, vision_input.frame_hw
                ).to(hidden_states.dtype)

            if torch.is_grad_enabled() and not hidden_states.requires_grad:
                # With adapters, the patch embedding is frozen, but recomputed layers need an input with a
                # gradient.
                hidden_states.requires_grad_()

            rotary_angles = vision_rope_angles(vision_input.position_hw, self.vision_spec.head_dim)
            # Our attention kernels rotate queries and keys while they read them. The second half of a head's
            # angles repeats the first, so they need only the first.
            cos_sin = None
            if self.kernels_apply_rope:
                half_angles = rotary_angles[:, 0, 0, : self.vision_spec.head_dim // 2]
                cos_sin = (half_angles.cos().contiguous(), half_angles.sin().contiguous())

            hidden_states = self.decoder(
                hidden_states=hidden_states[:, None],
                attention_mask=None,
                rotary_pos_emb=rotary_angles,
                packed_seq_params=PackedRow(
                    full_segments=vision_input.full_segments,
                    window_segments=vision_input.window_segments,
                    cos_sin=cos_sin,
                ),
                extract_layer_indices=set(self.vision_spec.deepstack_layers),
            )

        # The block returns a pair if it extracts inner layers.
        last_states, inner_states = hidden_states if self.deepstack_mergers else (hidden_states, [])

        # The mergers are trained even if the layers are frozen, so they run outside of ``set_grad_enabled``.
        deepstack_features = [
            merger(layer_states).squeeze(1)
            for merger, layer_states in zip(self.deepstack_mergers, inner_states, strict=True)
        ]
        return [self.merger(last_states).squeeze(1), *deepstack_features]
