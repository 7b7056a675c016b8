"""Messages from owners to rank 0: lists of samples, and counts by reason.

They are sent whenever a step is printed, through the key-value store of the process group, from host to host.
Only rank 0 and the ranks that have something to send take part, and no GPU memory is used. An earlier
reduction has counted the senders (``Tally.senders``).
"""

from __future__ import annotations

import json
from typing import Any

from megatron_vl.core_fixes.default_store import default_store

_PART = 1 << 20
"""Size of one entry of the store in bytes. The store's server refuses values of 8 MiB."""


class Mailbox:
    """Sends messages to rank 0 and its answer to all ranks, in rounds.

    Either every rank takes part in a round, or none does.

    Args:
        rank: the rank of this process.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.round = 0
        self.answer = ""
        """Key of rank 0's latest answer."""

    def begin(self) -> None:
        """Starts the next round. Call it on all ranks."""
        self.round += 1

    def send(self, order: int, value: Any) -> None:
        """Leaves ``value`` (JSON) for rank 0. Rank 0 sorts the messages by ``order``."""
        store, text = default_store(), json.dumps([order, value])
        slot = store.add(self._key("slots"), 1) - 1
        parts = [text[start : start + _PART] for start in range(0, len(text), _PART)]
        for number, part in enumerate(parts):
            store.set(self._key(slot, number), part)
        store.set(self._key(slot, "parts"), str(len(parts)))

    def receive(self, senders: int) -> list[Any]:
        """On rank 0: waits for messages of ``senders`` ranks. Returns their values, sorted by ``order``."""
        store, found = default_store(), []
        for slot in range(senders):
            keys = [self._key(slot, number) for number in range(int(store.get(self._key(slot, "parts"))))]
            found.append(json.loads("".join(store.get(key).decode() for key in keys)))
            for key in (*keys, self._key(slot, "parts")):
                store.delete_key(key)
        store.delete_key(self._key("slots"))
        return [value for _, value in sorted(found, key=lambda entry: entry[0])]

    def share(self, value: Any = None) -> Any:
        """Returns on every rank the value that rank 0 passes."""
        store, last, self.answer = default_store(), self.answer, self._key("answer")
        if self.rank == 0:
            store.set(self.answer, json.dumps(value))
            if last:  # all ranks have read it, because they have begun another round
                store.delete_key(last)
        return json.loads(store.get(self.answer))

    def _key(self, *parts: object) -> str:
        return "/".join(("megatron_vl/mailbox", str(self.round), *map(str, parts)))
