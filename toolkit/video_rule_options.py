"""Options, shared by several commands, for the rules under which a checkpoint was trained on videos."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vl.config import VideoPositions, VideoPrompt
from toolkit.options import CommandOptions, option

SHOWN_DEFAULT = "the training's; where that is unknown: released"


@dataclass(kw_only=True)
class VideoRuleOptions(CommandOptions):
    """Rules for videos.

    A run's checkpoint names the rule that it was trained under, and so does a folder exported from it
    (``megatron_vl.json``); an option that says otherwise is refused.
    """

    video_positions: VideoPositions | None = option(None, shown_default=SHOWN_DEFAULT)
    """Positions at videos of Qwen2-VL and Qwen2.5-VL, like data.video_positions of the training."""
    video_prompt: VideoPrompt | None = option(None, shown_default=SHOWN_DEFAULT)
    """Text at videos of Qwen3-VL, like data.video_prompt of the training."""

    def asked_rules(self) -> dict[str, str]:
        """The rules that were given on the command line, by the names of their options."""
        rules = {"video_positions": self.video_positions, "video_prompt": self.video_prompt}
        return {name: rule for name, rule in rules.items() if rule is not None}
