"""Loss curves of one training in bf16 and with each FP8 recipe, through trainer and loader, on one GPU.

    python -m tests.gpu.fp8_curve --data DATA [--steps 80] [--out FOLDER] [fields of the run]

DATA is a folder of `megatron-vl data convert`, the demo's for instance. The model is a small Qwen2.5-VL with
the released head dimensions and random weights; it learns the answers by heart. Exit code 1 when a recipe
ends above bf16's noise: the mean loss of the last quarter more than 2 % of the first loss apart.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from converters.convert import convert_weights
from tests.gpu.parity import SIZES
from toolkit.tiny_checkpoint import write_tiny_checkpoint

RUNS = {
    "bf16": [],
    "bf16, other order of samples": ["--data.seed", "77"],
    **{recipe: ["--fp8.recipe", recipe] for recipe in ("tensorwise", "delayed", "blockwise")},
    **{
        f"{recipe}, tower too": ["--fp8.recipe", recipe, "--fp8.vision", "true"]
        for recipe in ("tensorwise", "delayed")
    },
}


def losses(log: Path) -> list[float]:
    return [float(value) for value in re.findall(r"\| loss (\S+)", log.read_text())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument(
        "--runs", nargs="*", default=list(RUNS), help="names of the runs; the first is the reference"
    )
    args, run_fields = parser.parse_known_args()
    work = Path(tempfile.mkdtemp(prefix="fp8-"))
    out = args.out or work
    out.mkdir(parents=True, exist_ok=True)
    write_tiny_checkpoint(work / "hf", "qwen2_5_vl", dtype=torch.float32, **SIZES)
    convert_weights(work / "hf", work / "full")
    common = ["--model.hf", work / "hf", "--model.checkpoint", work / "full", "--data.path", args.data]
    common += f"--data.seq_len 1024 --data.num_workers 1 --steps {args.steps} --global_batch_size 4".split()
    common += "--optimizer.lr 5e-4 --optimizer.warmup_steps 10 --optimizer.weight_decay 0.01".split()
    common += run_fields
    running = []
    for number, name in enumerate(args.runs):
        log = (out / f"run_{number}.log").open("w")
        environment = os.environ | {"MASTER_PORT": str(29600 + number)}
        command = [sys.executable, "-m", "megatron_vl.train", *map(str, common), *RUNS[name]]
        running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))

    codes = [process.wait() for process in running]
    curves = {name: losses(out / f"run_{number}.log") for number, name in enumerate(args.runs)}
    (out / "fp8_curves.json").write_text(json.dumps(curves))
    reference = curves[args.runs[0]]
    failed = any(codes)
    quarter = max(1, args.steps // 4)

    for name, code in zip(args.runs, codes, strict=True):
        curve = curves[name]
        if code or len(curve) < args.steps:
            print(f"FAILED {name}: exit {code}, {len(curve)} of {args.steps} steps")
            failed = True
            continue
        apart = abs(sum(curve[-quarter:]) - sum(reference[-quarter:])) / quarter / reference[0]
        failed |= apart > 0.02
        shown = " ".join(f"{curve[i]:.4f}" for i in range(0, args.steps, max(1, args.steps // 8)))
        verdict = "ok    " if apart <= 0.02 else "FAILED"
        print(f"{verdict} {name:30s} {shown} ... {curve[-1]:.4f} | {apart:.2%} of the first loss apart")

    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
