"""The metrics of a run: one printed line per step, and the same numbers in every sink (see
:mod:`megatron_vl.training.report.sinks`)."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.config import TrainConfig
from megatron_vl.core_fixes.default_store import default_store
from megatron_vl.data.source.bad_samples import DROPPED_PREFIX, BadSampleMeter, details_by_reason
from megatron_vl.data.source.blend import BlendSource
from megatron_vl.estimate.flops import needed_flops, row_sizes
from megatron_vl.estimate.gpus import peak_tflops
from megatron_vl.parallel.process_grid import ProcessGrid
from megatron_vl.platform import Platform
from megatron_vl.spec.families import ModelSpec
from megatron_vl.training.optimizer import PartLearningRates
from megatron_vl.training.report.sinks import MetricsSink, ValidationResult, append_lines, open_metrics_sinks
from megatron_vl.training.rows.batch_broadcast import StepBatch
from megatron_vl.training.source_counts import SourceCounts, SourceMeter
from megatron_vl.training.step import SKIP_TEXTS, StepResult

MAX_LISTED_SAMPLES = 10_000
"""Largest number of samples that a printed line lists from all ranks together, about 3 MB."""
MAX_BACKLOG_SAMPLES = 10_000
"""Largest number of samples that a rank keeps for the lists of later lines. Further ones are only counted."""
LINE_CHARS = 100
"""Largest width of a printed line, unless a single part of it is longer."""
_PART_BYTES = 1 << 20
"""Size of one entry of the store in bytes. The store's server refuses values of 8 MiB."""
_LARGEST = ("data_wait_s", "memory_gib")
"""The fields of :class:`StepMetrics` that are reduced to their maximum; all others are summed."""


@dataclass
class StepMetrics:
    """One rank's numbers since the last printed line.

    What is sent and reduced follows from the fields. The size of the message does not depend on the number of
    ranks. Only ranks that own a loader count rows; the others leave these fields at 0.
    """

    language_flops: float = 0.0
    vision_flops: float = 0.0
    num_real_tokens: int = 0
    """Tokens of samples, without the padded tails of rows."""
    samples: int = 0
    images: int = 0
    patches: int = 0
    dropped_samples: int = 0
    sending_ranks: int = 0
    """Ranks that also send a message (see :class:`Rank0Gather`)."""
    data_wait_s: float = 0.0
    memory_gib: float = 0.0

    def reduce_over_ranks(self, device: torch.device) -> StepMetrics:
        """The numbers reduced over all ranks, equal on each. Collective."""
        reduced: dict[str, Any] = {}
        summed = [field.name for field in fields(self) if field.name not in _LARGEST]
        for names, reduce_op in ((summed, dist.ReduceOp.SUM), (_LARGEST, dist.ReduceOp.MAX)):
            # Integers are exact up to 2^53.
            values = torch.tensor([getattr(self, name) for name in names], dtype=torch.float64, device=device)
            dist.all_reduce(values, op=reduce_op)  # one for all numbers of a kind
            reduced |= {
                name: type(getattr(self, name))(value)
                for name, value in zip(names, values.tolist(), strict=True)
            }
        return StepMetrics(**reduced)

    def speed_metrics(
        self, elapsed_s: float, num_steps: int, num_ranks: int, peak_tflops: float
    ) -> dict[str, Any]:
        """The speed of ``num_steps`` steps, from the numbers of all ranks. MFU is None without a peak."""
        rank_seconds = elapsed_s * num_ranks
        total_flops = self.language_flops + self.vision_flops
        tflops = total_flops / rank_seconds / 1e12
        return {
            "step_s": elapsed_s / num_steps,
            "tokens_per_s_per_rank": self.num_real_tokens / rank_seconds,
            "tflops_per_rank": tflops,
            "vision_flops_share": self.vision_flops / total_flops if total_flops else 0.0,
            "mfu": tflops / peak_tflops if peak_tflops else None,
            "memory_gib": self.memory_gib,
            "data_wait_s": self.data_wait_s / num_steps,
        }


