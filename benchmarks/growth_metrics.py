"""Measures the cost of a printed line as ranks grow: one object gathered from all to all, or
one small reduction.

    torchrun --standalone --nproc-per-node 4 benchmarks/growth_metrics.py [--ranks 4096] [--listed 512]

``gathered`` is ``all_gather_object`` of what a rank counted, as in metrics.py until 2026-11-22: every entry
is padded to the largest, and every rank's device holds all of them. ``reduced`` is the present way: a tally
of fixed size, and lists from their owners to rank 0 through the store. Times are measured on the running
ranks (median, of the slowest rank); bytes for ``--ranks`` ranks are computed from the sizes of the messages.
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_vl.parallel.process_grid import end_distributed, init_distributed
from megatron_vl.platform import get_platform
from megatron_vl.training.metrics import MAX_LIST_BYTES
from megatron_vl.training.rank_0_gather import Rank0Gather
from megatron_vl.training.step_metrics import StepMetrics


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4096, help="compute bytes for this many ranks")
    parser.add_argument("--listed", type=int, default=512, help="samples that one replica lists in this line")
    parser.add_argument("--repeats", type=int, default=30)
    return parser.parse_args()


def sample(number: int) -> dict[str, str]:
    """A listed sample in the form that the loader makes."""
    return {
        "key": f"train-{number // 1000:06d}/{number:09d}",
        "shard": f"train-{number // 1000:06d}.tar",
        "source": f"conversations_{number % 7}.jsonl record {number}",
        "reason": "image does not decode",
        "detail": (
            f"image {number:09d}.0.jpg: not a readable image (OSError: image file is truncated (23 bytes not "
            "processed))"
        ),
    }


def entry(listed: list[dict[str, str]]) -> tuple[Any, ...]:
    """What a rank passed to ``all_gather_object``."""
    counts = {"samples": 40, "images": 60, "patches": 90_000} | (
        {"dropped/image does not decode": len(listed)} if listed else {}
    )
    return (1.2e15, 3.4e14, 0.01, 71.3, counts, 65_536, [], listed)


def gathered(listed: list[dict[str, str]]) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, entry(listed))


def reduced(listed: list[dict[str, str]], device: torch.device, mailbox: Rank0Gather) -> None:
    mine = StepMetrics(1.2e15, 3.4e14, 65_536, 40, 60, 90_000, len(listed), int(bool(listed)), 0.01, 71.3)
    total = mine.reduce_over_ranks(device)
    if not total.sending_ranks:
        return
    mailbox.begin_round()
    if listed:
        mailbox.send_message(
            0, {"reasons": {"image does not decode": len(listed)}, "dropped": listed, "keys": []}
        )
    if mailbox.rank == 0:
        mailbox.receive_messages(total.sending_ranks)
    mailbox.share_answer({"image does not decode": total.dropped_samples})


def timed(function: Callable[[], None], repeats: int, device: torch.device) -> float:
    """Median milliseconds of the slowest rank."""
    found = []
    for _ in range(repeats + 3):
        dist.barrier()
        start = time.perf_counter()
        function()
        mine = torch.tensor([time.perf_counter() - start], device=device)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        found.append(mine.item() * 1e3)
    return statistics.median(found[3:])


def main() -> None:
    arguments = parse()
    platform = get_platform()
    init_distributed(platform)
    rank = dist.get_rank()
    world = dist.get_world_size()
    device = platform.device
    mailbox = Rank0Gather(rank)

    rows = []
    for count in (0, arguments.listed):
        listed = [sample(number) for number in range(count)] if rank == world - 1 else []
        before = timed(partial(gathered, listed), arguments.repeats, device)
        after = timed(partial(reduced, listed, device, mailbox), arguments.repeats, device)
        rows.append((count, before, after))

    if rank == 0:
        print(f"{world} ranks on {platform.name}; bytes computed for {arguments.ranks} ranks")
        for count, before, after in rows:
            listed = [sample(number) for number in range(count)]
            padded = len(pickle.dumps(entry(listed))) * arguments.ranks
            host = len(json.dumps(listed)) if listed else 0
            print(
                f"{count:5} samples listed by one replica | gathered {before:7.2f} ms, "
                f"{padded:,} bytes on every device | reduced {after:6.2f} ms, "
                f"{8 * len(fields(StepMetrics))} bytes on every device, "
                f"{host:,} of at most {MAX_LIST_BYTES:,} bytes to rank 0's host"
            )
    end_distributed()


if __name__ == "__main__":
    main()
