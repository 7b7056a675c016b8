"""Measures processor seconds and memory of a conversion as the number of records grows.

    python benchmarks/growth_conversion.py --counts 1000 10000 100000

Every second record has a picture of 32 x 32 pixels as bytes in a Parquet file or as a file of its own; the
others are text. Each conversion runs in a process of its own, whose start
counts. Memory is the peak of the process's resident
set (its workers', if they use more, are printed beside it). The set is also converted in ``--parts`` parts,
one after the other, and merged; both must give the same shards.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

KINDS = ("lines", "parquet")


def write_input(folder: Path, kind: str, count: int) -> Path:
    """Writes the records; returns their file."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    (folder / "media").mkdir(parents=True, exist_ok=True)
    pictures = []
    for i in range(64):
        data = io.BytesIO()
        pixels = np.random.default_rng(i).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(data, "JPEG")
        pictures.append(data.getvalue())
        (folder / f"media/{i}.jpg").write_bytes(data.getvalue())

    def record(i: int) -> dict:
        turns = [{"role": "user", "content": ("<image>" if i % 2 else "") + f"Question {i}? " + "word " * 40}]
        turns.append({"role": "assistant", "content": f"Answer {i}. " + "word " * 80})
        inside = {"bytes": pictures[i % 64], "path": None}
        picture = f"{i % 64}.jpg" if kind == "lines" else inside
        return {"id": f"record {i}", "messages": turns, "images": [picture] if i % 2 else []}

    if kind == "lines":
        with (folder / "in.jsonl").open("w") as file:
            file.writelines(json.dumps(record(i)) + "\n" for i in range(count))
        return folder / "in.jsonl"

    writer = None
    for start in range(0, count, 1000):
        table = pa.Table.from_pylist([record(i) for i in range(start, min(count, start + 1000))])
        writer = writer or pq.ParquetWriter(folder / "in.parquet", table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()
    return folder / "in.parquet"


def run(*arguments: str) -> tuple[float, int, int]:
    """Processor seconds of a conversion, and peak MiB of its process and of the largest of its workers."""
    command = [sys.executable, __file__, "--one", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def one(arguments: list[str]) -> None:
    """Runs a command in this process and prints its peak memory."""
    from toolkit.cli import main

    if main(arguments) != 0:
        raise SystemExit(1)
    used = [resource.getrusage(kind) for kind in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(each.ru_utime + each.ru_stime for each in used)
    print(json.dumps([seconds, *(each.ru_maxrss >> 10 for each in used)]))


def digest(out: Path) -> str:
    return hashlib.sha256((out / ".nv-meta/convert.json").read_bytes()).hexdigest()


def measure(kind: str, count: int, workers: int, parts: int) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = write_input(folder, kind, count)
        base = ["data", "convert", "--input", str(source), "--media-root", str(folder / "media")]
        base += ["--workers", str(workers)]
        whole = run(*base, "--out", str(folder / "whole"))
        line = (
            f"{kind:8} {count:8} {whole[0]:8.1f} s {count / whole[0]:7.0f}/s {whole[1]:5} + {whole[2]:5} MiB"
        )

        if parts:
            shared = [*base, "--out", str(folder / "shared")]
            each = [run(*shared, "--shard", f"{i}/{parts}") for i in range(parts)]
            merged = run("data", "merge", str(folder / "shared"), "--workers", str(workers))
            if digest(folder / "whole") != digest(folder / "shared"):
                raise SystemExit("the parts gave other shards")
            slowest = max(seconds for seconds, _, _ in each)
            line += f"   {parts} parts {slowest:7.1f} s, merge {merged[0]:7.1f} s {merged[1]:5} MiB"

        shutil.rmtree(folder / "whole")
        return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--parts", type=int, default=0)
    arguments = parser.parse_args()
    for kind in arguments.kinds:
        for count in arguments.counts:
            print(measure(kind, count, arguments.workers, arguments.parts), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2:])
    else:
        main()
