"""Samples, loss tokens and losses by source of a blend: of a step, since the last line, and of the run."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_vl.data.source.blend import BlendSource

MAX_SHOWN_SOURCES = 4
"""Largest number of sources in a printed line: those with the largest shares."""


class SourceCounts(NamedTuple):
    """Numbers by source, in the order of the blend: three tensors float64 [sources].

    Float64 holds integers up to 2^53, so that one collective sums all of them.
    """

    samples: Tensor
    tokens: Tensor
    losses: Tensor
    """Sums of the losses of these tokens, times their weights."""


def count_sources(rows: Iterable[Iterable[tuple[int, int]]], num_sources: int) -> SourceCounts:
    """The counts of rows, given as (source, loss tokens) of each row's samples, without their losses."""
    counts = SourceCounts(*torch.zeros(3, num_sources, dtype=torch.float64))
    for source, tokens in (sample for row in rows for sample in row):
        counts.samples[source] += 1
        counts.tokens[source] += tokens
    return counts


class SourceMeter:
    """Adds up the counts of a run. Equal on all ranks."""

    def __init__(self, blend_sources: Sequence[BlendSource]) -> None:
        self.blend_sources = tuple(blend_sources)
        self.recent = count_sources([], len(self.blend_sources))
        self.totals: dict[str, dict[str, Any]] = {
            source.source_key: {"name": source.source_name, "samples": 0, "loss_tokens": 0}
            for source in blend_sources
        }
        """Totals of the whole run by the key of a source. Sources that have left the blend keep theirs."""

    def add(self, counts: SourceCounts | None) -> None:
        """Counts a step; None for a step without a blend."""
        if counts is None:
            return
        for recent, added in zip(self.recent, counts, strict=True):
            recent += added
        for i, source in enumerate(self.blend_sources):
            self.totals[source.source_key]["samples"] += int(counts.samples[i])
            self.totals[source.source_key]["loss_tokens"] += int(counts.tokens[i])

    def take_line(self, passes: Mapping[str, float]) -> tuple[dict[str, Any], str]:
        """(numbers of a printed line by name, its text). Both are empty without a blend.

        Args:
            passes: how many passes over each source were made, by its key; empty on ranks that do not print.

        Losses are means since the last line, and counts are those of the whole run. A source without a loss
        token since the last line has None for its loss.
        """
        metrics: dict[str, Any] = {}
        texts = []
        for i, source in enumerate(self.blend_sources):
            counts, tokens = self.totals[source.source_key], float(self.recent.tokens[i])
            loss = float(self.recent.losses[i]) / tokens if tokens else None
            made = passes.get(source.source_key)
            metrics |= {
                f"source/{source.source_name}/loss": loss,
                f"source/{source.source_name}/samples_seen": counts["samples"],
                f"source/{source.source_name}/loss_tokens_seen": counts["loss_tokens"],
                f"source/{source.source_name}/passes": made,
            }
            numbers = [abbreviate_count(counts[name]) for name in ("samples", "loss_tokens")]
            numbers += [] if made is None else [f"{made:.2f} passes"]
            loss_text = "-" if loss is None else f"{loss:.4f}"
            texts.append(f"{source.source_name} {loss_text} ({', '.join(numbers)})")
        self.recent = count_sources([], len(self.blend_sources))
        by_share = sorted(range(len(texts)), key=lambda i: self.blend_sources[i].sample_share, reverse=True)
        return metrics, " | ".join(texts[i] for i in sorted(by_share[:MAX_SHOWN_SOURCES]))

    def state_dict(self) -> dict[str, dict[str, Any]]:
        return {key: dict(counts) for key, counts in self.totals.items()}

    def load_state_dict(self, saved_state: Mapping[str, Any]) -> None:
        """Continues the counts of a checkpoint. Names are those of the current blend."""
        for key, counts in saved_state.items():
            numbers = {name: int(counts[name]) for name in ("samples", "loss_tokens")}
            self.totals[key] = {"name": str(counts["name"])} | self.totals.get(key, {}) | numbers


def abbreviate_count(count: float) -> str:
    """A count in at most five characters: 999, 1.2k, 34.5k, 6.7M."""
    for unit in ("", "k", "M", "G"):
        if count < 999.5:
            return f"{count:.1f}{unit}" if unit else f"{count:.0f}"
        count /= 1000
    return f"{count:.1f}T"
