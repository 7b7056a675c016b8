"""Energon's shuffle buffer with a limit in bytes as well as in samples.

A thousand photographs take 200 MB and a thousand videos 20 GB,
in every worker of every rank that owns a loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron.energon import WorkerConfig
from megatron.energon.wrappers import ShuffleBufferDataset as EnergonShuffleBuffer

GIB = 1 << 30


class ShuffleBufferDataset(EnergonShuffleBuffer[Any]):
    """Returns a random sample of its buffer once the buffer holds ``size`` samples or ``most_bytes`` bytes.

    If the buffer never reaches the limit in bytes, it draws exactly the same samples as Energon 7.4.1's own
    buffer, and the saved states of the two are equal (Energon finds a state by the name of its class, hence
    the name). The number of bytes follows from the samples in the buffer, which a restored state brings back.
    So the order changes only if the limit takes effect and storage has lost some of these samples since.

    Args:
        size: largest number of samples, at least 1.
        most_bytes: limit in bytes. The sample that reaches it is still kept; a sample that alone exceeds it
            passes straight through. 0: no limit.
        size_of: gives the size of a sample in bytes.
    """

    def __init__(
        self,
        dataset: Any,
        size: int,
        most_bytes: int,
        size_of: Callable[[Any], int],
        worker_config: WorkerConfig,
    ) -> None:
        self.most_bytes, self.size_of = most_bytes, size_of
        super().__init__(dataset, size=size, worker_config=worker_config)

    def __iter__(self) -> Iterator[Any]:
        buffer = self._active_buffer
        buffer.worker_start()
        self._sizes = [self.size_of(sample) for sample in buffer]
        self._held = sum(self._sizes)

        samples = buffer.append_iter()
        while True:
            if self._is_full():
                yield self._draw()
                continue
            sample = next(samples, None)
            if sample is None:
                break
            self._sizes.append(self.size_of(sample))
            self._held += self._sizes[-1]

        while self._sizes:
            yield self._draw()

    def _is_full(self) -> bool:
        return len(self._sizes) >= self.size or 0 < self.most_bytes <= self._held

    def _draw(self) -> Any:
        index = self._worker_rng.randbelow(len(self._sizes))
        self._held -= self._sizes.pop(index)
        return self._active_buffer.pop(index)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "most_bytes": self.most_bytes}


def at_most(size: int, most_gib: float, sample_bytes: float) -> tuple[int, float]:
    """Number of samples and GiB that a buffer comes to hold.

    Args:
        size: largest number of samples.
        most_gib: limit in GiB; 0: none.
        sample_bytes: mean size of a sample in bytes; 0: not known.
    """
    if most_gib and sample_bytes and size * sample_bytes > most_gib * GIB:
        return max(1, -int(-most_gib * GIB // sample_bytes)), most_gib
    return size, size * sample_bytes / GIB
