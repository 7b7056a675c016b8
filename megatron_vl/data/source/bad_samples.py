"""Samples that training could not use: lists them, counts them by reason, and limits their share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron_vl.data.source.blend import named

TOO_LONG, TOO_MANY_PATCHES = "longer than seq_len", "more than max_patches"
NOT_IN_TEMPLATE = "not written by the chat template"
TEMPLATE_ADVICE = (
    "converting again does not help where the checkpoint's chat template cannot write tools, calls or"
    " reasoning: take such records out, or use a family whose template writes them"
)
LIMITS = {TOO_LONG: ("tokens", "data.seq_len"), TOO_MANY_PATCHES: ("patches", "data.max_patches")}
"""Unit and field of the limit that a sample of such a reason exceeds."""
LISTED_PER_ROW = 256
"""Largest number of samples that one row lists. Further ones are only counted."""


@dataclass(frozen=True)
class DroppedSample:
    """One unusable sample.

    It is left out; but if a medium does not decode, the sample stays in the row, grey and without loss.
    """

    key: str
    """Key in the data set; ``SHARD[i]``, with i counted from 0, if the key could not be read."""
    shard: str
    """Name of the tar file; empty if not known."""
    source: str
    """Input file and record that the sample was converted from; empty if not known."""
    data_set: str
    """Name of its source in a blend; empty without a blend."""
    reason: str
    """Reason that the sample is counted under."""
    detail: str
    size: int
    """Tokens or patches of a sample that exceeds one of :data:`LIMITS`; 0 for other reasons."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def details_by_reason(listed: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What samples (:meth:`DroppedSample.as_json`) have in common: by reason, their largest ``size`` and the
    names of their ``data_sets``."""
    details: dict[str, dict[str, Any]] = {}
    for sample in listed:
        known = details.setdefault(sample["reason"], {"size": 0, "data_sets": []})
        known["size"] = max(known["size"], sample["size"])
        known["data_sets"] = sorted({*known["data_sets"], sample["data_set"]} - {""})
    return details


class BadSampleMeter:
    """Detects when too large a share of the samples could not be used.

    The share is ``bad / max(seen, minimum)``. A few bad samples at the start do not stop a run, and a data
    set that is bad from the start is noticed before ``minimum`` samples were read.

    Args:
        max_share: largest accepted share, from 0 (none) to 1 (any).
        minimum: divisor of the share while fewer samples were seen. To tolerate a missing shard that is a
            small part of the data, give the number of samples of the data set.

    Raises:
        ValueError: the limits are impossible.
    """

    def __init__(self, max_share: float, minimum: int = 1000) -> None:
        if not 0 <= max_share <= 1 or minimum < 1:
            raise ValueError(
                f"data.max_bad_share {max_share} must be from 0 to 1, and {minimum} samples at least 1"
            )
        self.max_share, self.minimum = max_share, minimum
        self.used = 0
        self.reasons: Counter[str] = Counter()
        self.sizes: dict[str, int] = {}
        self.data_sets: dict[str, set[str]] = {}

    def add(
        self,
        samples: int,
        dropped: Mapping[str, int],
        details: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Counts ``samples`` in rows and ``dropped`` ones by reason (``Row.num_samples``, ``Row.dropped``).

        Args:
            details: what is known of the dropped ones (:func:`details_by_reason`), for the message.
        """
        self.used += samples
        self.reasons.update(dropped)
        for reason, known in (details or {}).items():
            self.sizes[reason] = max(self.sizes.get(reason, 0), known["size"])
            self.data_sets.setdefault(reason, set()).update(known["data_sets"])

    @property
    def bad(self) -> int:
        return self.reasons.total()

    @property
    def share(self) -> float:
        return self.bad / max(self.used + self.bad, self.minimum)

    def problem(self) -> str:
        """Why the run must stop; empty while the share is within the limit."""
        if not self.bad or self.share <= self.max_share:
            return ""
        return (
            f"{self.bad} of {self.used + self.bad} samples could not be used, more than data.max_bad_share"
            f" {self.max_share:g} (of {max(self.used + self.bad, self.minimum)}): {self.by_reason()}."
            f" {self.advice()}; or raise data.max_bad_share"
        )

    def advice(self) -> str:
        """What to do about the unusable samples."""
        reasons = [reason for reason, _ in self.reasons.most_common()]
        advice = "; ".join(dict.fromkeys(map(self._advice, reasons)))
        return advice[:1].upper() + advice[1:]

    def _advice(self, reason: str) -> str:
        if reason in LIMITS:
            unit, limit = LIMITS[reason]
            size = self.sizes.get(reason)
            enough = f" to {size} (the {unit} of the largest one so far)" if size else ""
            return f"raise {limit}{enough}, or lower data.max_pixels if pictures fill it"
        if reason == NOT_IN_TEMPLATE:
            return TEMPLATE_ADVICE
        return "correct the data and convert them again"

    def by_reason(self) -> str:
        """The counts by reason, the largest first, with the sources of a blend."""
        return ", ".join(
            f"{count} {reason}{self._sources_of(reason)}" for reason, count in self.reasons.most_common()
        )

    def _sources_of(self, reason: str) -> str:
        names = sorted(self.data_sets.get(reason, ()))
        return f" (source {named(names)})" if names else ""

    def state_dict(self) -> dict[str, Any]:
        return {"used": self.used, "reasons": dict(self.reasons)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.used = int(state["used"])
        self.reasons = Counter(state["reasons"])


DROPPED = "dropped/"
"""Prefix of a reason in the counts of a row."""


def add_pending(state: Mapping[str, Any], pending: Iterable[Mapping[str, int]]) -> dict[str, Any]:
    """Adds what single ranks have counted since to the state of a meter (:meth:`BadSampleMeter.state_dict`).

    Args:
        pending: counts of each rank by name: ``samples`` and ``dropped/REASON``. Other names are ignored.
    """
    meter = BadSampleMeter(1.0)
    meter.load_state_dict(state)
    for counts in pending:
        reasons = {
            name.removeprefix(DROPPED): count for name, count in counts.items() if name.startswith(DROPPED)
        }
        meter.add(counts.get("samples", 0), reasons)
    return {**state, **meter.state_dict()}
