"""A rank of an all-reduce: ``torchrun -m toolkit.doctor.all_reduce nccl|gloo``. Rank 0 prints a line."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def reduce_on_rank(backend: str) -> int:
    """Reduces a tensor whose sum is known. Returns exit code 1 if the result is wrong."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=90))
    num_elements = 1 << (26 if backend == "nccl" else 20)
    base_tensor = torch.arange(num_elements, device=device, dtype=torch.float32) % 1000

    for _ in range(5):
        reduced_tensor = base_tensor * (rank + 1)
        dist.barrier()
        start_time = time.perf_counter()
        dist.all_reduce(reduced_tensor)
        reduced_tensor[-1].item()  # waits for the device
        elapsed_seconds = time.perf_counter() - start_time

    dist.destroy_process_group()
    if not torch.equal(reduced_tensor, base_tensor * (world_size * (world_size + 1) // 2)):
        print(f"rank {rank}: the sum is wrong", file=sys.stderr)
        return 1
    if rank == 0:
        speed = 2 * (world_size - 1) / world_size * base_tensor.nbytes / elapsed_seconds
        size_text = f"{base_tensor.nbytes / 2**20:.0f} MiB in {elapsed_seconds * 1e3:.2f} ms"
        print(f"RESULT {size_text}, {speed / 1e9:.1f} GB/s on the bus")
    return 0


if __name__ == "__main__":
    sys.exit(reduce_on_rank(sys.argv[1]))
