"""Trains a Qwen-VL model: ``torchrun --nproc-per-node N -m megatron_vl.train --config RUN.yaml [--section.field value ...]``."""

from __future__ import annotations

import os
import sys

from megatron_vl.config import parse, validate


def main(argv: list[str] | None = None) -> int:
    """Parses, checks, trains. Returns the exit code: 0 done, 1 stopped with a message."""
    config = parse(argv)
    try:
        validate(config, int(os.environ.get("WORLD_SIZE", 1)))
        from megatron_vl.training.loop import check, train

        check(config)
        train(config)
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        if os.environ.get("MEGATRON_VL_TRACEBACK"):
            raise
        rank = os.environ.get("RANK", "0")
        print(f"megatron_vl.train: rank {rank}: {error}\n(MEGATRON_VL_TRACEBACK=1 shows where)", file=sys.stderr, flush=True)
        return 1
    finally:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
