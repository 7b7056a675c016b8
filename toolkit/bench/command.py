"""``megatron-vl bench``: measures how fast a model trains, and where its time and memory go."""

from __future__ import annotations

import tempfile
from pathlib import Path

from megatron_vl.config import validate_config
from megatron_vl.data.source.location import check_data_path
from megatron_vl.estimate.split import run_layout
from megatron_vl.system.errors import UsageError
from toolkit.common.launch import run_group, usable_gpus
from toolkit.common.options import to_command_line

from .options import BenchOptions, resolve_bench_run

ALLOCATOR_VARIABLES = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Without it, packed rows of changing sizes fragment the GPU's memory."""


def bench(options: BenchOptions) -> int:
    """Starts the ranks and shows the figures. Returns the exit code."""
    bench_run = resolve_bench_run(options)
    if bench_run.dataset:  # before anything heavy is imported
        check_data_path(bench_run.dataset)
    world_size = options.nproc_per_node or usable_gpus()
    if not world_size:
        raise UsageError(
            "torch sees no GPU here; give the number of ranks with --nproc-per-node N, also for a run on CPU"
        )
    validate_config(bench_run.config, world_size)
    run_layout(bench_run.config, bench_run.spec, world_size)
    on_cpu = bench_run.config.platform == "cpu" or not usable_gpus(world_size)
    if bench_run.dataset:
        from megatron_vl.training.missing_sizes import write_missing_sizes_alone

        write_missing_sizes_alone(bench_run.data_config("data"), bench_run.config.model.hf)
    with tempfile.TemporaryDirectory(prefix="megatron-vl-bench-") as temporary_dir:
        figures_path = Path(options.out or f"{temporary_dir}/figures.json")
        # The ranks parse the same options again.
        words = to_command_line(options, leave_out=("nproc_per_node", "out", "json"))
        completed_process = run_group(
            "toolkit.bench",
            [*words, "--out", figures_path],
            world_size,
            show="errors" if options.json else "all",
            environment=ALLOCATOR_VARIABLES,
            on_cpu=on_cpu,
        )
        if options.json and not completed_process.returncode:
            print(figures_path.read_text(), end="")
    return completed_process.returncode
