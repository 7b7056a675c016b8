"""Times functions on the GPU, for the other benchmarks."""

from collections.abc import Callable

import torch


def milliseconds(function: Callable[[], object], runs: int = 20) -> float:
    """Mean over ``runs`` consecutive calls, after five for warm-up."""
    for _ in range(5):
        function()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(runs):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / runs
