"""The metrics of a run: one printed line per step, and the same numbers in every sink (see
:mod:`megatron_vl.training.report.sinks`)."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_vl.config import TrainConfig
from megatron_vl.data.source.bad_samples import DROPPED_PREFIX, BadSampleMeter, details_by_reason
from megatron_vl.data.source.blend import BlendSource
from megatron_vl.estimate.flops import needed_flops, row_sizes
from megatron_vl.estimate.gpus import peak_tflops
from megatron_vl.parallel.process_grid import ProcessGrid
from megatron_vl.platform import Platform
from megatron_vl.spec.families import ModelSpec
from megatron_vl.training.evaluation import ValidationResult
from megatron_vl.training.optimizer import PartLearningRates
from megatron_vl.training.report.gather import Rank0Gather
from megatron_vl.training.report.sinks import MetricsSink, open_metrics_sinks
from megatron_vl.training.report.step_metrics import StepMetrics
from megatron_vl.training.rows.batch_broadcast import StepBatch
from megatron_vl.training.source_counts import SourceCounts, SourceMeter
from megatron_vl.training.step import SKIP_REASONS, StepResult

MAX_LIST_BYTES = 4 << 20
"""Largest size in bytes of the lists of samples that a printed line collects from all ranks together."""
MAX_BACKLOG_SAMPLES = 10_000
"""Largest number of samples that a rank keeps for the lists of later lines. Further ones are only counted."""


class MetricsLog:
    """Collects a step's numbers over all ranks and writes them on rank 0.

    Speed is measured by the wall clock over whole steps, data loading included, between two printed lines.
    Tokens do not include the padded tails of rows.

    Args:
        blend_sources: the sources of the blend; empty if the data set is no blend.
    """

    def __init__(
        self,
        config: TrainConfig,
        spec: ModelSpec,
        grid: ProcessGrid,
        platform: Platform,
        blend_sources: Sequence[BlendSource] = (),
    ) -> None:
        self.spec, self.grid, self.platform = spec, grid, platform
        self.model_config, self.lora, self.total_steps = config.model, config.lora, config.steps
        self.run_dir = Path(config.checkpoint.dir) if config.checkpoint.dir else None
        self.lists_samples = config.log.samples
        self.interval_start = time.perf_counter()
        self.rank_0_gather = Rank0Gather(grid.rank)
        self.interval_steps = 0
        self.step_metrics = StepMetrics()
        self.drop_reasons: Counter[str] = Counter()
        self.sample_keys: list[list[str]] = []
        self.unsent_samples: list[dict[str, Any]] = []
        """Samples that could not be used and that were not yet sent to rank 0."""
        self.quarantined_ids: set[tuple[str, ...]] = set()
        self.bad_sample_meter = BadSampleMeter(config.data.max_bad_share)
        self.source_meter = SourceMeter(blend_sources)
        self.device_peak_tflops = peak_tflops(
            torch.cuda.get_device_name() if platform.name == "cuda" else "cpu", config.log.peak_tflops
        )
        self.metrics_sinks: list[MetricsSink] = open_metrics_sinks(config) if grid.rank == 0 else []

    def add_step(self, step_batch: StepBatch, source_counts: SourceCounts | None = None) -> None:
        """Counts a step's rows. Only the rank of each replica that owns the loader counts them.

        Args:
            source_counts: numbers by source of the whole step, equal on all ranks.
        """
        self.interval_steps += 1
        self.source_meter.add(source_counts)
        if not self.grid.owns_loader:
            return

        step_metrics = self.step_metrics
        step_metrics.data_wait_s += step_batch.loader_wait_s
        for segment_lengths, (frame_lengths, window_lengths), loss_tokens in zip(
            step_batch.segment_lengths, step_batch.vision_lengths, step_batch.loss_tokens, strict=True
        ):
            step_metrics.num_real_tokens += sum(segment_lengths)
            sizes = row_sizes(segment_lengths, frame_lengths, window_lengths, loss_tokens)
            flops = needed_flops(self.spec, self.model_config, self.lora, sizes)
            step_metrics.language_flops += flops.language
            step_metrics.vision_flops += flops.tower

        for item_name, item_count in step_batch.item_counts.items():
            if item_name.startswith(DROPPED_PREFIX):
                self.drop_reasons[item_name.removeprefix(DROPPED_PREFIX)] += item_count
                step_metrics.dropped_samples += item_count
            else:
                setattr(step_metrics, item_name, getattr(step_metrics, item_name) + item_count)

        if self.lists_samples:
            self.sample_keys += step_batch.sample_keys
        self.unsent_samples = (self.unsent_samples + step_batch.dropped_samples)[:MAX_BACKLOG_SAMPLES]

    def log_step(
        self,
        step: int,
        step_result: StepResult,
        learning_rates: PartLearningRates,
        skipped_steps: Mapping[str, int],
    ) -> dict[str, Any]:
        """Prints the line of ``step`` (one-based) and returns its numbers. Collective."""
        self.step_metrics.memory_gib = self.platform.peak_memory_gib()
        has_lists = bool(self.drop_reasons or self.unsent_samples or self.sample_keys)
        self.step_metrics.sending_ranks = int(has_lists)
        speed_metrics, global_metrics = self._reduce_metrics()
        drop_reasons, drop_details = self._gather_sample_lists(step, global_metrics)
        source_metrics, source_summary = self.source_meter.take_line()
        logged_metrics: dict[str, Any] = {
            "step": step,
            "loss": step_result.loss,
            "loss_tokens": step_result.loss_tokens,
            "grad_norm": step_result.grad_norm,
            "updated": step_result.is_updated,
            "lr": learning_rates["language"],
            **{f"lr/{part}": rate for part, rate in learning_rates.items()},
            **{f"skipped/{reason}": count for reason, count in skipped_steps.items()},
            **speed_metrics,
            **self._expert_load_metric(step, step_result),
            "samples": global_metrics.samples,
            "images": global_metrics.images,
            "patches": global_metrics.patches,
            **{f"{DROPPED_PREFIX}{reason}": count for reason, count in drop_reasons.items()},
            **source_metrics,
        }
        self.bad_sample_meter.add_counts(global_metrics.samples, drop_reasons, drop_details)
        self._print_line(logged_metrics, source_summary, step_result.skip_reason)
        self.interval_steps, self.step_metrics = 0, StepMetrics()
        return logged_metrics

    def _reduce_metrics(self) -> tuple[dict[str, Any], StepMetrics]:
        """The speed since the last line, and the counts of all ranks. Collective."""
        current_time = time.perf_counter()
        elapsed_s, self.interval_start = current_time - self.interval_start, current_time
        global_metrics = self.step_metrics.reduce_over_ranks(self.platform.device)
        total_flops = global_metrics.language_flops + global_metrics.vision_flops
        tflops_per_rank = total_flops / elapsed_s / self.grid.world_size / 1e12
        speed_metrics = {
            "step_s": elapsed_s / self.interval_steps,
            "tokens_per_s_per_rank": global_metrics.num_real_tokens / elapsed_s / self.grid.world_size,
            "tflops_per_rank": tflops_per_rank,
            "vision_flops_share": global_metrics.vision_flops / total_flops if total_flops else 0.0,
            "mfu": tflops_per_rank / self.device_peak_tflops if self.device_peak_tflops else None,
            "memory_gib": global_metrics.memory_gib,
            "data_wait_s": global_metrics.data_wait_s / self.interval_steps,
        }
        return speed_metrics, global_metrics

    def _gather_sample_lists(
        self, step: int, global_metrics: StepMetrics
    ) -> tuple[dict[str, int], dict[str, Any]]:
        """Sends the lists of samples from the loaders' owners to rank 0, which writes them. Collective.

        The size of one line's lists is bounded for all ranks together. Other samples wait for the next line.
        Returns (number of unusable samples by reason, details of the listed ones by reason) on all ranks.
        """
        if not global_metrics.sending_ranks:
            return {}, {}

        self.rank_0_gather.begin_round()
        if self.step_metrics.sending_ranks:
            samples_to_send, self.unsent_samples = _split_by_size(
                self.unsent_samples, MAX_LIST_BYTES // global_metrics.sending_ranks
            )
            self.rank_0_gather.send_message(
                self.grid.dp_rank,
                {"reasons": dict(self.drop_reasons), "dropped": samples_to_send, "keys": self.sample_keys},
            )
            self.drop_reasons, self.sample_keys = Counter(), []

        global_reasons: Counter[str] = Counter()
        listed_samples: list[dict[str, Any]] = []
        if self.grid.rank == 0:
            list_messages = self.rank_0_gather.receive_messages(global_metrics.sending_ranks)
            for list_message in list_messages:
                global_reasons.update(list_message["reasons"])
                listed_samples += list_message["dropped"]
            self._write_quarantine(step, listed_samples)
            if self.lists_samples:
                self._write_sample_keys(step, [list_message["keys"] for list_message in list_messages])

        if not global_metrics.dropped_samples:
            return {}, {}
        return self.rank_0_gather.share_answer([dict(global_reasons), details_by_reason(listed_samples)])

    def _expert_load_metric(self, step: int, step_result: StepResult) -> dict[str, float]:
        """``expert_load``: tokens of the busiest expert divided by its layer's mean, in the worst layer.

        With expert parallelism also ``expert_rank_load`` (:func:`busiest_rank_load`). The sinks get the load
        of every expert, relative to the mean of its layer.
        """
        if step_result.expert_load is None:
            return {}
        expert_tokens = step_result.expert_load.double().cpu()
        layers = expert_tokens.sum(1).nonzero()[:, 0].tolist()
        relative_loads = {layer: expert_tokens[layer] / expert_tokens[layer].mean() for layer in layers}
        for metrics_sink in self.metrics_sinks:
            metrics_sink.write_expert_load(step, relative_loads)
        load_metrics = {"expert_load": max(float(share.max()) for share in relative_loads.values())}
        if (num_ranks := self.grid.sharding.ep) > 1:
            load_metrics["expert_rank_load"] = busiest_rank_load(expert_tokens[layers], num_ranks)
        return load_metrics

    def log_evaluation(self, step: int, validation_result: ValidationResult) -> None:
        """Prints and writes an evaluation. Its time does not count for the speed of steps."""
        self.exclude_seconds(validation_result.elapsed_s)
        if self.grid.rank != 0:
            return
        print(
            f"step {step:>6}/{self.total_steps} | validation loss {validation_result.loss:.6f} |"
            f" {validation_result.loss_tokens} tokens | {validation_result.elapsed_s:.1f} s",
            flush=True,
        )
        for metrics_sink in self.metrics_sinks:
            metrics_sink.write_evaluation(step, validation_result)

    def exclude_seconds(self, excluded_s: float) -> None:
        """Excludes time that was not spent on training from the speed of steps."""
        self.interval_start += excluded_s

    def _write_quarantine(self, step: int, dropped_samples: list[dict[str, Any]]) -> None:
        """Lists unusable samples in ``quarantine.jsonl`` beside the checkpoints, each sample once per run."""
        # Keys are those of one data set, and a blend has several.
        samples_by_id = {
            tuple(sample[name] for name in ("data_set", "shard", "key", "reason")): sample
            for sample in dropped_samples
        }
        new_samples = {
            name: sample for name, sample in samples_by_id.items() if name not in self.quarantined_ids
        }
        self.quarantined_ids.update(new_samples)
        if new_samples and self.run_dir is not None:
            with (self.run_dir / "quarantine.jsonl").open("a") as file:
                file.writelines(
                    json.dumps({"step": step, **sample}) + "\n" for sample in new_samples.values()
                )

    def bad_sample_state(self) -> tuple[dict[str, Any], dict[str, int]]:
        """The counts to save in a checkpoint.

        They are the counts over all ranks up to the last printed step, and this rank's own counts since then.
        """
        local_counts = {f"{DROPPED_PREFIX}{reason}": count for reason, count in self.drop_reasons.items()}
        return self.bad_sample_meter.state_dict(), {"samples": self.step_metrics.samples, **local_counts}

    def _write_sample_keys(self, step: int, keys_by_rank: list[list[list[str]]]) -> None:
        """Writes one line per printed step: the samples of each row, rows of data-parallel rank 0 first."""
        if self.run_dir is not None:
            with (self.run_dir / "samples.jsonl").open("a") as file:
                file.write(
                    json.dumps({"step": step, "rows": [row for part in keys_by_rank for row in part]}) + "\n"
                )

    def _print_line(self, logged_metrics: dict[str, Any], source_summary: str, skip_reason: str) -> None:
        if self.grid.rank != 0:
            return
        speed_text = (
            f"MFU {logged_metrics['mfu']:6.1%} (vision {logged_metrics['vision_flops_share']:.0%})"
            if logged_metrics["mfu"] is not None
            else f"{logged_metrics['tflops_per_rank']:.3f} TFLOP/s"
        )
        line_parts = [
            f"step {logged_metrics['step']:>6}/{self.total_steps} | loss {logged_metrics['loss']:.6f} | grad"
            f" norm {logged_metrics['grad_norm']:.4f} | {_learning_rates_text(logged_metrics)} |"
            f" {logged_metrics['step_s'] * 1e3:.0f} ms | {logged_metrics['tokens_per_s_per_rank']:.0f}"
            f" tok/s/GPU | {speed_text} | {logged_metrics['memory_gib']:.1f} GiB | data wait"
            f" {logged_metrics['data_wait_s'] * 1e3:.0f} ms",
            *_expert_load_texts(logged_metrics),
            source_summary,
            f"dropped {self.bad_sample_meter.bad_count}" if self.bad_sample_meter.bad_count else "",
            f"SKIPPED: {SKIP_REASONS[skip_reason]}" if skip_reason else "",
        ]
        print(" | ".join(filter(None, line_parts)), flush=True)
        for metrics_sink in self.metrics_sinks:
            metrics_sink.write_step(logged_metrics)

    def close(self, has_failed: bool = False) -> None:
        """Closes the sinks.

        Args:
            has_failed: whether the run ends with an error.
        """
        for metrics_sink in self.metrics_sinks:
            metrics_sink.close(has_failed)


def busiest_rank_load(expert_tokens: Tensor, num_ranks: int) -> float:
    """Tokens of the busiest expert-parallel rank of each layer divided by the layer's mean, on average.

    All ranks wait for that rank in every layer, so experts compute for this many times as long as if they
    were evenly loaded.

    Args:
        expert_tokens: [layers, experts], number of tokens. Ranks have equal numbers of successive experts.
    """
    rank_tokens = expert_tokens.unflatten(1, (num_ranks, -1)).sum(2)
    return float((rank_tokens.amax(1) / rank_tokens.mean(1)).mean())


def _expert_load_texts(logged_metrics: dict[str, Any]) -> list[str]:
    return [
        f"busiest {unit} {logged_metrics[name]:.2f}x"
        for unit, name in (("expert", "expert_load"), ("rank", "expert_rank_load"))
        if name in logged_metrics
    ]


def _learning_rates_text(logged_metrics: dict[str, Any]) -> str:
    """The learning rates in a printed line: ``lr 1.000e-05 (vision 0.000e+00, merger frozen)``."""
    language_rate, vision_rate, merger_rate = (
        "frozen" if logged_metrics[f"lr/{part}"] is None else f"{logged_metrics[f'lr/{part}']:.3e}"
        for part in ("language", "vision", "merger")
    )
    return f"lr {language_rate} (vision {vision_rate}, merger {merger_rate})"


def _split_by_size(
    dropped_samples: list[dict[str, Any]], max_bytes: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The first samples up to about ``max_bytes`` bytes (at least one sample), and the remaining ones."""
    count, used_bytes = 0, 0
    for sample in dropped_samples:
        used_bytes += len(json.dumps(sample))
        if count and used_bytes > max_bytes:
            break
        count += 1
    return dropped_samples[:count], dropped_samples[count:]


def log_rank_0(grid: ProcessGrid, message: str) -> None:
    """Prints on rank 0."""
    if grid.rank == 0:
        print(message, flush=True)
