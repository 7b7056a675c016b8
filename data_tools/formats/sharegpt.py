"""ShareGPT, and LLaVA's JSON: ``conversations`` with ``from`` and ``value``.

``<image>`` and ``<video>`` in the text stand for the entries of ``image(s)`` and ``video(s)``, each a string
or a list. LLaVA's own code moves a picture to the beginning of its turn; here it stays where the text has it.
"""

from __future__ import annotations

from typing import Any

from .canonical import Message
from .content import Reader
from .kind import Format, listed_turns


def _read(record: dict[str, Any], reader: Reader) -> list[Message]:
    return reader.turns(listed_turns(record, "conversations"))


FORMAT = Format(
    "sharegpt",
    "conversations",
    "conversations with from and value, <image> in the text for entries of image(s) (LLaVA, LLaMA-Factory)",
    lambda record: record.get("conversations") is not None,
    _read,
)
