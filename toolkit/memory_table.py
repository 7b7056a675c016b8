"""The memory of a GPU of each pipeline stage as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_vl.planning.memory import PARTS

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 132
"""Columns of a terminal in which no heading is cut off, where rich would write "wei…"."""


def memory_table(stages: Sequence[Mapping[str, Any]], title: str) -> Table:
    """One line per stage, in GiB. The column of host memory is there when optimizer state is offloaded.

    Args:
        stages: what ``StageMemory.as_json`` gives, first stage first.
    """
    from rich.table import Table

    head = {"stage": "stage", "in_flight": "in flight", **{part: part for part in PARTS}, "total": "total"}
    if any(stage["host"] for stage in stages):
        head["host"] = "host"

    table = Table(*head.values(), title=title)
    for stage in stages:
        table.add_row(*(str(stage[name]) for name in head))
    return table
