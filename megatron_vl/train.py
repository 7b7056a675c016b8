"""One rank of a training; ``megatron-vl train`` starts them. By hand:

    torchrun --nproc-per-node N -m megatron_vl.train --config RUN.yaml [--section.field value ...]

SIGTERM or SIGUSR1 to any rank: all ranks save after the step under way and end with exit code 0. torchrun kills its ranks 30
seconds after SIGTERM; ``python -m megatron_vl.launch`` in its place waits for them.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import sys
from pathlib import Path

from megatron_vl.config import parse
from megatron_vl.errors import TRACEBACK, describe, exit_code, is_fixable
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
    except Exception as error:
        tell_once(error)
        return exit_code(error)
    finally:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
    return 0


def tell_once(error: Exception) -> None:
    """Prints why the training ends; of this node's ranks, only the first with this message does."""
    said = describe(error)
    message = said.partition("\n")[0]
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
    hint = "" if os.environ.get(TRACEBACK) or not is_fixable(error) else f"\n({TRACEBACK}=1 shows where)"
    print(f"megatron_vl.train: rank {rank}: {said}{hint}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
