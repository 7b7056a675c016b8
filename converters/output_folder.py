"""Manages a conversion's output folder: locks it, continues after a kill, and marks it as finished.

A conversion keeps a journal, ``unfinished.jsonl``, from before its first byte until after its last one. The
first line describes the conversion. Each further line records one written tensor with its SHA-256. If the
conversion is started again with the same arguments on the same source, it reads those tensors back, keeps the
ones whose hash is unchanged, and writes the others. So the result does not depend on when it was killed. With
other arguments, it is refused.

A folder with a journal is unfinished, and a folder without one is finished. At the end, data files get their
final names, then the manifest (or a Hugging Face folder's small files) is written, and then the journal is
deleted. A lock on the journal keeps a second conversion out of the folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

from megatron_vl import durable_files
from megatron_vl.journal import JsonLinesJournal
from megatron_vl.weights.manifest import JOURNAL_FILE, MANIFEST_FILE, WEIGHTS_FORMAT
from megatron_vl.weights.tensor_files import TensorWriter, WeightsError, partial_path

MEGATRON_FILE_PATTERN = (
    r"(manifest\.json|(weights-\d+-of-\d+|tp\d+_pp\d+|ep\d+_etp\d+_pp\d+)\.safetensors)(\.partial)?"
)
HF_FILE_PATTERN = r"(adapter_)?model(-\d+-of-\d+)?\.safetensors(\.partial|\.index\.json)?"
"""Names of the files that a conversion (above) or an export writes. ``--force`` removes no other files."""


class DiskFullError(WeightsError):
    """The disk has too little space for the remaining files. Written files stay, to continue later."""


@dataclass
class ConversionOutput:
    """The files of a conversion while they are being written.

    Attributes:
        kept_tensors: (file, tensor) pairs that an earlier attempt wrote and that need not be written again.
        sha256_by_tensor: (file, tensor) -> SHA-256, for all tensors written so far.
    """

    writer_by_file: dict[str, TensorWriter]
    kept_tensors: frozenset[tuple[str, str]]
    sha256_by_tensor: dict[tuple[str, str], str]
    _journal: JsonLinesJournal = field(repr=False)

    def record_tensor(self, file_name: str, tensor_name: str, tensor_sha256: str) -> None:
        self.sha256_by_tensor[file_name, tensor_name] = tensor_sha256
        self._journal.append_entry([file_name, tensor_name, tensor_sha256])

    def count_kept_files(self) -> int:
        """Number of files in which every tensor was kept."""
        return sum(
            all((file, name) in self.kept_tensors for name in writer.tensor_names())
            for file, writer in self.writer_by_file.items()
        )

    def commit_files(self) -> None:
        """Gives all files their final names, once their bytes are on the disk."""
        for writer in self.writer_by_file.values():
            writer.commit()


@contextmanager
def open_output(
    output_dir: Path,
    input_dirs: Sequence[Path],
    header_by_file: dict[str, bytes],
    conversion_facts: dict[str, Any],
    *,
    force_overwrite: bool,
    worker_count: int,
    is_hf_export: bool = False,
) -> Iterator[ConversionOutput]:
    """A context that locks ``output_dir`` and opens a file for each header.

    The caller writes the tensors, commits the files and completes the folder. After a disk error or an
    interruption, written files stay for the next attempt, which prints how many it kept. If the weights are
    at fault, all files are removed.

    Args:
        input_dirs: the folders that are read.
        header_by_file: file -> its header.
        conversion_facts: the description of the conversion, in JSON types. If ``output_dir`` is unfinished
            and its description is equal, the conversion continues.
        force_overwrite: whether to replace the weights in ``output_dir`` (a HF checkpoint if
            ``is_hf_export``), or another unfinished conversion there.
        worker_count: number of threads that read back the tensors of an earlier attempt.
        is_hf_export: whether ``output_dir`` becomes a Hugging Face folder.

    Raises:
        FileExistsError: ``output_dir`` holds something that is not to be replaced.
        WeightsError: ``output_dir`` is one of ``input_dirs``.
        DiskFullError: the disk has too little space.
    """
    conversion_facts = {"kind": "Hugging Face" if is_hf_export else "Megatron"} | conversion_facts
    journal, recorded_sha256 = _claim_output_dir(
        output_dir, input_dirs, conversion_facts, force_overwrite, is_hf_export
    )

    writer_by_file: dict[str, TensorWriter] = {}
    try:
        _prepare_partial_files(output_dir, header_by_file, bool(recorded_sha256), is_hf_export)
        for file_name, header in header_by_file.items():
            writer_by_file[file_name] = TensorWriter(output_dir / file_name, header, keep_partial=True)
        kept_tensors = _verify_kept_tensors(recorded_sha256, writer_by_file, worker_count)
        conversion_output = ConversionOutput(writer_by_file, kept_tensors, recorded_sha256, journal)
        _check_disk_space(output_dir, writer_by_file)
        if recorded_sha256:
            print(_continue_message(conversion_output), file=sys.stderr, flush=True)

        yield conversion_output

    except BaseException as error:
        for tensor_writer in writer_by_file.values():
            tensor_writer.close()
        # Invalid weights stay invalid in the next attempt. After any other error, it can continue.
        has_bad_weights = isinstance(error, WeightsError) and not isinstance(error, DiskFullError)
        remove_files = not recorded_sha256 or has_bad_weights
        if remove_files:
            _remove_weights(output_dir, is_hf_export)
        journal.close(remove_file=remove_files)
        raise

    journal.close(remove_file=True)


def _continue_message(conversion_output: ConversionOutput) -> str:
    total = sum(len(writer.tensor_names()) for writer in conversion_output.writer_by_file.values())
    return (
        f"continuing: {conversion_output.count_kept_files()} of {len(conversion_output.writer_by_file)} "
        f"files kept, {len(conversion_output.kept_tensors)} of {total} tensors"
    )


def _claim_output_dir(
    output_dir: Path,
    input_dirs: Sequence[Path],
    conversion_facts: dict[str, Any],
    force_overwrite: bool,
    is_hf_export: bool,
) -> tuple[JsonLinesJournal, dict[tuple[str, str], str]]:
    """Checks that this conversion may write to ``output_dir``, and removes the files that it replaces.

    Returns:
        The locked journal of the folder, and its (file, tensor) -> SHA-256.
    """
    if any(output_dir.resolve() == path.resolve() for path in input_dirs):
        raise WeightsError(f"--out {output_dir} is the input folder")
    if output_dir.exists() and not output_dir.is_dir():
        raise FileExistsError(f"--out {output_dir} is a file")

    if not (output_dir / JOURNAL_FILE).is_file():
        _check_replaceable(output_dir, force_overwrite, is_hf_export)
    durable_files.make_dirs(output_dir)
    journal = JsonLinesJournal(output_dir / JOURNAL_FILE, _check_journal_entry, is_exclusive=True)
    # In the types that JSON gives back, so that equal descriptions compare equal.
    conversion_facts = json.loads(json.dumps(conversion_facts))
    earlier_facts, *recorded_tensors = [*journal.known_entries()] or [None]
    if not isinstance(earlier_facts, dict):  # damaged
        earlier_facts, recorded_tensors = None, []

    try:
        if earlier_facts == conversion_facts:
            return journal, {(file, name): digest for file, name, digest in recorded_tensors}

        if earlier_facts is None:  # a new or damaged journal
            _check_replaceable(output_dir, force_overwrite, is_hf_export)
        elif not force_overwrite or earlier_facts.get("kind") != conversion_facts["kind"]:
            raise FileExistsError(_unfinished_message(output_dir, earlier_facts, conversion_facts))

        journal.remove_entries()
        # Before any removal, so that the folder counts as unfinished from now on.
        journal.append_entry(conversion_facts)
        earlier_facts = conversion_facts
        _remove_weights(output_dir, is_hf_export)
        return journal, {}

    except BaseException:
        journal.close(remove_file=earlier_facts is None)
        raise


def _check_journal_entry(journal_entry: Any) -> Any:
    """A line of the journal: the description of the work, or [file, tensor, SHA-256]."""
    if not isinstance(journal_entry, dict):
        [_, _, _] = journal_entry
    return journal_entry


def _unfinished_message(
    output_dir: Path, earlier_facts: dict[str, Any], current_facts: dict[str, Any]
) -> str:
    """The message if ``output_dir`` holds an unfinished conversion that differs from this one."""
    if earlier_facts.get("kind") != current_facts["kind"]:
        return (
            f"--out {output_dir} holds an unfinished conversion to "
            f"{earlier_facts.get('kind')} weights; give another --out"
        )
    return (
        f"--out {output_dir} holds an unfinished conversion, and "
        f"{_first_difference(earlier_facts, current_facts)}; repeat its command "
        "to continue it, give --force to start over, or give another --out"
    )


def _check_replaceable(output_dir: Path, force_overwrite: bool, is_hf_export: bool) -> None:
    """Raises FileExistsError unless ``output_dir`` is empty, or has weights that may be replaced."""
    present_files = list(output_dir.iterdir()) if output_dir.is_dir() else []
    present_files = [path for path in present_files if path.name != JOURNAL_FILE]
    if not present_files:
        return
    has_only_weights = len(_weight_files(output_dir, is_hf_export)) == len(present_files)
    if is_hf_export:
        config_path, adapter_path = (output_dir / "config.json"), (output_dir / "adapter_config.json")
        is_checkpoint = config_path.is_file() or adapter_path.is_file()
    else:
        is_checkpoint = _is_manifest(output_dir / MANIFEST_FILE)
    if not (has_only_weights or is_checkpoint):
        raise FileExistsError(
            f"--out {output_dir} is not empty and holds no checkpoint of "
            "this kind, so nothing in it is replaced; give another folder"
        )
    if not force_overwrite:
        raise FileExistsError(
            f"--out {output_dir} is not empty; give another "
            "folder, or --force to replace the checkpoint there"
        )


def _is_manifest(file_path: Path) -> bool:
    try:
        parsed_json = json.loads(file_path.read_text())
    except (FileNotFoundError, ValueError):
        return False
    return isinstance(parsed_json, dict) and parsed_json.get("format") == WEIGHTS_FORMAT


def _weight_files(output_dir: Path, is_hf_export: bool) -> list[Path]:
    """The files of weights. The manifest comes first: once it is removed, the others do not count as
    complete."""
    names = re.compile(HF_FILE_PATTERN if is_hf_export else MEGATRON_FILE_PATTERN)
    weight_files = [path for path in output_dir.iterdir() if names.fullmatch(path.name)]
    return sorted(weight_files, key=lambda path: path.name != MANIFEST_FILE)


def _remove_weights(output_dir: Path, is_hf_export: bool) -> None:
    for path in _weight_files(output_dir, is_hf_export):
        path.unlink()


def _first_difference(earlier_value: Any, current_value: Any, field_path: str = "") -> str:
    """Describes the first field in which two descriptions of a conversion differ."""
    if isinstance(earlier_value, dict) and isinstance(current_value, dict):
        for key in [*current_value, *earlier_value]:
            if earlier_value.get(key) != current_value.get(key):
                return _first_difference(
                    earlier_value.get(key), current_value.get(key), f"{field_path} {key}".strip()
                )
    return f"{field_path} was {_value_text(earlier_value)}, but is now {_value_text(current_value)}"


def _value_text(field_value: Any) -> str:
    return "absent" if field_value is None else str(field_value)


def _prepare_partial_files(
    output_dir: Path, header_by_file: dict[str, bytes], is_continuing: bool, is_hf_export: bool
) -> None:
    """Gives all files their partial names again, and removes those that are not needed."""
    for path in _weight_files(output_dir, is_hf_export):
        if path.name in header_by_file and is_continuing and not partial_path(path).exists():
            os.replace(path, partial_path(path))
        elif path.name.removesuffix(".partial") not in header_by_file or not path.name.endswith(".partial"):
            path.unlink()


def _verify_kept_tensors(
    recorded_sha256: dict[tuple[str, str], str], writer_by_file: dict[str, TensorWriter], worker_count: int
) -> frozenset[tuple[str, str]]:
    """The (file, tensor) pairs in the journal whose bytes in the files still have the recorded hash."""

    def is_unchanged(recorded_key: tuple[str, str]) -> bool:
        file_name, tensor_name = recorded_key
        return writer_by_file[file_name].stored_sha256(tensor_name) == recorded_sha256[recorded_key]

    # The journal may be damaged and name tensors that this conversion does not write.
    recorded_keys = []
    for file_name, tensor_name in recorded_sha256:
        if file_name in writer_by_file and tensor_name in writer_by_file[file_name].tensor_names():
            recorded_keys.append((file_name, tensor_name))

    with ThreadPoolExecutor(max(1, worker_count)) as thread_pool:
        return frozenset(compress(recorded_keys, thread_pool.map(is_unchanged, recorded_keys)))


def _check_disk_space(output_dir: Path, writer_by_file: Mapping[str, TensorWriter]) -> None:
    free_bytes = shutil.disk_usage(output_dir).free
    missing_bytes = 0
    for writer in writer_by_file.values():
        missing_bytes += max(0, writer.file_size_bytes - writer.allocated_bytes)
    if free_bytes < missing_bytes:
        raise DiskFullError(
            f"{output_dir}: {missing_bytes / 1e9:.1f} GB must be written, "
            f"but the disk has {free_bytes / 1e9:.1f} GB free"
        )
