"""Options of the commands that read records: ``train`` and ``data convert``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toolkit.common.options import CommandOptions, option


@dataclass(kw_only=True)
class RecordOptions(CommandOptions):
    """How records are read."""

    media_root: Path | None = option(
        None, metavar="DIR", shown_default="the folder of the records", must_exist=True
    )
    """Resolve media paths relative to this folder; paths that leave it are refused."""
    columns: str | None = option(None, metavar="COLUMN=PART,...", shown_default="the fields of the format")
    """Read a question and an answer from these columns, such as question=user,answer=assistant,image=image
    (also video, system, tools and id)."""
    missing_markers: Literal["first", "refuse"] = option("refuse")
    """What to do with a record that lists media and has no <image> or <video> in its text: put the media
    before the first question, or refuse it."""
