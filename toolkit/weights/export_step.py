"""Exports one saved step of a running training (``checkpoint.export_hf``); the trainer starts it.

    python -m toolkit.weights.export_step '{"checkpoint": ..., ...}'

The argument holds the fields of :class:`Job`. The folder has its name only when all of it is there. Until
then it is ``OUT.partial``, from which the same job continues after a kill. A failure removes it, since the
training needs the disk more than the export does, and its last line on standard error says why.
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
    """What to export, and for whom."""

    checkpoint: str
    """A step folder."""
    hf: str
    """Hugging Face folder of origin."""
    out: str
    """Folder to write. One that is there is of another branch of the run, and is set aside."""
    parent: int
    """Process that this one ends with."""
    leave_free: int
    """Bytes that must stay free on the disk for the training's next checkpoint."""
    facts: dict[str, Any]
    """For the file that says where the folder comes from."""


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
    """Ends this process soon after its parent, however that ended."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def export_step(job: Job, out: Path, partial: Path) -> None:
    """Raises UserError, OSError: it could not be made."""
    from converters.convert import export

    durable.make_folder(out.parent)
    _check_room(job, partial)
    export(job.checkpoint, job.hf, partial, workers=THREADS, force=True)

    weights = json.loads((Path(job.checkpoint) / "weights" / MANIFEST).read_text())["digest"]
    # The rule for videos, where the export knows it.
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
    """A free name for the export of another branch's step of the same number."""
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
