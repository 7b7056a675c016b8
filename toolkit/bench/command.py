"""``megatron-vl bench``: measures how fast a model trains, and where its time goes."""

from __future__ import annotations

from megatron_vl.data.source.location import check_data_path
from megatron_vl.estimate.split import run_layout
from toolkit.common.launch import run_group, usable_gpus

from .options import BenchOptions, resolve_bench_run


def bench(options: BenchOptions) -> int:
    """Starts the ranks, which show the figures. Returns the exit code."""
    run = resolve_bench_run(options)
    data_config = run.workloads.get("data")
    if data_config:  # before anything heavy is imported
        check_data_path(data_config.path)
    world_size = options.nproc_per_node or usable_gpus() or 1
    run_layout(run.config, run.spec, world_size)
    on_cpu = run.config.platform == "cpu" or not usable_gpus(world_size)
    if data_config:
        from megatron_vl.training.missing_sizes import write_missing_sizes_alone

        write_missing_sizes_alone(data_config, run.config.model.hf)
    # The ranks parse the same options again.
    return run_group("toolkit.bench", options.words, world_size, show="all", on_cpu=on_cpu).returncode
