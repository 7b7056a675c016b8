"""Reads and writes safetensors files a few megabytes at a time.

The safetensors library writes whole files. Conversions of models larger than memory need regions of tensors,
and files that are filled in place. A file consists of 8 bytes with the length of the header, a JSON header,
and the raw tensors.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_vl import durable, progress
from megatron_vl.errors import UserError

CHUNK_BYTES = 4 << 20
"""Number of bytes to read, hash and write at a time. Together with the number of workers, it bounds the
memory of a conversion."""

MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""A flag of Linux for which Python's mmap has no name."""
MAPPED_BYTES = 16 << 20
"""Largest number of bytes of a file that stay mapped."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The types that weights may have: safetensors' code -> torch's type."""
CODES = {dtype: code for code, dtype in DTYPES.items()}
OTHER_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types that can be compared and stored but not converted."""
ALL_CODES = CODES | {dtype: code for code, dtype in OTHER_DTYPES.items()}
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}


class WeightsError(UserError, ValueError):
    """Weights cannot be read or written. The message names the file or tensor and says what to do."""


class Region(NamedTuple):
    """Rows ``row:row_end`` and columns ``col:col_end`` of a matrix."""

    row: int
    row_end: int
    col: int
    col_end: int


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """The shape of a tensor as a matrix: dim 0 by all others. A vector is one column, a scalar one element.

    A tensor with three dimensions is a stack of matrices (experts), one below the other, so that rows do not
    become too long.
    """
    if not shape:
        return 1, 1
    if len(shape) == 3:
        return shape[0] * shape[1], shape[2]
    columns = 1
    for n in shape[1:]:
        columns *= n
    return shape[0], columns


def full_region(shape: Sequence[int]) -> Region:
    rows, cols = matrix_shape(shape)
    return Region(0, rows, 0, cols)


def row_regions(shape: Sequence[int], itemsize: int) -> Iterator[Region]:
    """Regions of whole rows that cover a matrix, each of about :data:`CHUNK_BYTES`."""
    rows, cols = matrix_shape(shape)
    step = max(1, CHUNK_BYTES // max(1, cols * itemsize))
    for row in range(0, rows, step):
        yield Region(row, min(rows, row + step), 0, cols)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class TensorReader:
    """Reads a safetensors file region by region through a memory map that stays small.

    Mapping is several times cheaper than reading into new memory. Used pages are released while reading
    continues, so that a conversion does not appear to use memory for the whole checkpoint.

    Raises:
        WeightsError: the file is missing or not a complete safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise WeightsError(f"{path} is missing")
        header = read_header(path)
        try:
            # The library checks the header for wrong ranges, overlaps, gaps and lengths.
            with safe_open(path, framework="numpy"):
                pass
        except SafetensorError as error:
            raise WeightsError(
                f"{path} is not a whole safetensors file ({error}); fetch or write it again"
            ) from error

        self._entries: dict[str, dict[str, Any]] = json.loads(header[8:])
        self._entries.pop("__metadata__", None)
        self._start = len(header)
        # The map is private and writable, because torch needs a writable buffer. It reserves no memory,
        # because a file may be larger than the memory. Nothing writes to it.
        with open(path, "rb") as file:
            flags = mmap.MAP_PRIVATE | MAP_NORESERVE
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            self._map = mmap.mmap(file.fileno(), 0, flags, protection)

        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._used = 0

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name]["shape"])

    def code(self, name: str) -> str:
        """The type of a tensor in safetensors' notation, such as ``BF16``."""
        return self._entries[name]["dtype"]

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor. Raises :class:`WeightsError` if weights cannot have this type."""
        if self.code(name) not in DTYPES:
            valid = ", ".join(DTYPES)
            raise WeightsError(
                f"{self.path}: tensor {name!r} has type {self.code(name)}; weights may be {valid}, not"
                " quantised"
            )
        return DTYPES[self.code(name)]

    def region(self, name: str, region: Region) -> Tensor:
        """A region ``[rows, cols]`` of a tensor as a matrix. It is a view of the file: do not write to it.

        Raises:
            WeightsError: tensors of this type cannot be read.
        """
        if self.code(name) not in DTYPES | OTHER_DTYPES:
            raise WeightsError(
                f"{self.path}: tensor {name!r} has type {self.code(name)}, which this program does not read"
            )
        dtype = (DTYPES | OTHER_DTYPES)[self.code(name)]
        cols = matrix_shape(self.shape(name))[1]
        first = self._start + self._entries[name]["data_offsets"][0]
        start = first + region.row * cols * dtype.itemsize
        end = first + region.row_end * cols * dtype.itemsize

        data = self._bytes[start:end]
        self._give_back(len(data))
        if start % dtype.itemsize:
            # The format allows unaligned tensors, although no current program writes them. torch cannot view
            # them.
            data = data.clone()
        return data.view(dtype).view(-1, cols)[:, region.col : region.col_end]

    def _give_back(self, count: int) -> None:
        """Releases all mapped pages once in a while.

        If a reader still uses a page, the kernel maps it again from the page cache.
        """
        self._used += count
        if self._used > MAPPED_BYTES:
            self._used = count
            self._map.madvise(mmap.MADV_DONTNEED)

    def sha256(self, name: str, seen: Callable[[int], object] | None = None) -> str:
        """The SHA-256 of a tensor's stored bytes. ``seen`` is called with the size in bytes of each piece."""
        digest = hashlib.sha256()
        start, end = (self._start + at for at in self._entries[name]["data_offsets"])
        for at in range(start, end, CHUNK_BYTES):
            data = self._bytes[at : min(end, at + CHUNK_BYTES)]
            self._give_back(len(data))
            digest.update(memoryview(data.numpy()))
            if seen:
                seen(len(data))
        return digest.hexdigest()

    def tensor(self, name: str) -> Tensor:
        """A copy of a whole tensor."""
        return self.region(name, full_region(self.shape(name))).clone().reshape(self.shape(name))


