"""Times functions on the GPU, for the other benchmarks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


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


def device_milliseconds(function: Callable[[], object], runs: int = 10) -> float:
    """Mean sum of the times of all kernels of a call. The second-level cache holds other data before each.

    The time in which the GPU waits for the host does not count.
    """
    other_data = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(runs):
            other_data.fill_(1)
            function()
        torch.cuda.synchronize()

    kernels = [kernel for kernel in profiler.key_averages() if "FillFunctor<unsigned char>" not in kernel.key]
    return sum(kernel.self_device_time_total for kernel in kernels) / runs / 1000
