"""Verifies a data set: every shard must exist with the recorded size and SHA-256."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_vl.system.json_files import file_sha256
from megatron_vl.system.progress_bar import progress

from .records import ConvertError
from .shards import CONVERSION_FILE, METADATA_DIR


def verify_dataset(dataset_dir: Path) -> tuple[int, list[str]]:
    """Reads all shards of a data set and compares them with the record.

    Returns:
        The number of shards, and one line for each shard that is not as written.

    Raises:
        ConvertError: the folder is not a complete data set of ``megatron-vl data convert``.
    """
    if part_dirs := sorted(dataset_dir.glob("part-*-of-*")):
        results = [verify_dataset(part_dir) for part_dir in part_dirs]
        return sum(shards for shards, _ in results), [line for _, lines in results for line in lines]
    record_path = dataset_dir / METADATA_DIR / CONVERSION_FILE
    try:
        shard_records = json.loads(record_path.read_text())["shards"]
    except FileNotFoundError as error:
        raise ConvertError(
            f"{dataset_dir} is not a complete data set of "
            f"`megatron-vl data convert`: {record_path} is missing"
        ) from error
    except (ValueError, KeyError) as error:
        raise ConvertError(f"{record_path} is damaged ({error}); convert the data again") from error
    problems = []
    total_bytes = sum(shard_record["bytes"] for shard_record in shard_records.values())
    with progress(total_bytes, "bytes", "verifying") as show_progress:
        for name, shard_record in shard_records.items():
            problems += _shard_problems(dataset_dir / name, shard_record["bytes"], shard_record["sha256"])
            show_progress(shard_record["bytes"])
    return len(shard_records), problems


def _shard_problems(tar_path: Path, expected_bytes: int, expected_sha256: str) -> list[str]:
    try:
        problems = [] if tar_path.with_suffix(".tar.idx").is_file() else [f"{tar_path}.idx is missing"]
        actual_bytes = tar_path.stat().st_size
        if actual_bytes != expected_bytes:
            return [*problems, f"{tar_path} has {actual_bytes} bytes, but {expected_bytes} were written"]

        if file_sha256(tar_path) != expected_sha256:
            problems.append(f"{tar_path}: its SHA-256 differs from the recorded one")
        return problems
    except OSError as error:
        return [f"{tar_path} cannot be read: {error.strerror}"]
