"""Saves the state of a loader whose workers have not all begun.

In Energon 7.4.1 a worker answers commands from a thread that starts before the worker has restored its state.
A worker that is slow to start (on a busy machine, for instance) then answers with the state of a worker that
was never restored, and one sample too far. A run that resumed from such a checkpoint would silently read
other samples.
"""

from __future__ import annotations

from typing import Any

from megatron.energon.savable_loader import SavableDatasetCheckpoint, SavableDatasetWrapper

_BEFORE_THE_FIRST = -1
"""Sample index of the mark that Energon keeps in place of a state until there is one."""


class EarlySaves(SavableDatasetWrapper[Any]):
    """Energon's dataset in a worker, which answers rightly from the start."""

    def get_checkpoint(self, last_sample_indexes: list[int]) -> SavableDatasetCheckpoint:
        """The state at the next sample of this worker.

        Args:
            last_sample_indexes: the last sample of each worker that the main process has received.
        """
        states = self._last_checkpoints
        if len(states) == 1 and states[0].sample_index == _BEFORE_THE_FIRST:
            # Where it will begin: at what it will restore, or at its start.
            return SavableDatasetCheckpoint(
                state=self._workers_restore_from[self._worker_id],
                offset=self._workers_skip_samples[self._worker_id],
            )
        return super().get_checkpoint(last_sample_indexes)


def allow_early_saves(loader: Any) -> None:
    """Lets the workers of a loader answer rightly before they have begun. Call it before they start."""
    if isinstance(loader.dataset, SavableDatasetWrapper):
        loader.dataset.__class__ = EarlySaves
