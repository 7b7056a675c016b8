"""Samples that training could not use: lists them, counts them by reason, and limits their share."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

TOO_LONG = "longer than seq_len"
TOO_MANY_PATCHES = "more than max_patches"
NOT_IN_CHAT_TEMPLATE = "not written by the chat template"
TEMPLATE_ADVICE = (
    "converting again does not help where the chat template cannot write tools, calls or reasoning: take such"
    " records out, or give a template that writes them (data.chat_template; qwen2_vl_tools writes tools for"
    " Qwen2-VL and Qwen2.5-VL)"
)
LIMIT_BY_REASON = {TOO_LONG: ("tokens", "data.seq_len"), TOO_MANY_PATCHES: ("patches", "data.max_patches")}
"""Unit and field of the limit that a sample of such a reason exceeds."""
MAX_LISTED_PER_ROW = 256
"""Largest number of samples that one row lists. Further ones are only counted."""
MIN_SEEN = 1000
"""Divisor of the share of unusable samples while fewer were seen."""


@dataclass(frozen=True)
class DroppedSample:
    """One unusable sample.

    It is left out, except if a medium does not decode. Then it stays in the row, grey and without loss.
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
    detail: str
    size: int
    """Tokens or patches of a sample that exceeds one of :data:`LIMIT_BY_REASON`; 0 for other reasons."""


def details_by_reason(dropped_samples: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By reason: the largest ``size`` of the samples, and the names of their ``data_sets``.

    Args:
        dropped_samples: :class:`DroppedSample`, each as a mapping.
    """
    reason_details: dict[str, dict[str, Any]] = {}
    for sample in dropped_samples:
        known_details = reason_details.setdefault(sample["reason"], {"size": 0, "data_sets": []})
        known_details["size"] = max(known_details["size"], sample["size"])
        known_details["data_sets"] = sorted({*known_details["data_sets"], sample["data_set"]} - {""})
    return reason_details


class BadSampleMeter:
    """Notices when the share of unusable samples is too large.

    The share is ``bad / max(seen, MIN_SEEN)``. So a few bad samples at the start do not stop a run. A data
    set that is bad from the start is noticed before :data:`MIN_SEEN` samples were read.

    Args:
        max_share: largest accepted share, from 0 (none) to 1 (any).
    """

    def __init__(self, max_share: float) -> None:
        self.max_share = max_share
        self.used_count = 0
        self.reason_counts: Counter[str] = Counter()
        self.largest_sizes: dict[str, int] = {}
        self.datasets_by_reason: dict[str, set[str]] = {}

    def add_counts(
        self,
        used_samples: int,
        dropped_counts: Mapping[str, int],
        dropped_details: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Counts used and dropped samples.

        Args:
            used_samples: number of samples in rows (``TrainingRow.num_samples``).
            dropped_counts: number of dropped samples by reason (``TrainingRow.dropped_counts``).
            dropped_details: details of the dropped samples for the message (:func:`details_by_reason`).
        """
        self.used_count += used_samples
        self.reason_counts.update(dropped_counts)
        for reason, known_details in (dropped_details or {}).items():
            self.largest_sizes[reason] = max(self.largest_sizes.get(reason, 0), known_details["size"])
            self.datasets_by_reason.setdefault(reason, set()).update(known_details["data_sets"])

    @property
    def bad_count(self) -> int:
        return self.reason_counts.total()

    def stop_reason(self) -> str:
        """Why the run must stop; empty while the share is within the limit."""
        seen_count = self.used_count + self.bad_count
        if not self.bad_count or self.bad_count / max(seen_count, MIN_SEEN) <= self.max_share:
            return ""
        return (
            f"{self.bad_count} of {seen_count} samples could not be used, more than data.max_bad_share"
            f" {self.max_share:g} (of {max(seen_count, MIN_SEEN)}): {self.counts_by_reason()}."
            f" {self.advice_text()}; or raise data.max_bad_share"
        )

    def advice_text(self) -> str:
        """What to do about the unusable samples."""
        reasons = (reason for reason, _ in self.reason_counts.most_common())
        advice_text = "; ".join(dict.fromkeys(map(self._advice_for_reason, reasons)))
        return advice_text[:1].upper() + advice_text[1:]

    def _advice_for_reason(self, reason: str) -> str:
        if reason in LIMIT_BY_REASON:
            size_unit, limit_field = LIMIT_BY_REASON[reason]
            size = self.largest_sizes.get(reason)
            enough_text = f" to {size} (the {size_unit} of the largest one so far)" if size else ""
            return f"raise {limit_field}{enough_text}, or lower data.max_pixels if images fill it"
        if reason == NOT_IN_CHAT_TEMPLATE:
            return TEMPLATE_ADVICE
        return "correct the data and convert them again"

    def counts_by_reason(self) -> str:
        """The counts by reason, the largest first, with the sources of a blend."""
        texts = []
        for reason, count in self.reason_counts.most_common():
            names = sorted(self.datasets_by_reason.get(reason, ()))
            texts.append(f"{count} {reason}" + (f" (source {', '.join(names)})" if names else ""))
        return ", ".join(texts)

    def state_dict(self) -> dict[str, Any]:
        return {"used": self.used_count, "reasons": dict(self.reason_counts)}

    def load_state_dict(self, saved_state: Mapping[str, Any]) -> None:
        self.used_count = int(saved_state["used"])
        self.reason_counts = Counter(saved_state["reasons"])


DROPPED_PREFIX = "dropped/"
"""Prefix of a reason in the counts of a row."""


def add_pending_counts(
    saved_state: Mapping[str, Any], counts_by_rank: Iterable[Mapping[str, int]]
) -> dict[str, Any]:
    """Adds counts that single ranks made later to the state of a meter (:meth:`BadSampleMeter.state_dict`).

    Args:
        counts_by_rank: counts of each rank by name: ``samples`` and ``dropped/REASON``. Other names are
            ignored.
    """
    meter = BadSampleMeter(1.0)
    meter.load_state_dict(saved_state)
    for counts in counts_by_rank:
        dropped = {
            name.removeprefix(DROPPED_PREFIX): count
            for name, count in counts.items()
            if name.startswith(DROPPED_PREFIX)
        }
        meter.add_counts(counts.get("samples", 0), dropped)
    return meter.state_dict()
