"""``megatron-vl bench --calibrate``: measures the rates of this machine and stores them for the planner.

A calibration is made in three steps. First, single kernels are timed: products, elementwise work, attention,
the update of weights, copies, collectives. Second, quantities that depend more on the model's modules than on
the GPU, such as the bytes that a layer's norms move, are taken from the calibration that was used so far.
Third, one factor scales all compute rates, so that predictions match the steps that ``bench`` measured.
"""

from __future__ import annotations

import dataclasses
import functools
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
    find_calibration,
    parse_gpu_kind,
    stored_calibration_path,
    write_calibration,
)
from megatron_vl.planning.fit_rates import (
    LARGEST_SPEEDUP,
    fit_saturating_rate,
    fit_speed_factor,
    scale_compute_rates,
)
from megatron_vl.planning.predict import predict_layout
from megatron_vl.planning.row_statistics import RowStatistics
from megatron_vl.platform import Platform
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from toolkit.plan.data_rows import row_shape

from . import report
from .options import BenchRun
from .workload import draw_rows

STATISTICS_ROWS = 16
"""Number of rows from which the statistics of a workload are computed."""


@dataclasses.dataclass(frozen=True)
class KernelWorkSizes:
    """The amounts of work for which kernels are timed."""

    token_count: int
    """Tokens in the widest product, and in attention."""
    product_widths: tuple[int, ...]
    """Widths of products."""
    document_lengths: tuple[int, ...]
    """Lengths in tokens of documents for causal attention."""
    element_count: int
    """Elements of elementwise kernels, updates and copies."""
    collective_bytes: int
    """Bytes of a collective."""
    seconds_per_kernel: float
    """Seconds for which each kernel is timed."""


KERNEL_WORK_SIZES = {
    "cuda": KernelWorkSizes(
        8192, (512, 1024, 2048, 4096, 8192), (512, 1024, 2048, 8192), 1 << 27, 256 << 20, 0.2
    ),
    "cpu": KernelWorkSizes(256, (64, 128, 256, 512, 1024), (64, 256, 512), 1 << 21, 4 << 20, 0.1),
}


TIMED_COLLECTIVES = 8
"""Number of calls over which the time of a collective is averaged."""


