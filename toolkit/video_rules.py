"""The rules for videos that a checkpoint was trained under, and the options that say them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from megatron_vl.config import VideoPositions, VideoPrompt
from megatron_vl.errors import UsageError, UserError
from toolkit.options import CommandOptions, option, option_flag

SHOWN_DEFAULT = "the training's; where that is unknown: released"
RELEASED_RULE = "released"
VALID_RULES = {"video_positions": get_args(VideoPositions), "video_prompt": get_args(VideoPrompt)}
"""Field of ``DataConfig`` -> its valid values."""


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


def resolve_video_rules(
    checkpoint_dir: Path,
    trained_rules: dict[str, str],
    asked_rules: dict[str, str],
    print_line: Callable[[str], None],
) -> dict[str, str]:
    """Returns fields of ``DataConfig``: the rules given as options, and that of the checkpoint's training.

    Args:
        checkpoint_dir: the checkpoint, for messages.
        trained_rules: the checkpoint's rule; empty if it is unknown.
        asked_rules: the rules given as options.
        print_line: receives a line of text if the rule is not that of the released models.

    Raises:
        UsageError: an option contradicts the checkpoint's rule.
        UserError: this version does not know the checkpoint's rule.
    """
    for field_name, trained_rule in trained_rules.items():
        if asked_rules.get(field_name, trained_rule) != trained_rule:
            raise UsageError(
                f"{option_flag(field_name)} {asked_rules[field_name]} contradicts {checkpoint_dir}, "
                f"which was trained under {trained_rule!r}: leave the option out"
            )
        if trained_rule not in VALID_RULES[field_name]:
            raise UserError(
                f"{checkpoint_dir} was trained under data.{field_name} {trained_rule!r}, "
                "which this version does not know: use the one that trained it"
            )
        if trained_rule != RELEASED_RULE:
            print_line(
                f"videos follow {field_name} {trained_rule!r}, under which {checkpoint_dir} was trained"
            )
    return {**asked_rules, **trained_rules}
