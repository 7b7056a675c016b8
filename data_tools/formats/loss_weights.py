"""Reads loss weights as they are spelled in the wild, for a record and for its turns.

A turn's weight is ``loss_weight``, ``weight`` (OpenAI, OpenChat), ``loss`` (ms-swift:
false, true or a number), ``loss_scale``, or ``train`` (Axolotl: false or true). A record's weight is
``loss_weight``, ``sample_weight`` or ``weight``; it multiplies those of its turns.
"""

from __future__ import annotations

from typing import Any

from .conversation import Message, RecordError, shorten_value

TURN_WEIGHT_KEYS = ("loss_weight", "weight", "loss", "loss_scale", "train")
RECORD_WEIGHT_KEYS = ("loss_weight", "sample_weight", "weight")
MAX_LOSS_WEIGHT = 1e4
"""A larger weight is a mistake rather than an intention: one sample would outweigh all others of a step."""


def read_loss_weight(
    json_object: dict[str, Any], weight_keys: tuple[str, ...], field_prefix: str
) -> tuple[float, str] | None:
    """The weight of a turn or record and the field that gives it; None if no field does.

    Raises:
        RecordError: it is not a number from 0 to 10000, or two fields differ.
    """
    weight: tuple[float, str] | None = None
    for weight_key in weight_keys:
        weight_value = json_object.get(weight_key)
        if weight_value is None or weight_value == "":
            continue
        field_path = f"{field_prefix}{weight_key}"
        # Not a number is not between them either.
        if not isinstance(weight_value, int | float) or not 0 <= weight_value <= MAX_LOSS_WEIGHT:
            detail = (
                f"{shorten_value(weight_value)} is no loss weight; valid: "
                f"a number from 0 to {MAX_LOSS_WEIGHT:g}, true or false"
            )
            raise RecordError("bad loss weight", detail, field_path)
        if weight is not None and weight[0] != float(weight_value):
            detail = f"{weight[1]} is {weight[0]:g}, but {field_path} is {shorten_value(weight_value)}"
            raise RecordError("bad loss weight", detail, field_path)
        weight = weight or (float(weight_value), field_path)
    return weight


def apply_turn_weight(turn: dict[str, Any], message: Message, field_prefix: str) -> None:
    """Sets the weight of an assistant's message.

    Raises:
        RecordError: a turn that is not the assistant's has a weight above 0; only answers are trained on.
    """
    weight = read_loss_weight(turn, TURN_WEIGHT_KEYS, field_prefix)
    if weight is None:
        return
    if message["role"] != "assistant":
        # True and 1 are what tools write into every turn; other numbers were chosen for this one.
        if weight[0] not in (0.0, 1.0):
            detail = (
                f"the {message['role']}'s turn has the loss weight {weight[0]:g}, "
                "but only answers are trained on"
            )
            raise RecordError("loss on a prompt", detail, weight[1])
        return
    if weight[0] != 1:
        message["loss_weight"] = weight[0]


def apply_record_weight(record: dict[str, Any], messages: list[Message]) -> None:
    """Multiplies the weights of all answers by the record's weight."""
    record_weight = read_loss_weight(record, RECORD_WEIGHT_KEYS, "")
    if record_weight is None or record_weight[0] == 1:
        return
    for message in messages:
        if message["role"] == "assistant":
            message["loss_weight"] = record_weight[0] * message.get("loss_weight", 1.0)
