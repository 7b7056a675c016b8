"""Options of the commands that read records: ``train`` and ``data convert``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from toolkit.common.options import CommandOptions, option

if TYPE_CHECKING:
    from data_tools.convert import ConversionOptions

MAX_QUARANTINED = 0.01
"""Share of the records that may be unusable, unless the user gives another."""


@dataclass(kw_only=True)
class RecordOptions(CommandOptions):
    """How records are read."""

    media_root: list[Path] | None = option(
        None, metavar="DIR", several=True, shown_default="the folder of the records", must_exist=True
    )
    """Look for media in these folders, one after the other; paths that leave them are refused."""
    follow_links: bool = False
    """Also read media behind links that lead out of their folder."""
    columns: str | None = option(None, metavar="COLUMN=PART,...", shown_default="the fields of the format")
    """Read a question and an answer from these columns, such as question=user,answer=assistant,image=image
    (also video, system, tools and id); or a caption or text, such as url=image,alt=caption."""
    missing_markers: Literal["first", "refuse"] = option("refuse")
    """What to do with a record that lists media and has no <image> or <video> in its text: put the media
    before the first question, or refuse it."""
    caption_prompt: str | None = option(None, metavar="TEXT", shown_default="none")
    """Make each caption the answer to this question about its image. Without it, an image and its caption are
    a document, without a chat template."""

    def conversion_options(
        self, inputs: list[Path], out: Path, workers: int | None = None, **further_options: Any
    ) -> ConversionOptions:
        """The settings of a conversion of ``inputs`` into ``out``.

        Args:
            workers: number of processes; None: as many as the machine suits.
        """
        from data_tools.convert import ConversionOptions, default_workers  # it imports torch

        folders = self.media_root or [path if path.is_dir() else path.parent for path in inputs]
        return ConversionOptions(
            media_root=tuple(dict.fromkeys(folders)),
            out=out,
            follow_links=self.follow_links,
            workers=default_workers() if workers is None else workers,
            columns=self.columns or "",
            missing_markers=self.missing_markers,
            caption_prompt=self.caption_prompt or "",
            **further_options,
        )
