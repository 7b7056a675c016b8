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

    Either every rank takes part in a round, or none does: all add 1 to ``round_number`` when one begins.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.round_number = 0
        self.answer_key = ""

    def send_message(self, sort_order: int, message: Any) -> None:
        """Leaves ``message`` (JSON) for rank 0. Rank 0 sorts the messages by ``sort_order``."""
        store, text = default_store(), json.dumps([sort_order, message])
        slot = store.add(self._key("slots"), 1) - 1
        starts = range(0, len(text), _PART_BYTES)
        for number, start in enumerate(starts):
            store.set(self._key(slot, number), text[start : start + _PART_BYTES])
        # Last, because rank 0 waits for it.
        store.set(self._key(slot, "parts"), str(len(starts)))

    def receive_messages(self, num_senders: int) -> list[Any]:
        """On rank 0: waits for the messages of ``num_senders`` ranks; returns them in their order."""
        messages = []
        for slot in range(num_senders):
            parts = [self._take(slot, number) for number in range(int(self._take(slot, "parts")))]
            messages.append(json.loads("".join(parts)))
        default_store().delete_key(self._key("slots"))
        return [message for _, message in sorted(messages, key=lambda entry: entry[0])]

    def share_answer(self, answer: Any = None) -> Any:
        """Returns on every rank the ``answer`` that rank 0 passes. Collective."""
        store, previous_key, self.answer_key = default_store(), self.answer_key, self._key("answer")
        if self.rank == 0:
            store.set(self.answer_key, json.dumps(answer))
            if previous_key:  # all ranks have read it, because they have begun another round
                store.delete_key(previous_key)
        return json.loads(store.get(self.answer_key))

    def _take(self, *key_parts: object) -> str:
        """Waits for a value, and removes it from the store."""
        store, key = default_store(), self._key(*key_parts)
        value = store.get(key).decode()
        store.delete_key(key)
        return value

    def _key(self, *key_parts: object) -> str:
        return "/".join(("megatron_vl/rank_0_gather", str(self.round_number), *map(str, key_parts)))
