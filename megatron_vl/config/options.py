"""Declares the fields of a run and the options of commands, with the range of their values."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

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
    several: bool = False,
    must_exist: bool | Literal["model"] = False,
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
        several: whether the option takes several words, and may be repeated.
        must_exist: whether to refuse a path that does not exist; "model": with how to download a model.
    """
    facts = {name: value for name, value in locals().items() if name != "default"}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=facts)
    return dataclasses.field(default=default, metadata=facts)


def valid_range(number: float, facts: Mapping[str, Any]) -> str:
    """The range of an option in words if the number is outside of it, which NaN always is; else empty."""
    minimum, maximum, bound = facts["minimum"], facts["maximum"], facts["exclusive_minimum"]
    if minimum <= number <= maximum and number > bound:
        return ""
    if bound > minimum:
        return f"above {bound:g}"
    return f"between {minimum} and {maximum}" if maximum < math.inf else f"at least {minimum:g}"
