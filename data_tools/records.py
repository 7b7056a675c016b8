"""Reads files of records as a stream: a JSON array, JSON lines (both also as .gz or .zst), or a table.

No file is in memory as a whole. What Python's JSON parser would change without a word is refused.

In a table, a column of images is a structure of ``bytes`` and ``path``, as ``datasets`` writes it, or bytes.
Tables fill the fields that a structure lacks with null, so null fields are left out, at every depth: a tool
call would otherwise get the arguments of all others, with null in them.
"""

import codecs
import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, TextIO

from megatron_vl.data.sample.written_numbers import read_number
from megatron_vl.system.errors import UserError

EXACT_DIGITS = 15
"""A decimal number of so many digits is the same after it was a float."""
CHUNK_BYTES = 1 << 20
COMPRESSION_SUFFIXES = (".gz", ".zst")
WHITE_SPACE = re.compile(r"[ \t\r\n]*")
MAX_RECORD_BYTES = 1 << 30
INTEGER_SKIPPING_DECODER = json.JSONDecoder(parse_int=len)
"""Finds the end of a record that is refused for its keys, or for an integer that Python does not read."""
HEADED_SUFFIXES = (".parquet", ".csv", ".tsv")
"""Tables of which :func:`column_names` reads the columns alone."""
TABLE_SUFFIXES = (".parquet", ".arrow", ".csv", ".tsv")
MAX_BATCH_BYTES = 32 << 20
MAX_BATCH_ROWS = 64
MAX_NESTING = 200
"""Levels of lists and objects in a record. Worker processes cannot receive what is nested a lot deeper."""


class DuplicateKeyError(UserError, ValueError):
    """A JSON object has a key twice. Python would keep the last value without a word."""


class RoundedNumber(float):
    """A number with another value than was written, for instance 0 for 1e-400.

    It is refused only where it would be written again, as in the arguments of a call.
    """


class ConvertError(UserError, ValueError):
    """A conversion that cannot be made; the message says what to do."""


class UnreadableRecord(NamedTuple):
    """Takes the place of a record that cannot be read."""

    reason: str
    detail: str


def _read_float(number_text: str) -> float:
    number = read_number(number_text)
    if len(number_text) <= EXACT_DIGITS and "e" not in number_text and "E" not in number_text:
        return number
    try:
        is_exact = Decimal(number_text) == Decimal(repr(float(number)))
    except ArithmeticError:  # an exponent that even Decimal does not read
        is_exact = False
    return number if is_exact else RoundedNumber(number)