@dataclasses.dataclass(frozen=True)
class KernelTimer:
    """Times kernels on one device."""

    platform: Platform
    spec: ModelSpec
    config: TrainConfig

    @property
    def work_sizes(self) -> KernelWorkSizes:
        return KERNEL_WORK_SIZES[self.platform.name]

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.config.dtype)

    def mean_seconds(self, timed_work: Callable[[], Any]) -> float:
        """Mean seconds of a call, over as many calls as fit into the time for a kernel."""
        for _ in range(3):
            timed_work()
        self.platform.synchronize()
        call_count, start = 0, time.perf_counter()
        while call_count < 3 or time.perf_counter() - start < self.work_sizes.seconds_per_kernel:
            for _ in range(4):
                timed_work()
            call_count += 4
            self.platform.synchronize()
        return (time.perf_counter() - start) / call_count

    def random_tensor(self, *tensor_shape: int, requires_grad: bool = False) -> Tensor:
        return torch.randn(*tensor_shape, device=self.platform.device, dtype=self.dtype).requires_grad_(
            requires_grad
        )

    def product_rates(self) -> tuple[float, float]:
        """TFLOP/s of very wide products, and the width at which products reach half of that.

        All three products of a linear are timed: forward, input gradient and weight gradient. Narrow ones
        have more tokens, as in a tower, so that each takes longer than the processor needs to launch it.
        """
        product_tflops = []
        for product_width in self.work_sizes.product_widths:
            token_count = self.work_sizes.token_count * self.work_sizes.product_widths[-1] // product_width
            x = self.random_tensor(token_count, product_width, requires_grad=True)
            weight = self.random_tensor(product_width, product_width, requires_grad=True)
            output_gradient = self.random_tensor(token_count, product_width)

            def run_products(x=x, weight=weight, output_gradient=output_gradient) -> None:
                torch.autograd.grad(x @ weight.t(), (x, weight), output_gradient)

            # Three products of 2 FLOPs for each multiplication and addition.
            flops = 6 * token_count * product_width * product_width
            product_tflops.append(flops / self.mean_seconds(run_products) / 1e12)
        return fit_saturating_rate(self.work_sizes.product_widths, product_tflops)

    def memory_rate(self) -> float:
        """TB/s of an elementwise kernel that reads one tensor and writes another."""
        x = self.random_tensor(self.work_sizes.element_count)
        output_tensor = torch.empty_like(x)
        return 2 * x.nbytes / self.mean_seconds(lambda: torch.mul(x, 1.5, out=output_tensor)) / 1e12

    def attention_rates(self) -> tuple[float, float]:
        """TFLOP/s of the language model's attention over long documents, and the length with half of that."""
        language_spec = self.spec.language
        backend_name = attention_backends(self.config, self.spec, self.platform.name)["language"]
        heads_and_dim = (language_spec.num_heads, language_spec.head_dim)
        attention_tflops = []
        for length in self.work_sizes.document_lengths:
            attention_tflops.append(self._attention_rate(backend_name, *heads_and_dim, length, causal=True))

        return fit_saturating_rate(self.work_sizes.document_lengths, attention_tflops)

    def tower_attention_rate(self) -> float:
        """TFLOP/s of full attention in the tower."""
        vision_spec = self.spec.vision
        backend_name = attention_backends(self.config, self.spec, self.platform.name)["vision"]
        heads_and_dim = (vision_spec.num_heads, vision_spec.head_dim)
        return self._attention_rate(
            backend_name, *heads_and_dim, self.work_sizes.document_lengths[1], causal=False
        )

    def _attention_rate(
        self, backend_name: str, num_heads: int, head_dim: int, document_length: int, *, causal: bool
    ) -> float:
        """Useful TFLOP/s of the forward and backward pass over documents of one length."""
        document_count = max(1, 2 * self.work_sizes.token_count // document_length)
        cu_seqlens = (
            torch.arange(document_count + 1, dtype=torch.int32, device=self.platform.device) * document_length
        )
        attention_backend = make_backend(backend_name)
        query, key, value = (
            self.random_tensor(document_count * document_length, num_heads, head_dim, requires_grad=True)
            for _ in range(3)
        )
        output_gradient = self.random_tensor(document_count * document_length, num_heads, head_dim)

        def run_attention() -> None:
            attention_output = attention_backend(
                query, key, value, Segments(cu_seqlens, document_length), causal
            )
            torch.autograd.grad(attention_output, (query, key, value), output_gradient)

        # As in the cost model, a backward pass counts as 2.5 forward passes, and in the tower as 2.
        flops_factor = 3.5 * 2 if causal else 3 * 4
        flops = flops_factor * num_heads * head_dim * document_count * document_length**2
        return flops / self.mean_seconds(run_attention) / 1e12

    def update_costs(self) -> tuple[float, float]:
        """Picoseconds per parameter of an AdamW update, and of clearing and scaling a gradient."""
        parameter_count = self.work_sizes.element_count
        weight = torch.nn.Parameter(torch.zeros(parameter_count, device=self.platform.device))
        gradient = torch.zeros_like(weight)
        weight.backward(gradient)
        adam_optimizer = torch.optim.AdamW([weight], lr=1e-4, fused=True)

        def clear_gradient() -> None:
            gradient.zero_()
            gradient.mul_(1.5)

        update_seconds = self.mean_seconds(adam_optimizer.step)
        clear_seconds = self.mean_seconds(clear_gradient)
        return update_seconds / parameter_count * 1e12, clear_seconds / parameter_count * 1e12

    def host_copy_rate(self) -> float:
        """GB/s in each direction between device and pinned host memory, with copies both ways at once.

        On CPU, it is the rate of a copy between host buffers.
        """
        byte_count = self.work_sizes.element_count
        if self.platform.name == "cpu":
            source_buffer = torch.empty(byte_count, dtype=torch.uint8)
            target_buffer = torch.empty_like(source_buffer)
            return byte_count / self.mean_seconds(lambda: target_buffer.copy_(source_buffer)) / 1e9

        host_buffers = [torch.empty(byte_count, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        device_buffers = [torch.empty_like(buffer, device=self.platform.device) for buffer in host_buffers]
        copy_streams = [torch.cuda.Stream() for _ in range(2)]

        def copy_both_ways() -> None:
            with torch.cuda.stream(copy_streams[0]):
                device_buffers[0].copy_(host_buffers[0], non_blocking=True)
            with torch.cuda.stream(copy_streams[1]):
                host_buffers[1].copy_(device_buffers[1], non_blocking=True)

        return byte_count / self.mean_seconds(copy_both_ways) / 1e9

    def collective_rates(self) -> tuple[float, float]:
        """GB/s that a device sends in an all-gather, and an all-gather's latency in seconds. Collective."""
        world_size = dist.get_world_size()

        def time_all_gather(shard_bytes: int) -> float:
            local_shard = torch.ones(shard_bytes, dtype=torch.uint8, device=self.platform.device)
            gathered_shards = torch.empty(
                world_size * shard_bytes, dtype=torch.uint8, device=self.platform.device
            )
            return self._mean_collective_seconds(
                lambda: dist.all_gather_into_tensor(gathered_shards, local_shard)
            )

        latency = time_all_gather(64)
        shard_bytes = self.work_sizes.collective_bytes // world_size
        gather_seconds = time_all_gather(shard_bytes)
        # A disturbed machine may seem to have a latency as long as the whole.
        transfer_seconds = max(gather_seconds - latency, gather_seconds / 2)
        return shard_bytes * (world_size - 1) / transfer_seconds / 1e9, latency

    def send_rate(self) -> float:
        """GB/s from the first rank to the second. Collective."""
        rank = dist.get_rank()
        tensor = torch.ones(
            self.work_sizes.collective_bytes // 4, dtype=torch.uint8, device=self.platform.device
        )

        def send_once() -> None:
            if rank == 0:
                dist.send(tensor, 1)
            elif rank == 1:
                dist.recv(tensor, 0)

        return tensor.nbytes / self._mean_collective_seconds(send_once) / 1e9

    def _mean_collective_seconds(self, timed_work: Callable[[], Any]) -> float:
        """Mean seconds of a collective over as many calls on all ranks."""
        for _ in range(3):
            timed_work()
        dist.barrier()
        self.platform.synchronize()
        start = time.perf_counter()
        for _ in range(TIMED_COLLECTIVES):
            timed_work()
        self.platform.synchronize()
        return (time.perf_counter() - start) / TIMED_COLLECTIVES


def attention_backends(config: TrainConfig, spec: ModelSpec, platform_name: str) -> dict[str, str]:
    """The kernels of attention that a run uses in the language model and in the vision tower."""
    backends = {}
    for part_name, head_dim in (("language", spec.language.head_dim), ("vision", spec.vision.head_dim)):
        backends[part_name] = choose_backend(
            config.model.attention,
            platform=platform_name,
            head_dim=head_dim,
            causal=part_name == "language",
            dtype=getattr(torch, config.dtype),
        )
    return backends


def measure_kernels(options: BenchRun, spec: ModelSpec, platform: Platform) -> Calibration:
    """Measures the rates of single kernels. The slowest rank counts for most of them. Collective."""
    accelerator_name = device_name(platform)
    previous_rates = previous_calibration(accelerator_name)
    kernel_timer = KernelTimer(platform, spec, options.config)

    product_tflops, product_width = kernel_timer.product_rates()
    attention_tflops, attention_length = kernel_timer.attention_rates()
    adam_picoseconds, clear_picoseconds = kernel_timer.update_costs()
    local_rates: dict[str, float] = {
        "product_tflops": product_tflops,
        "memory_tb_s": kernel_timer.memory_rate(),
        "attention_tflops": attention_tflops,
        "tower_attention_tflops": kernel_timer.tower_attention_rate(),
        "host_copy_gb_s": kernel_timer.host_copy_rate(),
    }

    rates_by_rank = report.gather_to_all(local_rates)
    slowest_rates = {field: min(rank[field] for rank in rates_by_rank) for field in local_rates}
    slowest_rates |= {
        "product_width": product_width,
        "attention_length": attention_length,
        "optimizer_ps": adam_picoseconds,
        "gradient_ps": clear_picoseconds,
    }
    slowest_rates["expert_tflops"] = (
        previous_rates.expert_tflops * slowest_rates["product_tflops"] / previous_rates.product_tflops
    )
    world_size = dist.get_world_size()
    if world_size > 1:
        collective_gb_s, collective_latency = kernel_timer.collective_rates()
        slowest_rates |= {
            "nvlink_gb_s": collective_gb_s,
            "collective_s": collective_latency,
            "send_gb_s": kernel_timer.send_rate(),
        }
    slowest_rates = report.gather_to_all(slowest_rates)[0]

    gpu_kind = parse_gpu_kind(accelerator_name)
    data_sheet = DATA_SHEETS.get(gpu_kind)
    if platform.name == "cuda":
        torch.cuda.empty_cache()
    provenance_lines = [
        f"Measured by `megatron-vl bench --calibrate` on {world_size} x "
        f"{accelerator_name}, torch {torch.__version__}, {options.config.dtype}: "
        f"{', '.join(sorted(set(slowest_rates) - {'expert_tflops'}))}.",
        f"All other fields: {previous_rates.source}; expert_tflops in proportion to product_tflops.",
    ]
    return dataclasses.replace(
        previous_rates,
        **slowest_rates,
        gpu=gpu_kind,
        memory_gib=platform.total_memory_gib() or psutil.virtual_memory().total / 2**30,
        peak_tflops=options.config.log.peak_tflops
        or (data_sheet.peak_tflops if data_sheet else slowest_rates["product_tflops"]),
        measured=True,
        provenance=tuple(provenance_lines),
    )


def device_name(platform: Platform) -> str:
    return torch.cuda.get_device_name() if platform.name == "cuda" else "cpu"


def previous_calibration(accelerator_name: str) -> Calibration:
    """The calibration that is in use for a device, or that of the H200 if it has none."""
    kind = parse_gpu_kind(accelerator_name)
    return find_calibration(
        kind if kind in DATA_SHEETS or stored_calibration_path(kind).is_file() else "H200"
    )


def finish_calibration(
    options: BenchRun,
    spec: ModelSpec,
    layout: Layout,
    kernel_calibration: Calibration,
    figures_by_workload: dict[str, Any],
) -> dict[str, Any]:
    """Scales the rates so that predicted steps match measured ones, and stores them. On rank 0.

    Returns:
        The rates and their file, the factor (None if no factor fits), and predicted and measured steps.
    """
    measured_steps = {name: figures["step_s"] for name, figures in figures_by_workload.items()}
    statistics_by_workload = {name: row_statistics(options, spec, name) for name in measured_steps}
    predict_steps = functools.partial(_predict_steps, options.config, spec, layout, statistics_by_workload)
    rate_factor: float | None = fit_speed_factor(
        kernel_calibration,
        lambda candidate_rates: list(predict_steps(candidate_rates).values()),
        list(measured_steps.values()),
    )
    if not LARGEST_SPEEDUP**-0.99 < rate_factor < LARGEST_SPEEDUP**0.99:
        rate_factor = None

    scaled_calibration = scale_compute_rates(kernel_calibration, rate_factor or 1.0)
    scaling_note = _scaling_note(rate_factor, spec.family, measured_steps)
    scaled_calibration = dataclasses.replace(
        scaled_calibration, provenance=(*scaled_calibration.provenance, scaling_note)
    )
    calibration_path = Path(options.calibration or stored_calibration_path(scaled_calibration.gpu))
    write_calibration(calibration_path, scaled_calibration)

    unscaled_steps, predicted_steps = predict_steps(kernel_calibration), predict_steps(scaled_calibration)
    step_comparison = {}
    for name, step_seconds in measured_steps.items():
        step_comparison[name] = {
            "measured": step_seconds,
            "kernels_alone": unscaled_steps[name],
            "predicted": predicted_steps[name],
        }
    return {
        "file": str(calibration_path),
        "gpu": scaled_calibration.gpu,
        "factor": rate_factor,
        "steps_s": step_comparison,
        "rates": scaled_calibration.as_json(),
    }


def _predict_steps(
    config: TrainConfig,
    spec: ModelSpec,
    layout: Layout,
    statistics_by_workload: dict[str, RowStatistics],
    candidate_rates: Calibration,
) -> dict[str, float]:
    """Seconds of a step of each workload."""
    step_predictions = {}
    for name, workload_statistics in statistics_by_workload.items():
        step_predictions[name] = predict_layout(
            config,
            spec,
            dist.get_world_size(),
            layout,
            row_statistics=workload_statistics,
            calibration=candidate_rates,
        ).step_seconds
    return step_predictions


def _scaling_note(rate_factor: float | None, family: str, measured_steps: dict[str, float]) -> str:
    """Says in a sentence how the rates were scaled, for the calibration's file."""
    step_texts = [f"{name} {1e3 * seconds:,.0f}" for name, seconds in measured_steps.items()]
    measured_text = f"{family}, {', '.join(step_texts)} ms"
    if rate_factor is None:
        return f"No factor explains the measured steps ({measured_text}), so the rates were not scaled."
    return (
        f"Then all compute rates were multiplied by {rate_factor:.3f}, so that predicted steps match"
        f" measured steps on average ({measured_text})."
    )


def row_statistics(options: BenchRun, spec: ModelSpec, workload: str) -> RowStatistics:
    config = options.config
    if workload == "data":
        from toolkit.plan.data_rows import measure_rows

        return measure_rows(config, spec, STATISTICS_ROWS)
    drawn_rows = draw_rows(spec, config.data.seq_len, with_images=workload == "images", seed=17)
    return RowStatistics(
        workload, tuple(row_shape(row) for row in itertools.islice(drawn_rows, STATISTICS_ROWS))
    )
