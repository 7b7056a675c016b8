"""``megatron-vl bench``: measures how fast a model trains, and where its time and memory go."""

from __future__ import annotations

import tempfile
from pathlib import Path

from megatron_vl.errors import UserError
from toolkit.launch import run_group
from toolkit.options import require_exactly_one, to_command_line

from .options import BenchOptions, resolve_bench_run

COMMAND_ONLY_OPTIONS = ("gpus", "processes", "out", "json")
"""Options that are not passed on to the ranks."""
ALLOCATOR_VARIABLES = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Without it, packed rows of changing sizes fragment the GPU's memory."""


def bench(options: BenchOptions) -> int:
    """Starts the ranks and shows the figures. Returns the exit code."""
    require_exactly_one(options, "gpus", "processes")
    world_size = options.gpus or options.processes or 1
    bench_run = resolve_bench_run(options)
    bench_run.check_ranks(world_size)  # before any process starts
    if options.gpus:
        _check_gpus(options.gpus)
    if "data" in bench_run.workloads:
        from megatron_vl.training.missing_sizes import write_missing_sizes_alone

        write_missing_sizes_alone(bench_run.data_config("data"), bench_run.config.model.hf)

    # The ranks parse the same options again.
    rank_arguments = to_command_line(options, leave_out=COMMAND_ONLY_OPTIONS) + options.fields
    if options.processes:
        rank_arguments += ["--platform", "cpu"]
    # Without a GPU, torch's profiler prints "ERROR: gpuGetDeviceCount failed" on each rank.
    cpu_variables = {"KINETO_LOG_LEVEL": "5"} if options.processes else {}
    with tempfile.TemporaryDirectory(prefix="megatron-vl-bench-") as temporary_dir:
        figures_path = Path(options.out or f"{temporary_dir}/figures.json")
        completed_process = run_group(
            "toolkit.bench",
            [*rank_arguments, "--out", figures_path],
            world_size,
            show="errors" if options.json else "all",
            environment=ALLOCATOR_VARIABLES | cpu_variables,
            on_cpu=bool(options.processes),
        )
        if options.json and not completed_process.returncode:
            print(figures_path.read_text(), end="")
    return completed_process.returncode


def _check_gpus(requested_gpus: int) -> None:
    import torch

    if (visible_gpus := torch.cuda.device_count()) < requested_gpus:
        raise UserError(
            f"--gpus {requested_gpus}: torch sees {visible_gpus} GPUs here; "
            f"use --processes {requested_gpus} for small models on CPU"
        )
