"""Samples, loss tokens and losses by source of a blend: of a step, since the last line, and of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_vl.data.source.blend import BlendSource

MAX_SHOWN_SOURCES = 4
"""Largest number of sources that a printed line shows one by one."""


@dataclass
class SourceCounts:
    """Numbers by source, in the order of the blend."""

    samples: list[int]
    tokens: list[int]
    """Numbers of loss tokens."""
    losses: list[float]
    """Sums of the losses of these tokens, times their weights."""

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[tuple[int, int]]], num_sources: int) -> SourceCounts:
        """The counts of rows, given as (source, loss tokens) of each row's samples, without their losses."""
        row_counts = cls.all_zero(num_sources)
        for row in rows:
            for source, tokens in row:
                row_counts.samples[source] += 1
                row_counts.tokens[source] += tokens
        return row_counts

    @classmethod
    def all_zero(cls, num_sources: int) -> SourceCounts:
        return cls([0] * num_sources, [0] * num_sources, [0.0] * num_sources)

    @classmethod
    def from_flat(cls, flat_counts: Sequence[float]) -> SourceCounts:
        """The inverse of :meth:`to_flat`."""
        count = len(flat_counts) // 3
        samples, tokens, losses = (flat_counts[start : start + count] for start in range(0, 3 * count, count))
        return cls(list(map(int, samples)), list(map(int, tokens)), list(losses))

    def to_flat(self) -> list[float]:
        """Samples, tokens and losses in one list."""
        return [*map(float, self.samples), *map(float, self.tokens), *self.losses]

    def add(self, added_counts: SourceCounts) -> None:
        for name in ("samples", "tokens", "losses"):
            own_values = getattr(self, name)
            for source, number in enumerate(getattr(added_counts, name)):
                own_values[source] += number


class SourceMeter:
    """Adds up the counts of a run. Equal on all ranks.

    Args:
        blend_sources: the sources of the blend; empty if the data set is no blend.
    """

    def __init__(self, blend_sources: Sequence[BlendSource] = ()) -> None:
        self.blend_sources = tuple(blend_sources)
        self.recent_counts = SourceCounts.all_zero(len(self.blend_sources))
        """Counts since the last printed line."""
        self.totals_by_source: dict[str, dict[str, Any]] = {
            source.source_key: {"name": source.source_name, "samples": 0, "loss_tokens": 0}
            for source in blend_sources
        }
        """Totals of the whole run by the key of a source. Sources that have left the blend keep theirs."""

    def add(self, source_counts: SourceCounts | None) -> None:
        """Counts a step; None for a step without a blend."""
        if source_counts is None:
            return

        self.recent_counts.add(source_counts)
        for source, samples, tokens in zip(
            self.blend_sources, source_counts.samples, source_counts.tokens, strict=True
        ):
            self.totals_by_source[source.source_key]["samples"] += samples
            self.totals_by_source[source.source_key]["loss_tokens"] += tokens

    def take_line(self) -> tuple[dict[str, Any], str]:
        """(numbers of a printed line by name, its text). Both are empty without a blend.

        Losses are means since the last line, and counts are those of the whole run. A source without a loss
        token since the last line has None for its loss.
        """
        recent_counts, self.recent_counts = self.recent_counts, SourceCounts.all_zero(len(self.blend_sources))
        if not self.blend_sources:
            return {}, ""
        source_metrics: dict[str, Any] = {}
        for i, blend_source in enumerate(self.blend_sources):
            source_totals = self.totals_by_source[blend_source.source_key]
            source_metrics |= {
                f"source/{blend_source.source_name}/loss": _mean_loss(recent_counts, [i]),
                f"source/{blend_source.source_name}/samples_seen": source_totals["samples"],
                f"source/{blend_source.source_name}/loss_tokens_seen": source_totals["loss_tokens"],
            }
        return source_metrics, self._line_text(recent_counts)

    def _line_text(self, recent_counts: SourceCounts) -> str:
        sources_by_share = sorted(
            range(len(self.blend_sources)), key=lambda i: (-self.blend_sources[i].sample_share, i)
        )
        shown_sources = sorted(sources_by_share[:MAX_SHOWN_SOURCES])
        other_sources = sources_by_share[MAX_SHOWN_SOURCES:]
        source_texts = []
        for i in shown_sources:
            source_texts.append(self._source_text(self.blend_sources[i].source_name, recent_counts, [i]))
        if other_sources:
            source_texts.append(
                self._source_text(f"{len(other_sources)} others", recent_counts, other_sources)
            )
        return ", ".join(source_texts)

    def _source_text(self, source_name: str, recent_counts: SourceCounts, source_indices: list[int]) -> str:
        samples = loss_tokens = 0
        for i in source_indices:
            source_totals = self.totals_by_source[self.blend_sources[i].source_key]
            samples += source_totals["samples"]
            loss_tokens += source_totals["loss_tokens"]

        mean_loss = _mean_loss(recent_counts, source_indices)
        loss_text = "-" if mean_loss is None else f"{mean_loss:.4f}"
        return f"{source_name} {loss_text} ({abbreviate_count(samples)}, {abbreviate_count(loss_tokens)})"

    def state_dict(self) -> dict[str, dict[str, Any]]:
        return {key: dict(counts) for key, counts in self.totals_by_source.items()}

    def load_state_dict(self, saved_state: Mapping[str, Any]) -> None:
        """Continues the counts of a checkpoint. Names are those of the current blend."""
        names = {source.source_key: source.source_name for source in self.blend_sources}
        for key, source_totals in saved_state.items():
            self.totals_by_source[key] = {
                "name": names.get(key, str(source_totals["name"])),
                "samples": int(source_totals["samples"]),
                "loss_tokens": int(source_totals["loss_tokens"]),
            }


def _mean_loss(source_counts: SourceCounts, source_indices: list[int]) -> float | None:
    """Mean loss over the tokens of several sources; None without loss tokens."""
    tokens = sum(source_counts.tokens[i] for i in source_indices)
    return math.fsum(source_counts.losses[i] for i in source_indices) / tokens if tokens else None


def abbreviate_count(full_count: int) -> str:
    """A count in at most five characters: 999, 1.2k, 34.5k, 6.7M."""
    size = float(full_count)
    for count_unit in ("", "k", "M", "G", "T"):
        if size < 999.5 or count_unit == "T":
            break
        size /= 1000
    return f"{size:.0f}" if not count_unit else f"{size:.1f}{count_unit}"
