"""Verifies a data set: every shard must exist with the recorded size and SHA-256."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from megatron_vl.errors import UserError

from .resume import RECORD


class VerifyError(UserError, ValueError):
    """A folder that cannot be checked; the message says why."""


def verify(path: Path, progress: Callable[[str], None] | None = None) -> tuple[int, list[str]]:
    """Reads all shards of a data set and compares them with the record.

    Returns:
        The number of shards, and one line for each shard that is not as written.

    Raises:
        VerifyError: the folder is not a complete data set of ``megatron-vl data convert``.
    """
    record = path / ".nv-meta" / RECORD
    try:
        shards = json.loads(record.read_text())["shards"]
    except FileNotFoundError as error:
        raise VerifyError(
            f"{path} is not a complete data set of `megatron-vl data convert`: {record} is missing"
        ) from error
    except (ValueError, KeyError) as error:
        raise VerifyError(f"{record} is damaged ({error}); convert the data again") from error

    problems: list[str] = []
    total = sum(shard["bytes"] for shard in shards.values())
    done = 0
    start = time.monotonic()
    for name, shard in shards.items():
        problems += _problems(path / name, shard["bytes"], shard["sha256"])
        done += shard["bytes"]
        rate = done / max(time.monotonic() - start, 1e-9)
        if progress:
            progress(
                f"{done / max(total, 1):4.0%}  {rate / 1e6:.0f} MB/s, "
                f"{(total - done) / max(rate, 1):.0f} s left"
            )

    return len(shards), problems


def _problems(tar: Path, size: int, sha256: str) -> list[str]:
    try:
        index = [] if tar.with_suffix(".tar.idx").is_file() else [f"{tar}.idx is missing"]
        if tar.stat().st_size != size:
            return [*index, f"{tar} has {tar.stat().st_size} bytes, but {size} were written"]
        with tar.open("rb") as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == sha256
        return index if same else [*index, f"{tar}: its SHA-256 differs from the recorded one"]
    except OSError as error:
        return [f"{tar} cannot be read: {error.strerror}"]
