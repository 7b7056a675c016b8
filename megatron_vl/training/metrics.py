"""What a run says of itself: one line a step, JSON lines, TensorBoard."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_vl.config import TrainConfig
from megatron_vl.data.bad_samples import BadSampleMeter
from megatron_vl.models.families import ModelSpec
from megatron_vl.parallel.grid import Grid
from megatron_vl.platform import Platform

from .evaluation import Evaluation
from .feed import StepData
from .flops import Flops, peak_tflops, row_flops
from .step import StepResult


class MetricsLog:
    """Collects a step's numbers over all ranks and writes them on rank 0.

    Speed is the wall clock of whole steps, data included, between two printed lines; tokens are real ones, without the
    padded tails of rows.
    """

    def __init__(self, config: TrainConfig, spec: ModelSpec, grid: Grid, platform: Platform) -> None:
        self.config, self.spec, self.grid, self.platform = config, spec, grid, platform
        self.mark = time.perf_counter()
        self.steps, self.tokens = 0, 0
        self.flops = Flops(0.0, 0.0)
        self.wait_s = 0.0
        self.counts: dict[str, int] = {}
        self.keys: list[list[str]] = []
        self.dropped: list[dict[str, str]] = []
        self.listed: set[tuple[str, str]] = set()
        self.meter = BadSampleMeter(config.data.max_bad_share)
        self.totals: dict[str, int] = {}
        name = torch.cuda.get_device_name() if platform.name == "cuda" else "cpu"
        self.peak = peak_tflops(name, config.log.peak_tflops)
        self.file = self.board = None
        if grid.rank == 0 and config.checkpoint.dir:
            path = Path(config.checkpoint.dir)
            path.mkdir(parents=True, exist_ok=True)
            self.file = (path / "metrics.jsonl").open("a")
        if grid.rank == 0 and config.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(config.log.tensorboard)

    def add(self, data: StepData) -> None:
        """Counts a step's rows; only the loader's owner of each replica counts, so that sums over ranks are right."""
        self.steps += 1
        if not self.grid.owns_loader:
            return
        self.wait_s += data.wait_s
        rows = zip(data.segment_lengths, data.vision_lengths, data.loss_tokens, strict=True)
        for lengths, (full, window), loss_tokens in rows:
            self.tokens += sum(lengths)
            self.flops = self.flops + row_flops(self.spec, self.config.model, lengths, full, window, loss_tokens)
        if self.config.log.samples:
            self.keys += data.keys
        self.dropped += data.dropped
        for name, value in data.counts.items():
            self.counts[name] = self.counts.get(name, 0) + value

    def write(self, step: int, result: StepResult, lr: float) -> dict[str, Any]:
        """Collective. Prints the line of ``step`` (one-based) and returns its numbers."""
        now = time.perf_counter()
        seconds, self.mark = now - self.mark, now
        everyone: list[Any] = [None] * self.grid.world_size
        mine = (
            self.flops.language,
            self.flops.vision,
            self.wait_s,
            self.platform.peak_memory_gib(),
            self.counts,
            self.tokens,
            self.keys,
            self.dropped,
        )
        dist.all_gather_object(everyone, mine)
        language, vision = sum(e[0] for e in everyone), sum(e[1] for e in everyone)
        world, counts = self.grid.world_size, self._sum_counts([e[4] for e in everyone])
        tokens = sum(e[5] for e in everyone)
        numbers: dict[str, Any] = {
            "step": step,
            "loss": result.loss,
            "loss_tokens": result.loss_tokens,
            "grad_norm": result.grad_norm,
            "updated": result.updated,
            "lr": lr,
            "step_s": seconds / self.steps,
            "tokens_per_s_per_rank": tokens / seconds / world,
            "tflops_per_rank": (language + vision) / seconds / world / 1e12,
            "vision_flops_share": vision / (language + vision) if language + vision else 0.0,
            "mfu": (language + vision) / seconds / world / 1e12 / self.peak if self.peak else None,
            "memory_gib": max(e[3] for e in everyone),
            "data_wait_s": max(e[2] for e in everyone) / self.steps,
            **self._expert_load(step, result),
            **counts,
        }
        self._emit(numbers)
        self._quarantine(step, [sample for e in everyone for sample in e[7]])
        self.meter.add(counts.get("samples", 0), {n[8:]: v for n, v in counts.items() if n.startswith("dropped/")})
        if self.config.log.samples:
            self._list_samples(step, [e[6] for e in everyone])
        self.steps = self.tokens = 0
        self.flops, self.wait_s, self.counts = Flops(0.0, 0.0), 0.0, {}
        self.keys, self.dropped = [], []
        return numbers

    def _expert_load(self, step: int, result: StepResult) -> dict[str, float]:
        """``expert_load``: tokens of the busiest expert over its layer's mean, in the worst layer; each layer on TensorBoard."""
        if result.expert_load is None:
            return {}
        load = result.expert_load.double().cpu()
        layers = load.sum(1).nonzero()[:, 0].tolist()
        shares = {layer: load[layer] / load[layer].mean() for layer in layers}
        if self.board:
            for layer, share in shares.items():
                self.board.add_scalar(f"expert_load/layer_{layer:02d}", float(share.max()), step)
            self.board.add_histogram("expert_load/all", torch.cat(list(shares.values())), step)
        return {"expert_load": max(float(share.max()) for share in shares.values())}

    def evaluated(self, step: int, result: Evaluation) -> None:
        """Shows and writes an evaluation; its time is left out of the steps' speed."""
        self.mark += result.seconds
        if self.grid.rank != 0:
            return
        print(
            f"step {step:>6}/{self.config.steps} | validation loss {result.loss:.6f} | {result.loss_tokens} tokens | "
            f"{result.seconds:.1f} s",
            flush=True,
        )
        numbers = {"step": step, "loss": result.loss, "loss_tokens": result.loss_tokens, "seconds": result.seconds}
        if self.config.checkpoint.dir:
            with (Path(self.config.checkpoint.dir) / "eval.jsonl").open("a") as file:
                file.write(json.dumps(numbers | {"answers": [asdict(a) for a in result.answers]}, ensure_ascii=False) + "\n")
        if self.board:
            self.board.add_scalar("validation_loss", result.loss, step)
            for number, a in enumerate(result.answers):
                text = "\n\n".join(f"**{name}**: {value}" for name, value in asdict(a).items())
                self.board.add_text(f"answer_{number}", text, step)
            self.board.flush()

    def _quarantine(self, step: int, dropped: list[dict[str, str]]) -> None:
        """Lists the samples that could not be used in ``quarantine.jsonl`` beside the checkpoints, each once a run."""
        dropped = [sample for sample in dropped if (sample["key"], sample["reason"]) not in self.listed]
        self.listed |= {(sample["key"], sample["reason"]) for sample in dropped}
        if dropped and self.grid.rank == 0 and self.config.checkpoint.dir:
            with (Path(self.config.checkpoint.dir) / "quarantine.jsonl").open("a") as file:
                file.writelines(json.dumps({"step": step, **sample}) + "\n" for sample in dropped)

    def too_many_bad(self) -> str | None:
        """Why the run should stop, when more samples could not be used than ``data.max_bad_share``; equal on all ranks."""
        return self.meter.problem() or None

    def bad_samples(self) -> tuple[dict[str, Any], dict[str, int]]:
        """For a checkpoint: the counts over all ranks up to the last printed step, and this rank's own since then."""
        return self.meter.state_dict(), dict(self.counts)

    def load_bad_samples(self, state: dict[str, Any]) -> None:
        """Goes on counting from a checkpoint; on all ranks alike."""
        self.meter.load_state_dict(state)
        for reason, count in self.meter.reasons.items():
            self.totals[f"dropped/{reason}"] = count

    def _list_samples(self, step: int, keys: list[list[list[str]]]) -> None:
        """One line a printed step: the samples of each row, rows of data-parallel rank 0 first."""
        if self.grid.rank == 0 and self.config.checkpoint.dir:
            with (Path(self.config.checkpoint.dir) / "samples.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "rows": [row for part in keys for row in part]}) + "\n")

    def _sum_counts(self, parts: list[dict[str, int]]) -> dict[str, int]:
        counts: dict[str, int] = {}
        for part in parts:
            for name, value in part.items():
                counts[name] = counts.get(name, 0) + value
        for name, value in counts.items():
            self.totals[name] = self.totals.get(name, 0) + value
        return counts

    def _emit(self, n: dict[str, Any]) -> None:
        if self.grid.rank != 0:
            return
        dropped = sum(v for k, v in self.totals.items() if k.startswith("dropped/"))
        speed = (
            f"MFU {n['mfu']:6.1%} (vision {n['vision_flops_share']:.0%})"
            if n["mfu"] is not None
            else f"{n['tflops_per_rank']:.3f} TFLOP/s"
        )
        line = (
            f"step {n['step']:>6}/{self.config.steps} | loss {n['loss']:.6f} | grad norm {n['grad_norm']:.4f} | lr {n['lr']:.3e} "
            f"| {n['step_s'] * 1e3:.0f} ms | {n['tokens_per_s_per_rank']:.0f} tok/s/GPU | {speed} | {n['memory_gib']:.1f} GiB | "
            f"data wait {n['data_wait_s'] * 1e3:.0f} ms"
        )
        line += f" | busiest expert {n['expert_load']:.2f}x" if "expert_load" in n else ""
        line += f" | dropped {dropped}" if dropped else ""
        line += "" if n["updated"] else " | SKIPPED: loss or gradient is not finite"
        print(line, flush=True)
        if self.file:
            self.file.write(json.dumps(n) + "\n")
            self.file.flush()
        if self.board:
            for name, value in n.items():
                if isinstance(value, (int, float)) and name != "step":
                    self.board.add_scalar(name, value, n["step"])
            self.board.flush()

    def close(self) -> None:
        for sink in (self.file, self.board):
            if sink:
                sink.close()


def say(grid: Grid, message: str) -> None:
    """Prints on rank 0."""
    if grid.rank == 0:
        print(message, flush=True)
        sys.stdout.flush()
