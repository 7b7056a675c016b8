"""Reads and writes safetensors files a few megabytes at a time.

The safetensors library writes whole files. Conversions of models larger than memory need regions of tensors,
and files that are filled in place. A file consists of 8 bytes with the length of the header, a JSON header,
and the raw tensors.
"""

import hashlib
import json
import math
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_vl.system import durable_files, progress
from megatron_vl.system.errors import UserError

CHUNK_BYTES = 4 << 20
"""Number of bytes to read, hash and write at a time. Together with the number of workers, it bounds the
memory of a conversion."""

MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""A flag of Linux for which Python's mmap has no name."""
MAX_MAPPED_BYTES = 16 << 20
"""Largest number of bytes of a file that stay mapped."""

DTYPE_BY_CODE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The types that weights may have: safetensors' code -> torch's type."""
CODE_BY_DTYPE = {dtype: code for code, dtype in DTYPE_BY_CODE.items()}
OTHER_DTYPE_BY_CODE = {
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
ANY_DTYPE_BY_CODE = DTYPE_BY_CODE | OTHER_DTYPE_BY_CODE
ANY_CODE_BY_DTYPE = {dtype: code for code, dtype in ANY_DTYPE_BY_CODE.items()}
DTYPE_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in CODE_BY_DTYPE}


class WeightsError(UserError, ValueError):
    """Weights cannot be read or written. The message names the file or tensor and says what to do."""


class MatrixRegion(NamedTuple):
    """Rows ``row:row_end`` and columns ``col:col_end`` of a matrix."""

    row: int
    row_end: int
    col: int
    col_end: int

    @property
    def is_empty(self) -> bool:
        return self.row >= self.row_end or self.col >= self.col_end


def matrix_shape(tensor_shape: Sequence[int]) -> tuple[int, int]:
    """The shape of a tensor as a matrix: dim 0 by all others. A vector is one column, a scalar one element.

    A tensor with three dimensions is a stack of matrices (experts), one below the other, so that rows do not
    become too long.
    """
    if not tensor_shape:
        return 1, 1
    if len(tensor_shape) == 3:
        return tensor_shape[0] * tensor_shape[1], tensor_shape[2]
    return tensor_shape[0], math.prod(tensor_shape[1:])


def row_regions(
    tensor_shape: Sequence[int], itemsize: int, *, rows_multiple: int = 1
) -> Iterator[MatrixRegion]:
    """Regions of whole rows that cover a matrix, each of about :data:`CHUNK_BYTES`.

    Args:
        rows_multiple: regions have a multiple of this number of rows.
    """
    num_rows, num_cols = matrix_shape(tensor_shape)
    rows_per_region = max(1, CHUNK_BYTES // max(1, num_cols * itemsize))
    rows_per_region = math.ceil(rows_per_region / rows_multiple) * rows_multiple
    for row in range(0, num_rows, rows_per_region):
        yield MatrixRegion(row, min(num_rows, row + rows_per_region), 0, num_cols)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class TensorReader:
    """Reads a safetensors file region by region through a memory map that stays small.

    Mapping is several times cheaper than reading into new memory. Used pages are released while reading
    continues, so that a conversion does not appear to use memory for the whole checkpoint.

    Raises:
        WeightsError: the file is missing or not a complete safetensors file.
    """

    def __init__(self, file_path: Path) -> None:
        self.path = file_path
        if not file_path.is_file():
            raise WeightsError(f"{file_path} is missing")
        header_bytes = read_safetensors_header(file_path)
        try:
            # The library checks the header for wrong ranges, overlaps, gaps and lengths.
            with safe_open(file_path, framework="numpy"):
                pass
        except SafetensorError as error:
            raise WeightsError(
                f"{file_path} is not a whole safetensors file ({error}); fetch or write it again"
            ) from error

        self._header_entries: dict[str, dict[str, Any]] = json.loads(header_bytes[8:])
        self._header_entries.pop("__metadata__", None)
        self._data_start = len(header_bytes)
        # The map is private and writable, because torch needs a writable buffer. It reserves no memory,
        # because a file may be larger than the memory. Nothing writes to it.
        with open(file_path, "rb") as opened_file:
            self._memory_map = mmap.mmap(
                opened_file.fileno(), 0, mmap.MAP_PRIVATE | MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            )

        self._mapped_bytes = torch.frombuffer(self._memory_map, dtype=torch.uint8)
        self._used_bytes = 0

    def tensor_names(self) -> list[str]:
        return list(self._header_entries)

    def shape(self, tensor_name: str) -> tuple[int, ...]:
        return tuple(self._header_entries[tensor_name]["shape"])

    def dtype_code(self, tensor_name: str) -> str:
        """The type of a tensor in safetensors' notation, such as ``BF16``."""
        return self._header_entries[tensor_name]["dtype"]

    def dtype(self, tensor_name: str) -> torch.dtype:
        """The type of a tensor. Raises :class:`WeightsError` if weights cannot have this type."""
        if (type_code := self.dtype_code(tensor_name)) not in DTYPE_BY_CODE:
            raise WeightsError(
                f"{self.path}: tensor {tensor_name!r} has type {type_code}; weights may be"
                f" {', '.join(DTYPE_BY_CODE)}, not quantised"
            )
        return DTYPE_BY_CODE[type_code]

    def read_region(self, tensor_name: str, region: MatrixRegion) -> Tensor:
        """A region ``[rows, cols]`` of a tensor as a matrix. It is a view of the file: do not write to it.

        Raises WeightsError if tensors of this type cannot be read.
        """
        if (dtype := ANY_DTYPE_BY_CODE.get(self.dtype_code(tensor_name))) is None:
            raise WeightsError(
                f"{self.path}: tensor {tensor_name!r} has type "
                f"{self.dtype_code(tensor_name)}, which this program does not read"
            )
        num_cols = matrix_shape(self.shape(tensor_name))[1]
        tensor_start = self._data_start + self._header_entries[tensor_name]["data_offsets"][0]
        region_start = tensor_start + region.row * num_cols * dtype.itemsize
        region_end = tensor_start + region.row_end * num_cols * dtype.itemsize

        region_bytes = self._mapped_bytes[region_start:region_end]
        self._release_pages(len(region_bytes))
        if region_start % dtype.itemsize:
            # The format allows unaligned tensors, which torch cannot view. No current program writes them.
            region_bytes = region_bytes.clone()
        return region_bytes.view(dtype).view(-1, num_cols)[:, region.col : region.col_end]

    def expect_scattered_reads(self, is_scattered: bool) -> None:
        """Whether reading ahead, which is 8 MB on some disks, would be in vain."""
        self._memory_map.madvise(mmap.MADV_RANDOM if is_scattered else mmap.MADV_NORMAL)

    def _release_pages(self, byte_count: int) -> None:
        """Releases all mapped pages once in a while.

        If a reader still uses a page, the kernel maps it again from the page cache.
        """
        self._used_bytes += byte_count
        if self._used_bytes > MAX_MAPPED_BYTES:
            self._used_bytes = byte_count
            self._memory_map.madvise(mmap.MADV_DONTNEED)

    def sha256(self, tensor_name: str, on_bytes_read: Callable[[int], object] | None = None) -> str:
        """The SHA-256 of a tensor's stored bytes.

        Args:
            on_bytes_read: called after each piece with its number of bytes.
        """
        hasher = hashlib.sha256()
        first_offset, end_offset = self._header_entries[tensor_name]["data_offsets"]
        data_end = self._data_start + end_offset
        for chunk_start in range(self._data_start + first_offset, data_end, CHUNK_BYTES):
            chunk_bytes = self._mapped_bytes[chunk_start : min(data_end, chunk_start + CHUNK_BYTES)]
            self._release_pages(len(chunk_bytes))
            hasher.update(memoryview(chunk_bytes.numpy()))
            if on_bytes_read:
                on_bytes_read(len(chunk_bytes))
        return hasher.hexdigest()


