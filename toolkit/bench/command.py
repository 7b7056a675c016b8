"""``megatron-vl bench``: measures how fast a model trains, and where its time goes."""

import os

from megatron_vl.config import validate_config
from megatron_vl.data.source.location import check_data_path
from megatron_vl.train import run_rank
from toolkit.common.launch import run_group, usable_gpus

from .options import BenchOptions, parse_bench_options


def bench(options: BenchOptions) -> int:
    run = parse_bench_options(options.words)
    if "RANK" in os.environ:
        from .measure import measure_benchmark

        return run_rank(lambda: measure_benchmark(run))
    world_size = options.nproc_per_node or usable_gpus() or 1
    validate_config(run.config, world_size)
    if data := run.workloads.get("data"):
        check_data_path(data.path)
        from megatron_vl.training.missing_sizes import write_missing_sizes_alone

        write_missing_sizes_alone(data, run.config.model.hf)
    on_cpu = run.config.platform == "cpu" or not usable_gpus(world_size)
    return run_group("toolkit", ["bench", *options.words], world_size, show="all", on_cpu=on_cpu).returncode
