"""Measures the cost of opening a data set as its shards grow.

    python benchmarks/growth_shards.py --shards 100000

A folder with that many (empty) shards is described as the converter describes it. The benchmark measures what
one rank of a job does (it reads and checks the description), the message that the other ranks get, and what
Energon itself does on every rank that owns a loader. Calls are those that Python makes; seconds are CPU time
and, in parentheses, wall-clock time.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_tools.shards import IndexWriter, WrittenShard
from megatron_vl.data.source.dataset_description import read_description

SAMPLES = 1000
"""Samples per shard."""
CALLS: Counter[str] = Counter()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=100_000, help="number of shards of the data set")
    parser.add_argument("--ranks", type=int, default=4096, help="number of ranks of the job")
    parser.add_argument(
        "--model-ranks", type=int, default=32, help="ranks of a replica (tp x pp); one of them owns a loader"
    )
    args = parser.parse_args()
    owners = args.ranks // args.model_ranks
    count_calls()

    with tempfile.TemporaryDirectory() as folder:
        data = write(Path(folder) / "data", args.shards)
        facts = measured(
            "description, read and checked", 1, lambda: read_description(data).split_facts("train")
        )
        size = len(pickle.dumps(facts))
        print(f"  the message to the other {args.ranks - 1} ranks has {size} bytes")

        measured("Energon's own opening", owners, lambda: opened(data))


def write(data: Path, count: int) -> Path:
    data.mkdir()
    writer = IndexWriter(data / ".nv-meta")
    for i in range(count):
        name = f"train-{i:06d}.tar"
        (data / name).touch()
        writer.add_shard(WrittenShard(name, SAMPLES, 0, f"{i:064x}"))
    writer.finish()
    return data


def opened(data: Path) -> Any:
    """Asks Energon for what :func:`megatron_vl.data.loader.build_loader` does."""
    from megatron.energon import WorkerConfig
    from megatron.energon.metadataset import load_dataset

    alone = WorkerConfig(rank=0, world_size=1, num_workers=0)
    return load_dataset(data).get_datasets(
        training=False, split_part="train", worker_config=alone, decoder=None
    )


def measured(name: str, ranks: int, run: Callable[[], Any]) -> Any:
    """Prints what ``run`` cost on one rank and in a job. Returns its result."""
    CALLS.clear()
    clock = time.perf_counter()
    processor = time.process_time()
    result = run()
    clock, processor = time.perf_counter() - clock, time.process_time() - processor
    stats = CALLS["stat"]
    opens = CALLS["open"]
    listings = CALLS["scandir"]
    print(f"{name}: {processor:.2f} s ({clock:.2f} s), {stats} stats, {opens} opens, {listings} listings")
    print(f"  on {ranks} ranks of the job: {ranks * stats} stats, {ranks * opens} opens")
    return result


def count_calls() -> None:
    """Counts stat and lstat together; counts opens and listings by Python's audit events."""

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            CALLS["stat"] += 1
            return real(*args, **kwargs)

        return call

    os.stat, os.lstat = counting(os.stat), counting(os.lstat)  # type: ignore[assignment]
    sys.addaudithook(
        lambda event, _: (
            CALLS.update([event.removeprefix("os.")]) if event in ("open", "os.scandir") else None
        )
    )


if __name__ == "__main__":
    main()
