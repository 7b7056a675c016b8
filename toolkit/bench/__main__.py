"""One rank of a benchmark, started by torchrun or ``megatron-vl bench``."""

from __future__ import annotations

import os
import sys

from megatron_vl.errors import UserError, describe, is_fixable

from .options import parse


def main(argv: list[str]) -> int:
    """Runs the benchmark. Returns exit code 0, 1 if it fails while running, or 2 for invalid options."""
    rank = os.environ.get("RANK", "0")
    try:
        options = parse(argv)
        from .measure import run

        run(options)
        from megatron_vl.parallel.grid import end_distributed

        end_distributed()
    except Exception as error:
        # Every rank prints its own error, because torchrun shows only one of them.
        print(f"toolkit.bench: rank {rank}: {describe(error)}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UserError | FileNotFoundError) and is_fixable(error) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
