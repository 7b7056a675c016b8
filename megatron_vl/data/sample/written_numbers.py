"""Numbers that keep the digits with which they were written: 0.10 in a call stays 0.10.

Neither JSON nor a chat template writes a float so. A mark around the digits, as a text in the number's place,
is removed from what they write.
"""

import json
import re
from typing import Any

_MARK = "\ufdd0"
"""A code point that is no character, so that texts hardly have it."""
_MARKED_NUMBER = re.compile(f'"?{_MARK}([-+.0-9eE]+){_MARK}"?')


class WrittenNumber(float):
    """A number that Python would write with other digits."""

    digits = ""


def read_number(digits: str) -> float:
    """A number of a JSON text (``parse_float``)."""
    number = WrittenNumber(digits)
    number.digits = digits
    return number if repr(number) != digits else float(digits)


def mark_numbers(json_value: Any) -> Any:
    """The value with a marked text for each :class:`WrittenNumber`."""
    if isinstance(json_value, WrittenNumber):
        return f"{_MARK}{json_value.digits}{_MARK}"
    if isinstance(json_value, dict):
        return {key: mark_numbers(item) for key, item in json_value.items()}
    return list(map(mark_numbers, json_value)) if isinstance(json_value, list | tuple) else json_value


def unmark_numbers(text: str) -> str:
    """A text in which values of :func:`mark_numbers` were written, with the digits alone."""
    return _MARKED_NUMBER.sub(r"\1", text) if _MARK in text else text


def dump_json(json_value: Any) -> str:
    """The JSON text of a value, with the digits of its numbers as they were written."""
    return unmark_numbers(json.dumps(mark_numbers(json_value), ensure_ascii=False))
