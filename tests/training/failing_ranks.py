"""Ranks of which the last one fails while the others wait where nothing wakes them; for test_failures.py.

    torchrun --nproc-per-node 2 tests/training/failing_ranks.py [nccl]

Over NCCL the others wait on the device for a reduction that the last rank never joins.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_vl.parallel import failures


def wait_for_nobody() -> None:
    """Holds the lock of the store's connection, as making a communicator does while a peer is missing."""
    dist.distributed_c10d._get_default_store().wait(["never"], timedelta(seconds=600))


def write_slowly(path: Path) -> None:
    """Writes like a checkpoint that is being saved while a rank fails."""
    time.sleep(3)
    path.write_text("whole")


def main() -> None:
    backend = (sys.argv[1:] + ["gloo"])[0]
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    rank = dist.get_rank()
    world = dist.get_world_size()
    failures.watch_ranks()
    dist.all_reduce(torch.ones(1, device=device))
    dist.barrier()

    if rank == world - 1:
        time.sleep(1)
        print(f"failed at {time.time():.2f}", flush=True)
        failures.print_failure_once(failures.report_failure(OSError("train-000007.tar: Input/output error")))
        failures.exit_after_failure()
    if folder:
        threading.Thread(target=write_slowly, args=(folder / f"written_{rank}",)).start()
    if backend == "nccl":
        waits = torch.ones(1, device=device)
        dist.all_reduce(waits)
        print("not reached", waits.tolist())
    wait_for_nobody()


if __name__ == "__main__":
    main()
