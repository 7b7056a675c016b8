"""The GPU's time of a function, for the benchmarks beside this file."""

from __future__ import annotations

from collections.abc import Callable

import torch


def milliseconds(function: Callable[[], object], runs: int = 20) -> float:
    """Mean over ``runs`` calls behind one another, after five to warm up."""
    for _ in range(5):
        function()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(runs):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / runs