class Rank0Gather:
    """Sends lists of samples and counts by reason from the loaders' owners to rank 0, and its answer to all
    ranks, in rounds.

    They go through the key-value store of the process group, from host to host, whenever a step is printed.
    Only rank 0 and the ranks that have something to send take part, and no GPU memory is used. An earlier
    reduction has counted the senders (``StepMetrics.sending_ranks``). Either every rank takes part in a
    round, or none does: all add 1 to ``round_number`` when one begins.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.round_number = 0
        self.answer_key = ""

    def send_message(self, sort_order: int, message: Any) -> None:
        """Leaves ``message`` (JSON) for rank 0. Rank 0 sorts the messages by ``sort_order``."""
        store, text = default_store(), json.dumps([sort_order, message])
        slot = store.add(self._key("slots"), 1) - 1
        starts = range(0, len(text), _PART_BYTES)
        for number, start in enumerate(starts):
            store.set(self._key(slot, number), text[start : start + _PART_BYTES])
        # Last, because rank 0 waits for it.
        store.set(self._key(slot, "parts"), str(len(starts)))

    def receive_messages(self, num_senders: int) -> list[Any]:
        """On rank 0: waits for the messages of ``num_senders`` ranks; returns them in their order."""
        messages = []
        for slot in range(num_senders):
            num_parts = int(self._take(slot, "parts"))
            messages.append(json.loads("".join(self._take(slot, number) for number in range(num_parts))))
        default_store().delete_key(self._key("slots"))
        return [message for _, message in sorted(messages, key=lambda entry: entry[0])]

    def share_answer(self, answer: Any) -> Any:
        """Returns on every rank the ``answer`` that rank 0 passes. Collective."""
        store, previous_key, self.answer_key = default_store(), self.answer_key, self._key("answer")
        if self.rank == 0:
            store.set(self.answer_key, json.dumps(answer))
            if previous_key:  # all ranks have read it, because they have begun another round
                store.delete_key(previous_key)
        return json.loads(store.get(self.answer_key))

    def _take(self, *key_parts: object) -> str:
        """Waits for a value, and removes it from the store."""
        store, key = default_store(), self._key(*key_parts)
        value = store.get(key).decode()
        store.delete_key(key)
        return value

    def _key(self, *key_parts: object) -> str:
        return "/".join(("megatron_vl/rank_0_gather", str(self.round_number), *map(str, key_parts)))


class MetricsLog:
    """Collects a step's numbers over all ranks and writes them on rank 0.

    Speed is measured by the wall clock over whole steps, data loading included, between two printed lines.
    Tokens do not include the padded tails of rows.
    """

    def __init__(
        self,
        config: TrainConfig,
        spec: ModelSpec,
        grid: ProcessGrid,
        platform: Platform,
        blend_sources: Sequence[BlendSource] = (),
    ) -> None:
        self.config, self.spec, self.grid, self.platform = config, spec, grid, platform
        self.run_dir = Path(config.checkpoint.dir) if config.checkpoint.dir else None
        self.interval_start = time.perf_counter()
        self.interval_steps = 0
        self.step_metrics = StepMetrics()
        self.rank_0_gather = Rank0Gather(grid.rank)
        self.drop_reasons: Counter[str] = Counter()
        self.sample_keys: list[list[str]] = []
        self.unsent_samples: list[dict[str, Any]] = []
        self.quarantined_ids: set[tuple[str, ...]] = set()
        self.bad_sample_meter = BadSampleMeter(config.data.max_bad_share)
        self.source_meter = SourceMeter(blend_sources)
        self.peak_tflops = peak_tflops(
            torch.cuda.get_device_name() if platform.name == "cuda" else "cpu", config.log.peak_tflops
        )
        self.printed_memory = ""
        self.sinks: list[MetricsSink] = open_metrics_sinks(config) if grid.rank == 0 else []

    def add_step(self, step_batch: StepBatch, source_counts: SourceCounts | None = None) -> None:
        """Counts a step's rows. Only the rank of each replica that owns the loader counts them."""
        self.interval_steps += 1
        self.source_meter.add(source_counts)
        if not self.grid.owns_loader:
            return

        metrics = self.step_metrics
        metrics.data_wait_s += step_batch.loader_wait_s
        for header in step_batch.headers:
            metrics.num_real_tokens += sum(header["lengths"])
            frame_lengths, window_lengths = header["vision_lengths"]
            sizes = row_sizes(header["lengths"], frame_lengths, window_lengths, header["loss_tokens"])
            flops = needed_flops(self.spec, self.config, sizes)
            metrics.language_flops += flops.language
            metrics.vision_flops += flops.tower

            for name, count in header["counts"].items():
                if name.startswith(DROPPED_PREFIX):
                    self.drop_reasons[name.removeprefix(DROPPED_PREFIX)] += count
                    metrics.dropped_samples += count
                else:
                    setattr(metrics, name, getattr(metrics, name) + count)

            if self.config.log.samples:
                self.sample_keys.append(header["keys"])
            self.unsent_samples = (self.unsent_samples + header["dropped"])[:MAX_BACKLOG_SAMPLES]

    def log_step(
        self,
        step: int,
        step_result: StepResult,
        learning_rates: PartLearningRates,
        skipped_steps: Mapping[str, int],
        source_passes: Mapping[str, float],
    ) -> dict[str, Any]:
        """Prints the line of ``step`` (one-based) and returns its numbers. Collective."""
        self.step_metrics.memory_gib = self.platform.peak_memory_gib()
        self.step_metrics.sending_ranks = int(
            bool(self.drop_reasons or self.unsent_samples or self.sample_keys)
        )
        # The clock stops before the reduction, which may wait for a slow rank.
        now = time.perf_counter()
        elapsed_s, self.interval_start = now - self.interval_start, now
        totals = self.step_metrics.reduce_over_ranks(self.platform.device)
        drop_reasons, drop_details = self._gather_sample_lists(step, totals)
        source_metrics, source_text = self.source_meter.take_line(source_passes)
        metrics: dict[str, Any] = {
            "step": step,
            "loss": step_result.loss,
            "loss_tokens": step_result.loss_tokens,
            "grad_norm": step_result.grad_norm,
            "updated": step_result.is_updated,
            "lr": learning_rates["language"],
            **{f"lr/{part}": rate for part, rate in learning_rates.items()},
            **{f"skipped/{reason}": count for reason, count in skipped_steps.items()},
            **totals.speed_metrics(elapsed_s, self.interval_steps, self.grid.world_size, self.peak_tflops),
            **self._expert_load_metrics(step_result),
            "samples": totals.samples,
            "images": totals.images,
            "patches": totals.patches,
            **{f"{DROPPED_PREFIX}{reason}": count for reason, count in drop_reasons.items()},
            **source_metrics,
            **step_result.more_metrics,
        }
        self.bad_sample_meter.add_counts(totals.samples, drop_reasons, drop_details)
        if self.grid.rank == 0:
            self._print_line(metrics, f"{step_result.more_text} | {source_text}", step_result.skip_reason)
            for sink in self.sinks:
                sink.write_step(metrics)
        self.interval_steps, self.step_metrics = 0, StepMetrics()
        return metrics

    def _gather_sample_lists(self, step: int, totals: StepMetrics) -> tuple[dict[str, int], dict[str, Any]]:
        """Sends the lists of samples from the loaders' owners to rank 0, which writes them. Collective.

        The size of one line's lists is bounded for all ranks together. Other samples wait for the next line.
        Returns (number of unusable samples by reason, details of the listed ones by reason) on all ranks.
        """
        if not totals.sending_ranks:
            return {}, {}

        self.rank_0_gather.round_number += 1
        if self.step_metrics.sending_ranks:
            count = max(1, MAX_LISTED_SAMPLES // totals.sending_ranks)
            dropped, self.unsent_samples = self.unsent_samples[:count], self.unsent_samples[count:]
            message = {"reasons": self.drop_reasons, "dropped": dropped, "keys": self.sample_keys}
            self.rank_0_gather.send_message(self.grid.dp_rank, message)
            self.drop_reasons, self.sample_keys = Counter(), []

        reasons: Counter[str] = Counter()
        listed: list[dict[str, Any]] = []
        if self.grid.rank == 0:
            messages = self.rank_0_gather.receive_messages(totals.sending_ranks)
            for message in messages:
                reasons.update(message["reasons"])
                listed += message["dropped"]
            self._write_quarantine(step, listed)
            if self.config.log.samples and self.run_dir is not None:
                # One line per printed step: the samples of each row, rows of data-parallel rank 0 first.
                rows = [row for message in messages for row in message["keys"]]
                append_lines(self.run_dir / "samples.jsonl", [{"step": step, "rows": rows}])

        if not totals.dropped_samples:
            return {}, {}
        return self.rank_0_gather.share_answer([reasons, details_by_reason(listed)])

    def _write_quarantine(self, step: int, dropped_samples: list[dict[str, Any]]) -> None:
        """Lists unusable samples in ``quarantine.jsonl`` beside the checkpoints, each sample once per run."""
        # Keys are those of one data set, and a blend has several.
        names = ("data_set", "shard", "key", "reason")
        listed = {
            tuple(sample[name] for name in names): {"step": step, **sample} for sample in dropped_samples
        }
        new_samples = [listed[each] for each in listed if each not in self.quarantined_ids]
        self.quarantined_ids.update(listed)
        if new_samples and self.run_dir is not None:
            append_lines(self.run_dir / "quarantine.jsonl", new_samples)

    def bad_sample_state(self) -> tuple[dict[str, Any], dict[str, int]]:
        """The counts to save in a checkpoint.

        They are the counts over all ranks up to the last printed step, and this rank's own counts since then.
        """
        dropped = {f"{DROPPED_PREFIX}{reason}": count for reason, count in self.drop_reasons.items()}
        return self.bad_sample_meter.state_dict(), {"samples": self.step_metrics.samples, **dropped}

    def _expert_load_metrics(self, step_result: StepResult) -> dict[str, float]:
        """``expert_load``: tokens of the busiest expert divided by its layer's mean, in the worst layer.

        With expert parallelism also ``expert_rank_load`` (:func:`busiest_rank_load`).
        """
        if step_result.expert_load is None:
            return {}
        tokens = step_result.expert_load.double().cpu()
        tokens = tokens[tokens.sum(1) > 0]  # the layers with experts
        metrics = {"expert_load": float((tokens.amax(1) / tokens.mean(1)).max())}
        if (ep := self.grid.sharding.ep) > 1:
            metrics["expert_rank_load"] = busiest_rank_load(tokens, ep)
        return metrics

    def _print_line(self, metrics: dict[str, Any], more_text: str, skip_reason: str) -> None:
        seconds, memory_text = metrics["step_s"], f"{metrics['memory_gib']:.1f} GiB"
        rates = [metrics[f"lr/{part}"] for part in ("language", "vision", "merger")]
        speed = f"{metrics['tflops_per_rank']:.1f} TFLOP/s" if self.platform.name == "cuda" else ""
        parts = [
            self._step_text(metrics["step"]),
            f"SKIPPED: {SKIP_TEXTS[skip_reason]}" if skip_reason else "",
            f"loss {metrics['loss']:.6f}",
            f"grad {metrics['grad_norm']:.4g}",
            # The rates of all parts follow one schedule; the start names their peaks if they differ.
            f"lr {next(rate for rate in rates if rate is not None):.2e}",
            f"{seconds:.1f} s" if seconds >= 10 else f"{seconds * 1e3:.0f} ms",
            f"{metrics['tokens_per_s_per_rank']:.0f} tok/s/GPU",
            f"MFU {metrics['mfu']:.1%}" if metrics["mfu"] is not None else speed,
            memory_text if memory_text != self.printed_memory else "",  # it is a peak, and stays the same
            f"data wait {metrics['data_wait_s'] * 1e3:.0f} ms"
            if metrics["data_wait_s"] > seconds / 10
            else "",
            f"busiest expert {metrics['expert_load']:.2f}x" if "expert_load" in metrics else "",
            f"busiest rank {metrics['expert_rank_load']:.2f}x" if "expert_rank_load" in metrics else "",
            *more_text.split(" | "),
            f"dropped {self.bad_sample_meter.bad_count}" if self.bad_sample_meter.bad_count else "",
        ]
        self.printed_memory = memory_text
        print(wrap_parts(filter(None, parts)), flush=True)

    def _step_text(self, step: int) -> str:
        return f"step {step:>{len(str(self.config.steps))}}/{self.config.steps}"

    def log_evaluation(self, step: int, result: ValidationResult) -> None:
        """Prints and writes an evaluation. Its time does not count for the speed of steps."""
        self.exclude_seconds(result.elapsed_s)
        parts = [
            self._step_text(step),
            f"validation loss {result.loss:.6f}",
            f"{result.loss_tokens} tokens",
            f"{result.elapsed_s:.1f} s",
            result.more_text,
        ]
        log_rank_0(self.grid, wrap_parts(filter(None, parts)))
        for sink in self.sinks:
            sink.write_evaluation(step, result)

    def exclude_seconds(self, excluded_s: float) -> None:
        """Excludes time that was not spent on training from the speed of steps."""
        self.interval_start += excluded_s

    def close(self, has_failed: bool = False) -> None:
        for sink in self.sinks:
            sink.close(has_failed)


def busiest_rank_load(expert_tokens: Tensor, ep: int) -> float:
    """Tokens of the busiest expert-parallel rank of each layer divided by the layer's mean, on average.

    All ranks wait for that rank in every layer, so experts compute for this many times as long as if they
    were evenly loaded.

    Args:
        expert_tokens: [layers, experts], number of tokens. Ranks have equal numbers of successive experts.
    """
    rank_tokens = expert_tokens.unflatten(1, (ep, -1)).sum(2)
    return float((rank_tokens.amax(1) / rank_tokens.mean(1)).mean())


def wrap_parts(parts: Iterable[str]) -> str:
    """Parts of a line with ``|`` between them. After :data:`LINE_CHARS` it goes on in an indented line."""
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]} | {part}" if lines[-1].strip() else lines[-1] + part
        if len(longer) > LINE_CHARS:
            lines.append(f"    {part}")
        else:
            lines[-1] = longer
    return "\n".join(lines)


def log_rank_0(grid: ProcessGrid, message: str) -> None:
    if grid.rank == 0:
        print(message, flush=True)
