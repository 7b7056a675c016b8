"""Follows the rule for videos that a checkpoint was trained under, and says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_vl.config import RULES_BEFORE
from megatron_vl.errors import UsageError, UserError

RELEASED = "released"


def follow(
    folder: Path, trained: dict[str, str], asked: dict[str, str], say: Callable[[str], None]
) -> dict[str, str]:
    """Fields of ``DataConfig``: the rules asked for, and the one that a checkpoint was trained under.

    Args:
        folder: the checkpoint, for messages.
        trained: its rule; empty where none is known.
        asked: the rules given as options.
        say: receives a line where the rule is not that of the released models.

    Raises:
        UsageError: the checkpoint was trained under another rule than the one asked for.
        UserError: this version does not know its rule.
    """
    for name, rule in trained.items():
        option = "--" + name.replace("_", "-")
        if asked.get(name, rule) != rule:
            raise UsageError(
                f"{option} {asked[name]} contradicts {folder}, which was trained under {rule!r}: leave the"
                " option out"
            )
        if rule not in (RELEASED, RULES_BEFORE[name]):
            raise UserError(
                f"{folder} was trained under data.{name} {rule!r}, which this version does not know: use the"
                " one that trained it"
            )
        if rule != RELEASED:
            say(f"videos follow {name} {rule!r}, under which {folder} was trained")
    return {**asked, **trained}
