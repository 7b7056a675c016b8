"""Measures the open files and threads that a gloo group of all loader owners costs as owners grow.

    python benchmarks/growth_groups.py [--owners 2,4,6,8] [--extrapolate 1000,4096]

Ranks are forked on this machine. They count /proc/self/fd and /proc/self/task twice: ``without`` the owners'
mesh, when all of them have a connection to the store alone, and ``with`` it, when one gloo group of all was
made and used once. ``data.balance`` needs that group. What the mesh adds is the difference; both counts also
hold two files for each rank forked earlier, which are this benchmark's. The numbers for larger worlds are
**not measured**: they are those of a straight line through the last two measured ones. ``lazy`` is torch's
TORCH_GLOO_LAZY_INIT=1, for comparison; it connects on first use, here to the neighbours in a ring.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import time
import traceback
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist

from megatron_vl.core_fixes.gloo_threads import use_one_worker

SETTINGS = {"torch's default": (2, "0"), "one worker": (1, "0"), "one worker, lazy": (1, "1")}
PATIENCE = timedelta(seconds=60)
"""For ranks that wait for each other; one that fails ends the measurement with its error."""


def counted() -> tuple[int, int]:
    """Number of open files and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def owner(rank: int, world: int, port: int, workers: int, lazy: str, results: Any) -> None:
    """One rank; rank 0 holds the store, so that the process that forks has no threads."""
    try:
        os.environ["TORCH_GLOO_LAZY_INIT"] = lazy
        if workers == 1:
            use_one_worker()
        store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0, timeout=PATIENCE)
        without = counted()

        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)
        patches: list[Any] = [None] * world
        dist.all_gather_object(patches, [rank])
        with_mesh = counted()

        results.put((rank, without, with_mesh))
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        results.put(None)


def measured(world: int, workers: int, lazy: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Files and threads of a process without the mesh and with it: of the last rank, which holds no store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    context = get_context("fork")
    results = context.SimpleQueue()
    arguments = [(rank, world, port, workers, lazy, results) for rank in range(world)]
    processes = [context.Process(target=owner, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()

    found = [results.get() for _ in processes]
    if not all(found):
        raise SystemExit("a rank failed; its error is above")
    for process in processes:
        process.join(30)
    _, without, with_mesh = max(found)
    return without, with_mesh


def on_a_line(worlds: list[int], values: list[int], world: int) -> int:
    """The value at ``world`` owners of the straight line through the last two measured ones."""
    slope = (values[-1] - values[-2]) / (worlds[-1] - worlds[-2])
    return round(values[-1] + slope * (world - worlds[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--owners", default="2,4,6,8")
    parser.add_argument("--extrapolate", default="1000,4096")
    arguments = parser.parse_args()
    worlds, further = (
        [int(word) for word in words.split(",")] for words in (arguments.owners, arguments.extrapolate)
    )
    if len(set(worlds)) < 2:
        parser.error("--owners needs two numbers at least: a straight line goes through them")

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    print(f"torch {torch.__version__}; open files allowed: {soft}, at most {hard}", flush=True)
    for name, (workers, lazy) in SETTINGS.items():
        added: list[int] = []
        print(name, flush=True)
        for world in worlds:
            begin = time.perf_counter()
            without, with_mesh = measured(world, workers, lazy)
            added.append(with_mesh[0] - without[0])
            print(
                f"  {world:3} owners | files without {without[0]:3}, with {with_mesh[0]:3} | threads without"
                f" {without[1]:2}, with {with_mesh[1]:2} | {time.perf_counter() - begin:.1f} s",
                flush=True,
            )
        guessed = ", ".join(f"{on_a_line(worlds, added, world)} at {world} owners" for world in further)
        print(f"  extrapolated, not measured: the mesh adds {guessed}", flush=True)


if __name__ == "__main__":
    main()
