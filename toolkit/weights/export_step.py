"""Exports one saved step of a running training (``checkpoint.export_hf``); the trainer starts it.

    python -m toolkit.weights.export_step '{"checkpoint": ..., ...}'

The argument holds the fields of :class:`ExportJob`. After a failure, the last line on standard error gives
the reason, and nothing is left on the disk, which the training needs more than the export does.
"""

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vl.system import durable_files
from megatron_vl.system.errors import UserError, describe_error
from megatron_vl.system.processes import end_with_parent
from megatron_vl.weights.run_folder import unused_path
from megatron_vl.weights.weight_reader import WeightReader


@dataclass
class ExportJob:
    checkpoint: str
    hf: str
    out: str
    """Folder to write. If it exists, it was exported from other weights and is renamed."""
    parent: int
    """Process id of the trainer; this process ends when the trainer does."""
    is_last: bool
    """Whether the training writes no further checkpoint, for which the disk would need room."""
    facts: dict[str, Any]
    """Contents of the file that records where the export comes from (:data:`EXPORT_FACTS_FILE`)."""
    merges_adapter: bool = False
    """Whether adapters are merged into the weights of ``hf``, and not written as PEFT's files."""


def main(argv: list[str]) -> int:
    export_job = ExportJob(**json.loads(argv[0]))
    end_with_parent(export_job.parent)
    os.nice(10)

    try:
        export_step(export_job)
        if note := media_note(Path(export_job.out), Path(export_job.hf)):
            print(f"NOTE: {note}")  # the trainer prints it
    except Exception as error:
        print(" ".join(describe_error(error).split()), file=sys.stderr)
        return 1
    return 0


def export_step(export_job: ExportJob) -> None:
    """Exports one step. A run with LoRA gets PEFT's files, unless its adapters are merged.

    Raises:
        UserError, OSError: the export failed.
    """
    from converters.convert import export_adapter, export_weights

    export_dir, checkpoint_dir = Path(export_job.out), Path(export_job.checkpoint)
    reader = WeightReader(checkpoint_dir, takes_lora=True)
    has_adapters = bool(reader.lora.rank)
    writes_peft = has_adapters and not export_job.merges_adapter
    durable_files.make_dirs(export_dir.parent)
    _check_free_space(export_job, writes_peft)
    if export_dir.exists():
        durable_files.rename_path(export_dir, unused_path(export_dir.with_name(f"{export_dir.name}.earlier")))

    export_facts = export_job.facts | {"weights": reader.manifest["digest"]}
    if writes_peft:
        # The run may have begun with other weights than those in model.hf, from which its config comes.
        export_adapter(
            checkpoint_dir, export_job.hf, export_dir, may_have_other_base=True, export_facts=export_facts
        )
    else:
        export_weights(
            checkpoint_dir,
            export_job.hf,
            export_dir,
            merges_adapter=has_adapters,
            workers=2,  # the training comes first
            export_facts=export_facts,
        )


def media_note(export_dir: Path, hf_dir: Path) -> str:
    """A note if the processor config of ``hf_dir`` has other limits than training had; otherwise empty."""
    from megatron_vl.data.sample.pixel_settings import media_limits_note
    from megatron_vl.weights.trained_media import exported_media

    try:
        return media_limits_note(hf_dir, exported_media(export_dir))
    except (ValueError, OSError):
        return ""  # without a processor config that can be read, there is nothing to compare


def _check_free_space(export_job: ExportJob, writes_peft: bool) -> None:
    from converters.fp8 import is_fp8_folder

    # An export is as large as the original folder, or as the adapters of a run with LoRA.
    source_dir = Path(export_job.checkpoint) / "weights" if writes_peft else Path(export_job.hf)
    size = sum(path.stat().st_size for path in source_dir.glob("*.safetensors"))
    size *= 1 if writes_peft or not is_fp8_folder(source_dir) else 2  # it is written in bfloat16
    # The next checkpoint will be as large; a large run's has many thousand files.
    saved_files = () if export_job.is_last else Path(export_job.checkpoint).rglob("*")
    next_size = sum(path.stat().st_size for path in saved_files if path.is_file())
    free_bytes = shutil.disk_usage(Path(export_job.out).parent).free
    if free_bytes < size + next_size:
        raise UserError(
            f"the disk has {free_bytes / 1e9:.1f} GB free; the export takes {size / 1e9:.1f} GB, and"
            f" {next_size / 1e9:.1f} GB are left for the next checkpoint"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
