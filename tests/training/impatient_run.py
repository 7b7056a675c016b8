"""``megatron_vl.train``, which waits one second for a sample."""

from __future__ import annotations

import sys

from megatron_vl.data.source import tolerant_reader


def main() -> int:
    tolerant_reader.SAMPLE_TIMEOUT_S = 1.0
    from megatron_vl.train import main as train

    return train(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
