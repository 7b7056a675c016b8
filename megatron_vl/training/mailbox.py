"""What loaders' owners have to say to rank 0 alone: lists of samples and counts by reason, at printed lines
that have some.

It travels through the key-value store of the process group, from host to host: only the ranks that have
something and rank 0 take part, and no GPU holds it. How many write is known from a reduction before
(``Tally.senders``).
"""

from __future__ import annotations

import json
from typing import Any

from megatron_vl.core_fixes.default_store import default_store

_PART = 1 << 20
"""Bytes of one entry of the store; its server refuses values of 8 MiB."""


class Mailbox:
    """Letters to rank 0 and its answer to all, a round at a time. Every rank takes part in a round, or none.

    Args:
        rank: of this process.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.round = 0
        self.answer = ""
        """Key of rank 0's latest answer."""

    def begin(self) -> None:
        """The next round; on all ranks."""
        self.round += 1

    def send(self, order: int, value: Any) -> None:
        """Leaves ``value`` (JSON) for rank 0, which will find it in the place ``order`` among the others."""
        store, text = default_store(), json.dumps([order, value])
        slot = store.add(self._key("slots"), 1) - 1
        parts = [text[start : start + _PART] for start in range(0, len(text), _PART)]
        for number, part in enumerate(parts):
            store.set(self._key(slot, number), part)
        store.set(self._key(slot, "parts"), str(len(parts)))

    def receive(self, senders: int) -> list[Any]:
        """On rank 0: what ``senders`` ranks sent, in their order. Waits for them."""
        store, found = default_store(), []
        for slot in range(senders):
            keys = [self._key(slot, number) for number in range(int(store.get(self._key(slot, "parts"))))]
            found.append(json.loads("".join(store.get(key).decode() for key in keys)))
            for key in (*keys, self._key(slot, "parts")):
                store.delete_key(key)
        store.delete_key(self._key("slots"))
        return [value for _, value in sorted(found, key=lambda entry: entry[0])]

    def share(self, value: Any = None) -> Any:
        """What rank 0 gives, on every rank."""
        store, last, self.answer = default_store(), self.answer, self._key("answer")
        if self.rank == 0:
            store.set(self.answer, json.dumps(value))
            if last:  # all have read it: they have begun another round
                store.delete_key(last)
        return json.loads(store.get(self.answer))

    def _key(self, *parts: object) -> str:
        return "/".join(("megatron_vl/mailbox", str(self.round), *map(str, parts)))
