"""Two ranks that end in one of several ways; started by test_failures.py.

python -m megatron_vl.launch --standalone --nproc-per-node 2 -m tests.training.ending_ranks writer ...
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from megatron_vl.parallel import failures
from megatron_vl.parallel.process_grid import init_distributed
from megatron_vl.parallel.process_groups import destroy_groups
from megatron_vl.platform import get_platform
from megatron_vl.system.signals import handle_stop_signals
from megatron_vl.train import _report_failure


def writer(seconds: float, path: str) -> None:
    """The second rank fails while the first writes a checkpoint, and waits for it as the loop does."""

    def write() -> None:
        time.sleep(seconds)
        Path(path).write_text("whole")

    if dist.get_rank() == 1:
        time.sleep(0.5)
        raise OSError("train-7.tar: Input/output error")
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    time.sleep(600)


def host_killed() -> None:
    """The first rank, in which the store lives, dies; the second waits for nothing that would tell it."""
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()


def late_end(seconds: float) -> None:
    """The second rank gets no time between the last barrier and the orderly end."""
    if dist.get_rank() == 1:
        time.sleep(seconds)
    failures.stop_watching()


def main() -> int:
    """Arguments: a case, how long a rank waits for the others (0: as it is), and what the case takes."""
    case, seen_s, *values = sys.argv[1:]
    if float(seen_s):
        failures._PEER_TIMEOUT_S = float(seen_s)
    handle_stop_signals()

    try:
        init_distributed(get_platform("cpu"))
        failures.watch_ranks()
        dist.barrier()
        if case == "writer":
            writer(float(values[0]), values[1])
        elif case == "host_killed":
            host_killed()
        else:
            late_end(float(values[0]))
    except Exception as error:
        return _report_failure(error)
    finally:
        destroy_groups()
    return 0


if __name__ == "__main__":
    sys.exit(main())
