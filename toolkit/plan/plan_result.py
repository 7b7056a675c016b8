"""The result of ``megatron-vl plan``."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vl.planning.layout_search import SearchRequest, SearchResult
from megatron_vl.planning.predict import RunPrediction


@dataclass(frozen=True)
class PlanResult:
    """The request, the best layout, and the layouts that it is compared with."""

    search_request: SearchRequest
    best_prediction: RunPrediction
    search_result: SearchResult | None
    """None if the layout was given."""
    fitting_alternative: RunPrediction | None = None
    """A layout that fits, if the given one does not."""
    own_prediction: RunPrediction | None = None
    """The prediction of the layout that the run sets, if other layouts were searched."""
