"""A loader of rows that are in memory, for trainings without a data set: comparisons and tests."""

from collections.abc import Iterable, Iterator
from typing import Any

from megatron_vl.data.packing.training_row import TrainingRow


class GivenRows(Iterator[TrainingRow]):
    """Gives one data-parallel rank rows from memory, and the trainer what it asks of a loader.

    Args:
        rows: the rows of this rank in order. They may never end.
    """

    dataset_identity: Any = {"content": "rows in memory", "split": "train", "samples": 0}
    start_notes: tuple[str, ...] = ()

    def __init__(self, rows: Iterable[TrainingRow]) -> None:
        self.rows = iter(rows)
        self.row_settings: dict[str, Any] = {}
        self.model_folder_settings: dict[str, Any] = {}

    def __next__(self) -> TrainingRow:
        return next(self.rows)

    def state_dict(self) -> dict[str, Any]:
        """A run on these rows is never resumed."""
        return {}

    def close(self) -> None:
        """Nothing is open."""


def replica_rows[T](step_rows: Iterable[list[T]], dp_rank: int, dp: int) -> Iterator[T]:
    """Yields the rows of one data-parallel rank.

    Args:
        step_rows: the rows of each step's global batch. Each rank gets an equal number of them, in order.
    """
    for rows in step_rows:
        share = len(rows) // dp
        yield from rows[dp_rank * share : (dp_rank + 1) * share]
