"""``megatron-vl bench``: measures how fast a model trains, and where its time and memory go."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from megatron_vl.errors import UserError
from toolkit.launch import run_group
from toolkit.options import exactly_one, words

from .options import BenchOptions, resolve

OF_COMMAND = ("gpus", "processes", "out", "json")
"""Options that are not passed on to the ranks."""


def bench(options: BenchOptions) -> int:
    """Starts the ranks and shows the figures. Returns the exit code."""
    exactly_one(options, "gpus", "processes")
    processes = options.gpus or options.processes or 1
    run = resolve(options)
    run.check_ranks(processes)  # before any process starts
    if options.gpus:
        _check_gpus(options.gpus)
    if "data" in run.workloads:
        from megatron_vl.training.missing_sizes import write_missing_sizes_alone

        write_missing_sizes_alone(run.config.data, run.hf)

    given = words(options, leave_out=OF_COMMAND) + options.fields
    if options.processes:
        given += ["--platform", "cpu"]
    figures = _launch(processes, given, quiet=options.json, cpu=bool(options.processes))
    if isinstance(figures, int):
        return figures

    if options.out:
        out = Path(options.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(figures, indent=2) + "\n")
    if options.json:
        print(json.dumps(figures, indent=2))
    return 0


def _check_gpus(wanted: int) -> None:
    import torch

    if (found := torch.cuda.device_count()) < wanted:
        raise UserError(
            f"--gpus {wanted}: torch sees {found} GPUs here; use --processes {wanted} for small models on CPU"
        )


def _launch(processes: int, options: list[str], quiet: bool, cpu: bool) -> dict[str, Any] | int:
    """Starts one process per rank. Returns the figures of rank 0, or the exit code of a failed group."""
    # Without a GPU, torch's profiler prints "ERROR: gpuGetDeviceCount failed" on each rank.
    variables = {"KINETO_LOG_LEVEL": "5"} if cpu else {}
    with tempfile.TemporaryDirectory(prefix="megatron-vl-bench-") as folder:
        out = Path(folder) / "figures.json"
        done = run_group(
            "toolkit.bench",
            [*options, "--out", out],
            processes,
            show="errors" if quiet else "all",
            # Without it, packed rows of changing sizes fragment the GPU's memory.
            environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | variables,
            on_cpu=cpu,
        )
        if done.returncode:
            return done.returncode
        return json.loads(out.read_text())
