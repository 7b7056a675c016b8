"""One rank of a benchmark, started by torchrun or ``megatron-vl bench``."""

from __future__ import annotations

import os
import sys

from megatron_vl.errors import UserError, describe_error, is_user_fixable

from .options import parse_bench_options


def main(argv: list[str]) -> int:
    """Runs the benchmark. Returns exit code 0, 1 if it fails while running, or 2 for invalid options."""
    rank = os.environ.get("RANK", "0")
    try:
        options = parse_bench_options(argv)
        from megatron_vl.parallel.process_grid import end_distributed

        from .measure import measure_benchmark
        from .report import finish_report

        finish_report(options, measure_benchmark(options))
        end_distributed()
    except Exception as error:
        # Every rank prints its own error, because torchrun shows only one of them.
        print(f"toolkit.bench: rank {rank}: {describe_error(error)}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UserError | FileNotFoundError) and is_user_fixable(error) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
