"""Reads loss weights as they are spelled in the wild, for a record and for its turns.

A turn's weight is ``loss_weight`` (LLaMA-Factory v1), ``weight`` (OpenAI, OpenChat), ``loss`` (ms-swift:
false, true or a number), ``loss_scale``, or ``train`` (Axolotl: false or true). A record's weight is
``loss_weight``, ``sample_weight`` or ``weight``; it multiplies those of its turns.
"""

from __future__ import annotations

import math
from typing import Any

from .canonical import Message, RecordError, shown

TURN_KEYS = ("loss_weight", "weight", "loss", "loss_scale", "train")
RECORD_KEYS = ("loss_weight", "sample_weight", "weight")
LARGEST = 1e4
"""A larger weight is a mistake rather than an intention: one sample would outweigh all others of a step."""


def weight_of(item: dict[str, Any], keys: tuple[str, ...], prefix: str) -> tuple[float, str] | None:
    """The weight of a turn or record and the field that gives it; None if no field does.

    Raises:
        RecordError: it is not a number from 0 to 10000, or two fields differ.
    """
    found: tuple[float, str] | None = None
    for key in keys:
        value = item.get(key)
        if value is None or value == "":
            continue
        where = f"{prefix}{key}"
        if not isinstance(value, (bool, int, float)) or not 0 <= value <= LARGEST or math.isnan(value):
            detail = f"{shown(value)} is no loss weight; valid: a number from 0 to {LARGEST:g}, true or false"
            raise RecordError("bad loss weight", detail, where)
        if found is not None and found[0] != float(value):
            raise RecordError(
                "bad loss weight", f"{found[1]} is {found[0]:g}, but {where} is {shown(value)}", where
            )
        found = found or (float(value), where)
    return found


def turn_weight(turn: dict[str, Any], message: Message, prefix: str) -> None:
    """Sets the weight of an assistant's message.

    Raises:
        RecordError: the turn of somebody else has a weight above 0: only answers are learnt.
    """
    found = weight_of(turn, TURN_KEYS, prefix)
    if found is None:
        return
    if message["role"] != "assistant":
        # True and 1 are what tools write into every turn; other numbers were chosen for this one.
        if found[0] not in (0.0, 1.0):
            detail = (
                f"the {message['role']}'s turn has the loss weight {found[0]:g}, but only answers are learnt"
            )
            raise RecordError("loss on a prompt", detail, found[1])
        return
    if found[0] != 1:
        message["loss_weight"] = found[0]


def apply_record_weight(record: dict[str, Any], messages: list[Message]) -> None:
    """Multiplies the weights of all answers by the record's weight."""
    found = weight_of(record, RECORD_KEYS, "")
    if found is None or found[0] == 1:
        return
    for message in messages:
        if message["role"] == "assistant":
            message["loss_weight"] = found[0] * message.get("loss_weight", 1.0)
