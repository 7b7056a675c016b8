"""One rank of doctor's all-reduce: ``torchrun -m toolkit.doctor.all_reduce nccl|gloo``. Rank
0 prints JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

ELEMENTS = {"nccl": 1 << 26, "gloo": 1 << 20}
REPEATS = 5


def main(backend: str) -> int:
    """Reduces a tensor whose sum is known. Returns exit code 1 if the result is wrong."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        if backend == "nccl"
        else torch.device("cpu")
    )
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=timedelta(seconds=90))
    ramp = torch.arange(ELEMENTS[backend], device=device, dtype=torch.float32) % 1000
    tensor = ramp
    seconds = 0.0

    for _ in range(REPEATS):
        tensor = ramp * (rank + 1)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        tensor[-1].item()  # waits for the device
        seconds = time.perf_counter() - start

    right = torch.equal(tensor, ramp * (world * (world + 1) // 2))
    size = tensor.numel() * 4
    dist.destroy_process_group()
    if not right:
        print(f"rank {rank}: the sum is wrong", file=sys.stderr)
        return 1

    if rank == 0:
        bus = 2 * (world - 1) / world * size / seconds / 1e9
        print(json.dumps({"backend": backend, "bytes": size, "seconds": seconds, "bus_gb_s": bus}))

    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
