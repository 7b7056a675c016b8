"""The options of several commands about the rules by which a checkpoint was trained on videos."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from toolkit.options import CommandOptions

# megatron_vl.config has the same values under these names, but importing it is too slow for `--help`.
VideoPositions = Literal["released", "transformers_5_3"]
VideoPrompt = Literal["released", "transformers_5_10"]


@dataclass(kw_only=True)
class VideoRuleOptions(CommandOptions):
    """Rules for videos, for checkpoints trained under other rules than the released models."""

    video_positions: VideoPositions = "released"
    """Rule for positions at videos of Qwen2-VL and Qwen2.5-VL, like data.video_positions of the run."""
    video_prompt: VideoPrompt = "released"
    """Rule for the text at videos of Qwen3-VL, like data.video_prompt of the run."""
