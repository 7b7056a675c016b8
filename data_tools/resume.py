"""Lets a killed conversion continue: stores its plan, the journal of verdicts, and the finished shards.

All of it lies in ``OUT/.convert`` until the data set is complete. The journal holds one line for each batch
of records, in order: the sizes and checksums of the media of each usable record, or why it was refused. A
second run with the same arguments reads the records again, takes the verdicts from the journal instead of
decoding media, derives the same shards, keeps the intact ones, and continues where the journal ends. Its
output equals that of an undisturbed run, byte for byte.

A power cut is no worse than a kill: whatever a plan, a manifest or the finished data set mentions is on the
disk before it (:mod:`megatron_vl.durable_files`). Only the journal may lose lines; lost verdicts are computed
again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from megatron_vl import durable_files
from megatron_vl.errors import UserError
from megatron_vl.json_files import check_format_version

from .media import MediaInfo
from .shards import WORK_FOLDER, file_sha256

PLAN_VERSION = 1
"""The version of a plan, and of the rules by which records are read."""
PLAN_FILE = "plan.json"
CONVERSION_FILE = "convert.json"
"""A file in ``.nv-meta`` of a complete data set: the plan by which it was made, and its shards."""
OWN_FILE_NAME = re.compile(
    r"(train|val)-\d+\.tar(\.idx)?|quarantine\.jsonl|report\.json(\.partial)?|\.nv-meta|\.convert"
)
"""Names in an output folder that a conversion may delete."""


class ResumeError(UserError, ValueError):
    """This conversion may not write to the folder; the message says what to do."""


def make_plan(input_paths: list[Path], media_root: Path | None, **options: Any) -> dict[str, Any]:
    """Everything that determines the output: options, media root, and the content of the input files."""
    input_entries = []
    for name, path in zip(input_names(input_paths), input_paths, strict=True):
        input_entries.append({"name": name, "bytes": path.stat().st_size, **_file_digest(path)})

    return {
        "format": PLAN_VERSION,
        "options": options,
        "inputs": input_entries,
        "media_root": str(media_root or ""),
    }


def input_names(input_paths: list[Path]) -> list[str]:
    """The names of the input files in messages: the file name, or the path if two files share a name."""
    file_names = [path.name for path in input_paths]
    if len(set(file_names)) == len(file_names):
        return file_names
    common_dir = os.path.commonpath([path.resolve().parent for path in input_paths])
    return [str(path.resolve().relative_to(common_dir)) for path in input_paths]


FULL_HASH_LIMIT = 4 << 30
"""Of a larger file, only pieces are hashed, or every node would read terabytes before it begins."""
HASHED_PIECES = 256


def _file_digest(file_path: Path) -> dict[str, str]:
    """The SHA-256 of a file, or of evenly spaced pieces of a MiB if it is large."""
    size = file_path.stat().st_size
    if size <= FULL_HASH_LIMIT:
        return {"sha256": file_sha256(file_path)}
    pieces_digest = hashlib.sha256()
    with file_path.open("rb") as file:
        for i in range(HASHED_PIECES):
            file.seek((size - (1 << 20)) * i // (HASHED_PIECES - 1))
            pieces_digest.update(file.read(1 << 20))
    return {"sha256_of_pieces": pieces_digest.hexdigest()}


def public_plan(full_plan: dict[str, Any]) -> dict[str, Any]:
    """The plan as it stays in the data set, without the location of the media on this machine."""
    return {name: value for name, value in full_plan.items() if name != "media_root"}


def describe_differences(old_plan: dict[str, Any], new_plan: dict[str, Any]) -> str:
    """Describes the differences between two plans for a message; empty if they are equal."""
    difference_texts = []
    for option_name in sorted({*old_plan.get("options", {}), *new_plan["options"]}):
        old_value = old_plan.get("options", {}).get(option_name)
        new_value = new_plan["options"].get(option_name)
        if old_value != new_value and option_name == "index":
            difference_texts.append(
                "what dataset_info.json says of the inputs (or whether it is an input) has changed"
            )
        elif old_value != new_value:
            difference_texts.append(f"{option_name} was {old_value}, now {new_value}")

    if old_plan.get("media_root") != new_plan.get("media_root"):
        difference_texts.append(
            f"media root was {old_plan.get('media_root')}, now {new_plan.get('media_root')}"
        )

    old_inputs = old_plan.get("inputs", [])
    new_inputs = new_plan["inputs"]
    old_names = [input_entry["name"] for input_entry in old_inputs]
    new_names = [input_entry["name"] for input_entry in new_inputs]
    if old_names != new_names:
        difference_texts.append(f"inputs were {', '.join(old_names)}, now {', '.join(new_names)}")
    else:
        for old_input, new_input in zip(old_inputs, new_inputs, strict=True):
            if old_input != new_input:
                difference_texts.append(f"input {old_input['name']} has changed")

    return "; ".join(difference_texts) or ("" if old_plan == new_plan else "the plan")


@contextmanager
def exclusive_access(lock_path: Path, *, needs_locks: bool = True) -> Iterator[None]:
    """Lets one process after the other into the context.

    Args:
        needs_locks: whether to raise OSError on a file system without locks, which otherwise lets in all.
    """
    with lock_path.open("ab") as lock_file:
        try:
            fcntl.lockf(lock_file, fcntl.LOCK_EX)
        except OSError:
            if needs_locks:
                raise
        yield


class ConversionWorkspace:
    """The output folder of one conversion, which one process locks at a time.

    Args:
        dataset_dir: folder of the data set.
        plan: the result of :func:`make_plan`.
        discard_existing: whether to delete what an earlier conversion left there.
        part_name: name of a part of the work; empty: the whole. Parts may share the folder.

    Raises:
        ResumeError: the folder holds something else, a conversion with another plan, or a running one.
    """

    def __init__(
        self, dataset_dir: Path, plan: dict[str, Any], discard_existing: bool, part_name: str = ""
    ) -> None:
        self.dataset_dir = dataset_dir
        self.part_name = part_name
        self.work_dir = dataset_dir / WORK_FOLDER
        self.plan = plan
        self.meta_dir = self.work_dir / "nv-meta"
        self._locks: list[IO[bytes]] = []
        if dataset_dir.exists() and not dataset_dir.is_dir():
            raise ResumeError(f"--out {dataset_dir} is not a folder")

        for path in sorted(dataset_dir.iterdir()) if dataset_dir.exists() else []:
            if not OWN_FILE_NAME.fullmatch(path.name):
                raise ResumeError(
                    f"--out {dataset_dir} is not an empty folder (it "
                    f"holds {path.name}); give another or remove it"
                )

        durable_files.make_dirs(dataset_dir)
        self.is_complete = False
        self._take_locks()
        try:
            # One part after the other reads and writes what they share.
            with exclusive_access(self.work_dir / "shared.lock"):
                self._open_folder(discard_existing)
        except BaseException:
            # A complete data set has no work folder, so closing removes the one that the locks made.
            self.is_complete = (dataset_dir / ".nv-meta" / CONVERSION_FILE).exists()
            self.close()
            raise

    def write_once(self, file_name: str, file_bytes: bytes) -> None:
        """Writes a file of the work folder, unless another part did."""
        with exclusive_access(self.work_dir / "shared.lock"):
            if not (self.work_dir / file_name).exists():
                durable_files.write_file(self.work_dir / file_name, file_bytes)

    def _open_folder(self, discard_existing: bool) -> None:
        """Compares the plan with that of an earlier conversion, and removes what cannot be continued."""
        if discard_existing:
            self._discard_existing()
        conversion_record = _read_plan(self.dataset_dir / ".nv-meta" / CONVERSION_FILE)
        if conversion_record:
            old_plan = conversion_record.get("plan")
        else:
            old_plan = _read_plan(self.work_dir / PLAN_FILE)
        if old_plan is None and any(entry_path != self.work_dir for entry_path in self.dataset_dir.iterdir()):
            raise ResumeError(
                f"--out {self.dataset_dir} is not an empty folder "
                "and no conversion can continue there; give another"
            )

        if old_plan is not None:
            self._check_same_plan(old_plan, is_complete=conversion_record is not None)
        self.is_complete = conversion_record is not None
        if not self.is_complete and (not self.part_name or old_plan is None):
            durable_files.write_file(self.work_dir / PLAN_FILE, json.dumps(self.plan).encode())
        if not self.is_complete and not self.part_name:
            _remove_path(self.meta_dir)
            stale_paths = list(self.work_dir.glob("tmp.*"))
            stale_paths += self.dataset_dir.glob("*" + durable_files.PARTIAL_SUFFIX)
            for stale_path in stale_paths:
                _remove_path(stale_path)

    def _check_same_plan(self, old_plan: dict[str, Any], *, is_complete: bool) -> None:
        """Raises ResumeError if what is in the folder was made by another plan."""
        check_format_version(
            f"the data set in --out {self.dataset_dir}",
            old_plan.get("format"),
            PLAN_VERSION,
            "give another --out, or convert again there with --force",
            ResumeError,
        )
        differences_text = describe_differences(
            old_plan, public_plan(self.plan) if is_complete else self.plan
        )
        if differences_text:
            folder_state = "a complete data set made" if is_complete else "an unfinished conversion"
            raise ResumeError(
                f"--out {self.dataset_dir} holds {folder_state} with other "
                f"arguments or input: {differences_text}. Give the same arguments "
                "again, give another --out, or start over there with --force"
            )

    def _discard_existing(self) -> None:
        """Removes everything but the locks.

        The file that marks the data set as complete goes first, so that a data set whose removal is
        interrupted does not look complete.
        """
        record_path = self.dataset_dir / ".nv-meta" / CONVERSION_FILE
        if record_path.exists():
            record_path.unlink()
            durable_files.fsync_path(record_path.parent)
        for entry_path in (*self.dataset_dir.iterdir(), *self.work_dir.iterdir()):
            if entry_path != self.work_dir and entry_path.name not in ("lock", "shared.lock"):
                _remove_path(entry_path)

    def _take_locks(self) -> None:
        durable_files.make_dirs(self.work_dir)
        lock_modes = {"lock": fcntl.LOCK_SH if self.part_name else fcntl.LOCK_EX}
        if self.part_name:
            lock_modes[f"{self.part_name}.lock"] = fcntl.LOCK_EX
        for lock_name, lock_mode in lock_modes.items():
            self._locks.append((self.work_dir / lock_name).open("a+b"))
            try:
                # The lock is released with the process; children do not inherit it.
                fcntl.lockf(self._locks[-1], lock_mode | fcntl.LOCK_NB)
            except OSError as error:
                raise ResumeError(f"--out {self.dataset_dir}: another conversion is writing there") from error

    def publish_dataset(self, shard_records: dict[str, dict[str, Any]]) -> None:
        """Makes the data set appear in one step, and removes the work folder."""
        (self.meta_dir / CONVERSION_FILE).write_text(
            json.dumps({"plan": public_plan(self.plan), "shards": shard_records}, indent=2) + "\n"
        )
        durable_files.fsync_tree(self.meta_dir)
        durable_files.rename_path(self.meta_dir, self.dataset_dir / ".nv-meta")
        self.is_complete = True

    def close(self) -> None:
        for lock_file in self._locks:
            lock_file.close()
        if self.is_complete and not self.part_name:
            _remove_path(self.work_dir)


def _read_plan(plan_path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(plan_path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ResumeError(f"{plan_path} is damaged ({error}); start over with --force") from error


def _remove_path(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def parse_verdicts(json_verdicts: Any) -> list[Any]:
    """The verdicts of a journal, from JSON. Raises TypeError if they are something else.

    A verdict is the measures of a record's media, or its line of the quarantine file.
    """
    parsed_verdicts: list[Any] = []
    for verdict in json_verdicts:
        if not isinstance(verdict, dict):
            verdict = [MediaInfo(*measures) for measures in verdict]
        parsed_verdicts.append(verdict)
    return parsed_verdicts
