"""Describes how the blend of a resumed run differs from that of its checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron_vl.data.source.blend import (
    MAX_LISTED_SOURCES,
    BlendError,
    BlendSource,
    list_names,
    read_blend_sources,
)

UNBLENDED_TEXT = "the only data set"
"""Stands for the weight of a data set that is not blended."""


@dataclass(frozen=True)
class BlendChange:
    """What differs between the blend of a checkpoint and that of the run."""

    old_sources: tuple[BlendSource, ...]
    new_sources: tuple[BlendSource, ...]
    known_source_keys: frozenset[str] = frozenset()
    """Keys of all sources that were ever in the run's blend."""

    @property
    def is_same_data(self) -> bool:
        """Whether the same samples are drawn, as often and in the same order. Weights count by ratio."""
        old_keys = [source.source_key for source in self.old_sources]
        if old_keys != [source.source_key for source in self.new_sources]:
            return False
        for old_source, new_source in zip(self.old_sources, self.new_sources, strict=True):
            is_same_share = math.isclose(old_source.sample_share, new_source.sample_share, rel_tol=1e-9)
            if not is_same_share or old_source.draws_per_pass != new_source.draws_per_pass:
                return False
        return True

    def summary(self) -> str:
        """The sources of both blends, as a clause."""
        return f"{_describe_sources(self.old_sources)} before, {_describe_sources(self.new_sources)} now"

    @property
    def keeps_any_source(self) -> bool:
        """Whether any source of the checkpoint's blend is still there."""
        old_keys = {source.source_key for source in self.old_sources}
        return any(source.source_key in old_keys for source in self.new_sources)

    def change_lines(self) -> list[str]:
        """Says what happens to each source, in one line each. Unchanged sources share a line."""
        old_by_key = {blend_source.source_key: blend_source for blend_source in self.old_sources}
        changed_lines = []
        unchanged_names = []
        for blend_source in self.new_sources:
            change_line = self._source_change(blend_source, old_by_key.pop(blend_source.source_key, None))
            if change_line:
                changed_lines.append(change_line)
            else:
                unchanged_names.append(blend_source.source_name)
        for blend_source in old_by_key.values():
            changed_lines.append(f"{blend_source.source_name} is left out; its counts are kept")

        unlisted_count = len(changed_lines) - MAX_LISTED_SOURCES
        if unlisted_count > 0:
            changed_lines = [
                *changed_lines[:MAX_LISTED_SOURCES],
                f"{unlisted_count} more sources change",
            ]
        if unchanged_names:
            unchanged_text = (
                unchanged_names[0] if len(unchanged_names) == 1 else f"{len(unchanged_names)} sources"
            )
            changed_lines.append(f"{unchanged_text} as before, from where the checkpoint stands")
        return changed_lines

    def _source_change(self, new_source: BlendSource, old_source: BlendSource | None) -> str:
        """What happens to a source of the run; empty if nothing does."""
        weight_text = new_source.weight_text or UNBLENDED_TEXT
        share_text = f"{weight_text}, {new_source.sample_share:.1%} of the samples expected"
        if old_source is None:
            if new_source.source_key in self.known_source_keys:
                return f"{new_source.source_name} is back and goes on where it was when it left: {share_text}"
            is_known_name = any(one.source_name == new_source.source_name for one in self.old_sources)
            replaced_note = " (another data set than the one that had this name)" if is_known_name else ""
            return f"{new_source.source_name} is new{replaced_note} and begins at its start: {share_text}"

        # A data set that is not blended has no name in a checkpoint.
        is_renamed = new_source.source_name != old_source.source_name and bool(old_source.weight_text)
        name_text = new_source.source_name
        if is_renamed:
            name_text = f"{new_source.source_name}, which was {old_source.source_name},"
        if not new_source.sample_share and old_source.sample_share:
            return (
                f"nothing is drawn from {name_text} any more ({new_source.weight_text}); its position is kept"
            )
        if new_source.weight_text != old_source.weight_text:
            old_share_text = f"{old_source.weight_text or UNBLENDED_TEXT} ({old_source.sample_share:.1%})"
            new_share_text = f"{weight_text} ({new_source.sample_share:.1%})"
            return f"{name_text} goes on where it is: {old_share_text} becomes {new_share_text}"
        if f"{new_source.sample_share:.1%}" != f"{old_source.sample_share:.1%}":
            shares_text = (
                f"{new_source.sample_share:.1%} of the samples expected, after {old_source.sample_share:.1%}"
            )
            return f"{name_text} goes on where it is: {weight_text}, {shares_text}"
        return f"{name_text} goes on where it is" if is_renamed else ""


def _describe_sources(blend_sources: tuple[BlendSource, ...]) -> str:
    if not blend_sources:
        return "data that cannot be read"
    source_texts = []
    for source in blend_sources:
        content_text = f" of {source.content_id[:8]}" if source.content_id else ""
        source_texts.append(f"{source.source_name} ({source.sample_count:,} samples{content_text})")
    return list_names(source_texts)


def read_saved_sources(saved_identity: Any) -> tuple[BlendSource, ...]:
    """The sources of a saved identity; none if it cannot be read."""
    try:
        return read_blend_sources(saved_identity, "the former data set")
    except (BlendError, KeyError, TypeError, ValueError, AttributeError):
        return ()
