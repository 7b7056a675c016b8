"""Messages from the loaders' owners to rank 0: lists of samples, and counts by reason.

They are sent whenever a step is printed, through the key-value store of the process group, from host to host.
Only rank 0 and the ranks that have something to send take part, and no GPU memory is used. An earlier
reduction has counted the senders (``StepMetrics.sending_ranks``).
"""

from __future__ import annotations

import json
from typing import Any

from megatron_vl.core_fixes.default_store import default_store

_PART_BYTES = 1 << 20
"""Size of one entry of the store in bytes. The store's server refuses values of 8 MiB."""


class Rank0Gather:
    """Sends messages to rank 0 and its answer to all ranks, in rounds.

    Either every rank takes part in a round, or none does.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.round_number = 0
        self.answer_key = ""
        """Key of rank 0's latest answer."""

    def begin_round(self) -> None:
        """Starts the next round. Call it on all ranks."""
        self.round_number += 1

    def send_message(self, sort_order: int, message: Any) -> None:
        """Leaves ``message`` (JSON) for rank 0. Rank 0 sorts the messages by ``sort_order``."""
        store, text = default_store(), json.dumps([sort_order, message])
        slot_number = store.add(self._store_key("slots"), 1) - 1
        message_parts = [text[start : start + _PART_BYTES] for start in range(0, len(text), _PART_BYTES)]
        for number, message_part in enumerate(message_parts):
            store.set(self._store_key(slot_number, number), message_part)
        store.set(self._store_key(slot_number, "parts"), str(len(message_parts)))

    def receive_messages(self, sender_count: int) -> list[Any]:
        """On rank 0: waits for messages of ``sender_count`` ranks.

        Returns the messages, sorted by the ``sort_order`` of their senders.
        """
        store, received_messages = default_store(), []
        for slot_number in range(sender_count):
            text = ""
            count_key = self._store_key(slot_number, "parts")
            for part_number in range(int(store.get(count_key))):
                part_key = self._store_key(slot_number, part_number)
                text += store.get(part_key).decode()
                store.delete_key(part_key)
            store.delete_key(count_key)
            received_messages.append(json.loads(text))
        store.delete_key(self._store_key("slots"))
        return [value for _, value in sorted(received_messages, key=lambda entry: entry[0])]

    def share_answer(self, answer: Any = None) -> Any:
        """Returns on every rank the ``answer`` that rank 0 passes. Collective."""
        store, previous_key, self.answer_key = default_store(), self.answer_key, self._store_key("answer")
        if self.rank == 0:
            store.set(self.answer_key, json.dumps(answer))
            if previous_key:  # all ranks have read it, because they have begun another round
                store.delete_key(previous_key)
        return json.loads(store.get(self.answer_key))

    def _store_key(self, *key_parts: object) -> str:
        return "/".join(("megatron_vl/mailbox", str(self.round_number), *map(str, key_parts)))
