"""ShareGPT, and LLaVA's JSON: ``conversations`` with ``from`` and ``value``.

``<image>`` and ``<video>`` in the text stand for the entries of ``image(s)`` and ``video(s)``, each a string
or a list. LLaVA's own code moves an image to the beginning of its turn; here it stays where the text has it.
"""

from __future__ import annotations

from .record_reader import RecordFormat

FORMAT = RecordFormat(
    "sharegpt",
    "conversations",
    "conversations with from and value, <image> in the text for entries of image(s) (LLaVA, LLaMA-Factory)",
    lambda record: record.get("conversations") is not None,
)
