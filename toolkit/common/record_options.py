"""Options of the commands that read records: ``train`` and ``data convert``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_vl.system.processes import available_cores
from toolkit.common.options import CommandOptions, option, option_flag

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
    columns: str = option("", metavar="COLUMN=PART,...", shown_default="the fields of the format")
    """Read a question and an answer from these columns, such as question=user,answer=assistant,image=image
    (also video, system, tools and id); or a caption or text, such as url=image,alt=caption."""
    missing_markers: Literal["first", "refuse"] = option("refuse")
    """What to do with a record that lists media and has no <image> or <video> in its text: put the media
    before the first question, or refuse it."""
    caption_prompt: str = option("", metavar="TEXT", shown_default="none")
    """Make each caption the answer to this question about its image. Without it, an image and its caption are
    a document, without a chat template."""
    val_fraction: float = option(0.0, metavar="F", shown_default="0")
    """Put this share of the samples into the validation split."""

    def sample_options(self) -> dict[str, Any]:
        """The options that decide which samples records become."""
        return {
            name: getattr(self, name)
            for name in ("columns", "missing_markers", "caption_prompt", "val_fraction")
        }

    def given_flags(self) -> list[str]:
        """The flags of the options that were given: those that have not their default."""
        return [
            option_flag(field.name)
            for field in fields(RecordOptions)
            if field.name in RecordOptions.__annotations__ and getattr(self, field.name) != field.default
        ]

    def conversion_options(
        self, inputs: list[Path], out: Path, workers: int | None = None, **further_options: Any
    ) -> ConversionOptions:
        """The settings of a conversion of ``inputs`` into ``out``.

        Args:
            workers: number of processes; None: as many as the machine suits.
        """
        from data_tools.convert import ConversionOptions  # it imports torch

        folders = self.media_root or [path if path.is_dir() else path.parent for path in inputs]
        return ConversionOptions(
            media_root=tuple(dict.fromkeys(folders)),
            out=out,
            follow_links=self.follow_links,
            workers=available_cores() if workers is None else workers,
            **self.sample_options(),
            **further_options,
        )


def ignored_keys_text(key_location: str, counts: dict[str, int]) -> str:
    """What is ignored in a location, why, and what that means; the most frequent keys first."""
    shown = Counter(counts).most_common(10)
    noun = key_location.removesuffix("s")
    keys = [
        f"{key if key.isprintable() else ascii(key)} in {count} {noun if count == 1 else key_location}"
        for key, count in shown
    ]
    if len(counts) > len(shown):
        keys.append(f"and {len(counts) - len(shown)} more keys (see report.json)")
    reason = "keys that the format does not read, so that nothing in them is trained on"
    return f"ignored ({reason}): {', '.join(keys)}"
