"""Reads the rows of Parquet, Arrow and CSV files as records, a few at a time.

A column of images is a structure of ``bytes`` and ``path``, as ``datasets`` writes it, or bytes. Tables
fill the fields that a structure lacks with null, so null fields are left out, at every depth: a tool call
would otherwise get the arguments of all others, with null in them.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

HEADED_SUFFIXES = (".parquet", ".csv", ".tsv")
"""Tables of which :func:`column_names` reads the columns alone."""
TABLE_SUFFIXES = (".parquet", ".arrow", ".csv", ".tsv")
MAX_BATCH_BYTES = 32 << 20
MAX_BATCH_ROWS = 64


def read_rows(
    table_path: Path, on_bytes: Callable[[int], None], is_wanted: Callable[[int, int], bool]
) -> Iterator[tuple[int, Any]]:
    """Yields (row number from 1, record).

    Args:
        on_bytes: receives the file's bytes, in proportion to its rows.
        is_wanted: whether one of the rows from the first argument to before the second, counted from 0, is of
            use. None may take the place of a record that is not.

    Raises:
        ValueError: the file is damaged (pyarrow's errors are such).
    """
    read_table = {".parquet": _read_parquet, ".arrow": _read_arrow}.get(table_path.suffix, _read_csv)
    file_size = table_path.stat().st_size
    row_number = reported_bytes = 0
    for table_rows, total_rows in read_table(table_path, is_wanted):
        row_number += len(table_rows)
        bytes_done = file_size * row_number // max(total_rows, row_number, 1)
        on_bytes(bytes_done - reported_bytes)
        reported_bytes = bytes_done
        yield from enumerate(table_rows, row_number - len(table_rows) + 1)


def _read_parquet(table_path: Path, is_wanted: Callable[[int, int], bool]) -> Iterator[tuple[list[Any], int]]:
    """Yields (rows, number of rows in the file). Row groups without wanted rows are not read."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(table_path, buffer_size=1 << 20, pre_buffer=False) as parquet_file:
        row_start = 0
        for row_group in range(parquet_file.num_row_groups):
            group_metadata = parquet_file.metadata.row_group(row_group)
            num_rows = group_metadata.num_rows
            if not is_wanted(row_start, row_start + num_rows):
                yield [None] * num_rows, parquet_file.metadata.num_rows
                row_start += num_rows
                continue

            rows_per_batch = _rows_per_batch(num_rows, group_metadata.total_byte_size)
            for record_batch in parquet_file.iter_batches(
                rows_per_batch, row_groups=[row_group], use_threads=False
            ):
                yield _batch_records(record_batch, row_start, is_wanted), parquet_file.metadata.num_rows
                row_start += record_batch.num_rows


def _read_arrow(table_path: Path, is_wanted: Callable[[int, int], bool]) -> Iterator[tuple[list[Any], int]]:
    """Yields (rows, 0): a stream does not say how many rows it has."""
    import pyarrow as pa

    with pa.memory_map(str(table_path)) as memory_map:
        try:
            record_batches: Any = pa.ipc.open_stream(memory_map)
        except pa.ArrowInvalid:
            arrow_file = pa.ipc.open_file(memory_map)
            record_batches = (arrow_file.get_batch(i) for i in range(arrow_file.num_record_batches))
        row_start = 0
        for record_batch in record_batches:
            rows_per_batch = _rows_per_batch(record_batch.num_rows, record_batch.nbytes)
            for i in range(0, record_batch.num_rows, rows_per_batch):
                batch_slice = record_batch.slice(i, rows_per_batch)
                yield _batch_records(batch_slice, row_start, is_wanted), 0
                row_start += batch_slice.num_rows


def column_names(table_path: Path) -> list[str]:
    """The columns of a Parquet, CSV or TSV file. Raises ValueError as :func:`read_rows`."""
    if table_path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return list(pq.read_schema(table_path).names)
    with table_path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as table_file:
        return _read_header(table_path, table_file)[0]


def _read_header(table_path: Path, table_file: TextIO) -> tuple[list[str], Any]:
    csv.field_size_limit(MAX_BATCH_BYTES)
    reader = csv.reader(table_file, delimiter="\t" if table_path.suffix == ".tsv" else ",", strict=True)
    names = next(reader, [])
    _check_utf8(names)
    if len(names) == 1 and ";" in names[0]:
        raise ValueError("the first line has semicolons and no comma; write the file with commas")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"the first line must name each column once, and is {names}")
    return names, reader


def _read_csv(table_path: Path, is_wanted: Callable[[int, int], bool]) -> Iterator[tuple[list[Any], int]]:
    """Yields (rows, 0). The first line names the columns; an empty field is a missing one."""
    with table_path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as table_file:
        names, reader = _read_header(table_path, table_file)
        try:
            for values in filter(None, reader):
                _check_utf8(values)
                if len(values) != len(names):
                    raise ValueError(f"{len(values)} fields instead of {len(names)}")
                yield [{name: text for name, text in zip(names, values, strict=True) if text}], 0
        except (csv.Error, ValueError) as error:
            raise ValueError(f"line {reader.line_num}: {error}") from error


def _check_utf8(values: list[str]) -> None:
    try:
        "".join(values).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it is not UTF-8; save the file as UTF-8") from error


def _rows_per_batch(num_rows: int, num_bytes: int) -> int:
    return max(1, min(MAX_BATCH_ROWS, MAX_BATCH_BYTES * num_rows // max(num_bytes, 1)))


def _batch_records(record_batch: Any, row_start: int, is_wanted: Callable[[int, int], bool]) -> list[Any]:
    if not is_wanted(row_start, row_start + record_batch.num_rows):
        return [None] * record_batch.num_rows
    return [_without_nulls(row) for row in record_batch.to_pylist()]


def _without_nulls(field_value: Any) -> Any:
    """A value without the null fields of its structures."""
    if isinstance(field_value, dict):
        return {name: _without_nulls(item) for name, item in field_value.items() if item is not None}
    if isinstance(field_value, list):
        return [_without_nulls(item) for item in field_value]
    return field_value
