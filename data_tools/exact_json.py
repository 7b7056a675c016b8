"""Reads JSON so that what Python would change without a word can still be refused where it matters."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

EXACT_DIGITS = 15
"""A decimal number of so many digits is the same after it was a float."""


class RoundedNumber(float):
    """A number with another value than was written, for instance 0 for 1e-400."""

    difference = "a number has more digits, or another exponent, than a float holds; write it as a string"


class RepeatedKeys(dict[str, Any]):
    """An object in which a key was written twice; it has the last value, as in Python's json."""

    difference = "an object has a key twice, of which only one would be written; leave out one"


def _read_float(number_text: str) -> float:
    number = float(number_text)
    if len(number_text) <= EXACT_DIGITS and "e" not in number_text and "E" not in number_text:
        return number
    try:
        is_exact = Decimal(number_text) == Decimal(repr(number))
    except ArithmeticError:  # an exponent that even Decimal does not read
        is_exact = False
    return number if is_exact else RoundedNumber(number)


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    json_object = dict(pairs)
    return json_object if len(json_object) == len(pairs) else RepeatedKeys(json_object)


EXACT_DECODER = json.JSONDecoder(parse_float=_read_float, object_pairs_hook=_read_object)
