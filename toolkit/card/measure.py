"""Puts a card together: the benchmark, its prediction, the two sides' losses, and what they ran on."""

from __future__ import annotations

import contextlib
import datetime
import gc
import platform as python_platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_vl.parallel.process_grid import end_distributed
from megatron_vl.planning.gpus import calibration_for_platform, query_gpus
from megatron_vl.planning.predict import predict_layout
from megatron_vl.platform import get_platform
from megatron_vl.spec.families import read_spec
from toolkit.bench.calibrate import attention_backends, row_statistics
from toolkit.bench.measure import measure_benchmark
from toolkit.bench.options import BenchRun
from toolkit.doctor.machine_checks import installed_version, transformer_engine_version
from toolkit.launch import REPOSITORY_ROOT

from . import curves
from .conversations import describe_conversations
from .options import CardOptions

DISTRIBUTIONS = ("torch", "megatron-core", "transformers", "flash-attn-4", "triton")
"""Packages that decide what is computed, beside Transformer Engine."""


def make_card(options: CardOptions, bench_run: BenchRun) -> dict[str, Any]:
    """Measures everything, in this process.

    Returns:
        The content of the card's file. Times are in seconds, memory is in GiB, losses are in nats a token.
    """
    seconds_by_part: dict[str, float] = {}
    with timed_part("the benchmark", seconds_by_part):
        bench_figures = measure_benchmark(bench_run)
    speed = bench_figures["workloads"]["images"]

    config_spec = read_spec(options.hf)
    model_card = {
        "model": bench_figures["model"]
        | {
            "hf": options.model_name,
            "config_language_layers": config_spec.language.num_layers,
            "config_vision_layers": config_spec.vision.num_layers,
        },
        "source": describe_source(options.commit),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": bench_figures["machine"] | describe_software(bench_run),
        "speed": speed | {"notes": bench_figures["notes"]},
        "predicted": predict_speed(bench_run, speed),
        "curve": measure_curves(options, bench_run, seconds_by_part),
        "seconds": seconds_by_part,
    }
    end_distributed()
    return model_card


@contextlib.contextmanager
def timed_part(part_name: str, seconds_by_part: dict[str, float]) -> Iterator[None]:
    """Shows and times a part, and frees its memory."""
    print(f"card: {part_name} ...", file=sys.stderr, flush=True)
    start_time = time.perf_counter()
    yield
    seconds_by_part[part_name] = round(time.perf_counter() - start_time, 1)

    gc.collect()
    torch.cuda.empty_cache()


def predict_speed(bench_run: BenchRun, speed: dict[str, Any]) -> dict[str, Any]:
    """What the planner says of the benchmark's rows, and the share by which the measurement is above it."""
    config = bench_run.config
    spec = bench_run.read_model_spec()
    calibration = calibration_for_platform(config.platform)
    prediction = predict_layout(
        config,
        spec,
        1,
        bench_run.resolve_layout(1),
        row_statistics=row_statistics(bench_run, spec, "images"),
        calibration=calibration,
        patch_count=speed["work"]["patches_per_row"]["max"],
    )
    return {
        "rates_of": calibration.gpu,
        "rates_measured": calibration.measured,
        "step_s": prediction.step_seconds,
        "peak_gib": prediction.peak_gib,
        "step_error": speed["step_s"] / prediction.step_seconds - 1,
        "memory_error": speed["memory"]["peak_gib"] / prediction.peak_gib - 1,
    }


def measure_curves(
    options: CardOptions, bench_run: BenchRun, seconds_by_part: dict[str, float]
) -> dict[str, Any]:
    """Trains both sides, and ``transformers`` once more with other kernels of attention."""
    platform = get_platform(bench_run.config.platform)
    with tempfile.TemporaryDirectory(prefix="megatron-vl-card-") as temporary_dir:
        with timed_part("weights and conversations", seconds_by_part):
            curve_run = curves.prepare_curve(
                bench_run.read_model_spec(),
                Path(temporary_dir),
                platform.name,
                steps=options.steps,
                learning_rate=options.lr,
            )
        losses = {}
        with timed_part("megatron-vl", seconds_by_part):
            losses["megatron-vl"] = curves.train_here(curve_run, platform)
        with timed_part("transformers", seconds_by_part):
            losses["transformers"] = curves.train_in_transformers(curve_run)
        with timed_part("transformers, eager", seconds_by_part):
            losses["transformers, eager"] = curves.train_in_transformers(curve_run, attention="eager")

    return curve_figures(curve_run, losses)


def curve_figures(curve_run: curves.CurveRun, losses: dict[str, list[float]]) -> dict[str, Any]:
    """The settings of the trainings, their losses, and their gaps to ``transformers``."""
    gaps, tail_means = {}, {}
    for training_name, loss_curve in losses.items():
        tail_means[training_name] = curves.tail_mean(loss_curve)
        if training_name != "transformers":
            gaps[training_name] = curves.curve_gap(loss_curve, losses["transformers"])

    config = curve_run.config
    return {
        "data": describe_conversations(curves.CONVERSATION_COUNT),
        "tail_steps": min(curves.TAIL_STEPS, config.steps),
        "rows_per_step": config.global_batch_size,
        "row_tokens": config.data.seq_len,
        "dtype": config.dtype,
        "optimizer": vars(config.optimizer),
        "losses": losses,
        "tail_means": tail_means,
        "gaps": gaps,
    }


def describe_software(bench_run: BenchRun) -> dict[str, Any]:
    """Versions, and the attention kernels that were chosen."""
    config = bench_run.config
    versions = {package_name: installed_version(package_name) for package_name in DISTRIBUTIONS}
    versions["transformer-engine"] = transformer_engine_version()
    versions["python"] = python_platform.python_version()
    local_gpus = query_gpus() if config.platform == "cuda" else []
    driver_version = local_gpus[0].driver_version if local_gpus else None
    return {
        "versions": versions,
        "driver": driver_version,
        "attention": attention_backends(config, bench_run.read_model_spec(), config.platform),
    }


def describe_source(given_commit: str) -> dict[str, Any]:
    """The commit of this checkout, and whether tracked files differ from it (None: unknown)."""
    if given_commit or not (REPOSITORY_ROOT / ".git").exists():
        return {"commit": given_commit or None, "changed": None}
    try:
        commit = _ask_git("rev-parse", "HEAD")
        return {"commit": commit, "changed": bool(_ask_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "changed": None}


def _ask_git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY_ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def summary_lines(model_card: dict[str, Any]) -> list[str]:
    """The main figures of a card as text."""
    speed, predicted, curve = model_card["speed"], model_card["predicted"], model_card["curve"]
    lines = [
        f"{model_card['model']['hf']}: {speed['tokens_per_s_per_gpu']:,.0f} tokens/s, "
        f"{1e3 * speed['step_s']:,.0f} ms a step ({1e3 * predicted['step_s']:,.0f} predicted), "
        f"{speed['memory']['peak_gib']:.1f} GiB ({predicted['peak_gib']:.1f} predicted), with the rates of "
        f"{predicted['rates_of']}"
    ]
    for name, gap in curve["gaps"].items():
        lines.append(
            f"{name} beside transformers: gap {gap['mean']:.2e} on average, {gap['largest']:.2e} at most "
            f"(step {gap['largest_at_step']}); last losses {gap['tail']:+.2e}"
        )
    return lines
