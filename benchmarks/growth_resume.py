"""Measures what one rank opens and waits for when it resumes the optimizer state of thousands of ranks.

    python benchmarks/growth_resume.py [--dp 64] [--tp 8] [--pp 8] [--ranks 4]

The checkpoint is simulated: tp x pp x dp optimizer files as that many ranks leave them (4,096 by default),
with real headers, slices and hashes, of a narrow model (80 decoder layers of width 64), so that a file has
some kilobytes where a real one has gigabytes. The reading is real: the code that resumes a training reads one
rank's state at a time, from this machine's disk and its cache. A shared file system under thousands of ranks
needs far longer for each open.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_vl.spec.tensors import Sharding, TensorInfo
from megatron_vl.training import optimizer_state
from megatron_vl.training.optimizer_state import (
    INDEX_FILE,
    STATE_KINDS,
    OptimizerStateReader,
    list_index_entries,
    write_hashed_safetensors,
    write_slice_index,
)

LAYERS, WIDTH = 80, 64

Slice = tuple[TensorInfo, int, int]
"""A tensor and the range of its flattened data that a rank holds."""


def stage_tensors(stage: int, pp: int) -> list[TensorInfo]:
    """The tensors of one pipeline stage in the order of its gradient buffer."""
    shapes: list[tuple[str, tuple[int, ...], Any]] = [
        ("input_norm", (WIDTH,), "replicated"),
        ("qkv", (3 * WIDTH, WIDTH), "column"),
        ("qkv_bias", (3 * WIDTH,), "column"),
        ("proj", (WIDTH, WIDTH), "row"),
        ("mlp_norm", (WIDTH,), "replicated"),
        ("fc1", (8 * WIDTH, WIDTH), "gated"),
        ("fc2", (WIDTH, 4 * WIDTH), "row"),
    ]
    layers = range(stage * LAYERS // pp, (stage + 1) * LAYERS // pp)
    return [
        TensorInfo(f"decoder.layers.{n}.{name}", shape, split, "layer", n)
        for n in layers
        for name, shape, split in shapes
    ]


def slices(infos: list[TensorInfo], cut: Sharding, dp_rank: int, dp: int) -> Iterator[Slice]:
    """A data-parallel rank's even share of the buffer of its stage's tensors."""
    counts = [torch.Size(info.shard_shape(cut)).numel() for info in infos]
    low = sum(counts) * dp_rank // dp
    high = sum(counts) * (dp_rank + 1) // dp
    at = 0
    for info, count in zip(infos, counts, strict=True):
        start = max(low - at, 0)
        end = min(high - at, count)
        if start < end:
            yield info, start, end
        at += count


def write(folder: Path, tp: int, pp: int, dp: int) -> dict[str, dict[str, Any]]:
    """Writes all ranks' files and their index. Returns name -> size and hash."""
    folder.mkdir(parents=True)
    files, table = {}, {}
    for stage in range(pp):
        infos = stage_tensors(stage, pp)
        for dp_rank in range(dp):
            held = list(slices(infos, Sharding(tp), dp_rank, dp))
            for tp_rank in range(tp):
                tensors: dict[str, Tensor] = {}
                for info, start, end in held:
                    key = f"{info.name}[{start}:{end}]"
                    tensors |= {f"{key}/{kind}": torch.zeros(end - start) for kind in STATE_KINDS}
                    tensors[f"{key}/step"] = torch.tensor([100])
                name = f"rank_{(stage * dp + dp_rank) * tp + tp_rank:05d}.safetensors"
                files[name] = write_hashed_safetensors(folder / name, tensors, {"tp": str(tp_rank)})
                table[name] = list_index_entries(tensors, tp_rank, 0)

    files[INDEX_FILE] = write_slice_index(folder, table)
    return files


class Opens:
    """Counts files that are opened as tensors, or to compare them with their hash."""

    def __init__(self) -> None:
        self.names: list[str] = []
        safe_open, check_hash = optimizer_state.safe_open, optimizer_state.check_file_hash

        def open_(path: Path, **options: Any) -> Any:
            self.names.append(Path(path).name)
            return safe_open(path, **options)

        def check(path: Path, facts: Any) -> None:
            self.names.append(path.name)
            check_hash(path, facts)

        optimizer_state.safe_open = open_
        optimizer_state.check_file_hash = check


def resume(
    reader: OptimizerStateReader, infos: list[TensorInfo], cut: Sharding, tp_rank: int, dp_rank: int, dp: int
) -> None:
    """Reads one rank's state as :func:`megatron_vl.training.optimizer_state.restore_optimizer` does."""
    for info, start, end in slices(infos, cut, dp_rank, dp):
        for kind in STATE_KINDS:
            found = reader.read_range(info, kind, tp_rank, cut, start, end)
            assert found is not None and len(found) == end - start
        assert reader.adam_step_count(info.name) == 100
    reader.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--pp", type=int, default=8)
    parser.add_argument("--dp", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks to time, spread over the grid")
    args = parser.parse_args()
    world = args.tp * args.pp * args.dp
    place = Path(tempfile.mkdtemp(prefix="growth-resume-"))

    try:
        begin = time.perf_counter()
        files = write(place / "optimizer", args.tp, args.pp, args.dp)
        size = files[INDEX_FILE]["bytes"]
        print(
            f"{world} files in {time.perf_counter() - begin:.1f} s; the index has {size / 1e6:.2f} MB",
            flush=True,
        )
        print(
            json.dumps(
                {"ranks": world, "index_bytes": size, "cases": measure(place / "optimizer", files, args)}
            )
        )
    finally:
        shutil.rmtree(place)


def measure(folder: Path, files: dict[str, dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns one line for each layout that resumes."""
    opens = Opens()
    found = []
    cases = [
        ("the same", args.tp, args.dp),
        ("dp doubled", args.tp, 2 * args.dp),
        ("tp halved", args.tp // 2, 2 * args.dp),
    ]

    for layout, tp, dp in cases:
        opens.names.clear()
        begin = time.perf_counter()
        for number in range(args.ranks):
            stage = number * args.pp // args.ranks
            dp_rank = number * dp // args.ranks
            tp_rank = number % tp
            reader = OptimizerStateReader(folder, files, Sharding(args.tp))
            resume(reader, stage_tensors(stage, args.pp), Sharding(tp), tp_rank, dp_rank, dp)

        seconds = (time.perf_counter() - begin) / args.ranks
        line = {
            "layout": layout,
            "opens_a_rank": len(opens.names) / args.ranks,
            "s_a_rank": round(seconds, 3),
        }
        found.append(line)
        print("  ".join(f"{name} {value}" for name, value in line.items()), flush=True)

    return found


if __name__ == "__main__":
    main()
