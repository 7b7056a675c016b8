"""One rank of a benchmark, started by torchrun or ``megatron-vl bench``."""

import sys

from megatron_vl.train import run_rank

from .options import parse_bench_options


def main() -> None:
    """Runs the benchmark and reports its figures. Collective."""
    bench_run = parse_bench_options(sys.argv[1:])
    from .measure import measure_benchmark
    from .report import finish_report

    finish_report(bench_run.options.out, measure_benchmark(bench_run))


if __name__ == "__main__":
    sys.exit(run_rank(main))