def make_header(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Makes the length field and JSON header of a safetensors file, padded to 8 bytes.

    Tensors of wide types come first, so that all tensors are aligned.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
        rows, cols = matrix_shape(shape)
        end = offset + rows * cols * dtype.itemsize
        entries[name] = {"dtype": ALL_CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end

    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> bytes:
    """Reads the length field and JSON header of a safetensors file, as stored.

    Raises:
        WeightsError: the file is not a safetensors file.
    """
    with open(path, "rb") as file:
        length = file.read(8)
        size = int.from_bytes(length, "little")
        text = file.read(size) if len(length) == 8 and size <= 100_000_000 else b""
    if not text or len(text) != size:
        raise WeightsError(f"{path} is not a whole safetensors file; fetch or write it again")
    return length + text


def partial_path(path: Path) -> Path:
    """The path that a file has until it is complete."""
    return path.with_name(path.name + ".partial")


class TensorWriter:
    """Writes a safetensors file tensor by tensor, in any order and from several threads.

    The header is known in advance, so each tensor has a fixed offset, and nothing is kept in memory. The file
    is called ``NAME.partial`` until :meth:`commit` renames it.

    Args:
        header: the result of :func:`make_header`.
        keep: whether to continue an existing ``NAME.partial`` (see :meth:`stored_sha256`) instead of emptying
            it.
    """

    def __init__(self, path: Path, header: bytes, keep: bool = False) -> None:
        self.path = path
        self._partial = partial_path(path)
        entries = json.loads(header[8:])
        self._metadata = entries.pop("__metadata__", None)
        self._offsets = {
            name: [len(header) + at for at in entry["data_offsets"]] for name, entry in entries.items()
        }
        self.size = max([len(header), *(end for _, end in self._offsets.values())])
        self._fd = os.open(self._partial, os.O_RDWR | os.O_CREAT | (0 if keep else os.O_TRUNC), 0o644)
        os.ftruncate(self._fd, self.size)
        self._write(header, 0)

    def names(self) -> list[str]:
        return list(self._offsets)

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while len(view):
            written = os.pwrite(self._fd, view, offset)
            view = view[written:]
            offset += written
            progress.tick()

    def write(self, name: str, chunks: Iterable[Tensor]) -> str:
        """Writes one tensor, given in pieces in row-major order. Returns the SHA-256 of its bytes.

        Raises:
            WeightsError: the pieces have another size than the header says.
        """
        digest = hashlib.sha256()
        offset, end = self._offsets[name]
        for chunk in chunks:
            data = memoryview(chunk.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy())
            digest.update(data)
            self._write(data, offset)
            offset += len(data)

        if offset != end:
            raise WeightsError(
                f"{self.path}: the size of tensor {name!r} differs from its header by {offset - end:+d} bytes"
            )
        return digest.hexdigest()

    def stored_sha256(self, name: str) -> str:
        """The SHA-256 of the bytes that the file currently has at a tensor's offset."""
        digest = hashlib.sha256()
        offset, end = self._offsets[name]
        while offset < end and (data := os.pread(self._fd, min(CHUNK_BYTES, end - offset), offset)):
            digest.update(data)
            offset += len(data)
        return digest.hexdigest()

    @property
    def allocated(self) -> int:
        """Number of bytes that the file occupies on the disk so far."""
        return os.fstat(self._fd).st_blocks * 512

    def commit(self, sync: bool = False) -> None:
        """Gives the file its final name.

        With ``sync``, its bytes are on the disk before it is renamed, and its name is on the disk on return.
        """
        if sync:
            durable.flush(self._fd, self._partial)
        self.close()

        if sync:
            durable.rename(self._partial, self.path)
        else:
            os.replace(self._partial, self.path)

    def close(self) -> None:
        """Closes ``NAME.partial`` without removing it. Closing twice does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def abort(self) -> None:
        """Removes ``NAME.partial``. If the file already has its final name, nothing is removed."""
        self.close()
        self._partial.unlink(missing_ok=True)