def unique_keys(key_value_pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a JSON parser (``object_pairs_hook``). Raises DuplicateKeyError."""
    json_object = dict(key_value_pairs)
    if len(json_object) < len(key_value_pairs):
        keys = [key for key, _ in key_value_pairs]
        repeated_key = next(key for key in json_object if keys.count(key) > 1)
        raise DuplicateKeyError(f"the key {repeated_key[:100]!r} occurs twice in one object")
    return json_object


EXACT_DECODER = json.JSONDecoder(parse_float=_read_float, object_pairs_hook=unique_keys)


def read_records(
    records_path: Path,
    on_bytes: Callable[[int], None] = lambda n: None,
    is_wanted: Callable[[int, int], bool] = lambda first_record, end_record: True,
) -> Iterator[tuple[int, Any]]:
    """Yields ``(number, record)``. Numbers count from 1 the lines, or the entries of an array or a table.

    A line that is not JSON, or a record that is nested too deeply or has an integer that Python does not
    read, is yielded as a :class:`UnreadableRecord`, and reading continues.

    Args:
        on_bytes: receives the number of bytes read for each record.
        is_wanted: whether one of the records from ``first_record`` to before ``end_record`` is of use. They
            are counted from 0 in the order in which they are yielded. The others are yielded as None, and
            their lines are not parsed.

    Raises:
        ConvertError: a JSON array or a table is broken (the start of its next record is unknown), or the file
            is empty.
    """
    if records_path.suffix in TABLE_SUFFIXES:
        try:
            yield from read_rows(records_path, on_bytes, is_wanted)
        except (ValueError, OSError) as error:
            raise ConvertError(f"{records_path} cannot be read: {error}") from error
        return
    is_compressed, inner_suffix = records_path.suffix in COMPRESSION_SUFFIXES, Path(records_path.stem).suffix
    if is_compressed and inner_suffix in TABLE_SUFFIXES:
        raise ConvertError(f"{records_path} is a compressed table, which is not read; decompress it first")

    with _open_content(records_path) as (raw_file, content_file):
        # Only looked at, because a pipe cannot be read twice.
        first_bytes = content_file.peek(CHUNK_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
        if not first_bytes:
            raise ConvertError(f"{records_path} is empty")

        reported_position = 0

        def count_bytes(text_bytes: int) -> None:
            nonlocal reported_position
            if content_file is not raw_file:  # progress is measured in the bytes of the compressed file
                text_bytes = raw_file.tell() - reported_position
                reported_position += text_bytes
            on_bytes(text_bytes)

        if first_bytes.startswith(b"["):
            yield from _read_array(records_path, content_file, count_bytes)
        else:
            yield from _read_json_lines(records_path, content_file, count_bytes, is_wanted)


@contextmanager
def _open_content(records_path: Path) -> Iterator[tuple[IO[bytes], Any]]:
    """A file and its content, which may be compressed. Raises ConvertError if that is damaged."""
    try:
        with (
            records_path.open("rb", CHUNK_BYTES) as raw_file,
            _decompressed(records_path, raw_file) as content_file,
        ):
            yield raw_file, content_file
    except (EOFError, OSError, zlib.error) as error:
        # gzip and pyarrow report damaged data as an OSError without a number.
        if isinstance(error, OSError) and error.errno:
            raise
        raise ConvertError(f"{records_path} is damaged: {error}") from error


def _decompressed(records_path: Path, raw_file: IO[bytes]) -> Any:
    if records_path.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw_file)
    if records_path.suffix == ".zst":
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(raw_file, "zstd"), CHUNK_BYTES)
    return raw_file


def _read_json_lines(
    records_path: Path,
    content_file: IO[bytes],
    on_bytes: Callable[[int], None],
    is_wanted: Callable[[int, int], bool],
) -> Iterator[tuple[int, Any]]:
    line_number = num_yielded = 0
    while line := content_file.readline(MAX_RECORD_BYTES):
        line_number += 1
        on_bytes(len(line))
        if len(line) == MAX_RECORD_BYTES and not line.endswith(b"\n"):
            detail = f"the line does not end within {MAX_RECORD_BYTES >> 20} MiB"
            yield line_number, UnreadableRecord("line too long", detail)
            num_yielded += 1
            # The rest of the line is read and dropped, in pieces.
            while line and not line.endswith(b"\n"):
                line = content_file.readline(MAX_RECORD_BYTES)
                on_bytes(len(line))
            continue

        if line_number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            record = _parse_line(line) if is_wanted(num_yielded, num_yielded + 1) else None
            if isinstance(record, UnreadableRecord) and not line.endswith(b"\n"):
                if record.reason in ("not JSON", "not UTF-8"):
                    raise ConvertError(
                        f"{records_path} ends within line {line_number} ({record.detail}): fetch the whole"
                        " file, or end that line if it is the last one"
                    )
            yield line_number, record
            num_yielded += 1


def _parse_line(line: bytes) -> Any:
    try:
        return _check_nesting(EXACT_DECODER.decode(line.decode()), line.count(b"[") + line.count(b"{"))
    except UnicodeDecodeError as error:
        return UnreadableRecord("not UTF-8", str(error))
    except (json.JSONDecodeError, RecursionError) as error:
        return UnreadableRecord("not JSON", str(error))
    except ValueError as error:
        return _unreadable(error)


def _unreadable(error: ValueError) -> UnreadableRecord:
    """The record of an error of :data:`EXACT_DECODER` in valid JSON."""
    if isinstance(error, DuplicateKeyError):
        return UnreadableRecord("duplicate key", str(error))
    digits = sys.get_int_max_str_digits()
    return UnreadableRecord("integer too long", f"more than {digits} digits; write the integer as a string")


def _check_nesting(json_value: Any, num_brackets: int) -> Any:
    """A parsed record, or what is wrong with it.

    Args:
        num_brackets: number of brackets and braces in its text. It bounds the depth, which spares most
            records the search.
    """
    if num_brackets <= MAX_NESTING:
        return json_value
    containers = [json_value]
    for _ in range(MAX_NESTING):
        children = (c.values() if isinstance(c, dict) else c for c in containers)
        containers = [child for child in chain.from_iterable(children) if isinstance(child, (dict, list))]
    if not containers:
        return json_value
    detail = f"the record has more than {MAX_NESTING} levels of lists and objects"
    return UnreadableRecord("nested too deeply", detail)


def _read_array(
    records_path: Path, content_file: IO[bytes], on_bytes: Callable[[int], None]
) -> Iterator[tuple[int, Any]]:
    text = _ArrayText(content_file, on_bytes, records_path)
    while (character := text.next_character()) != "]":
        if not character:
            raise ConvertError(f"{records_path} ends within its array, after record {text.num_records}")
        if text.num_records and character != ",":
            raise ConvertError(f"{records_path}: no comma after record {text.num_records}")
        text.position += 1  # the bracket or the comma
        if text.num_records or text.next_character() != "]":
            yield text.num_records + 1, text.read_record()
    text.position += 1
    if text.next_character():
        raise ConvertError(
            f"{records_path}: something follows the end of the array, after record {text.num_records};"
            " is it two files in one?"
        )


class _ArrayText:
    """The text of a JSON array from the current position on. It grows until it contains a whole record."""

    def __init__(self, content_file: IO[bytes], on_bytes: Callable[[int], None], records_path: Path) -> None:
        self.stream = io.TextIOWrapper(content_file, "utf-8-sig", newline="")
        self.on_bytes, self.path = on_bytes, records_path
        self.text, self.position, self.num_records = "", 0, 0

    def grow(self, num_characters: int = CHUNK_BYTES) -> bool:
        try:
            new_text = self.stream.read(num_characters)
        except UnicodeDecodeError as error:
            raise ConvertError(f"{self.path}: not UTF-8 after record {self.num_records}: {error}") from error
        self.text, self.position = self.text[self.position :] + new_text, 0
        return bool(new_text)

    def next_character(self) -> str:
        """The next character that is not white space; empty at the end of the file."""
        while True:
            self.position = WHITE_SPACE.match(self.text, self.position).end()  # type: ignore[union-attr]
            if self.position < len(self.text):
                return self.text[self.position]
            if not self.grow():
                return ""

    def read_record(self) -> Any:
        self.next_character()
        record_number, num_characters = self.num_records + 1, CHUNK_BYTES
        json_decoder, refused_record = EXACT_DECODER, None
        while True:
            try:
                json_value, end_position = json_decoder.raw_decode(self.text, self.position)
                # A number at the end of the buffer may continue in the next chunk.
                if end_position == len(self.text) and self.grow():
                    continue
                record_text = self.text[self.position : end_position]
                self.on_bytes(len(record_text.encode()))
                self.position, self.num_records = end_position, record_number
                num_brackets = record_text.count("[") + record_text.count("{")
                return refused_record or _check_nesting(json_value, num_brackets)
            except RecursionError as error:
                raise ConvertError(f"{self.path}: record {record_number} is nested too deeply") from error
            except json.JSONDecodeError as error:
                # A cut leaves an open string, or fails within the last characters.
                is_cut_off = error.msg.startswith("Unterminated string") or error.pos >= len(self.text) - 12
                error_text = error.msg.removesuffix(" starting at")
                nearby_text = self.text[error.pos : error.pos + 40]
                if len(self.text) - self.position > MAX_RECORD_BYTES:
                    error_text = f"it does not end within {MAX_RECORD_BYTES >> 20} MiB; is a quote missing?"
                    is_cut_off = False
                # Chunks double, so that a long record is not parsed again for every MiB of it.
                num_characters *= 2
                if not is_cut_off or not self.grow(num_characters):
                    raise ConvertError(
                        f"{self.path}: record {record_number} is not valid JSON: {error_text}, at"
                        f" {nearby_text!r}"
                    ) from error
            except ValueError as error:  # from here on, only the end of the record is looked for
                json_decoder, refused_record = INTEGER_SKIPPING_DECODER, _unreadable(error)


# --- Tables -------------------------------------------------------------------------------------------------


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
                for start in range(0, num_rows, MAX_BATCH_ROWS):  # a row group may have millions of rows
                    yield [None] * min(MAX_BATCH_ROWS, num_rows - start), parquet_file.metadata.num_rows
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
    return [_without_nulls(item) for item in field_value] if isinstance(field_value, list) else field_value
