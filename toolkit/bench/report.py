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

from megatron_vl.config import ModelConfig, RecomputeConfig
from megatron_vl.planning.flops import Flops, recompute_flops, row_flops
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.tensors import tensor_table

from .options import BenchRun


@dataclass
class Work:
    """The work of some steps, summed over rows."""

    rows: int = 0
    tokens: int = 0
    """Real tokens, without the padding at the end of rows."""
    samples: int = 0
    images: int = 0
    patches: list[int] = field(default_factory=list)
    """Number of patches of each row."""
    loss_tokens: int = 0
    model: Flops = Flops(0.0, 0.0)
    """FLOPs that training needs, with the output layer for loss tokens only."""
    model_all_tokens: Flops = Flops(0.0, 0.0)
    """FLOPs that training needs, with the output layer for every token."""
    executed: Flops = Flops(0.0, 0.0)
    """FLOPs that the system executed, including recomputation, and the output layer for all tokens for which
    it was computed."""

    def add(
        self,
        spec: ModelSpec,
        model: ModelConfig,
        recompute: RecomputeConfig,
        lengths: list[int],
        full: list[int],
        window: list[int],
        loss_tokens: int,
        *,
        whole_head: bool = False,
        decoupled: bool = False,
    ) -> None:
        """Counts a row with the given document, frame and window lengths.

        Args:
            whole_head: whether the system computes the output layer for every token.
            decoupled: whether every rank holds the vision tower, which then runs forward twice.
        """
        self.rows += 1
        self.tokens += sum(lengths)
        self.samples += len(lengths)
        self.patches.append(sum(full))
        self.loss_tokens += loss_tokens
        needed = row_flops(spec, model, lengths, full, window, loss_tokens)
        all_tokens = row_flops(spec, model, lengths, full, window, sum(lengths))
        self.model = self.model + needed
        self.model_all_tokens = self.model_all_tokens + all_tokens
        again = recompute_flops(spec, model, recompute, lengths, full, window, decoupled)
        self.executed = self.executed + (all_tokens if whole_head else needed) + again

    def __add__(self, other: Work) -> Work:
        return Work(
            self.rows + other.rows,
            self.tokens + other.tokens,
            self.samples + other.samples,
            self.images + other.images,
            self.patches + other.patches,
            self.loss_tokens + other.loss_tokens,
            self.model + other.model,
            self.model_all_tokens + other.model_all_tokens,
            self.executed + other.executed,
        )


def gather(mine: Any) -> list[Any]:
    """Gathers one object of each rank on every rank. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def headline(work: Work, step_seconds: list[float], world: int, peak: float) -> dict[str, Any]:
    """Computes the speed of the timed steps.

    Args:
        work: the work of all ranks in all timed steps.
        step_seconds: wall-clock time of each timed step.
        world: number of ranks.
        peak: TFLOP/s of one accelerator; 0 if unknown (MFU is then null).
    """
    seconds = sum(step_seconds)

    def per_rank(flops: float) -> float:
        return flops / seconds / world / 1e12

    def share(flops: float) -> float | None:
        return per_rank(flops) / peak if peak else None

    return {
        "step_s": seconds / len(step_seconds),
        "step_s_min": min(step_seconds),
        "step_s_max": max(step_seconds),
        "tokens_per_s_per_gpu": work.tokens / seconds / world,
        "images_per_s": work.images / seconds,
        "tflops_per_gpu": per_rank(work.model.total),
        "mfu": share(work.model.total),
        "mfu_language": share(work.model.language),
        "mfu_vision": share(work.model.vision),
        "mfu_all_tokens": share(work.model_all_tokens.total),
        "hfu": share(work.executed.total),
        "vision_flops_share": work.model.vision / work.model.total if work.model.total else 0.0,
        "work": {
            "rows": work.rows,
            "samples": work.samples,
            "images": work.images,
            "tokens_per_row": work.tokens / work.rows,
            "loss_tokens_per_row": work.loss_tokens / work.rows,
            "patches_per_row": {
                "min": min(work.patches),
                "mean": sum(work.patches) / work.rows,
                "max": max(work.patches),
            },
        },
    }


def machine(options: BenchRun, device: torch.device, peak: float) -> dict[str, Any]:
    """The machine and the versions with which the figures were measured."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {
        "device": name,
        "gpus": dist.get_world_size(),
        "peak_tflops": peak or None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
    }


def model_facts(options: BenchRun, spec: ModelSpec) -> dict[str, Any]:
    """The measured model. Its parameters include the padding of the vision FFN, as in our checkpoints."""
    return {
        "hf": options.hf,
        "family": spec.family,
        "parameters": sum(torch.Size(info.shape).numel() for info in tensor_table(spec).values()),
        "language_layers": spec.language.num_layers,
        "vision_layers": spec.vision.num_layers,
    }


