"""Exports one saved step of a running training (``checkpoint.export_hf``); the trainer starts it.

    python -m toolkit.weights.export_step '{"checkpoint": ..., ...}'

The argument holds the fields of :class:`ExportJob`. The export is written to ``OUT.partial`` and renamed to
``OUT`` when it is complete. After a kill, the same job continues from ``OUT.partial``. After a failure, that
folder is removed, because the training needs the disk more than the export does; the last line on standard
error gives the reason.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vl import durable_files
from megatron_vl.errors import UserError, describe_error
from megatron_vl.json_files import write_json
from megatron_vl.processes import end_with_parent
from megatron_vl.weights.manifest import MANIFEST_FILE
from megatron_vl.weights.run_folder import EXPORT_FACTS_FILE, unused_path
from megatron_vl.weights.weight_reader import WeightReader

EXPORT_THREADS = 2
"""Few: the training comes first."""
PROCESS_NICENESS = 10


@dataclass
class ExportJob:
    """One export of one step."""

    checkpoint: str
    """Step folder to export."""
    hf: str
    """Hugging Face folder of origin."""
    out: str
    """Folder to write. If it exists, it was exported from other weights and is renamed."""
    parent: int
    """Process id of the trainer; this process ends when the trainer does."""
    leave_free: int
    """Bytes that must stay free on the disk for the training's next checkpoint."""
    facts: dict[str, Any]
    """Contents of the file that records where the export comes from (:data:`EXPORT_FACTS_FILE`)."""
    merges_adapter: bool = False
    """Whether adapters are merged into the weights of ``hf``, and not written as PEFT's files."""


class ExportSpaceError(UserError):
    """The disk is too full for an export."""


def main(argv: list[str]) -> int:
    export_job = ExportJob(**json.loads(argv[0]))
    end_with_parent(export_job.parent)
    os.nice(PROCESS_NICENESS)

    export_dir = Path(export_job.out)
    partial_dir = export_dir.with_name(f"{export_dir.name}.partial")
    try:
        export_step(export_job, export_dir, partial_dir)
        if note := media_note(export_dir, Path(export_job.hf)):
            print(f"NOTE: {note}")  # the trainer prints it
    except Exception as error:
        shutil.rmtree(partial_dir, ignore_errors=True)
        print(" ".join(describe_error(error).split()), file=sys.stderr)
        return 1
    return 0


def export_step(export_job: ExportJob, export_dir: Path, partial_dir: Path) -> None:
    """Exports to ``partial_dir`` and renames it to ``export_dir``. A run with LoRA gets PEFT's files, unless
    its adapters are merged.

    Raises:
        UserError, OSError: the export failed.
    """
    from converters.convert import export_adapter, export_weights

    durable_files.make_dirs(export_dir.parent)
    has_adapters = bool(WeightReader(export_job.checkpoint, takes_adapters=True).lora.rank)
    writes_peft = has_adapters and not export_job.merges_adapter
    _check_free_space(export_job, partial_dir, writes_peft)
    if writes_peft:
        # The run may have begun with other weights than those in model.hf, from which its config comes.
        export_adapter(
            export_job.checkpoint, export_job.hf, partial_dir, force=True, may_have_other_base=True
        )
    else:
        export_weights(
            export_job.checkpoint,
            export_job.hf,
            partial_dir,
            merges_adapter=has_adapters,
            workers=EXPORT_THREADS,
            force=True,
        )

    manifest_path = Path(export_job.checkpoint) / "weights" / MANIFEST_FILE
    weights_digest = json.loads(manifest_path.read_text())["digest"]
    # The export may have written what training saw to this file; keep it.
    origin_note_path = partial_dir / EXPORT_FACTS_FILE
    existing_note = json.loads(origin_note_path.read_text()) if origin_note_path.is_file() else {}
    write_json(origin_note_path, export_job.facts | existing_note | {"weights": weights_digest})

    if export_dir.exists():
        earlier_dir = unused_path(export_dir.with_name(f"{export_dir.name}.earlier"))
        durable_files.rename_path(export_dir, earlier_dir)
    durable_files.rename_path(partial_dir, export_dir)


def media_note(export_dir: Path, hf_dir: Path) -> str:
    """A note if the processor config of ``hf_dir`` has other limits than training had; otherwise empty."""
    from megatron_vl.data.sample.pixels import media_limits_note
    from megatron_vl.weights.trained_media import exported_media

    try:
        return media_limits_note(hf_dir, exported_media(export_dir))
    except (ValueError, OSError):
        return ""  # without a processor config that can be read, there is nothing to compare


def _check_free_space(export_job: ExportJob, partial_dir: Path, has_adapters: bool) -> None:
    # An export is as large as the original folder, or as the adapters of a run with LoRA.
    source_dir = Path(export_job.checkpoint) / "weights" if has_adapters else Path(export_job.hf)
    size = sum(path.stat().st_size for path in source_dir.glob("*.safetensors"))
    written_bytes = sum(path.stat().st_blocks * 512 for path in partial_dir.rglob("*") if path.is_file())
    needed_bytes = size - written_bytes + export_job.leave_free
    free_bytes = shutil.disk_usage(partial_dir.parent).free
    if free_bytes < needed_bytes:
        raise ExportSpaceError(
            f"the disk has {free_bytes / 1e9:.1f} GB free; the export takes {size / 1e9:.1f} GB, and"
            f" {export_job.leave_free / 1e9:.1f} GB are left for the next checkpoint"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
