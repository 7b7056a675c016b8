"""Energon's shuffle buffer, bounded by bytes as well as by samples.

A thousand photographs are 200 MB, a thousand videos 20 GB, in every worker of every rank that owns a loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron.energon import WorkerConfig
from megatron.energon.wrappers import ShuffleBufferDataset as EnergonShuffleBuffer

GIB = 1 << 30


class ShuffleBufferDataset(EnergonShuffleBuffer[Any]):
    """Hands out a random sample of its buffer once that holds ``size`` samples, or ``most_bytes`` bytes.

    Where the bytes never reach the bound, this is Energon 7.4.1's own buffer, draw for draw, and the saved
    states of the two are the same (Energon finds a state by the name of its class, hence the name). The bytes
    follow from the samples in the buffer, which a restored state brings back: only where the bound bites and
    storage has lost some of them since does the order change.

    Args:
        size: samples, at least 1.
        most_bytes: the sample that reaches this bound is held, too; one that is larger by itself passes
            straight
            through. 0: no such bound.
        size_of: bytes of a sample.
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
        place = self._worker_rng.randbelow(len(self._sizes))
        self._held -= self._sizes.pop(place)
        return self._active_buffer.pop(place)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "most_bytes": self.most_bytes}


def at_most(size: int, most_gib: float, sample_bytes: float) -> tuple[int, float]:
    """Samples and GiB that a buffer comes to hold of samples of a mean size; 0 bytes: not known."""
    if most_gib and sample_bytes and size * sample_bytes > most_gib * GIB:
        return max(1, -int(-most_gib * GIB // sample_bytes)), most_gib
    return size, size * sample_bytes / GIB