def finish(options: BenchRun, figures: dict[str, Any]) -> None:
    """On rank 0, adds the ratio of image rows to text rows, writes ``out`` and prints the figures."""
    if dist.get_rank() != 0:
        return
    figures["image_over_text"] = image_over_text(figures["workloads"])
    if options.out:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2) if options.json else table(figures), flush=True)


def image_over_text(workloads: dict[str, dict[str, Any]]) -> float | None:
    """TFLOP/s on image rows divided by TFLOP/s on text rows of the same run: the ratio of their MFU."""
    if not {"images", "text"} <= workloads.keys():
        return None
    return workloads["images"]["tflops_per_gpu"] / workloads["text"]["tflops_per_gpu"]


def table(figures: dict[str, Any]) -> str:
    """Formats the machine, and a few lines per workload: speed, memory, parts."""
    m, model = figures["machine"], figures["model"]
    peak = f"{m['peak_tflops']:.0f} TFLOP/s peak" if m["peak_tflops"] else "peak unknown"
    size = f"{model['parameters'] / 1e9:.2f} B parameters"
    lines = [f"{figures['system']}: {model['family']}, {size}, {m['gpus']} x {m['device']} ({peak})"]
    lines += [f"  {note}" for note in figures["notes"]]
    for name, w in figures["workloads"].items():
        lines += _workload_lines(name, w)
    if figures["image_over_text"]:
        lines.append(
            f"  images / text: {figures['image_over_text']:.3f} of the text rows' MFU in the same run"
        )
    lines += calibration_lines(figures["calibration"]) if "calibration" in figures else []
    return "\n".join(lines)


def calibration_lines(facts: dict[str, Any]) -> list[str]:
    """Formats a calibration."""
    r = facts["rates"]
    said = [
        f"calibration of {facts['gpu']}: products {r['product_tflops']:.4g} TFLOP/s (half at a width of"
        f" {r['product_width']:.0f}), elementwise {r['memory_tb_s']:.3g} TB/s, attention"
        f" {r['attention_tflops']:.4g}, tower {r['tower_attention_tflops']:.4g} TFLOP/s, collectives"
        f" {r['nvlink_gb_s']:.4g} GB/s"
    ]
    for name, step in facts["steps_s"].items():
        said.append(
            f"  {name}: {1e3 * step['measured']:,.0f} ms per step measured, {1e3 * step['predicted']:,.0f}"
            f" predicted ({1e3 * step['kernels_alone']:,.0f} from the kernels alone)"
        )
    if facts["factor"] is None:
        said.append("  no factor explains the measured steps, so the rates are those of the kernels alone")
    return [*said, f"stored in {facts['file']}: plan, train and doctor use it for {facts['gpu']} from now on"]


def _workload_lines(name: str, w: dict[str, Any]) -> list[str]:
    speed = f"{w['tflops_per_gpu']:.3f} TFLOP/s/GPU"
    if w["mfu"] is not None:
        speed = (
            f"MFU {w['mfu']:.1%} (language {w['mfu_language']:.1%} + vision {w['mfu_vision']:.1%}; "
            f"{w['mfu_all_tokens']:.1%} with the output layer counted for every token), HFU {w['hfu']:.1%}, "
            f"{w['tflops_per_gpu']:.0f} TFLOP/s/GPU"
        )

    memory = w["memory"]
    lines = [
        f"  {name}: {w['tokens_per_s_per_gpu']:,.0f} tok/s/GPU, {w['images_per_s']:.1f} images/s, {speed}, "
        f"{w['step_s'] * 1e3:.0f} ms per step, {memory['peak_gib']:.1f} GiB, loss {w['loss']:.4f}"
    ]
    by_part = {part: memory[f"{part}_gib"] for part in MEMORY_PARTS if memory.get(f"{part}_gib") is not None}
    if by_part:
        lines.append("    memory (GiB): " + ", ".join(f"{part} {gib:.1f}" for part, gib in by_part.items()))
    if w.get("parts"):
        shown = (f"{part} {t['mean_s'] * 1e3:.1f}" for part, t in w["parts"].items())
        lines.append("    ms per step, mean over ranks: " + ", ".join(shown))
        lines.append(
            "    collectives in one profiled step, including waiting: " + _communication(w["communication"])
        )
        if any(w["efficiency"].values()):
            halves = (f"{half} {share:.1%}" for half, share in w["efficiency"].items() if share is not None)
            lines.append("    share of the peak while it runs: " + ", ".join(halves))
        s = w["straggling"]
        lines.append(
            f"    compute of the slowest data-parallel rank {s['max_over_mean']:.3f} of the mean; "
            f"idle pipeline stages {w['pipeline_idle_share']:.1%} of the step"
        )

    return lines


def _communication(c: dict[str, dict[str, float]]) -> str:
    names = {"communication_s": "total", "communication_exposed_s": "with nothing else running"}
    return ", ".join(f"{c[key]['mean_s'] * 1e3:.1f} ms {text}" for key, text in names.items() if key in c)


MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations")
