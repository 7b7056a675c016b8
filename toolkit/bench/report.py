"""Computes and shows the figures of a benchmark: the work done and the rates, as JSON and as a table.

The same code computes the trainer's figures and those of ``benchmarks.fsdp2``, so their FLOPs are counted
in the same way: from the true lengths of documents, frames and windows, without padding, and with the output
layer only for loss tokens (see :mod:`megatron_vl.planning.flops`). ``mfu_all_tokens`` counts the output layer
for every token, as most published figures do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_vl.config import LoraConfig, ModelConfig, RecomputeConfig
from megatron_vl.planning.flops import ModelFlops, recompute_flops, row_flops
from megatron_vl.planning.memory import count_parameters, trained_text
from megatron_vl.spec.families import ModelSpec

from .options import BenchRun


@dataclass
class WorkCounts:
    """The work of some steps, summed over rows."""

    row_count: int = 0
    token_count: int = 0
    """Real tokens, without the padding at the end of rows."""
    sample_count: int = 0
    image_count: int = 0
    patches_by_row: list[int] = field(default_factory=list)
    """Number of patches of each row."""
    loss_token_count: int = 0
    model_flops: ModelFlops = ModelFlops(0.0, 0.0)
    """FLOPs that training needs, with the output layer for loss tokens only."""
    model_flops_all_tokens: ModelFlops = ModelFlops(0.0, 0.0)
    """FLOPs that training needs, with the output layer for every token."""
    executed_flops: ModelFlops = ModelFlops(0.0, 0.0)
    """FLOPs that the system executed, including recomputation, and the output layer for all tokens for which
    it was computed."""

    def add_row(
        self,
        spec: ModelSpec,
        model_config: ModelConfig,
        recompute_config: RecomputeConfig,
        document_lengths: list[int],
        frame_lengths: list[int],
        window_lengths: list[int],
        loss_tokens: int,
        *,
        lora: LoraConfig | None = None,
        whole_head: bool = False,
        decoupled: bool = False,
    ) -> None:
        """Counts a row with the given document, frame and window lengths.

        Args:
            lora: the adapters, if there are any.
            whole_head: whether the system computes the output layer for every token.
            decoupled: whether every rank holds the vision tower, which then runs forward twice.
        """
        self.row_count += 1
        self.token_count += sum(document_lengths)
        self.sample_count += len(document_lengths)
        self.patches_by_row.append(sum(frame_lengths))
        self.loss_token_count += loss_tokens
        row_lengths = document_lengths, frame_lengths, window_lengths
        needed_flops = row_flops(spec, model_config, *row_lengths, loss_tokens, lora)
        all_token_flops = row_flops(spec, model_config, *row_lengths, sum(document_lengths), lora)
        self.model_flops = self.model_flops + needed_flops
        self.model_flops_all_tokens = self.model_flops_all_tokens + all_token_flops
        recomputed_flops = recompute_flops(
            spec, model_config, recompute_config, *row_lengths, decoupled, lora
        )
        forward_and_backward_flops = all_token_flops if whole_head else needed_flops
        self.executed_flops = self.executed_flops + forward_and_backward_flops + recomputed_flops

    def __add__(self, other: WorkCounts) -> WorkCounts:
        return WorkCounts(**{name: count + getattr(other, name) for name, count in vars(self).items()})


def gather_to_all(local_object: Any) -> list[Any]:
    """Gathers one object of each rank on every rank. Collective."""
    objects_by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects_by_rank, local_object)
    return objects_by_rank


def speed_figures(
    work_counts: WorkCounts, step_seconds: list[float], world_size: int, gpu_peak_tflops: float
) -> dict[str, Any]:
    """Computes the speed of the timed steps.

    Args:
        work_counts: the work of all ranks in all timed steps.
        step_seconds: wall-clock time of each timed step.
        world_size: number of ranks.
        gpu_peak_tflops: TFLOP/s of one accelerator; 0 if unknown (MFU is then null).
    """
    total_seconds = sum(step_seconds)

    def per_rank(flops: float) -> float:
        return flops / total_seconds / world_size / 1e12

    def share_of_peak(flops: float) -> float | None:
        return per_rank(flops) / gpu_peak_tflops if gpu_peak_tflops else None

    return {
        "step_s": total_seconds / len(step_seconds),
        "step_s_min": min(step_seconds),
        "step_s_max": max(step_seconds),
        "tokens_per_s_per_gpu": work_counts.token_count / total_seconds / world_size,
        "images_per_s": work_counts.image_count / total_seconds,
        "tflops_per_gpu": per_rank(work_counts.model_flops.total),
        "mfu": share_of_peak(work_counts.model_flops.total),
        "mfu_language": share_of_peak(work_counts.model_flops.language),
        "mfu_vision": share_of_peak(work_counts.model_flops.vision),
        "mfu_all_tokens": share_of_peak(work_counts.model_flops_all_tokens.total),
        "hfu": share_of_peak(work_counts.executed_flops.total),
        "vision_flops_share": work_counts.model_flops.vision / work_counts.model_flops.total
        if work_counts.model_flops.total
        else 0.0,
        "work": _work_figures(work_counts),
    }


def _work_figures(work_counts: WorkCounts) -> dict[str, Any]:
    return {
        "rows": work_counts.row_count,
        "samples": work_counts.sample_count,
        "images": work_counts.image_count,
        "tokens_per_row": work_counts.token_count / work_counts.row_count,
        "loss_tokens_per_row": work_counts.loss_token_count / work_counts.row_count,
        "patches_per_row": {
            "min": min(work_counts.patches_by_row),
            "mean": sum(work_counts.patches_by_row) / work_counts.row_count,
            "max": max(work_counts.patches_by_row),
        },
    }


def describe_machine(device: torch.device, gpu_peak_tflops: float) -> dict[str, Any]:
    """The machine and the versions with which the figures were measured."""
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "gpus": dist.get_world_size(),
        "peak_tflops": gpu_peak_tflops or None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
    }


def describe_model(options: BenchRun, spec: ModelSpec) -> dict[str, Any]:
    """The measured model. Its parameters include the padding of the vision FFN, as in our checkpoints."""
    parameter_count, trained_count = count_parameters(options.config, spec)
    return {
        "hf": options.hf,
        "family": spec.family,
        "parameters": parameter_count,
        "trained_parameters": trained_count,
        "language_layers": spec.language.num_layers,
        "vision_layers": spec.vision.num_layers,
    }


def finish_report(options: BenchRun, bench_figures: dict[str, Any]) -> None:
    """On rank 0, adds the ratio of image rows to text rows, writes ``out`` and prints the figures."""
    if dist.get_rank() != 0:
        return
    bench_figures["image_over_text"] = image_over_text(bench_figures["workloads"])
    if options.out:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(json.dumps(bench_figures, indent=2) + "\n")
    print(json.dumps(bench_figures, indent=2) if options.json else format_figures(bench_figures), flush=True)


def image_over_text(figures_by_workload: dict[str, dict[str, Any]]) -> float | None:
    """TFLOP/s on image rows divided by TFLOP/s on text rows of the same run: the ratio of their MFU."""
    if not {"images", "text"} <= figures_by_workload.keys():
        return None
    return figures_by_workload["images"]["tflops_per_gpu"] / figures_by_workload["text"]["tflops_per_gpu"]


def format_figures(bench_figures: dict[str, Any]) -> str:
    """Formats the machine, and a few lines per workload: speed, memory, parts."""
    machine_figures, model_figures = bench_figures["machine"], bench_figures["model"]
    peak_text = (
        f"{machine_figures['peak_tflops']:.0f} TFLOP/s peak"
        if machine_figures["peak_tflops"]
        else "peak unknown"
    )
    size_text = f"{model_figures['parameters'] / 1e9:.2f} B parameters"
    trained = trained_text(model_figures["parameters"], model_figures["trained_parameters"])
    table_lines = [
        f"{bench_figures['system']}: {model_figures['family']}, {size_text}, "
        f"{machine_figures['gpus']} x {machine_figures['device']} ({peak_text})"
    ]
    table_lines += [f"  {note}" for note in (trained, *bench_figures["notes"]) if note]
    for workload_name, workload_figures in bench_figures["workloads"].items():
        table_lines += _workload_lines(workload_name, workload_figures)
    if bench_figures["image_over_text"]:
        table_lines.append(
            f"  images / text: {bench_figures['image_over_text']:.3f} of the text rows' MFU in the same run"
        )
    table_lines += calibration_lines(bench_figures["calibration"]) if "calibration" in bench_figures else []
    return "\n".join(table_lines)


def calibration_lines(calibration_figures: dict[str, Any]) -> list[str]:
    """Formats a calibration."""
    kernel_rates = calibration_figures["rates"]
    text_lines = [
        f"calibration of {calibration_figures['gpu']}: products {kernel_rates['product_tflops']:.4g} TFLOP/s "
        f"(half at a width of {kernel_rates['product_width']:.0f}), elementwise "
        f"{kernel_rates['memory_tb_s']:.3g} TB/s, attention {kernel_rates['attention_tflops']:.4g}, "
        f"tower {kernel_rates['tower_attention_tflops']:.4g} TFLOP/s, collectives "
        f"{kernel_rates['nvlink_gb_s']:.4g} GB/s"
    ]
    for workload_name, step_figures in calibration_figures["steps_s"].items():
        text_lines.append(
            f"  {workload_name}: {1e3 * step_figures['measured']:,.0f} ms per "
            f"step measured, {1e3 * step_figures['predicted']:,.0f} predicted "
            f"({1e3 * step_figures['kernels_alone']:,.0f} from the kernels alone)"
        )
    if calibration_figures["factor"] is None:
        text_lines.append(
            "  no factor explains the measured steps, so the rates are those of the kernels alone"
        )
    return [
        *text_lines,
        f"stored in {calibration_figures['file']}: plan and train use it for {calibration_figures['gpu']}"
        " from now on",
    ]


def _workload_lines(workload_name: str, workload_figures: dict[str, Any]) -> list[str]:
    speed_text = f"{workload_figures['tflops_per_gpu']:.3f} TFLOP/s/GPU"
    if workload_figures["mfu"] is not None:
        speed_text = (
            f"MFU {workload_figures['mfu']:.1%} (language {workload_figures['mfu_language']:.1%} + "
            f"vision {workload_figures['mfu_vision']:.1%}; {workload_figures['mfu_all_tokens']:.1%} "
            f"with the output layer counted for every token), HFU {workload_figures['hfu']:.1%}, "
            f"{workload_figures['tflops_per_gpu']:.0f} TFLOP/s/GPU"
        )

    memory_figures = workload_figures["memory"]
    text_lines = [
        f"  {workload_name}: {workload_figures['tokens_per_s_per_gpu']:,.0f} tok/s/GPU, "
        f"{workload_figures['images_per_s']:.1f} images/s, "
        f"{speed_text}, {workload_figures['step_s'] * 1e3:.0f} ms per step "
        f"({workload_figures['step_s_min'] * 1e3:.0f} to {workload_figures['step_s_max'] * 1e3:.0f}), "
        f"{memory_figures['peak_gib']:.1f} GiB, loss {workload_figures['loss']:.4f}"
    ]

    memory_texts = []
    for part in MEMORY_PARTS:
        if memory_figures.get(f"{part}_gib") is not None:
            memory_texts.append(f"{part} {memory_figures[f'{part}_gib']:.1f}")
    if memory_texts:
        text_lines.append("    memory (GiB): " + ", ".join(memory_texts))

    if workload_figures.get("parts"):
        text_lines += _parts_lines(workload_figures)
    return text_lines


def _parts_lines(workload_figures: dict[str, Any]) -> list[str]:
    part_figures = workload_figures["parts"]
    part_texts = [f"{part} {figures['mean_s'] * 1e3:.1f}" for part, figures in part_figures.items()]
    half_texts = []
    for half, share in workload_figures["efficiency"].items():
        if share is not None:
            half_texts.append(f"{half} {share:.1%}")

    text_lines = [
        "    ms per step, mean over ranks: " + ", ".join(part_texts),
        "    collectives in one profiled step, including waiting: "
        + _communication_text(workload_figures["communication"]),
    ]
    if any(workload_figures["efficiency"].values()):
        text_lines.append("    share of the peak while it runs: " + ", ".join(half_texts))
    straggling_figures = workload_figures["straggling"]
    text_lines.append(
        f"    compute of the slowest data-parallel rank {straggling_figures['max_over_mean']:.3f} of "
        f"the mean; idle pipeline stages {workload_figures['pipeline_idle_share']:.1%} of the step"
    )
    return text_lines


def _communication_text(communication_figures: dict[str, dict[str, float]]) -> str:
    communication_texts = []
    for key, text in (("communication_s", "total"), ("communication_exposed_s", "with nothing else running")):
        if key in communication_figures:
            communication_texts.append(f"{communication_figures[key]['mean_s'] * 1e3:.1f} ms {text}")
    return ", ".join(communication_texts)


MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations")
