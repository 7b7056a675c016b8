"""Declares the fields of a run and the options of commands, with the range of their values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

MISSING = dataclasses.MISSING


def option(
    default: Any = MISSING,
    *,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    exclusive_minimum: float = -math.inf,
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
        minimum: smallest valid number.
        maximum: largest valid number.
        exclusive_minimum: bound that a valid number must exceed.
        metavar: the name of the value in ``--help`` of a command.
        shown_default: the default as ``--help`` of a command shows it; empty: the value itself.
        positional: whether the value is a word without an option name.
        repeat: whether to make a list, with one item each time the option is given.
        several: whether to make a list of all words that follow the option.
        must_exist: whether to refuse a path that does not exist.
    """
    option_metadata: dict[str, Any] = {
        "minimum": minimum,
        "maximum": maximum,
        "exclusive_minimum": exclusive_minimum,
        "metavar": metavar,
        "shown_default": shown_default,
        "positional": positional,
        "repeat": repeat,
        "several": several,
        "must_exist": must_exist,
    }
    if default is MISSING:
        return dataclasses.field(metadata=option_metadata)
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=option_metadata)
    return dataclasses.field(default=default, metadata=option_metadata)


def is_in_range(number: float, option_metadata: Mapping[str, Any]) -> bool:
    """Whether a number is in the range of an option, given its metadata. NaN is in none."""
    return (
        option_metadata["minimum"] <= number <= option_metadata["maximum"]
        and number > option_metadata["exclusive_minimum"]
    )
