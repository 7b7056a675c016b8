"""Reads JSON so that what Python would change without a word is refused."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from megatron_vl.data.sample.written_numbers import read_number
from megatron_vl.system.errors import UserError

EXACT_DIGITS = 15
"""A decimal number of so many digits is the same after it was a float."""


class DuplicateKeyError(UserError, ValueError):
    """A JSON object has a key twice. Python would keep the last value without a word."""


class RoundedNumber(float):
    """A number with another value than was written, for instance 0 for 1e-400.

    It is refused only where it would be written again, as in the arguments of a call.
    """


def _read_float(number_text: str) -> float:
    number = read_number(number_text)
    if len(number_text) <= EXACT_DIGITS and "e" not in number_text and "E" not in number_text:
        return number
    try:
        is_exact = Decimal(number_text) == Decimal(repr(float(number)))
    except ArithmeticError:  # an exponent that even Decimal does not read
        is_exact = False
    return number if is_exact else RoundedNumber(number)


def unique_keys(key_value_pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a JSON parser (``object_pairs_hook``). Raises DuplicateKeyError."""
    json_object = dict(key_value_pairs)
    if len(json_object) < len(key_value_pairs):
        keys = [key for key, _ in key_value_pairs]
        repeated_key = next(key for key in json_object if keys.count(key) > 1)
        raise DuplicateKeyError(f"the key {repeated_key[:100]!r} occurs twice in one object")
    return json_object


EXACT_DECODER = json.JSONDecoder(parse_float=_read_float, object_pairs_hook=unique_keys)
