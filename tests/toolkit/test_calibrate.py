"""Rates that ``bench --calibrate`` finds on a machine whose rates are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from toolkit.bench.calibrate import KERNEL_WORK_SIZES, KernelTimer

TFLOPS, HALF_WIDTH, LAUNCH_S = 718.0, 400.0, 300e-6
"""Products of an H200, and the time in which a slow processor launches the three of a linear."""


class KnownMachine(KernelTimer):
    """Computes nothing, and takes the time of a GPU that waits for its processor."""

    width = 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def random_tensor(self, *shape: int, requires_grad: bool = False) -> torch.Tensor:
        type(self).width = shape[-1]
        return torch.empty(*shape, device="meta", dtype=self.dtype, requires_grad=requires_grad)

    def mean_seconds(self, work: Any) -> float:
        with FlopCounterMode(display=False) as counter:
            work()
        rate = TFLOPS * 1e12 * self.width / (self.width + HALF_WIDTH)
        return max(LAUNCH_S, counter.get_total_flops() / rate)


class DisturbedMachine(KnownMachine):
    """Collectives of all sizes take as long as something else takes the processor."""

    def _mean_collective_seconds(self, work: Any, calls: int = 8) -> float:
        return 0.004


def test_a_disturbed_latency_does_not_make_collectives_fast(monkeypatch) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    platform, nothing = SimpleNamespace(name="cuda", device="meta"), SimpleNamespace()
    machine = DisturbedMachine(cast(Any, platform), cast(Any, nothing), cast(Any, nothing))
    speed, latency = machine.collective_rates()
    sent = KERNEL_WORK_SIZES["cuda"].collective_bytes / 2
    assert latency == 0.004
    assert sent / 0.004 / 1e9 <= speed <= 2 * sent / 0.004 / 1e9


def test_a_processor_that_launches_slowly_does_not_count_as_a_slow_product() -> None:
    platform, nothing = SimpleNamespace(name="cuda"), SimpleNamespace()
    machine = KnownMachine(cast(Any, platform), cast(Any, nothing), cast(Any, nothing))
    tflops, half_width = machine.product_rates()
    assert tflops == pytest.approx(TFLOPS, rel=1e-3)
    assert half_width == pytest.approx(HALF_WIDTH, rel=1e-2)
