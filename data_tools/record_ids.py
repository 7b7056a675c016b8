"""Finds the record that had an ``id`` first."""

from __future__ import annotations

import hashlib
import sys

import numpy as np

MAX_LATEST = 1 << 20
"""Ids that wait, in a dictionary, to be sorted into the array."""
WARNED_COUNT = 10**8
PLACE_BITS = 40
"""Bits of a place that count records; the upper ones are the number of the file."""


class RecordIds:
    """The ids so far: a sorted array of 128-bit hashes, and the place of each, 24 bytes together.

    Among 1e8 ids, the probability that two different ones have one hash is about 1e-23.
    """

    def __init__(self) -> None:
        self._hashes = np.zeros(0, "S16")
        self._places = np.zeros(0, np.int64)
        self._latest: dict[bytes, int] = {}
        self._file_names: list[str] = []

    def first_occurrence(self, record_identity: str, file_name: str, record_number: int) -> tuple[str, int]:
        """Returns the file and number of the first record with this id: the given record if the id is new."""
        # A string from JSON may contain single surrogates, which UTF-8 cannot encode.
        digest = hashlib.blake2b(record_identity.encode(errors="surrogatepass"), digest_size=16).digest()
        digest = digest.rstrip(b"\0")  # as numpy reads it from the array
        if not self._file_names or self._file_names[-1] != file_name:
            self._file_names.append(file_name)

        position = int(self._hashes.searchsorted(digest))
        if position < len(self._hashes) and self._hashes[position] == digest:
            place = int(self._places[position])
        else:
            this_place = (len(self._file_names) - 1) << PLACE_BITS | record_number
            place = self._latest.setdefault(digest, this_place)
            if len(self._latest) == MAX_LATEST:
                self._sort_latest()
        return self._file_names[place >> PLACE_BITS], place & (1 << PLACE_BITS) - 1

    def _sort_latest(self) -> None:
        """Sorts the latest ids into the array, which is copied."""
        new_hashes = np.array(list(self._latest), "S16")
        order = new_hashes.argsort()
        positions = self._hashes.searchsorted(new_hashes[order])
        new_places = np.fromiter(self._latest.values(), np.int64, len(order))
        self._places = np.insert(self._places, positions, new_places[order])
        self._hashes = np.insert(self._hashes, positions, new_hashes[order])
        self._latest.clear()
        count = len(self._hashes)
        if count >= WARNED_COUNT > count - len(order):
            print(
                f"{count:,} ids so far take {48 * count / 1e9:.1f} GB of memory; --duplicate-ids keep needs"
                " none, and --part divides them",
                file=sys.stderr,
            )
