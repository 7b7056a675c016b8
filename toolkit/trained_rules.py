"""Applies the rule for videos that a checkpoint was trained under."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

from megatron_vl.config import VideoPositions, VideoPrompt
from megatron_vl.errors import UsageError, UserError

RELEASED = "released"
RULES = {"video_positions": get_args(VideoPositions), "video_prompt": get_args(VideoPrompt)}
"""Field of ``DataConfig`` -> its valid values."""


def follow(
    folder: Path, trained: dict[str, str], asked: dict[str, str], say: Callable[[str], None]
) -> dict[str, str]:
    """Returns fields of ``DataConfig``: the rules given as options, and that of the checkpoint's training.

    Args:
        folder: the checkpoint, for messages.
        trained: the checkpoint's rule; empty if it is unknown.
        asked: the rules given as options.
        say: receives a line of text if the rule is not that of the released models.

    Raises:
        UsageError: an option contradicts the checkpoint's rule.
        UserError: this version does not know the checkpoint's rule.
    """
    for name, rule in trained.items():
        option = "--" + name.replace("_", "-")
        if asked.get(name, rule) != rule:
            raise UsageError(
                f"{option} {asked[name]} contradicts {folder}, which was trained under {rule!r}: leave the"
                " option out"
            )
        if rule not in RULES[name]:
            raise UserError(
                f"{folder} was trained under data.{name} {rule!r}, which this version does not know: use the"
                " one that trained it"
            )
        if rule != RELEASED:
            say(f"videos follow {name} {rule!r}, under which {folder} was trained")
    return {**asked, **trained}
