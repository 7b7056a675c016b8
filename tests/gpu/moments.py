"""Trains with Adam's moments in fp32 and bf16, on the GPU and in host memory, and compares.

    python -m tests.gpu.moments --data DATA [--steps 80] [--out FOLDER] [--platform cpu]

DATA is a folder of `megatron-vl data convert`, the demo's for instance. The runs share the GPU. The program
prints one line for each check and returns exit code 1 if one fails:

- A share of 0 and of 1 in host memory give the same losses, bit for bit, in every step, for both types.
- The mean loss of the last quarter with bf16 moments is within 2 % of the first loss of that with fp32 ones.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from converters.convert import convert_weights
from tests.gpu.parity import SIZES
from tests.gpu.results import Results, option_parser, work_folders
from toolkit.common.tiny_checkpoint import write_tiny_checkpoint

RUNS = [(moments, share) for moments in ("float32", "bfloat16") for share in (0, 1)]


def losses_of_run(work: Path, out: Path, args: argparse.Namespace, moments: str, share: int) -> list[float]:
    """The losses of a run; fewer than its steps if it failed."""
    folder = work / f"{moments}_{share}"
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
        "checkpoint.dir": folder,
    }
    words = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    with (out / f"{folder.name}.log").open("w") as log:
        subprocess.run(
            [sys.executable, "-m", "megatron_vl.train", *words], stdout=log, stderr=log, check=False
        )
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [line["loss"] for line in lines if "loss" in line]


def main() -> int:
    parser = option_parser(__doc__, platform=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=80)
    args = parser.parse_args()
    (work, out), results = work_folders(args.out, "moments"), Results()
    sizes = {} if args.platform == "cpu" else SIZES | {"layers": 24}
    write_tiny_checkpoint(work / "hf", "qwen2_5_vl", dtype=torch.float32, **sizes)
    convert_weights(work / "hf", work / "full")
    with ThreadPoolExecutor(len(RUNS)) as pool:
        curves = dict(
            zip(RUNS, pool.map(lambda run: losses_of_run(work, out, args, *run), RUNS), strict=True)
        )

    for run, curve in curves.items():
        results.add(f"{run} ran", len(curve) == args.steps, f"{len(curve)} steps")
    for moments in ("float32", "bfloat16"):
        same = curves[moments, 0] == curves[moments, 1]
        results.add(f"{moments}: offloaded is the same", same, "bit for bit" if same else "losses differ")
    quarter = max(1, args.steps // 4)
    wide, narrow = curves["float32", 0], curves["bfloat16", 0]
    apart = abs(sum(narrow[-quarter:]) - sum(wide[-quarter:])) / quarter / wide[0]
    is_near = narrow != wide and apart <= 0.02
    results.add("bfloat16 follows float32", is_near, f"{apart:.3%} of the first loss apart")
    return results.exit_code()


if __name__ == "__main__":
    sys.exit(main())
