"""Loss curves of one training in bf16 and with each FP8 recipe, through trainer and loader, on one GPU.

    python -m tests.gpu.fp8_curve --data DATA [--steps 80] [--out FOLDER] [fields of the run]

DATA is a folder of `megatron-vl data convert`, the demo's for instance. The model is a small Qwen2.5-VL with
the released head dimensions and random weights. Exit code 1 when a recipe is further from bf16 than bf16 with
the samples in another order.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import torch

from converters.convert import convert_weights
from tests.gpu.parity import SIZES
from tests.gpu.results import Results, option_parser, work_folders
from toolkit.common.tiny_checkpoint import write_tiny_checkpoint

REFERENCES = {"bf16": [], "bf16, other order of samples": ["--data.seed", "77"]}
RECIPES = {
    **{recipe: ["--fp8.recipe", recipe] for recipe in ("tensorwise", "delayed", "blockwise")},
    **{
        f"{recipe}, tower too": ["--fp8.recipe", recipe, "--fp8.vision", "true"]
        for recipe in ("tensorwise", "delayed")
    },
}


WINDOW = 40
"""Number of steps whose losses are averaged. A single loss depends on the rows of its step."""


def losses(log: Path) -> list[float]:
    return [float(value) for value in re.findall(r"\| loss (\S+)", log.read_text())]


def distance(curve: list[float], reference: list[float]) -> float:
    """The mean distance of the curves' window means, over the steps that both have; infinite without any."""
    num_steps = min(len(curve), len(reference))
    if not num_steps:
        return math.inf
    windows = [slice(first, min(first + WINDOW, num_steps)) for first in range(0, num_steps, WINDOW)]
    return mean(abs(mean(curve[window]) - mean(reference[window])) for window in windows)


def train_all(runs: dict[str, list[str]], common_options: list[str], out: Path) -> dict[str, list[float]]:
    """Trains all runs side by side on one GPU. Returns their losses; a run that fails has fewer."""
    processes = []
    for number, run_options in enumerate(runs.values()):
        environment = os.environ | {"MASTER_PORT": str(29600 + number)}
        command = [sys.executable, "-m", "megatron_vl.train", *common_options, *run_options]
        with (out / f"run_{number}.log").open("w") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))

    for process in processes:
        process.wait()
    return {name: losses(out / f"run_{number}.log") for number, name in enumerate(runs)}


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=RECIPES)
    args, run_fields = parser.parse_known_args()
    (work, out), results = work_folders(args.out, "fp8"), Results()

    write_tiny_checkpoint(work / "hf", "qwen2_5_vl", dtype=torch.float32, **SIZES)
    convert_weights(work / "hf", work / "full")
    common_options = ["--model.hf", str(work / "hf"), "--model.checkpoint", str(work / "full")]
    common_options += ["--data.path", args.data, "--steps", str(args.steps)]
    common_options += "--data.seq_len 1024 --data.num_workers 1 --global_batch_size 4".split()
    common_options += "--optimizer.lr 5e-4 --optimizer.warmup_steps 10 --optimizer.weight_decay 0.01".split()
    common_options += run_fields
    runs = REFERENCES | {name: RECIPES[name] for name in args.recipes}
    curves = train_all(runs, common_options, out)
    (out / "fp8_curves.json").write_text(json.dumps(curves))

    reference, other_order = (curves[name] for name in REFERENCES)
    limit = distance(other_order, reference)
    for name, curve in curves.items():
        is_good = len(curve) == args.steps and distance(curve, reference) <= limit
        shown = " ".join(f"{loss:.4f}" for loss in curve[:: max(1, args.steps // 8)])
        far = f"{distance(curve, reference):.4f} from bf16"
        results.add(name, is_good, f"{len(curve)} steps: {shown} | {far}")
    return results.exit_code()


if __name__ == "__main__":
    sys.exit(main())
