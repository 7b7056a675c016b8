"""Options of the commands that read records: ``train`` and ``data convert``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toolkit.common.options import CommandOptions, option


@dataclass(kw_only=True)
class RecordOptions(CommandOptions):
    """How records are read."""

    def media_roots(self, inputs: list[Path]) -> tuple[Path, ...]:
        """The folders of the media: those given, or those of the inputs."""
        if self.media_root:
            return tuple(self.media_root)
        folders = [path if path.is_dir() else path.parent for path in inputs]
        return tuple(dict.fromkeys(folders))

    media_root: list[Path] | None = option(
        None, metavar="DIR", several=True, shown_default="the folder of the records", must_exist=True
    )
    """Look for media in these folders, one after the other; paths that leave them are refused."""
    follow_links: bool = False
    """Also read media behind links that lead out of their folder."""
    columns: str | None = option(None, metavar="COLUMN=PART,...", shown_default="the fields of the format")
    """Read a question and an answer from these columns, such as question=user,answer=assistant,image=image
    (also video, system, tools and id)."""
    missing_markers: Literal["first", "refuse"] = option("refuse")
    """What to do with a record that lists media and has no <image> or <video> in its text: put the media
    before the first question, or refuse it."""
