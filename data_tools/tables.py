"""Reads the rows of Parquet and Arrow files as records, a few at a time.

A column of pictures is a structure of ``bytes`` and ``path``, as ``datasets`` writes it, or bytes. Tables
fill the fields that a structure lacks with null, so null fields are left out, at every depth: a tool call
would otherwise get the arguments of all others, with null in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SUFFIXES = (".parquet", ".arrow")
BYTES_AT_ONCE = 32 << 20
MOST_ROWS = 64


def read_rows(
    path: Path, on_bytes: Callable[[int], None], wanted: Callable[[int, int], bool]
) -> Iterator[tuple[int, Any]]:
    """Yields (row number from 1, record); None in place of records that are not ``wanted(first, end)``.

    ``on_bytes`` receives the file's bytes, in proportion to its rows.

    Raises:
        ValueError: the file is damaged (pyarrow's errors are such).
    """
    read = _parquet if path.suffix == ".parquet" else _arrow
    size = path.stat().st_size
    number = told = 0
    for rows, total in read(path, wanted):
        number += len(rows)
        share = size * number // max(total, number, 1)
        on_bytes(share - told)
        told = share
        yield from enumerate(rows, number - len(rows) + 1)


def _parquet(path: Path, wanted: Callable[[int, int], bool]) -> Iterator[tuple[list[Any], int]]:
    """Yields (rows, number of rows in the file). Row groups without wanted rows are not read."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        start = 0
        for group in range(file.num_row_groups):
            meta = file.metadata.row_group(group)
            rows = meta.num_rows
            if not wanted(start, start + rows):
                yield from (
                    ([None] * min(MOST_ROWS, rows - i), file.metadata.num_rows)
                    for i in range(0, rows, MOST_ROWS)
                )
                start += rows
                continue

            at_once = max(1, min(MOST_ROWS, BYTES_AT_ONCE * rows // max(meta.total_byte_size, 1)))
            for batch in file.iter_batches(at_once, row_groups=[group], use_threads=False):
                yield _records(batch, start, wanted), file.metadata.num_rows
                start += batch.num_rows


def _arrow(path: Path, wanted: Callable[[int, int], bool]) -> Iterator[tuple[list[Any], int]]:
    """Yields (rows, 0): a stream does not say how many rows it has."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        try:
            batches: Any = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            file = pa.ipc.open_file(source)
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
        start = 0
        for batch in batches:
            at_once = max(1, min(MOST_ROWS, BYTES_AT_ONCE * batch.num_rows // max(batch.nbytes, 1)))
            for i in range(0, batch.num_rows, at_once):
                rows = batch.slice(i, at_once)
                yield _records(rows, start, wanted), 0
                start += rows.num_rows


def _records(batch: Any, start: int, wanted: Callable[[int, int], bool]) -> list[Any]:
    if not wanted(start, start + batch.num_rows):
        return [None] * batch.num_rows
    return [_filled(row) for row in batch.to_pylist()]


def _filled(value: Any) -> Any:
    """A value without the null fields of its structures."""
    if isinstance(value, dict):
        return {name: _filled(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_filled(item) for item in value]
    return value
