"""Measures the open files and threads that a gloo group of all loader owners costs as owners grow.

    python benchmarks/growth_groups.py [--owners 2,4,8,16,24] [--extrapolate 1000,4096]

Ranks are forked on this machine and make one gloo group of all ranks, which they use once. Files are counted
in /proc/self/fd and threads in /proc/self/task, before and after. Numbers for larger worlds are extrapolated
on a straight line. ``lazy`` is torch's TORCH_GLOO_LAZY_INIT=1, for comparison.
"""

from __future__ import annotations

import argparse
import os
import resource
import traceback
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist

from megatron_vl.core_fixes.gloo_threads import use_one_worker

SETTINGS = {"torch's default": (2, "0"), "one worker": (1, "0"), "one worker, lazy": (1, "1")}


def counted() -> tuple[int, int]:
    """Number of open files and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def owner(rank: int, world: int, port: int, workers: int, lazy: str, results: Any) -> None:
    try:
        os.environ["TORCH_GLOO_LAZY_INIT"] = lazy
        if workers == 1:
            use_one_worker()
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))
        before = counted()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        made = counted()
        patches: list[Any] = [None] * world
        dist.all_gather_object(patches, [rank])
        after = counted()
        dist.barrier()
        results.put([[b - a for a, b in zip(before, then, strict=True)] for then in (made, after)])
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        results.put(None)


def measured(world: int, workers: int, lazy: str) -> list[int]:
    """The largest number of files and threads that the group adds to a process after it was used."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = get_context("fork")
    results = context.Queue()
    arguments = [(rank, world, store.port, workers, lazy, results) for rank in range(world)]
    processes = [context.Process(target=owner, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    found = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join(30)
    assert all(found), "a rank failed"
    return [max(after[i] for _, after in found) for i in range(2)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--owners", default="2,4,8,16,24")
    parser.add_argument("--extrapolate", default="1000,4096")
    arguments = parser.parse_args()
    worlds = [int(word) for word in arguments.owners.split(",")]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    print(f"torch {torch.__version__}; limit of open files: {soft}, at most {hard}")
    print("without data.balance there is no group of owners: 0 files (until 2026-11-22, as many as with it)")
    for name, (workers, lazy) in SETTINGS.items():
        files, threads = zip(*(measured(world, workers, lazy) for world in worlds), strict=True)
        slope = (files[-1] - files[0]) / (worlds[-1] - worlds[0])
        further = [int(word) for word in arguments.extrapolate.split(",")]
        guessed = ", ".join(
            f"{world}: {round(files[-1] + slope * (world - worlds[-1]))}" for world in further
        )
        print(
            f"{name}: owners {worlds}: files {list(files)}, threads {list(threads)} | "
            f"{slope:.2f} files per owner | on a straight line, files at {guessed}"
        )


if __name__ == "__main__":
    main()
