"""``megatron-vl bench --calibrate``: measures the rates of this machine and stores them for the planner.

A calibration is made in three steps. First, single kernels are timed: products, elementwise work, attention,
the update of weights, copies, collectives. Second, quantities that depend more on the model's modules than on
the GPU, such as the bytes that a layer's norms move, are taken from the calibration that was used so far.
Third, one factor scales all compute rates, so that predictions match the steps that ``bench`` measured.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.config import TrainConfig
from megatron_vl.models.attention import choose_backend, make_backend
from megatron_vl.models.batch import Segments
from megatron_vl.planning.calibration import (
    DATA_SHEETS,
    Calibration,
    kind_of,
    known,
    stored_path,
    write_calibration,
)
from megatron_vl.planning.predict import predict
from megatron_vl.planning.rates import LARGEST, faster, matched, saturating
from megatron_vl.planning.rows import RowStatistics
from megatron_vl.platform import Platform
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from toolkit.plan.data_rows import shape_of

from . import report
from .options import BenchRun
from .workload import rows

ROWS = 16
"""Number of rows from which the statistics of a workload are computed."""


@dataclasses.dataclass(frozen=True)
class Amounts:
    """The amounts of work for which kernels are timed."""

    tokens: int
    """Tokens in the widest product, and in attention."""
    widths: tuple[int, ...]
    """Widths of products."""
    lengths: tuple[int, ...]
    """Lengths in tokens of documents for causal attention."""
    elements: int
    """Elements of elementwise kernels, updates and copies."""
    message: int
    """Bytes of a collective."""
    seconds: float
    """Seconds for which each kernel is timed."""


AMOUNTS = {
    "cuda": Amounts(8192, (512, 1024, 2048, 4096, 8192), (512, 1024, 2048, 8192), 1 << 27, 256 << 20, 0.2),
    "cpu": Amounts(256, (64, 128, 256, 512, 1024), (64, 256, 512), 1 << 21, 4 << 20, 0.1),
}


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Times kernels on one device."""

    platform: Platform
    spec: ModelSpec
    config: TrainConfig

    @property
    def amounts(self) -> Amounts:
        return AMOUNTS[self.platform.name]

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.config.dtype == "bfloat16" else torch.float32

    def seconds(self, work: Callable[[], Any]) -> float:
        """Mean seconds of a call, over as many calls as fit into the time for a kernel."""
        for _ in range(3):
            work()
        self.platform.synchronize()
        calls, start = 0, time.perf_counter()
        while calls < 3 or time.perf_counter() - start < self.amounts.seconds:
            for _ in range(4):
                work()
            calls += 4
            self.platform.synchronize()
        return (time.perf_counter() - start) / calls

    def random(self, *shape: int, grad: bool = False) -> Tensor:
        return torch.randn(*shape, device=self.platform.device, dtype=self.dtype).requires_grad_(grad)

    def products(self) -> tuple[float, float]:
        """TFLOP/s of very wide products, and the width at which products reach half of that.

        All three products of a linear are timed: forward, input gradient and weight gradient. Narrow ones
        have more tokens, as in a tower, so that each takes longer than the processor needs to launch it.
        """
        rates = []
        for width in self.amounts.widths:
            tokens = self.amounts.tokens * self.amounts.widths[-1] // width
            x, weight = self.random(tokens, width, grad=True), self.random(width, width, grad=True)
            gradient = self.random(tokens, width)

            def work(x=x, weight=weight, gradient=gradient) -> None:
                torch.autograd.grad(x @ weight.t(), (x, weight), gradient)

            rates.append(6 * tokens * width * width / self.seconds(work) / 1e12)
        return saturating(self.amounts.widths, rates)

    def memory(self) -> float:
        """TB/s of an elementwise kernel that reads one tensor and writes another."""
        x = self.random(self.amounts.elements)
        y = torch.empty_like(x)
        return 2 * x.nbytes / self.seconds(lambda: torch.mul(x, 1.5, out=y)) / 1e12

    def attention(self) -> tuple[float, float]:
        """TFLOP/s of the language model's attention over long documents, and the length with half of that."""
        m = self.spec.language
        name = choose_backend(
            self.config.model.language_attention,
            platform=self.platform.name,
            head_dim=m.head_dim,
            causal=True,
            dtype=self.dtype,
        )
        rates = [
            self._attention(name, m.num_heads, m.head_dim, length, causal=True)
            for length in self.amounts.lengths
        ]
        return saturating(self.amounts.lengths, rates)

    def tower_attention(self) -> float:
        """TFLOP/s of full attention in the tower."""
        v = self.spec.vision
        dim = v.hidden_size // v.num_heads
        name = choose_backend(
            self.config.model.vision_attention,
            platform=self.platform.name,
            head_dim=dim,
            causal=False,
            dtype=self.dtype,
        )
        return self._attention(name, v.num_heads, dim, self.amounts.lengths[1], causal=False)

    def _attention(self, name: str, heads: int, dim: int, length: int, *, causal: bool) -> float:
        """Useful TFLOP/s of the forward and backward pass over documents of one length."""
        number = max(1, 2 * self.amounts.tokens // length)
        bounds = torch.arange(number + 1, dtype=torch.int32, device=self.platform.device) * length
        backend = make_backend(name)
        query, key, value = (self.random(number * length, heads, dim, grad=True) for _ in range(3))
        gradient = self.random(number * length, heads, dim)

        def work() -> None:
            out = backend(query, key, value, Segments(bounds, length), causal)
            torch.autograd.grad(out, (query, key, value), gradient)

        # As in the cost model, a backward pass counts as 2.5 forward passes, and in the tower as 2.
        passes = 3.5 * 2 if causal else 3 * 4
        return passes * heads * dim * number * length**2 / self.seconds(work) / 1e12

    def update(self) -> tuple[float, float]:
        """Picoseconds per parameter of an AdamW update, and of clearing and scaling a gradient."""
        n = self.amounts.elements
        weight = torch.nn.Parameter(torch.zeros(n, device=self.platform.device))
        gradient = torch.zeros_like(weight)
        weight.backward(gradient)
        adam = torch.optim.AdamW([weight], lr=1e-4, fused=True)

        def clear() -> None:
            gradient.zero_()
            gradient.mul_(1.5)

        return self.seconds(adam.step) / n * 1e12, self.seconds(clear) / n * 1e12

    def host_copies(self) -> float:
        """GB/s in each direction between device and pinned host memory, with copies both ways at once.

        On CPU, it is the rate of a copy between host buffers.
        """
        n = self.amounts.elements
        if self.platform.name == "cpu":
            a, b = torch.empty(n, dtype=torch.uint8), torch.empty(n, dtype=torch.uint8)
            return n / self.seconds(lambda: b.copy_(a)) / 1e9

        host = [torch.empty(n, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        here = [torch.empty(n, dtype=torch.uint8, device=self.platform.device) for _ in range(2)]
        streams = [torch.cuda.Stream() for _ in range(2)]

        def both() -> None:
            with torch.cuda.stream(streams[0]):
                here[0].copy_(host[0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                host[1].copy_(here[1], non_blocking=True)

        return n / self.seconds(both) / 1e9

    def collectives(self) -> tuple[float, float]:
        """GB/s that a device sends in an all-gather, and an all-gather's latency in seconds. Collective."""
        ranks = dist.get_world_size()

        def gather(size: int) -> float:
            mine = torch.ones(size, dtype=torch.uint8, device=self.platform.device)
            all_of_them = torch.empty(ranks * size, dtype=torch.uint8, device=self.platform.device)
            return self._counted(lambda: dist.all_gather_into_tensor(all_of_them, mine))

        latency = gather(64)
        size = self.amounts.message // ranks
        taken = gather(size)
        # A disturbed machine may seem to have a latency as long as the whole.
        moving = max(taken - latency, taken / 2)
        return size * (ranks - 1) / moving / 1e9, latency

    def message(self) -> float:
        """GB/s from the first rank to the second. Collective."""
        rank = dist.get_rank()
        tensor = torch.ones(self.amounts.message // 4, dtype=torch.uint8, device=self.platform.device)

        def send() -> None:
            if rank == 0:
                dist.send(tensor, 1)
            elif rank == 1:
                dist.recv(tensor, 0)

        return tensor.nbytes / self._counted(send) / 1e9

    def _counted(self, work: Callable[[], Any], calls: int = 8) -> float:
        """Mean seconds of a collective over ``calls`` calls, the same number on all ranks."""
        for _ in range(3):
            work()
        dist.barrier()
        self.platform.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        self.platform.synchronize()
        return (time.perf_counter() - start) / calls


def measure_kernels(options: BenchRun, spec: ModelSpec, platform: Platform) -> Calibration:
    """Measures the rates of single kernels. The slowest rank counts for most of them. Collective."""
    name = device_name(platform)
    base = base_calibration(name)
    kernels = Kernels(platform, spec, options.config)

    rates, width = kernels.products()
    attention, length = kernels.attention()
    adam, clear = kernels.update()
    mine: dict[str, float] = {
        "product_tflops": rates,
        "memory_tb_s": kernels.memory(),
        "attention_tflops": attention,
        "tower_attention_tflops": kernels.tower_attention(),
        "host_copy_gb_s": kernels.host_copies(),
    }

    everyone = report.gather(mine)
    found = {field: min(rank[field] for rank in everyone) for field in mine}
    found |= {"product_width": width, "attention_length": length, "optimizer_ps": adam, "gradient_ps": clear}
    found["expert_tflops"] = base.expert_tflops * found["product_tflops"] / base.product_tflops
    ranks = dist.get_world_size()
    if ranks > 1:
        speed, latency = kernels.collectives()
        found |= {"nvlink_gb_s": speed, "collective_s": latency, "send_gb_s": kernels.message()}
    found = report.gather(found)[0]

    kind = kind_of(name)
    sheet = DATA_SHEETS.get(kind)
    if platform.name == "cuda":
        torch.cuda.empty_cache()
    said = [
        f"Measured by `megatron-vl bench --calibrate` on {ranks} x {name}, torch {torch.__version__},"
        f" {options.config.dtype}: {', '.join(sorted(set(found) - {'expert_tflops'}))}.",
        f"All other fields: {base.source}; expert_tflops in proportion to product_tflops.",
    ]
    return dataclasses.replace(
        base,
        **found,
        gpu=kind,
        memory_gib=platform.memory_gib() or psutil.virtual_memory().total / 2**30,
        peak_tflops=options.config.log.peak_tflops
        or (sheet.peak_tflops if sheet else found["product_tflops"]),
        measured=True,
        provenance=tuple(said),
    )


def device_name(platform: Platform) -> str:
    return torch.cuda.get_device_name() if platform.name == "cuda" else "cpu"


def base_calibration(name: str) -> Calibration:
    """The calibration that is used so far for a device; H200's if there is none."""
    kind = kind_of(name)
    return known(kind if kind in DATA_SHEETS or stored_path(kind).is_file() else "H200")


def finish(
    options: BenchRun, spec: ModelSpec, layout: Layout, kernels: Calibration, workloads: dict[str, Any]
) -> dict[str, Any]:
    """Scales the rates so that predicted steps match measured ones, and stores them. On rank 0.

    Returns:
        The rates and their file, the factor (None if no factor fits), and predicted and measured steps.
    """
    statistics = {name: row_statistics(options, spec, name) for name in workloads}
    measured = {name: figures["step_s"] for name, figures in workloads.items()}

    def steps(c: Calibration) -> dict[str, float]:
        world = layout.replica_ranks * _dp(options, layout)
        return {
            name: predict(options.config, spec, world, layout, rows=found, calibration=c).step
            for name, found in statistics.items()
        }

    alone = steps(kernels)
    factor = matched(kernels, lambda c: list(steps(c).values()), list(measured.values()))
    reached = LARGEST**-0.99 < factor < LARGEST**0.99
    if not reached:
        factor = 1.0
    calibration = faster(kernels, factor)
    after = steps(calibration)
    compared = ", ".join(f"{name} {1e3 * measured[name]:,.0f}" for name in measured)
    scaled = (
        f"Then all compute rates were multiplied by {factor:.3f}, so that predicted steps match measured"
        f" steps on average ({spec.family}, {compared} ms)."
        if reached
        else f"No factor explains the measured steps ({spec.family}, {compared} ms), so the rates were not"
        " scaled."
    )
    calibration = dataclasses.replace(calibration, provenance=(*calibration.provenance, scaled))
    path = Path(options.calibration) if options.calibration else stored_path(calibration.gpu)
    write_calibration(path, calibration)
    return {
        "file": str(path),
        "gpu": calibration.gpu,
        "factor": factor if reached else None,
        "steps_s": {
            name: {"measured": measured[name], "kernels_alone": alone[name], "predicted": after[name]}
            for name in measured
        },
        "rates": calibration.as_json(),
    }


def _dp(options: BenchRun, layout: Layout) -> int:
    return dist.get_world_size() // layout.replica_ranks


def row_statistics(options: BenchRun, spec: ModelSpec, workload: str) -> RowStatistics:
    """The statistics of a workload's rows."""
    config = options.config
    if workload == "data":
        from toolkit.plan.data_rows import measured_rows

        return measured_rows(config, spec, ROWS)
    drawn = rows(spec, config.data.seq_len, images=workload == "images", seed=17)
    return RowStatistics(workload, tuple(shape_of(row) for row in itertools.islice(drawn, ROWS)))
