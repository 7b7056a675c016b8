"""Reads samples from shards that may have changed since conversion.

Energon 7.4.1 reads tar files inside a generator that does not handle errors: one missing file ends the epoch
of a worker. Here every index of the data set yields a sample or a description of what is wrong with it, so
that the order of samples and saved states stay valid.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from typing import Any

from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset

BROKEN = "__broken__"
"""Field of a crude sample that could not be read; its value is (reason, detail)."""
CRC_FIELD = b', "crc32": '


class TolerantReader:
    """Wraps an Energon reader. If reading fails, it returns a crude sample with the field :data:`BROKEN`."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        try:
            return self.reader[index]
        except FileNotFoundError as error:
            reason = "shard missing"
            detail = f"{error.filename or error} does not exist"
        except OSError as error:
            # A handle that failed once may keep failing (for instance
            # after a network file system was down): reopen it.
            self.reader.close()
            reason = "shard unreadable"
            detail = str(error)
        except Exception as error:  # tarfile, struct and Energon raise all kinds of errors on a damaged tar
            reason = "shard damaged"
            detail = f"{type(error).__name__}: {error}"

        shard, number = self._place(index)
        return {
            "__key__": f"{shard}[{number}]",
            "__shard__": shard,
            "__restore_key__": ("Webdataset", index),
            "__sources__": (),
            BROKEN: (reason, f"sample {number} of {shard}: {detail}"),
        }

    def _place(self, index: int) -> tuple[str, int]:
        """The shard, and the sample's number in it, counted from 0."""
        if not isinstance(self.reader, ShardInfosITarReader):
            return "data set", index
        starts = self.reader.shard_count_cumsum
        shard = min(bisect_right(starts, index) - 1, len(self.reader.shard_infos) - 1)
        return self.reader.shard_infos[shard].name, index - starts[shard]


def make_tolerant(dataset: Any) -> None:
    """Wraps the readers of every tar data set within ``dataset``, in place."""
    if isinstance(dataset, WebdatasetSampleLoaderDataset):
        dataset.join_readers = [TolerantReader(reader) for reader in dataset.join_readers]
    for inner in getattr(dataset, "datasets", ()):
        make_tolerant(inner)


def with_crc(text: bytes) -> bytes:
    """Adds the CRC-32 of the bytes of a non-empty JSON object to it as its last field."""
    return text[:-1] + CRC_FIELD + str(zlib.crc32(text)).encode() + b"}"


def crc_differs(text: bytes) -> bool:
    """Whether a text written by :func:`with_crc` has changed; False for a text without CRC-32."""
    body, mark, number = text.rpartition(CRC_FIELD)
    if not mark or not number[:-1].isdigit():
        return False
    return zlib.crc32(body + b"}") != int(number[:-1])