def make_safetensors_header(
    tensor_types: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    file_metadata: Mapping[str, str] | None = None,
) -> bytes:
    """Makes the length field and JSON header of a safetensors file, padded to 8 bytes.

    Tensors of wide types come first, so that all tensors are aligned.
    """
    header_entries: dict[str, Any] = {"__metadata__": dict(file_metadata)} if file_metadata else {}
    byte_offset = 0
    for tensor_name, (dtype, shape) in sorted(tensor_types.items(), key=lambda item: -item[1][0].itemsize):
        end_offset = byte_offset + math.prod(shape) * dtype.itemsize
        header_entries[tensor_name] = {
            "dtype": ANY_CODE_BY_DTYPE[dtype],
            "shape": list(shape),
            "data_offsets": [byte_offset, end_offset],
        }
        byte_offset = end_offset

    header_text = json.dumps(header_entries, separators=(",", ":")).encode()
    header_text += b" " * (-len(header_text) % 8)
    return len(header_text).to_bytes(8, "little") + header_text


def read_safetensors_header(file_path: Path) -> bytes:
    """Reads length field and JSON header of a safetensors file. Raises WeightsError if it is no such file."""
    with open(file_path, "rb") as opened_file:
        length_field = opened_file.read(8)
        header_size = int.from_bytes(length_field, "little")
        # A damaged length must not make this read a whole checkpoint.
        header_text = opened_file.read(header_size) if header_size <= 100_000_000 else b""

    if len(length_field) < 8 or not header_text or len(header_text) != header_size:
        raise WeightsError(f"{file_path} is not a whole safetensors file; fetch or write it again")
    return length_field + header_text


