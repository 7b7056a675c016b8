"""Lets a killed conversion continue: stores its plan, the journal of verdicts, and the finished shards.

All of it lies in ``OUT/.convert`` until the data set is complete. The journal holds one line for each batch
of records, in order: the sizes and checksums of the media of each usable record, or why it was refused. A
second run with the same arguments reads the records again, takes the verdicts from the journal instead of
decoding media, derives the same shards, keeps the intact ones, and continues where the journal ends. Its
output equals that of an undisturbed run, byte for byte.

A power cut is no worse than a kill: whatever a plan, a manifest or the finished data set mentions is on the
disk before it (:mod:`megatron_vl.durable`). Only the journal may lose lines; lost verdicts are computed
again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from megatron_vl import durable
from megatron_vl.errors import UserError
from megatron_vl.json_files import check_version

from .media import MediaInfo
from .shards import WORK

FORMAT = 1
"""The version of a plan, and of the rules by which records are read."""
PLAN = "plan.json"
RECORD = "convert.json"
"""A file in ``.nv-meta`` of a complete data set: the plan by which it was made, and its shards."""
OURS = re.compile(
    r"(train|val)-\d+\.tar(\.idx)?|quarantine\.jsonl|report\.json(\.partial)?|\.nv-meta|\.convert"
)
"""Names in an output folder that a conversion may delete."""


class ResumeError(UserError, ValueError):
    """This conversion may not write to the folder; the message says what to do."""


def make_plan(inputs: list[Path], media_root: Path | None, **options: Any) -> dict[str, Any]:
    """Everything that determines the output: options, media root, and the content of the input files."""
    files = [
        {"name": name, "bytes": path.stat().st_size, **_digest(path)}
        for name, path in zip(names(inputs), inputs, strict=True)
    ]
    return {"format": FORMAT, "options": options, "inputs": files, "media_root": str(media_root or "")}


def names(inputs: list[Path]) -> list[str]:
    """The names of the input files in messages: the file name, or the path if two files share a name."""
    short = [path.name for path in inputs]
    if len(set(short)) == len(short):
        return short
    common = os.path.commonpath([path.resolve().parent for path in inputs])
    return [str(path.resolve().relative_to(common)) for path in inputs]


HASHED = 4 << 30
"""Of a larger file, only pieces are hashed, or every node would read terabytes before it begins."""
PIECES = 256


def _digest(path: Path) -> dict[str, str]:
    """The SHA-256 of a file, or of evenly spaced pieces of a MiB if it is large."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= HASHED:
            return {"sha256": hashlib.file_digest(file, "sha256").hexdigest()}
        digest = hashlib.sha256()
        for i in range(PIECES):
            file.seek((size - (1 << 20)) * i // (PIECES - 1))
            digest.update(file.read(1 << 20))
        return {"sha256_of_pieces": digest.hexdigest()}


def public(plan: dict[str, Any]) -> dict[str, Any]:
    """The plan as it stays in the data set, without the location of the media on this machine."""
    return {name: value for name, value in plan.items() if name != "media_root"}


def differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Describes the differences between two plans for a message; empty if they are equal."""
    found = []
    for name in sorted({*old.get("options", {}), *new["options"]}):
        before = old.get("options", {}).get(name)
        now = new["options"].get(name)
        if before != now and name == "index":
            found.append("what dataset_info.json says of the inputs (or whether it is an input) has changed")
        elif before != now:
            found.append(f"{name} was {before}, now {now}")

    if old.get("media_root") != new.get("media_root"):
        found.append(f"media root was {old.get('media_root')}, now {new.get('media_root')}")
    before = old.get("inputs", [])
    now = new["inputs"]
    if [file["name"] for file in before] != [file["name"] for file in now]:
        found.append(
            f"inputs were {', '.join(f['name'] for f in before)}, now {', '.join(f['name'] for f in now)}"
        )
    else:
        found += [f"input {b['name']} has changed" for b, n in zip(before, now, strict=True) if b != n]

    return "; ".join(found) or ("" if old == new else "the plan")


class Workspace:
    """The output folder of one conversion, held by one process at a time.

    Args:
        out: folder of the data set. plan: from :func:`make_plan`. force: delete what an earlier
            conversion left there. part: name of a part of the work; parts hold the folder together.

    Raises:
        ResumeError: the folder holds something else, a conversion with another plan, or a running one.
    """

    def __init__(self, out: Path, plan: dict[str, Any], force: bool, part: str = "") -> None:
        self.out = out
        self.part = part
        self.work = out / WORK
        self.plan = plan
        self.meta = self.work / "nv-meta"
        self._locks: list[IO[bytes]] = []
        if out.exists() and not out.is_dir():
            raise ResumeError(f"--out {out} is not a folder")

        foreign = (
            sorted(path.name for path in out.iterdir() if not OURS.fullmatch(path.name))
            if out.exists()
            else []
        )
        if foreign:
            raise ResumeError(
                f"--out {out} is not an empty folder (it holds {foreign[0]}); give another or remove it"
            )

        durable.make_folder(out)
        self.complete = False
        self._take_lock()
        try:
            with self._alone():
                self._open(force)
        except BaseException:
            self.complete = (out / ".nv-meta" / RECORD).exists()  # a complete data set has no work folder
            self.close()
            raise

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lets one part after the other read and write what they share."""
        import fcntl

        with (self.work / "shared.lock").open("ab") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            yield

    def write_once(self, name: str, data: bytes) -> None:
        """Writes a file of the work folder, unless another part did."""
        with self._alone():
            if not (self.work / name).exists():
                durable.write(self.work / name, data)

    def _open(self, force: bool) -> None:
        if force:
            self._unmake()
            for path in self.out.iterdir():
                if path != self.work:
                    _remove(path)
            for path in self.work.iterdir():
                if path.name not in ("lock", "shared.lock"):
                    _remove(path)

        record = _read(self.out / ".nv-meta" / RECORD)
        old = record.get("plan") if record else _read(self.work / PLAN)
        if old is None and any(path != self.work for path in self.out.iterdir()):
            raise ResumeError(
                f"--out {self.out} is not an empty folder and no conversion can continue there; give another"
            )

        if old is not None:
            again = "give another --out, or convert again there with --force"
            check_version(f"the data set in --out {self.out}", old.get("format"), FORMAT, again, ResumeError)
            differ = differences(old, public(self.plan) if record else self.plan)
            if differ:
                state = "a complete data set made" if record else "an unfinished conversion"
                raise ResumeError(
                    f"--out {self.out} holds {state} with other arguments or input: {differ}. Give the same "
                    "arguments again, give another --out, or start over there with --force"
                )

        self.complete = record is not None
        if not self.complete and (not self.part or old is None):
            durable.write(self.work / PLAN, json.dumps(self.plan).encode())
        if not self.complete and not self.part:
            _remove(self.meta)
            for stale in (*self.work.glob("tmp.*"), *self.out.glob("*" + durable.PARTIAL)):
                _remove(stale)

    def _unmake(self) -> None:
        """First removes the file that marks the data set as complete, so that an interrupted removal
        never looks complete."""
        record = self.out / ".nv-meta" / RECORD
        if record.exists():
            record.unlink()
            durable.sync(record.parent)

    def _take_lock(self) -> None:
        import fcntl

        self.work.mkdir(exist_ok=True)
        kinds = {"lock": fcntl.LOCK_SH if self.part else fcntl.LOCK_EX}
        if self.part:
            kinds[f"{self.part}.lock"] = fcntl.LOCK_EX
        for name, kind in kinds.items():
            self._locks.append((self.work / name).open("a+b"))
            try:
                # The lock is released with the process; children do not inherit it.
                fcntl.lockf(self._locks[-1], kind | fcntl.LOCK_NB)
            except OSError as error:
                raise ResumeError(f"--out {self.out}: another conversion is writing there") from error

    def finish(self, shards: dict[str, dict[str, Any]]) -> None:
        """Makes the data set appear in one step, and removes the work folder."""
        (self.meta / RECORD).write_text(
            json.dumps({"plan": public(self.plan), "shards": shards}, indent=2) + "\n"
        )
        durable.sync_tree(self.meta)
        durable.rename(self.meta, self.out / ".nv-meta")
        self.complete = True

    def close(self) -> None:
        for lock in self._locks:
            lock.close()
        if self.complete and not self.part:
            _remove(self.work)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ResumeError(f"{path} is damaged ({error}); start over with --force") from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def as_plain(verdicts: list[list[MediaInfo] | dict[str, Any]]) -> list[Any]:
    """Verdicts as they are written: for each record, the measures of its media or its line of the
    quarantine file."""
    return [v if isinstance(v, dict) else [dataclasses.astuple(info) for info in v] for v in verdicts]


def parse_verdicts(plain: Any) -> list[Any]:
    """The verdicts that :func:`as_plain` wrote. Raises TypeError if they are something else."""
    return [v if isinstance(v, dict) else [MediaInfo(*info) for info in v] for v in plain]
