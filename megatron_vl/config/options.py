"""How a field of a run and an option of a command are declared, with the range of their values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

MISSING = dataclasses.MISSING


def option(
    default: Any = MISSING,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    above: float = -math.inf,
    metavar: str = "",
    shown_default: str = "",
    positional: bool = False,
    repeat: bool = False,
    several: bool = False,
    must_exist: bool = False,
) -> Any:
    """Declares a field of a run, or an option: a field of a command's options.

    Args:
        default: the value without the option. If it is left out, the option is required.
        least: smallest valid number.
        most: largest valid number.
        above: bound that a valid number must exceed.
        metavar: the name of the value in ``--help`` of a command.
        shown_default: the default as ``--help`` of a command shows it; empty: the value itself.
        positional: whether the value is a word without an option name.
        repeat: whether to make a list, with one item each time the option is given.
        several: whether to make a list of all words after the option.
        must_exist: whether to refuse a path that does not exist.
    """
    facts = {"least": least, "most": most, "above": above, "metavar": metavar, "shown_default": shown_default}
    facts |= {"positional": positional, "repeat": repeat, "several": several, "must_exist": must_exist}
    if default is MISSING:
        return dataclasses.field(metadata=facts)
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=facts)
    return dataclasses.field(default=default, metadata=facts)


def in_range(value: float, facts: Mapping[str, Any]) -> bool:
    """Whether a number is in the range of an option, given its metadata. NaN is in none."""
    return facts["least"] <= value <= facts["most"] and value > facts["above"]
