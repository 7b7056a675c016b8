"""The memory of a GPU of each pipeline stage as a table."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_vl.estimate.memory import GPU_MEMORY_PARTS


def wide_console() -> Console:
    """A console on standard output as wide as :func:`memory_table`; a terminal wraps its lines itself."""
    console = Console(highlight=False, file=sys.stdout)
    # In 132 columns no heading is cut off, where rich would write "wei…".
    console.width = max(console.width, 132)
    return console


def memory_table(stage_memories: Sequence[Mapping[str, Any]], title: str) -> Table:
    """One line per stage, in GiB. A column of host memory is shown if optimizer state is offloaded.

    Args:
        stage_memories: the result of ``StageMemory.as_json`` for each stage, in order.
    """
    columns = ["stage", "in_flight", *GPU_MEMORY_PARTS, "total"]
    columns += ["host"] * any(stage_memory["host"] for stage_memory in stage_memories)
    table = Table(*(name.replace("_", " ") for name in columns), title=title)
    for stage_memory in stage_memories:
        table.add_row(*(str(stage_memory[name]) for name in columns))
    return table
