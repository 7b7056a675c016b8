"""Reads files of records as a stream, never whole in memory: a JSON array, JSON lines (both also as .gz or
.zst), Parquet, and Arrow."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from megatron_vl.errors import UserError

from . import tables

CHUNK = 1 << 20
LARGEST_RECORD = 1 << 30
READS_ALL = json.JSONDecoder()
PASSES_INTEGERS_OVER = json.JSONDecoder(parse_int=len)
"""Finds the end of a record with an integer that has more digits than Python reads."""
DEEPEST = 200
"""Levels of lists and objects in a record. Worker processes cannot receive what is nested a lot deeper."""


class ReadError(UserError, ValueError):
    """A file that cannot be read any further; the message names the file and the record."""


class BadLine(str):
    """Says what is wrong with a line of a JSON-lines file or a record of an array, in its place; ``reason``
    is what it counts under."""

    reason = "not JSON"

    @classmethod
    def of(cls, reason: str, detail: object) -> BadLine:
        line = cls(detail)
        line.reason = reason
        return line

    def __reduce__(self) -> tuple[Any, ...]:
        return BadLine.of, (self.reason, str(self))


def _all(first: int, end: int) -> bool:
    return True


def read_records(
    path: Path,
    on_bytes: Callable[[int], None] = lambda n: None,
    wanted: Callable[[int, int], bool] = _all,
) -> Iterator[tuple[int, Any]]:
    """Yields ``(number, record)``: the line number in JSON lines, or the position in a JSON array or a table,
    from 1.

    A line that is not JSON, or a record that is nested too deeply or has an integer that Python does not
    read, is yielded as a :class:`BadLine`, and reading continues.

    Args:
        on_bytes: receives the number of bytes read for each record.
        wanted: whether records from the ``first`` to before the ``end`` of those that are yielded, counted
            from 0, are of use; the others are yielded as None, and their lines are not parsed.

    Raises:
        ReadError: a JSON array or a table is broken (the start of its next record is unknown), or the file
            is empty.
    """
    if path.suffix in tables.SUFFIXES:
        try:
            yield from tables.read_rows(path, on_bytes, wanted)
        except (ValueError, OSError) as error:
            raise ReadError(f"{path} cannot be read: {error}") from error
        return

    array = is_array(path)
    with _opened(path) as (raw, file):
        told = 0

        def tell(count: int) -> None:
            nonlocal told
            on_bytes(raw.tell() - told)
            told = raw.tell()

        counted = on_bytes if file is raw else tell
        yield from _array(path, file, counted) if array else _lines(file, counted, wanted)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], Any]]:
    """A file and its content, which may be compressed. Raises ReadError if that is damaged."""
    try:
        with path.open("rb") as raw, _unpacked(path, raw) as file:
            yield raw, file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ReadError(f"{path} is damaged: {error}") from error
    except OSError as error:
        if path.suffix != ".zst" or error.errno:
            raise
        raise ReadError(f"{path} is damaged: {error}") from error


def _unpacked(path: Path, raw: IO[bytes]) -> Any:
    """The content of a file that may be compressed, by its suffix."""
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if path.suffix == ".zst":
        import io

        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(raw, "zstd"), CHUNK)
    return raw


def is_array(path: Path) -> bool:
    """Whether a file is a JSON array rather than JSON lines. Raises ReadError if it is empty."""
    if path.suffix in tables.SUFFIXES:
        return False
    with _opened(path) as (_, file):
        start = file.read(CHUNK).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if not start:
        raise ReadError(f"{path} is empty")
    return start == b"["


def _lines(
    file: IO[bytes], on_bytes: Callable[[int], None], wanted: Callable[[int, int], bool]
) -> Iterator[tuple[int, Any]]:
    number = yielded = 0
    while line := file.readline(LARGEST_RECORD):
        number += 1
        on_bytes(len(line))
        if len(line) == LARGEST_RECORD and not line.endswith(b"\n"):
            yield (
                number,
                BadLine.of("line too long", f"the line does not end within {LARGEST_RECORD >> 20} MiB"),
            )
            yielded += 1
            while line and not line.endswith(b"\n"):
                line = file.readline(LARGEST_RECORD)
                on_bytes(len(line))
            continue

        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            yield number, _parsed(line) if wanted(yielded, yielded + 1) else None
            yielded += 1


def _parsed(line: bytes) -> Any:
    try:
        opened = line.count(b"[") + line.count(b"{")
        return _not_too_deep(json.loads(line.decode()), opened)
    except UnicodeDecodeError as error:
        return BadLine.of("not UTF-8", error)
    except (json.JSONDecodeError, RecursionError) as error:
        return BadLine.of("not JSON", error)
    except ValueError:
        return _long_integer()


def _long_integer() -> BadLine:
    """What is wrong with a record that Python's limit on the digits of an integer refuses."""
    most = sys.get_int_max_str_digits()
    return BadLine.of("integer too long", f"an integer has more than {most} digits; write it as a string")


