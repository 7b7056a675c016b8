"""What was learnt of each source of a blend: in a step, since the last printed line, and in the whole run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_vl.data.source.blend import Source

SHOWN = 4
"""Largest number of sources that a printed line shows one by one."""


@dataclass
class SourceCounts:
    """Numbers by source, in the order of the blend."""

    samples: list[int]
    tokens: list[int]
    """Loss tokens."""
    losses: list[float]
    """Sums of the losses of these tokens, times their weights."""

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[tuple[int, int]]], sources: int) -> SourceCounts:
        """The counts of some rows, without losses.

        Args:
            rows: (source, loss tokens) of each row's samples.
            sources: number of sources.
        """
        found = cls.none(sources)
        for row in rows:
            for source, tokens in row:
                found.samples[source] += 1
                found.tokens[source] += tokens
        return found

    @classmethod
    def none(cls, sources: int) -> SourceCounts:
        return cls([0] * sources, [0] * sources, [0.0] * sources)

    @classmethod
    def from_flat(cls, numbers: Sequence[float]) -> SourceCounts:
        """The inverse of :meth:`flat`."""
        count = len(numbers) // 3
        samples, tokens, losses = (numbers[start : start + count] for start in range(0, 3 * count, count))
        return cls([int(n) for n in samples], [int(n) for n in tokens], list(losses))

    def flat(self) -> list[float]:
        """Samples, tokens and losses in one list."""
        return [*map(float, self.samples), *map(float, self.tokens), *self.losses]

    def add(self, other: SourceCounts) -> None:
        for name in ("samples", "tokens", "losses"):
            mine = getattr(self, name)
            for source, number in enumerate(getattr(other, name)):
                mine[source] += number


class SourceMeter:
    """Adds up the counts of a run. Equal on all ranks.

    Args:
        sources: the blend; a run without one has none.
    """

    def __init__(self, sources: Sequence[Source] = ()) -> None:
        self.sources = tuple(sources)
        self.recent = SourceCounts.none(len(self.sources))
        """Since the last printed line."""
        self.seen: dict[str, dict[str, Any]] = {
            source.key: {"name": source.name, "samples": 0, "loss_tokens": 0} for source in sources
        }
        """Of the whole run by what a source is known by. Sources that left the blend stay."""

    def add(self, counts: SourceCounts | None) -> None:
        """Counts a step."""
        if counts is None:
            return
        self.recent.add(counts)
        for source, samples, tokens in zip(self.sources, counts.samples, counts.tokens, strict=True):
            self.seen[source.key]["samples"] += samples
            self.seen[source.key]["loss_tokens"] += tokens

    def next_line(self) -> tuple[dict[str, Any], str]:
        """The numbers of a printed line by name, and its words; both empty without a blend.

        The losses are means since the last line, the counts those of the whole run. A source without a loss
        token since then has no loss.
        """
        recent, self.recent = self.recent, SourceCounts.none(len(self.sources))
        if not self.sources:
            return {}, ""
        numbers: dict[str, Any] = {}
        for i, source in enumerate(self.sources):
            seen = self.seen[source.key]
            numbers |= {
                f"source/{source.name}/loss": _mean(recent, [i]),
                f"source/{source.name}/samples_seen": seen["samples"],
                f"source/{source.name}/loss_tokens_seen": seen["loss_tokens"],
            }
        return numbers, self._words(recent)

    def _words(self, recent: SourceCounts) -> str:
        order = sorted(range(len(self.sources)), key=lambda i: (-self.sources[i].share, i))
        shown, rest = sorted(order[:SHOWN]), order[SHOWN:]
        words = [self._word(self.sources[i].name, recent, [i]) for i in shown]
        if rest:
            words.append(self._word(f"{len(rest)} others", recent, rest))
        return ", ".join(words)

    def _word(self, name: str, recent: SourceCounts, which: list[int]) -> str:
        loss = _mean(recent, which)
        seen = [self.seen[self.sources[i].key] for i in which]
        samples, tokens = (short(sum(one[field] for one in seen)) for field in ("samples", "loss_tokens"))
        return f"{name} {'-' if loss is None else f'{loss:.4f}'} ({samples}, {tokens})"

    def state_dict(self) -> dict[str, dict[str, Any]]:
        return {key: dict(counts) for key, counts in self.seen.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues counting. Names are those of the present blend."""
        names = {source.key: source.name for source in self.sources}
        for key, counts in state.items():
            self.seen[key] = {
                "name": names.get(key, str(counts["name"])),
                "samples": int(counts["samples"]),
                "loss_tokens": int(counts["loss_tokens"]),
            }


def _mean(counts: SourceCounts, which: list[int]) -> float | None:
    """Mean loss of some sources; None without loss tokens."""
    tokens = sum(counts.tokens[i] for i in which)
    return math.fsum(counts.losses[i] for i in which) / tokens if tokens else None


def short(number: int) -> str:
    """A count in at most five characters: 999, 1.2k, 34.5k, 6.7M."""
    size = float(number)
    for unit in ("", "k", "M", "G", "T"):
        if size < 999.5 or unit == "T":
            break
        size /= 1000
    return f"{size:.0f}" if not unit else f"{size:.1f}{unit}"
