"""The options that say by which rules a checkpoint was trained on videos; several commands have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from toolkit.options import CommandOptions


# megatron_vl.config has the same values under these names; importing it takes longer than `--help` may.
@dataclass(kw_only=True)
class VideoRuleOptions(CommandOptions):
    """Rules for videos, for checkpoints that were trained under other ones than the released models."""

    video_positions: Literal["released", "transformers_5_3"] = "released"
    """Positions at videos of Qwen2-VL and Qwen2.5-VL, as data.video_positions of the training."""
    video_prompt: Literal["released", "transformers_5_10"] = "released"
    """Text at videos of Qwen3-VL, as data.video_prompt of the training."""
