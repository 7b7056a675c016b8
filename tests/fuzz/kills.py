"""Kills a four-rank run with SIGKILL at random moments and compares it with an undisturbed one.

    python -m tests.fuzz.kills --kills 20 [--offload]

The run uses TP2 x PP2 with sequence parallelism, overlapped reduction and gather, loader workers, and a
checkpoint every second step, so that many kills hit a save. Losses, gradient norms and the samples of every
step must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from megatron_vl.system.processes import kill_process_tree
from tests.support.tiny_run import LAYOUT, command, environment, metrics, prepare, train
from tests.tiny import tiny_checkpoint

OPTIONS = ["--checkpoint.interval", "2", "--log.samples", "true"]
LAYOUTS = {2: ["--parallel.tp", "2", "--parallel.sequence_parallel", "true"], 4: LAYOUT}
KEYS = ("loss", "grad_norm", "loss_tokens", "samples", "images", "lr")


def kill_once(
    prepared: dict[str, Path], run: Path, options: list[str], ranks: int, steps: int, rng: random.Random
) -> tuple[bool, str]:
    """Starts (or resumes) the run and kills it. Returns whether that came before its end, and the step."""
    seen = len(metrics(run))
    with (run.parent / "killed.log").open("ab") as log:
        words = command(prepared, run, *options, ranks=ranks, steps=steps)
        process = subprocess.Popen(words, env=environment(), stdout=log, stderr=log)
        while process.poll() is None and len(metrics(run)) == seen:
            time.sleep(0.05)
        wait = time.monotonic() + rng.uniform(0.0, 1.5)
        while process.poll() is None and time.monotonic() < wait:
            time.sleep(0.01)
        ended = process.poll() is not None
        if not ended:
            kill_process_tree(process.pid)
        code = process.wait()

    if ended and code:
        raise RuntimeError(
            f"the run ended by itself with exit code {code}; {run.parent / 'killed.log'} says why"
        )

    lines = metrics(run)
    saving = " while saving" if list(run.glob("step_*.partial")) else ""
    return not ended, f"step {lines[-1]['step'] if lines else 0}{saving}"


def joined(lines: list[dict[str, Any]]) -> dict[int, Any]:
    """Step -> its line. Raises ValueError when a repeated step differs from its first appearance."""
    steps: dict[int, Any] = {}
    for line in lines:
        value = [line[key] for key in KEYS] if "loss" in line else line["rows"]
        if steps.setdefault(line["step"], value) != value:
            raise ValueError(
                f"step {line['step']} came out differently after a kill: {steps[line['step']]} and {value}"
            )
    return steps


def run_kills(
    folder: Path, kills: int, seed: int, steps: int, workers: int = 2, ranks: int = 4, offload: bool = False
) -> dict[str, Any]:
    """The whole experiment. Raises ValueError when anything differs.

    Args:
        offload: every start of the killed run has another share of the optimizer state in host memory. The
            undisturbed one has none.
    """
    rng = random.Random(seed)
    options = [*LAYOUTS[ranks], *OPTIONS, "--data.num_workers", str(workers)]
    hf = tiny_checkpoint("qwen2_5_vl", tied=True, dtype=torch.float32)
    prepared = prepare(folder / "prepared", hf)
    start = time.perf_counter()
    done = train(prepared, folder / "undisturbed", *options, ranks=ranks, steps=steps)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])

    undisturbed_s = time.perf_counter() - start
    run = folder / "killed"
    killed = 0
    during_save = 0
    run.mkdir()
    while killed < kills:
        share = ["--optimizer.offload_fraction", rng.choice(["0.3", "1.0", "0.0"])] if offload else []
        was_killed, where = kill_once(prepared, run, [*options, *share], ranks, steps, rng)
        if not was_killed:
            raise ValueError(f"the run reached its end after {killed} kills; give more steps than {steps}")
        killed += 1
        during_save += "saving" in where
        print(
            f"kill {killed}/{kills} at {where}, last checkpoint "
            f"{[p.name for p in sorted(run.glob('step_*'))][-1:]}",
            flush=True,
        )

    rest = ["--optimizer.offload_fraction", "0.6"] if offload else []
    done = train(prepared, run, *options, *rest, ranks=ranks, steps=steps)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    for name in ("metrics.jsonl", "samples.jsonl"):
        ours, theirs = joined(metrics(run, name)), joined(metrics(folder / "undisturbed", name))
        if ours != theirs:
            first = min(step for step in ours.keys() | theirs.keys() if ours.get(step) != theirs.get(step))
            raise ValueError(f"{name}: step {first} is {ours.get(first)}, undisturbed {theirs.get(first)}")

    return {
        "kills": killed,
        "during_save": during_save,
        "steps": steps,
        "undisturbed_s": round(undisturbed_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=400, help="steps of the run; it must outlast the kills")
    parser.add_argument("--offload", action="store_true", help="a random share in host memory")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kills-"))  # it stays for inspection if something differs
    print(json.dumps(run_kills(folder, args.kills, 1, args.steps, offload=args.offload)))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
