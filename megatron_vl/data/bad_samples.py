"""Samples that training could not use: listed, counted by reason, and a limit on their share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

LISTED_PER_ROW = 256
"""Most samples that one row names; further ones are in its counts only."""


@dataclass(frozen=True)
class DroppedSample:
    """One sample that is left out, or (a medium that does not decode) stays in the row grey and without
    loss."""

    key: str
    """Key in the data set; ``SHARD[i]``, from 0, where not even that could be read."""
    shard: str
    """Name of the tar file; empty when it is not known."""
    source: str
    """Input file and record that the sample was converted from; empty when it is not known."""
    reason: str
    """What it is counted under."""
    detail: str

    def as_json(self) -> dict[str, str]:
        return asdict(self)


class BadSampleMeter:
    """Says when too large a share of the samples cannot be used.

    The share is ``bad / max(seen, minimum)``: a few bad samples at the start stop nothing, and a data set
    that is bad from the start is noticed before ``minimum`` samples were read.

    Args:
        max_share: largest share that is accepted, 0 (none) to 1 (any).
        minimum: samples that the share is counted of while fewer were seen. To tolerate that a whole shard is
            gone where it is a small part of the data, give the number of samples of the data set.

    Raises:
        ValueError: impossible limits.
    """

    def __init__(self, max_share: float, minimum: int = 1000) -> None:
        if not 0 <= max_share <= 1 or minimum < 1:
            raise ValueError(
                f"data.max_bad_share {max_share} must be from 0 to 1, and {minimum} samples at least 1"
            )
        self.max_share, self.minimum = max_share, minimum
        self.used = 0
        self.reasons: Counter[str] = Counter()

    def add(self, samples: int, dropped: Mapping[str, int]) -> None:
        """Counts ``samples`` in rows and ``dropped`` ones by reason (``Row.num_samples`` and
        ``Row.dropped``)."""
        self.used += samples
        self.reasons.update(dropped)

    @property
    def bad(self) -> int:
        return self.reasons.total()

    @property
    def share(self) -> float:
        return self.bad / max(self.used + self.bad, self.minimum)

    def problem(self) -> str:
        """Why the run has to stop; empty while the share is within the limit."""
        if not self.bad or self.share <= self.max_share:
            return ""
        return (
            f"{self.bad} of {self.used + self.bad} samples could not be used, more than data.max_bad_share"
            f" {self.max_share:g} (of {max(self.used + self.bad, self.minimum)}): {self.by_reason()}. Mend or"
            " convert the data again, or raise data.max_bad_share"
        )

    def by_reason(self) -> str:
        """The counts, the most frequent first."""
        return ", ".join(f"{count} {reason}" for reason, count in self.reasons.most_common())

    def state_dict(self) -> dict[str, Any]:
        return {"used": self.used, "reasons": dict(self.reasons)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.used, self.reasons = int(state["used"]), Counter(state["reasons"])


DROPPED = "dropped/"
"""Prefix of a reason in the counts of rows."""


def add_pending(state: Mapping[str, Any], pending: Iterable[Mapping[str, int]]) -> dict[str, Any]:
    """The state of a meter (:meth:`BadSampleMeter.state_dict`) with what single ranks have counted since.

    Args:
        pending: of each rank, ``samples`` and ``dropped/REASON``; other counts are left out.
    """
    meter = BadSampleMeter(1.0)
    meter.load_state_dict(state)
    for counts in pending:
        reasons = {
            name.removeprefix(DROPPED): count for name, count in counts.items() if name.startswith(DROPPED)
        }
        meter.add(counts.get("samples", 0), reasons)
    return {**state, **meter.state_dict()}