class TensorWriter:
    """Writes a safetensors file tensor by tensor, in any order and from several threads.

    The header is known in advance, so each tensor has a fixed offset, and nothing is kept in memory. The file
    is called ``FILE.partial`` until :meth:`commit` renames it to ``FILE``.

    Args:
        final_path: the path of the complete file.
        header: the result of :func:`make_safetensors_header`.
    """

    def __init__(self, final_path: Path, header: bytes) -> None:
        self.path = final_path
        self._partial_file = final_path.with_name(final_path.name + durable_files.PARTIAL_SUFFIX)
        header_entries = json.loads(header[8:])
        header_entries.pop("__metadata__", None)

        self._tensor_offsets: dict[str, tuple[int, int]] = {
            tensor_name: (len(header) + first_offset, len(header) + end_offset)
            for tensor_name, header_entry in header_entries.items()
            for first_offset, end_offset in [header_entry["data_offsets"]]
        }
        self.file_size_bytes = max((end for _, end in self._tensor_offsets.values()), default=len(header))

        self._file_descriptor = os.open(self._partial_file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.ftruncate(self._file_descriptor, self.file_size_bytes)
        self._write_at(header, 0)

    def tensor_names(self) -> list[str]:
        return list(self._tensor_offsets)

    def _write_at(self, byte_data: bytes | memoryview, file_offset: int) -> None:
        remaining_bytes = memoryview(byte_data)
        while len(remaining_bytes):
            written_bytes = os.pwrite(self._file_descriptor, remaining_bytes, file_offset)
            remaining_bytes = remaining_bytes[written_bytes:]
            file_offset += written_bytes
            progress.note_progress()

    def write_tensor(self, tensor_name: str, tensor_chunks: Iterable[Tensor], *, hashes: bool = True) -> str:
        """Writes one tensor, given in pieces in row-major order. Returns the SHA-256 of its bytes.

        Without ``hashes``, which take as long as the rest, it is that of no bytes.

        Raises WeightsError if the pieces have another size than the header says.
        """
        hasher = hashlib.sha256()
        file_offset, end_offset = self._tensor_offsets[tensor_name]
        for tensor_chunk in tensor_chunks:
            flat_chunk = tensor_chunk.detach().contiguous().cpu().view(-1)
            chunk_bytes = memoryview(flat_chunk.view(torch.uint8).numpy())
            if hashes:
                hasher.update(chunk_bytes)
            self._write_at(chunk_bytes, file_offset)
            durable_files.begin_flush(self._file_descriptor, file_offset, len(chunk_bytes))
            file_offset += len(chunk_bytes)

        if file_offset != end_offset:
            raise WeightsError(
                f"{self.path}: the size of tensor {tensor_name!r} differs "
                f"from its header by {file_offset - end_offset:+d} bytes"
            )
        return hasher.hexdigest()

    def commit(self) -> None:
        """Gives the file its final name.

        Its bytes are on the disk before it is renamed, and its name is on the disk on return.
        """
        durable_files.fsync_file(self._file_descriptor, self._partial_file)
        self.close()
        durable_files.rename_path(self._partial_file, self.path)

    def close(self) -> None:
        """Closes ``FILE.partial`` without removing it. Closing twice does nothing."""
        if self._file_descriptor >= 0:
            os.close(self._file_descriptor)
            self._file_descriptor = -1

    def abort(self) -> None:
        """Removes ``FILE.partial``. If the file already has its final name, nothing is removed."""
        self.close()
        self._partial_file.unlink(missing_ok=True)
