"""Trains with Adam's moments in fp32 and bf16, on the GPU and in host memory, and compares.

    python -m tests.gpu.moments --data DATA [--steps 80] [--at_once 4] [--out FOLDER] [--platform cpu]

DATA is a folder of `megatron-vl data convert`, the demo's for instance. Runs share the GPU; the memory of
each is its own count. The program prints one line for each check and returns exit code 1 if one fails:

- A share of 0 and of 1 in host memory give the same losses, bit for bit, in every step, for both types.
- The mean loss of the last quarter with bf16 moments is within 2 % of the first loss of that with fp32 ones.
- The peak of GPU memory falls by what the estimate says, within 0.3 GiB. (Not on CPU, which counts none.)
- The memory at the start, before the first step, is below the peak of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from converters.convert import convert_weights
from megatron_vl.config import parse_config
from megatron_vl.spec.families import read_spec
from tests.gpu.parity import SIZES
from tests.gpu.results import Results, option_parser, work_folders
from tests.support.planned import estimate_stage_memory
from toolkit.common.tiny_checkpoint import write_tiny_checkpoint

RUNS = {f"{moments}, {share}": (moments, share) for moments in ("float32", "bfloat16") for share in (0, 1)}
GIB = 2**30


def options_of(work: Path, args: argparse.Namespace, moments: str, share: int) -> list[str]:
    fields: dict[str, Any] = {
        "model.hf": work / "hf",
        "model.checkpoint": work / "full",
        "data.path": args.data,
        "data.seq_len": 1024,
        "data.num_workers": 1,
        "global_batch_size": 4,
        "steps": args.steps,
        "platform": args.platform,
        "dtype": "float32" if args.platform == "cpu" else "bfloat16",
        "optimizer.lr": 5e-4,
        "optimizer.warmup_steps": min(10, args.steps // 2),
        "optimizer.moments_dtype": moments,
        "optimizer.offload_fraction": share,
        "checkpoint.dir": work / f"{moments}_{share}",
    }
    return [word for name, value in fields.items() for word in (f"--{name}", str(value))]


def run(work: Path, out: Path, args: argparse.Namespace, moments: str, share: int) -> list[dict[str, Any]]:
    """The lines of a run's metrics; fewer than its steps if it failed."""
    folder = work / f"{moments}_{share}"
    with (out / f"moments_{moments}_{share}.log").open("w") as log:
        words = [sys.executable, "-m", "megatron_vl.train", *options_of(work, args, moments, share)]
        subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, env=dict(os.environ), check=False)
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [line for line in lines if "loss" in line]


def start_peak(work: Path, args: argparse.Namespace, moments: str, share: int) -> float:
    """Most GiB in use until the run is set up, in a process of its own."""
    program = (
        "import sys, torch; from megatron_vl.config import parse_config;"
        " from megatron_vl.parallel.start import join_ranks;"
        " from megatron_vl.training.resolve import resolve_run;"
        " from megatron_vl.training.trainer import Trainer; config = parse_config(sys.argv[1:]);"
        " Trainer(resolve_run(config, 1), join_ranks(config)).build();"
        " print('PEAK', torch.cuda.max_memory_allocated())"
    )
    # The run of the same settings, which goes on at the same time, has locked its folder.
    no_folder = ["--checkpoint.dir", ""]
    words = [sys.executable, "-c", program, *options_of(work, args, moments, share), *no_folder]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("PEAK ")]
    return int(found[0]) / GIB if found else float("nan")


def estimated(work: Path, args: argparse.Namespace, moments: str, share: int) -> float:
    config = parse_config(options_of(work, args, moments, share))
    return estimate_stage_memory(config, read_spec(work / "hf"), 1)[0].total_bytes / GIB


def checks(
    work: Path, args: argparse.Namespace, found: dict[str, list[dict[str, Any]]], starts: dict[str, float]
) -> list[tuple[str, bool, str]]:
    """(name, whether it holds, what was seen)."""
    losses = {name: [line["loss"] for line in lines] for name, lines in found.items()}
    seen = [
        (f"{name} ran", len(curve) == args.steps, f"{len(curve)} steps") for name, curve in losses.items()
    ]
    if not all(holds for _, holds, _ in seen):
        return seen

    quarter = max(1, args.steps // 4)
    reference, narrow = losses["float32, 0"], losses["bfloat16, 0"]
    for moments in ("float32", "bfloat16"):
        zero, one = losses[f"{moments}, 0"], losses[f"{moments}, 1"]
        differing = sum(a != b for a, b in zip(zero, one, strict=True))
        seen.append((f"{moments}: offloaded is the same", not differing, f"{differing} steps differ"))
    apart = abs(sum(narrow[-quarter:]) - sum(reference[-quarter:])) / quarter / reference[0]
    seen.append(("bfloat16 follows float32", apart <= 0.02, f"{apart:.3%} of the first loss apart"))
    seen.append(("bfloat16 is another type", narrow != reference, "losses differ"))
    if args.platform == "cpu":
        return seen

    peaks = {name: max(line["memory_gib"] for line in lines) for name, lines in found.items()}
    for name, chosen in RUNS.items():
        less = estimated(work, args, "float32", 0) - estimated(work, args, *chosen)
        freed = peaks["float32, 0"] - peaks[name]
        told = f"{freed:.2f} GiB, {less:.2f} estimated"
        seen.append((f"{name}: memory freed", abs(freed - less) <= 0.3, told))
        told = f"{starts[name]:.2f} GiB at the start, {peaks[name]:.2f} in a step"
        seen.append((f"{name}: the start is below a step", starts[name] <= peaks[name], told))
    return seen


def main() -> int:
    parser = option_parser(__doc__, platform=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--at_once", type=int, default=4, help="runs at a time")
    args = parser.parse_args()
    (work, out), results = work_folders(args.out, "moments"), Results()
    sizes = {} if args.platform == "cpu" else SIZES | {"layers": 24}
    write_tiny_checkpoint(work / "hf", "qwen2_5_vl", dtype=torch.float32, **sizes)
    convert_weights(work / "hf", work / "full")

    with ThreadPoolExecutor(args.at_once) as pool:
        running = {name: pool.submit(run, work, out, args, *chosen) for name, chosen in RUNS.items()}
        setting_up = {
            name: pool.submit(start_peak, work, args, *chosen)
            for name, chosen in RUNS.items()
            if args.platform == "cuda"
        }
        found = {name: future.result() for name, future in running.items()}
        starts = {name: future.result() for name, future in setting_up.items()}

    curves = {name: [line["loss"] for line in lines] for name, lines in found.items()}
    (out / "moments_curves.json").write_text(json.dumps(curves))
    seen = checks(work, args, found, starts)
    for check in seen:
        results.add(*check)
    return results.exit_code()


if __name__ == "__main__":
    sys.exit(main())
