"""Exports one saved step of a running training (``checkpoint.export_hf``); the trainer starts it.

    python -m toolkit.weights.export_step '{"checkpoint": ..., ...}'

The argument holds the fields of :class:`Job`. The export is written to ``OUT.partial`` and renamed to ``OUT``
when it is complete. After a kill, the same job continues from ``OUT.partial``. After a failure, that folder
is removed, because the training needs the disk more than the export does; the last line on standard error
gives the reason.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vl import durable
from megatron_vl.errors import UserError, describe
from megatron_vl.json_files import write_json
from megatron_vl.weights.manifest import MANIFEST
from megatron_vl.weights.run_folder import EXPORTED

THREADS = 2
"""Few: the training comes first."""
NICENESS = 10


@dataclass
class Job:
    """One export of one step."""

    checkpoint: str
    """Step folder to export."""
    hf: str
    """Hugging Face folder of origin."""
    out: str
    """Folder to write. If it exists, it belongs to another branch of the run and is renamed."""
    parent: int
    """Process id of the trainer; this process ends when the trainer does."""
    leave_free: int
    """Bytes that must stay free on the disk for the training's next checkpoint."""
    facts: dict[str, Any]
    """Contents of the file that records where the export comes from (:data:`EXPORTED`)."""


class NoRoomError(UserError):
    """The disk is too full for an export."""


def main(argv: list[str]) -> int:
    job = Job(**json.loads(argv[0]))
    threading.Thread(target=end_with, args=(job.parent,), daemon=True).start()
    os.nice(NICENESS)

    out = Path(job.out)
    partial = out.with_name(f"{out.name}.partial")
    try:
        export_step(job, out, partial)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        print(" ".join(describe(error).split()), file=sys.stderr)
        return 1
    return 0


def end_with(parent: int) -> None:
    """Ends this process within a second of its parent's end, for whatever reason the parent ended."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def export_step(job: Job, out: Path, partial: Path) -> None:
    """Exports to ``partial`` and renames it to ``out``.

    Raises:
        UserError, OSError: the export failed.
    """
    from converters.convert import export

    durable.make_folder(out.parent)
    _check_room(job, partial)
    export(job.checkpoint, job.hf, partial, workers=THREADS, force=True)

    weights = json.loads((Path(job.checkpoint) / "weights" / MANIFEST).read_text())["digest"]
    # The export may have written the rule for videos to this file; keep it.
    note = partial / EXPORTED
    noted = json.loads(note.read_text()) if note.is_file() else {}
    write_json(note, job.facts | noted | {"weights": weights})

    if out.exists():
        durable.rename(out, _aside(out))
    durable.rename(partial, out)


def _check_room(job: Job, partial: Path) -> None:
    size = sum(path.stat().st_size for path in Path(job.hf).glob("*.safetensors"))
    written = sum(path.stat().st_blocks * 512 for path in partial.rglob("*") if path.is_file())
    needed = size - written + job.leave_free
    free = shutil.disk_usage(partial.parent).free
    if free < needed:
        raise NoRoomError(
            f"the disk has {free / 1e9:.1f} GB free; the export takes {size / 1e9:.1f} GB, and"
            f" {job.leave_free / 1e9:.1f} GB are left for the next checkpoint"
        )


def _aside(out: Path) -> Path:
    """Returns an unused folder name for an existing export, which another branch of the run made."""
    try:
        facts = json.loads((out / EXPORTED).read_text())
        branch = re.fullmatch(r"\w{1,32}", facts["branch"])  # it becomes part of a folder's name
        base = f"{out.name}.branch_{branch[0]}.{int(facts['serial'])}" if branch else f"{out.name}.earlier"
    except (OSError, ValueError, KeyError, TypeError):
        base = f"{out.name}.earlier"

    path = out.with_name(base)
    copies = 1
    while path.exists():
        copies += 1
        path = out.with_name(f"{base}.{copies}")
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
