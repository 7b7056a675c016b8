"""Describes how the blend of a resumed run differs from that of its checkpoint."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from megatron_vl.data.source.blend import MAX_LISTED_SOURCES, BlendError, BlendSource, read_blend_sources


def blend_change_lines(
    old_sources: Sequence[BlendSource], new_sources: Sequence[BlendSource], drawn_keys: Collection[str] = ()
) -> list[str]:
    """One line for each source that changes.

    There are none if the same samples are drawn, as often and in the same order. Weights count by ratio.

    Args:
        drawn_keys: the keys of all sources from which the run has ever drawn.
    """
    old_by_key = {source.source_key: source for source in old_sources}
    lines = []
    for source in new_sources:
        old_source = old_by_key.pop(source.source_key, None)
        if old_source is None:
            change = "is back and continues" if source.source_key in drawn_keys else "is new"
            lines.append(f"{source.source_name} {change}: {_amount_text(source)}")
        elif (
            not math.isclose(source.sample_share, old_source.sample_share, rel_tol=1e-9)
            or source.draws_per_pass != old_source.draws_per_pass
        ):
            amounts = f"{_amount_text(old_source)} becomes {_amount_text(source)}"
            lines.append(f"{source.source_name} continues: {amounts}")
    for source in old_by_key.values():
        lines.append(f"{source.source_name} is left out; its position and counts are kept")

    has_same_order = [one.source_key for one in old_sources] == [one.source_key for one in new_sources]
    if not lines and not has_same_order:
        return ["the data sets are in another order"]
    if (unlisted_count := len(lines) - MAX_LISTED_SOURCES) > 0:
        lines = [*lines[:MAX_LISTED_SOURCES], f"{unlisted_count} more sources change"]
    return lines


def _amount_text(source: BlendSource) -> str:
    return f"{source.weight_text or 'the only data set'} ({source.sample_share:.1%})"


def read_saved_sources(saved_identity: Any) -> tuple[BlendSource, ...]:
    """The sources of a saved identity; none if it cannot be read."""
    try:
        return read_blend_sources(saved_identity, "the former data set")
    except (BlendError, KeyError, TypeError, ValueError, AttributeError):
        return ()