def _not_too_deep(value: Any, opened: int) -> Any:
    """A parsed record, or what is wrong with it. ``opened``: the number of brackets and braces in its text,
    which spares most records the search."""
    if opened <= DEEPEST:
        return value
    level = [value]
    for _ in range(DEEPEST):
        held = (item.values() if isinstance(item, dict) else item for item in level)
        level = [child for items in held for child in items if isinstance(child, (dict, list))]
        if not level:
            return value
    return BadLine.of("nested too deeply", f"the record has more than {DEEPEST} levels of lists and objects")


def _array(path: Path, file: IO[bytes], on_bytes: Callable[[int], None]) -> Iterator[tuple[int, Any]]:
    buffer = _Buffer(file, on_bytes, path)
    buffer.skip("[")
    number = 0
    while buffer.peek(number) != "]":
        if number:
            if buffer.peek(number) != ",":
                raise ReadError(f"{path}: no comma after record {number}")
            buffer.skip(",")
        number += 1
        yield number, buffer.record(number)
    buffer.finish()


class _Buffer:
    """The text of a file from the current position on; grows until it contains a whole record."""

    def __init__(self, file: IO[bytes], on_bytes: Callable[[int], None], path: Path) -> None:
        import codecs

        self.file = file
        self.on_bytes = on_bytes
        self.path = path
        self.decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self.text = ""
        self.at = 0
        self.ended = False
        self.told = 0
        """The position in the text up to which ``on_bytes`` has been informed."""
        self.number = 0
        """Number of the record that was read last."""

    def grow(self, size: int) -> None:
        data = self.file.read(size)
        self.tell()
        self.ended = len(data) < size
        try:
            self.text = self.text[self.at :] + self.decode(data, self.ended)
        except UnicodeDecodeError as error:
            raise ReadError(f"{self.path}: not UTF-8 after record {self.number}: {error}") from error
        self.at = self.told = 0

    def tell(self) -> None:
        """Reports the bytes consumed since the last call, without those that were only read ahead."""
        self.on_bytes(len(self.text[self.told : self.at].encode()))
        self.told = self.at

    def peek(self, number: int) -> str:
        """The next character that is not white space."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in " \t\r\n":
                self.at += 1
            if self.at < len(self.text):
                return self.text[self.at]
            if self.ended:
                raise ReadError(f"{self.path} ends within its array, after record {number}")
            self.grow(CHUNK)

    def skip(self, wanted: str) -> None:
        if self.peek(0) == wanted:
            self.at += 1

    def finish(self) -> None:
        """Checks that nothing follows the end of the array."""
        self.skip("]")
        while not self.text[self.at :].strip(" \t\r\n"):
            if self.ended:
                return
            self.at = len(self.text)
            self.grow(CHUNK)
        raise ReadError(
            f"{self.path}: something follows the end of the array, after record {self.number}; "
            "is it two files in one?"
        )

    def record(self, number: int) -> Any:
        self.peek(number - 1)
        size = CHUNK
        parser, refused = READS_ALL, None
        while True:
            try:
                value, end = parser.raw_decode(self.text, self.at)
                # A number at the end of the buffer may continue in the next chunk.
                if end < len(self.text) or self.ended:
                    opened = self.text.count("[", self.at, end) + self.text.count("{", self.at, end)
                    self.at = end
                    self.number = number
                    self.tell()
                    return refused or _not_too_deep(value, opened)
            except RecursionError as error:
                raise ReadError(f"{self.path}: record {number} is nested too deeply") from error
            except json.JSONDecodeError as error:
                # The record is cut off at the end of the buffer, or broken: a cut leaves an open string, or
                # fails within the last characters.
                cut = error.msg.startswith("Unterminated string") or error.pos >= len(self.text) - 12
                if self.ended or not cut:
                    what = error.msg.removesuffix(" starting at")
                    near = self.text[error.pos : error.pos + 40]
                    raise ReadError(
                        f"{self.path}: record {number} is not valid JSON: {what}, at {near!r}"
                    ) from error
            except ValueError:  # from here on, only the end of the record is looked for
                parser, refused = PASSES_INTEGERS_OVER, _long_integer()
                continue

            if len(self.text) - self.at > LARGEST_RECORD:
                raise ReadError(
                    f"{self.path}: record {number} does not end within {LARGEST_RECORD >> 20} MiB; "
                    "is a quote missing?"
                )

            size *= 2
            self.grow(size)
