"""Files of JSON lines to which a run appends."""

from __future__ import annotations

import os
from pathlib import Path

_BLOCK_BYTES = 1 << 16
"""Bytes that are read at a time to find the end of the last complete line."""


def drop_incomplete_line(lines_path: Path) -> None:
    """Cuts off a last line that a kill or a full disk left incomplete, so that none is appended to it."""
    if not lines_path.exists():
        return
    with lines_path.open("r+b") as lines_file:
        complete_bytes, last_line_end = lines_file.seek(0, os.SEEK_END), 0
        while complete_bytes and not last_line_end:
            block_start = max(0, complete_bytes - _BLOCK_BYTES)
            lines_file.seek(block_start)
            last_line_end = lines_file.read(complete_bytes - block_start).rfind(b"\n") + 1
            complete_bytes = block_start + last_line_end
        lines_file.truncate(complete_bytes)
