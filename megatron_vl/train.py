"""Trains a Qwen-VL model: ``torchrun --nproc-per-node N -m megatron_vl.train --config RUN.yaml [--section.field value ...]``.

SIGTERM or SIGUSR1 to any rank: all ranks save behind the step under way and end with exit code 0. torchrun kills its ranks 30
seconds after SIGTERM; ``python -m megatron_vl.launch`` in its place waits for them.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import sys
from pathlib import Path

from megatron_vl.config import parse
from megatron_vl.signals import take_stop_signals


def main(argv: list[str] | None = None) -> int:
    """Parses, checks, trains. Returns the exit code: 0 done, 1 stopped with a message."""
    config = parse(argv)
    faulthandler.enable()  # a crash in native code tells where Python was
    try:
        from megatron_vl.training.check import check

        check(config)
        take_stop_signals()
        from megatron_vl.training.loop import train

        train(config)
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("MEGATRON_VL_TRACEBACK"):
            raise
        tell_once(str(error))
        return 1
    finally:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
    return 0


def tell_once(message: str) -> None:
    """Prints why the training ends, the first of this node's ranks to have this message alone."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        # torchrun gives each rank a folder of its own within one of this start's.
        mark = Path(error_file).parent.parent / f"told_{hashlib.sha256(message.encode()).hexdigest()[:16]}"
        try:
            mark.open("x").close()
        except FileExistsError:
            return
        except OSError:
            pass  # better twice than never
    rank = os.environ.get("RANK", "0")
    print(f"megatron_vl.train: rank {rank}: {message}\n(MEGATRON_VL_TRACEBACK=1 shows where)", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
