"""What ``megatron-vl plan`` finds out."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vl.planning.predict import Prediction
from megatron_vl.planning.search import Found, Wanted


@dataclass(frozen=True)
class Plan:
    """What the command found out."""

    wanted: Wanted
    best: Prediction
    found: Found | None
    """None if the layout was given."""
    instead: Prediction | None = None
    """What fits, if the given layout does not."""
    own: Prediction | None = None
    """The layout that the run sets, beside those that were searched."""
