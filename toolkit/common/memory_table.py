"""The memory of a GPU of each pipeline stage as a table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_vl.estimate.memory import GPU_MEMORY_PARTS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TABLE_WIDTH = 132
"""Columns of a terminal in which no heading is cut off, where rich would write "wei…"."""


def wide_console() -> Console:
    """A console on standard output as wide as :func:`memory_table`; a terminal wraps its lines itself."""
    from rich.console import Console

    console = Console(highlight=False, file=sys.stdout)
    console.width = max(console.width, TABLE_WIDTH)
    return console


def memory_table(stage_memories: Sequence[Mapping[str, Any]], title: str) -> Table:
    """One line per stage, in GiB. A column of host memory is shown if optimizer state is offloaded.

    Args:
        stage_memories: the result of ``StageMemory.as_json`` for each stage, in order.
    """
    from rich.table import Table

    columns = ["stage", "in_flight", *GPU_MEMORY_PARTS, "total"]
    if any(stage_memory["host"] for stage_memory in stage_memories):
        columns.append("host")

    table = Table(*(name.replace("_", " ") for name in columns), title=title)
    for stage_memory in stage_memories:
        table.add_row(*(str(stage_memory[name]) for name in columns))
    return table
