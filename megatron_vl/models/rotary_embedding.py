"""Rotary tables: M-RoPE of the language model and 2D RoPE of the vision tower.

Both give the angles ``[S, 1, 1, dim]`` that Megatron-core's rotary functions take (two equal halves,
rotate-half convention). The products are elementwise in fp32, not matrix products, so TF32 settings do not
affect them.
"""

import torch
from torch import Tensor, nn

from megatron_vl.spec.families import LanguageSpec


class MultimodalRope(nn.Module):
    """Multimodal RoPE (Qwen2-VL, arXiv 2409.12191): each frequency follows time, height or width.

    Reference: ``Qwen2VLRotaryEmbedding`` and ``apply_multimodal_rotary_pos_emb`` of transformers, and
    ``Qwen3VLTextRotaryEmbedding`` for the interleaved order. It replaces core's ``MultimodalRotaryEmbedding``
    and is called in the same way.
    """

    def __init__(self, language_spec: LanguageSpec) -> None:
        super().__init__()
        num_frequencies = language_spec.rotary_dim // 2  # core does not rotate the rest of a head
        self._inv_freq = rotary_frequencies(language_spec)
        if language_spec.mrope_interleaved:
            # The order is t h w t h w ..., and only t once height and width have all their frequencies.
            self._axis_of_frequency = torch.zeros(num_frequencies, dtype=torch.int64)
            for axis in (1, 2):
                self._axis_of_frequency[axis : 3 * language_spec.mrope_section[axis] : 3] = axis
        else:
            self._axis_of_frequency = torch.repeat_interleave(
                torch.arange(3), torch.tensor(language_spec.mrope_section)
            )
        assert self._axis_of_frequency.numel() == num_frequencies

    def forward(
        self, position_ids: Tensor, mrope_section: list[int] | None = None, cp_group: object = None
    ) -> Tensor:
        """position_ids [3, 1, S] (or [3, S]) -> angles [S, 1, 1, rotary_dim]."""
        device = position_ids.device
        if self._inv_freq.device != device:
            self._inv_freq = self._inv_freq.to(device)
            self._axis_of_frequency = self._axis_of_frequency.to(device)
        float_positions = position_ids.reshape(3, -1).float()
        rotary_angles = float_positions[self._axis_of_frequency].transpose(0, 1) * self._inv_freq
        return torch.cat((rotary_angles, rotary_angles), dim=-1)[:, None, None, :]


def rotary_frequencies(language_spec: LanguageSpec) -> Tensor:
    """The angle of each frequency per position: fp32 [rotary_dim / 2].

    With YaRN, low frequencies are divided by its factor, and those between low and high ones in part. The
    attention factor is not in the angles (:attr:`~megatron_vl.models.attention.PackedAttention.rope_scale`).
    """
    rotary_dim, yarn = language_spec.rotary_dim, language_spec.yarn
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    wavelengths = language_spec.rope_theta**exponent
    if yarn is None:
        return 1.0 / wavelengths
    low, high = yarn.ramp_bounds(rotary_dim, language_spec.rope_theta)
    kept_share = 1 - ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    # In the order of transformers: at position 100,000, the last bit of a frequency is 1e-5 of a cosine.
    return 1.0 / (yarn.factor * wavelengths) * (1 - kept_share) + 1.0 / wavelengths * kept_share


def vision_rope_angles(position_hw: Tensor, head_dim: int) -> Tensor:
    """2D RoPE of the vision tower.

    The first half of the frequencies follows the row, the second half the column. Reference:
    ``VisionRotaryEmbedding`` and ``rot_pos_emb`` of Qwen2-VL.

    Args:
        position_hw: int [P, 2], row and column of each patch.

    Returns:
        Angles [P, 1, 1, head_dim], fp32.
    """
    half_dim = head_dim // 2
    exponent = torch.arange(0, half_dim, 2, dtype=torch.float32, device=position_hw.device) / half_dim
    patch_angles = (position_hw.float()[:, :, None] * (1.0 / 10000.0**exponent)).flatten(1)
    return torch.cat((patch_angles, patch_angles), dim=-1)[:, None, None, :]
