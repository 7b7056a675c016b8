"""The metrics of a run: one printed line per step, and the same numbers in every sink (see
:mod:`megatron_vl.training.sinks`)."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_vl.config import TrainConfig
from megatron_vl.data.source.bad_samples import DROPPED, BadSampleMeter, details_by_reason
from megatron_vl.data.source.blend import Source
from megatron_vl.parallel.grid import ProcessGrid
from megatron_vl.planning.flops import peak_tflops, row_flops
from megatron_vl.platform import Platform
from megatron_vl.spec.families import ModelSpec
from megatron_vl.training.evaluation import Evaluation
from megatron_vl.training.feed import StepData
from megatron_vl.training.mailbox import Mailbox
from megatron_vl.training.optimizer import Rates
from megatron_vl.training.sinks import Sink, open_sinks
from megatron_vl.training.source_counts import SourceCounts, SourceMeter
from megatron_vl.training.step import SKIPPED, StepResult
from megatron_vl.training.tally import Tally

LISTED_BYTES = 4 << 20
"""Largest size in bytes of the lists of samples that a printed line collects from all ranks together."""
BACKLOG = 10_000
"""Largest number of samples that a rank keeps for the lists of later lines. Further ones are only counted."""


class MetricsLog:
    """Collects a step's numbers over all ranks and writes them on rank 0.

    Speed is measured by the wall clock over whole steps, data loading included, between two printed lines.
    Tokens do not include the padded tails of rows.

    Args:
        sources: the sources of the blend; none if the data set is no blend.
    """

    def __init__(
        self,
        config: TrainConfig,
        spec: ModelSpec,
        grid: ProcessGrid,
        platform: Platform,
        sources: Sequence[Source] = (),
    ) -> None:
        self.spec, self.grid, self.platform = spec, grid, platform
        self.model, self.steps_of_run = config.model, config.steps
        self.folder = Path(config.checkpoint.dir) if config.checkpoint.dir else None
        self.lists_samples = config.log.samples
        self.mark = time.perf_counter()
        self.mailbox = Mailbox(grid.rank)
        self.steps = 0
        self.tally = Tally()
        self.reasons: Counter[str] = Counter()
        self.keys: list[list[str]] = []
        self.dropped: list[dict[str, Any]] = []
        """Samples that could not be used and that were not yet sent to rank 0."""
        self.listed: set[tuple[str, ...]] = set()
        self.meter = BadSampleMeter(config.data.max_bad_share)
        self.sources = SourceMeter(sources)
        name = torch.cuda.get_device_name() if platform.name == "cuda" else "cpu"
        self.peak = peak_tflops(name, config.log.peak_tflops)
        self.sinks: list[Sink] = open_sinks(config) if grid.rank == 0 else []

    def add(self, data: StepData, sources: SourceCounts | None = None) -> None:
        """Counts a step's rows. Only the rank of each replica that owns the loader counts,
        so that sums are right.

        Args:
            sources: numbers by source of the whole step, equal on all ranks.
        """
        self.steps += 1
        self.sources.add(sources)
        if not self.grid.owns_loader:
            return

        tally = self.tally
        tally.data_wait_s += data.wait_s
        rows = zip(data.segment_lengths, data.vision_lengths, data.loss_tokens, strict=True)
        for lengths, (full, window), loss_tokens in rows:
            tally.tokens += sum(lengths)
            flops = row_flops(self.spec, self.model, lengths, full, window, loss_tokens)
            tally.language_flops += flops.language
            tally.vision_flops += flops.vision

        for name, value in data.counts.items():
            if name.startswith(DROPPED):
                self.reasons[name.removeprefix(DROPPED)] += value
                tally.dropped += value
            else:
                setattr(tally, name, getattr(tally, name) + value)

        if self.lists_samples:
            self.keys += data.keys
        self.dropped = (self.dropped + data.dropped)[:BACKLOG]

    def write(
        self, step: int, result: StepResult, rates: Rates, skipped: Mapping[str, int]
    ) -> dict[str, Any]:
        """Prints the line of ``step`` (one-based) and returns its numbers. Collective.

        Args:
            rates: learning rate of each part.
            skipped: the run's skipped steps so far, by reason.
        """
        now = time.perf_counter()
        seconds, self.mark = now - self.mark, now
        self.tally.memory_gib = self.platform.peak_memory_gib()
        self.tally.senders = int(bool(self.reasons or self.dropped or self.keys))
        total = self.tally.reduced(self.platform.device)
        reasons, details = self._exchange_lists(step, total)

        by_source, in_words = self.sources.next_line()

        flops, world = total.language_flops + total.vision_flops, self.grid.world_size
        numbers: dict[str, Any] = {
            "step": step,
            "loss": result.loss,
            "loss_tokens": result.loss_tokens,
            "grad_norm": result.grad_norm,
            "updated": result.updated,
            "lr": rates["language"],
            **{f"lr/{part}": rate for part, rate in rates.items()},
            **{f"skipped/{reason}": count for reason, count in skipped.items()},
            "step_s": seconds / self.steps,
            "tokens_per_s_per_rank": total.tokens / seconds / world,
            "tflops_per_rank": flops / seconds / world / 1e12,
            "vision_flops_share": total.vision_flops / flops if flops else 0.0,
            "mfu": flops / seconds / world / 1e12 / self.peak if self.peak else None,
            "memory_gib": total.memory_gib,
            "data_wait_s": total.data_wait_s / self.steps,
            **self._expert_load(step, result),
            "samples": total.samples,
            "images": total.images,
            "patches": total.patches,
            **{f"{DROPPED}{reason}": count for reason, count in reasons.items()},
            **by_source,
        }
        self.meter.add(total.samples, reasons, details)
        self._emit(numbers, in_words, result.skipped)

        self.steps = 0
        self.tally = Tally()
        return numbers

    def _exchange_lists(self, step: int, total: Tally) -> tuple[dict[str, int], dict[str, Any]]:
        """Rank 0 writes the samples that the loaders' owners list.

        Returns the number of unusable samples by reason, and what is known of those that are listed, equal on
        every rank.

        The size of one line's lists is bounded for all ranks together.
        What does not fit is sent with the next line.
        """
        if not total.senders:
            return {}, {}
        self.mailbox.begin()
        if self.tally.senders:
            now, self.dropped = _split_list(self.dropped, LISTED_BYTES // total.senders)
            letter = {"reasons": dict(self.reasons), "dropped": now, "keys": self.keys}
            self.mailbox.send(self.grid.dp_rank, letter)
            self.reasons, self.keys = Counter(), []

        found: Counter[str] = Counter()
        listed: list[dict[str, Any]] = []
        if self.grid.rank == 0:
            letters = self.mailbox.receive(total.senders)
            for letter in letters:
                found.update(letter["reasons"])
            listed = [sample for letter in letters for sample in letter["dropped"]]
            self._quarantine(step, listed)
            if self.lists_samples:
                self._list_samples(step, [letter["keys"] for letter in letters])
        if not total.dropped:
            return {}, {}
        reasons, details = self.mailbox.share([dict(found), details_by_reason(listed)])
        return reasons, details

    def _expert_load(self, step: int, result: StepResult) -> dict[str, float]:
        """``expert_load``: tokens of the busiest expert over its layer's mean, in the worst layer.

        The sinks get the number of each layer.
        """
        if result.expert_load is None:
            return {}
        load = result.expert_load.double().cpu()
        layers = load.sum(1).nonzero()[:, 0].tolist()
        shares = {layer: load[layer] / load[layer].mean() for layer in layers}
        for sink in self.sinks:
            sink.expert_load(step, shares)
        return {"expert_load": max(float(share.max()) for share in shares.values())}

    def evaluated(self, step: int, result: Evaluation) -> None:
        """Prints and writes an evaluation. Its time does not count in the steps' speed."""
        self.leave_out(result.seconds)
        if self.grid.rank != 0:
            return
        print(
            f"step {step:>6}/{self.steps_of_run} | validation loss {result.loss:.6f} | {result.loss_tokens}"
            f" tokens | {result.seconds:.1f} s",
            flush=True,
        )
        for sink in self.sinks:
            sink.evaluation(step, result)

    def leave_out(self, seconds: float) -> None:
        """Takes time out of the steps' speed that was not spent on training."""
        self.mark += seconds

    def _quarantine(self, step: int, dropped: list[dict[str, Any]]) -> None:
        """Lists unusable samples in ``quarantine.jsonl`` beside the checkpoints,
        each of them once per run."""
        # Keys are those of one data set, and a blend has several.
        named = {
            tuple(sample[name] for name in ("data_set", "shard", "key", "reason")): sample
            for sample in dropped
        }
        new = {name: sample for name, sample in named.items() if name not in self.listed}
        self.listed.update(new)
        if new and self.grid.rank == 0 and self.folder is not None:
            with (self.folder / "quarantine.jsonl").open("a") as file:
                file.writelines(json.dumps({"step": step, **sample}) + "\n" for sample in new.values())

    def too_many_bad(self) -> str | None:
        """Why the run must stop if more samples than ``data.max_bad_share`` could not be used;
        equal on all ranks."""
        return self.meter.problem() or None

    def bad_samples(self) -> tuple[dict[str, Any], dict[str, int]]:
        """The counts to save in a checkpoint.

        They are the counts over all ranks up to the last printed step, and this rank's own counts since then.
        """
        own = {f"{DROPPED}{reason}": count for reason, count in self.reasons.items()}
        return self.meter.state_dict(), {"samples": self.tally.samples, **own}

    def load_bad_samples(self, state: dict[str, Any]) -> None:
        """Continues counting from a checkpoint. Call it on all ranks with the same state."""
        self.meter.load_state_dict(state)

    def _list_samples(self, step: int, keys: list[list[list[str]]]) -> None:
        """Writes one line per printed step: the samples of each row, rows of data-parallel rank 0 first."""
        if self.grid.rank == 0 and self.folder is not None:
            with (self.folder / "samples.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "rows": [row for part in keys for row in part]}) + "\n")

    def _emit(self, n: dict[str, Any], sources: str, skipped: str) -> None:
        if self.grid.rank != 0:
            return
        dropped = self.meter.bad
        speed = (
            f"MFU {n['mfu']:6.1%} (vision {n['vision_flops_share']:.0%})"
            if n["mfu"] is not None
            else f"{n['tflops_per_rank']:.3f} TFLOP/s"
        )
        line = (
            f"step {n['step']:>6}/{self.steps_of_run} | loss {n['loss']:.6f} | grad norm {n['grad_norm']:.4f}"
            f" | {_rates(n)} | {n['step_s'] * 1e3:.0f} ms | {n['tokens_per_s_per_rank']:.0f} tok/s/GPU |"
            f" {speed} | {n['memory_gib']:.1f} GiB | data wait {n['data_wait_s'] * 1e3:.0f} ms"
        )
        line += f" | busiest expert {n['expert_load']:.2f}x" if "expert_load" in n else ""
        line += f" | {sources}" if sources else ""
        line += f" | dropped {dropped}" if dropped else ""
        line += f" | SKIPPED: {SKIPPED[skipped]}" if skipped else ""
        print(line, flush=True)
        for sink in self.sinks:
            sink.step(n)

    def close(self, failed: bool = False) -> None:
        """``failed``: the run ends with an error."""
        for sink in self.sinks:
            sink.close(failed)


def _rates(numbers: dict[str, Any]) -> str:
    """The learning rate of each part as a printed line shows it:
    ``lr 1.000e-05 (vision 0.000e+00, merger frozen)``."""
    language, vision, merger = (
        "frozen" if numbers[f"lr/{part}"] is None else f"{numbers[f'lr/{part}']:.3e}"
        for part in ("language", "vision", "merger")
    )
    return f"lr {language} (vision {vision}, merger {merger})"


def _split_list(
    samples: list[dict[str, Any]], size: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The first samples up to about ``size`` bytes (at least one sample), and the remaining ones."""
    count, used = 0, 0
    for sample in samples:
        used += len(json.dumps(sample))
        if count and used > size:
            break
        count += 1
    return samples[:count], samples[count:]


def say(grid: ProcessGrid, message: str) -> None:
    """Prints on rank 0."""
    if grid.rank == 0:
        print(message, flush=True)
        sys.stdout.flush()
