"""The memory of a GPU of each pipeline stage as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_vl.planning.memory import GPU_MEMORY_PARTS

if TYPE_CHECKING:
    from rich.table import Table

TABLE_WIDTH = 132
"""Columns of a terminal in which no heading is cut off, where rich would write "wei…"."""


def trained_text(parameter_count: int, trained_count: int) -> str:
    """Says how many parameters are trained; empty if all are."""
    if trained_count == parameter_count:
        return ""
    share = trained_count / parameter_count
    return f"trained: {trained_count:,} of {parameter_count:,} parameters ({share:.2%})"


def memory_table(stage_memories: Sequence[Mapping[str, Any]], title: str) -> Table:
    """One line per stage, in GiB. A column of host memory is shown if optimizer state is offloaded.

    Args:
        stage_memories: the result of ``StageMemory.as_json`` for each stage, in order.
    """
    from rich.table import Table

    column_headings = {
        "stage": "stage",
        "in_flight": "in flight",
        **{part: part for part in GPU_MEMORY_PARTS},
        "total": "total",
    }
    if any(stage_memory["host"] for stage_memory in stage_memories):
        column_headings["host"] = "host"

    table = Table(*column_headings.values(), title=title)
    for stage_memory in stage_memories:
        table.add_row(*(str(stage_memory[name]) for name in column_headings))
    return table
