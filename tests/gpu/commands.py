"""Trains on real GPUs as users do, with validation and with optimizer state in host memory.

    python -m tests.gpu.commands --ranks 2 [--out FOLDER] [--platform cpu]

Losses with optimizer state in host memory are those without, bit for bit, for moments of both types. Its
small checkpoint has the released head dimensions. Prints one line per check; exit code 1 if one fails.
"""

import subprocess
import sys
import time

import torch

from tests.gpu.parity import SIZES
from tests.gpu.results import Results, option_parser, work_folders
from tests.support.tiny_run import command, metrics, prepare
from toolkit.common.tiny_checkpoint import write_tiny_checkpoint

STEPS = 12


def main() -> int:
    args = option_parser(__doc__, ranks=2, platform=True).parse_args()
    (work, out), results, is_cuda = work_folders(args.out, "commands"), Results(), args.platform == "cuda"
    dtype = "bfloat16" if is_cuda else "float32"
    hf = write_tiny_checkpoint(work / "hf", "qwen2_5_vl", dtype=getattr(torch, dtype), **SIZES)
    prepared = prepare(work / "prepared", hf, val_fraction=0.25)
    several = str(args.ranks > 1).lower()
    common = ["--platform", args.platform, "--dtype", dtype, "--data.seq_len", "1024", "--eval.interval", "4"]
    common += ["--parallel.tp", str(args.ranks), "--parallel.sequence_parallel", several]

    for moments in ("float32", "bfloat16"):
        curves = []
        for share in ("0", "1"):
            name, start = f"{moments} moments, share {share} in host memory", time.monotonic()
            options = ["--optimizer.moments_dtype", moments, "--optimizer.offload_fraction", share]
            run = work / f"{moments}_{share}"
            words = command(prepared, run, *common, *options, ranks=args.ranks, steps=STEPS)
            done = subprocess.run(words, capture_output=True, text=True)
            (out / f"{moments}_{share}.log").write_text(done.stdout + done.stderr)
            results.add(name, done.returncode == 0, f"{time.monotonic() - start:.0f} s")
            curves.append([line["loss"] for line in metrics(run)])
        is_same = len(curves[0]) == STEPS and curves[0] == curves[1]
        results.add(f"{moments} moments in host memory", is_same, str(curves[0][-1:]))
        results.add("validation", bool(metrics(run, "eval.jsonl")), moments)
    return results.exit_code()


if __name__ == "__main__":
    sys.exit(main())
