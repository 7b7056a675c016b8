"""Reading from an object store that answers after 20 ms: blocks of a shard beside sequence and full shuffle.

    python -m benchmarks.object_store --out FOLDER --blocks 1 16 64 --workers 1 4

Conversations about COCO-shaped JPEGs (``photographs.py``) lie in shards, which an S3 server in a process of
its own serves with a delay for each request. Three things are timed:

* sequence: each process reads whole shards, one request after the other, and unpacks their samples;
* reading: samples in the order of planned batches, read and not decoded;
* loader: rows with decoded pictures, as a run gets them; local: from the same shards on the disk.

``--ranks`` shows the first of several data-parallel ranks: it reads the samples of its own rows only.
``--order`` reads nothing, and shows how random the order is.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import random
import re
import statistics
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import psutil
import torch
from megatron.energon.epathlib import EPath

from benchmarks.photographs import photographs
from data_tools.convert import ConversionOptions, convert_dataset
from data_tools.sample_sizes import index_datasets
from megatron_vl.config import DataConfig
from megatron_vl.data.loader import EncodedSample, RowEncoder, RowLoader, build_loader
from megatron_vl.data.source.sample_order import BlockOrder
from megatron_vl.spec.families import read_spec
from toolkit.bench.workload import COCO_SIZES
from toolkit.demo.demo_data import random_crop
from toolkit.tiny_checkpoint import write_tiny_checkpoint

BUCKET = "store"
SECONDS = 0.02
KINDS = ("sequence", "reading", "loader", "local")


class Store(BaseHTTPRequestHandler):
    """Objects of one bucket, which are the files of a folder."""

    protocol_version = "HTTP/1.1"
    folder: Path
    counts: Any
    """Requests and bytes so far."""

    def do_GET(self) -> None:
        time.sleep(SECONDS)
        path = self.folder / unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}").lstrip("/")
        if not path.is_file():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return

        size = path.stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(asked[1]), min(int(asked[2]), size - 1)) if asked else (0, size - 1)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(last + 1 - first))
        self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
        self.send_header("ETag", '"0"')
        self.end_headers()
        if self.command == "HEAD":
            return
        with self.counts.get_lock():
            self.counts[0] += 1
            self.counts[1] += last + 1 - first
        self.wfile.flush()
        with path.open("rb") as file:
            while first <= last:
                first += os.sendfile(self.connection.fileno(), file.fileno(), first, last + 1 - first)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


def serve(folder: Path, counts: Any, port: Any) -> None:
    Store.folder, Store.counts = folder, counts
    server = ThreadingHTTPServer(("127.0.0.1", 0), Store)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that ends
    port.send(server.server_port)
    server.serve_forever()


def make_data(out: Path, hf: Path, count: int, per_shard: int) -> None:
    """Writes shards with sizes. Every picture is in eight conversations."""
    rng, pictures, media = random.Random(5), photographs(), out / "media"
    media.mkdir(parents=True)
    for number in range(-(-count // 8)):
        random_crop(rng.choice(pictures), rng.choice(COCO_SIZES), rng).save(
            media / f"{number}.jpg", quality=92
        )
    records = []
    for _ in range(count):
        asked = {"from": "human", "value": "<image>\n" + "word " * rng.randint(10, 60)}
        turns = [asked, {"from": "gpt", "value": "word " * rng.randint(10, 60)}]
        records.append({"image": f"{rng.randrange(-(-count // 8))}.jpg", "conversations": turns})
    (out / "records.json").write_text(json.dumps(records))
    convert_dataset(
        [out / "records.json"], ConversionOptions(media, out / "set", samples_per_shard=per_shard)
    )
    index_datasets(DataConfig(path=str(out / "set")), read_spec(hf), hf)


def sequence(path: str, worker: int, workers: int) -> Iterator[int]:
    """Reads whole shards with one request each; gives the number of samples read each time."""
    folder = EPath(path)
    names = sorted(json.loads((folder / ".nv-meta" / ".info.json").read_bytes())["shard_counts"])
    while True:
        for name in names[worker::workers]:
            shard = folder / name
            with tarfile.open(fileobj=io.BytesIO(shard.fs.read(str(shard.internal_path)))) as file:
                for member in file:
                    content = file.extractfile(member)
                    assert content is not None and content.read()
                    if member.name.endswith(".jpg"):
                        yield 1


def planned(data: DataConfig, hf: Path, ranks: int, rows: int) -> RowLoader:
    return build_loader(data, read_spec(hf), hf, dp_size=ranks, rows_per_step=ranks * rows)


class SizesOnly(RowEncoder):
    """Decodes and encodes nothing."""

    def copy_for_process(self) -> SizesOnly:
        return self

    def cook(self, crude: dict[str, Any], source: int = 0) -> Any:
        assert "json" in crude, crude
        return crude

    def preencode_sample(self, sample: Any) -> Any:
        return EncodedSample(sample["__key__"], refused=("read", "and not decoded"))

    def make_row(self, samples: Sequence[Any], source: int = 0) -> Any:
        return SimpleNamespace(num_samples=len(samples), dropped_counts={})


def loading(data: DataConfig, hf: Path, ranks: int, rows: int, decode: bool) -> Iterator[int]:
    """Makes rows of decoded pictures, or reads their samples only."""
    loader = planned(data, hf, ranks, rows)
    if not decode:
        loader._planning_context.row_encoder.__class__ = SizesOnly
    try:
        for row in loader:
            assert not row.dropped_counts, row.dropped_samples
            yield row.num_samples
    finally:
        loader.close()


def count(samples: Iterator[int], seconds: float, totals: Any) -> None:
    """Adds to ``totals`` samples per second, after some time for warm-up, processor seconds for a sample, and
    all samples."""
    warm = next(samples)
    end = time.monotonic() + seconds / 2
    while time.monotonic() < end:
        warm += next(samples)
    start, read, spent = time.monotonic(), 0, -processor_seconds()
    while time.monotonic() < start + seconds:
        read += next(samples)
    spent += processor_seconds()
    with totals.get_lock():
        totals[0] += read / (time.monotonic() - start)
        totals[1] += spent
        totals[2] += read
        totals[3] += warm + read
    samples.close()  # type: ignore[attr-defined]


def processor_seconds() -> float:
    """Of this process and those that it has started."""
    this = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in (this, *this.children(recursive=True)))


def timed(makers: list[Callable[[], Iterator[int]]], seconds: float, counts: Any) -> tuple[float, ...]:
    """Samples per second of all processes together, processor seconds, requests and bytes of a sample."""
    totals = multiprocessing.Array("d", 4)
    before = np.array(counts)
    processes = [multiprocessing.Process(target=_counted, args=(make, seconds, totals)) for make in makers]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert not process.exitcode
    requests, size = (np.array(counts) - before) / totals[3]
    return totals[0], totals[1] / totals[2], requests, size


def _counted(make: Callable[[], Iterator[int]], seconds: float, totals: Any) -> None:
    count(make(), seconds, totals)


def show_order(blocks: list[int], samples: int = 1_000_000, per_shard: int = 1000) -> None:
    """Prints how near to a full shuffle an epoch of each block size is, for shards that share nothing.

    Every shard has a number from a normal distribution, which all its samples bear: the worst case of a data
    set whose shards differ. A batch's deviation is that of the mean number of its samples, as a multiple of
    the deviation with samples drawn independently.
    """
    numbers = np.random.default_rng(0).normal(size=samples // per_shard)
    print("block  neighbours apart  pairs of one shard, 64 / 512  deviation, 64 / 512 / 4096  rows correlate")
    for block in blocks:
        order = BlockOrder(np.full(samples // per_shard, per_shard), block)
        walk = order.samples(np.arange(samples), 1)
        at = np.argsort(walk).reshape(-1, per_shard)
        apart = np.abs(np.diff(at, axis=1)).mean() / samples
        shards = walk // per_shard

        pairs = []
        for size in (64, 512):
            batches = np.sort(shards[: samples // size * size].reshape(-1, size), axis=1)
            counts = [np.unique(batch, return_counts=True)[1] for batch in batches[:1000]]
            pairs.append(np.mean([(count * (count - 1)).sum() / size / (size - 1) for count in counts]))

        deviations = []
        for size in (64, 512, 4096):
            deviations.append(
                numbers[shards[: samples // size * size]].reshape(-1, size).mean(axis=1).std() * size**0.5
            )

        rows = numbers[shards].reshape(-1, 8).mean(axis=1)
        correlation = np.corrcoef(rows[:-1], rows[1:])[0, 1]
        print(
            f"{block:5} {apart:17.3f} {pairs[0]:18.4f} / {pairs[1]:.4f} {deviations[0]:16.2f} / "
            f"{deviations[1]:.2f} / {deviations[2]:.2f} {correlation:15.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("store"), help="folder of the data; written if it is missing"
    )
    parser.add_argument("--count", type=int, default=4000, help="samples")
    parser.add_argument("--per-shard", type=int, default=200)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rows", type=int, default=8, help="rows of a rank in a step, of 8,192 tokens")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--order", action="store_true", help="show how random the order is, and read nothing")
    args = parser.parse_args()
    if args.order:
        show_order(args.blocks)
        return
    torch.set_num_threads(1)

    hf = args.out / "hf"
    if not hf.exists():
        write_tiny_checkpoint(hf, "qwen2_5_vl")
        make_data(args.out, hf, args.count, args.per_shard)
    counts = multiprocessing.Array("q", 2)
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(args.out, counts, theirs), daemon=True)
    server.start()
    connect(args.out, ours.recv())

    for workers in args.workers:
        print(f"{args.ranks} ranks x {workers} workers")
        compare(args, hf, workers, counts)
    server.terminate()


def connect(folder: Path, port: int) -> None:
    """Describes the store to Energon's client."""
    os.environ |= {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
    options = {
        "base_path": BUCKET,
        "endpoint_url": f"http://127.0.0.1:{port}",
        "region_name": "us-east-1",
    }
    profiles = {"store": {"storage_provider": {"type": "s3", "options": options}}}
    (folder / "msc.json").write_text(json.dumps({"profiles": profiles}))
    os.environ["MSC_CONFIG"] = str(folder / "msc.json")


def compare(args: argparse.Namespace, hf: Path, workers: int, counts: Any) -> None:
    """Prints a line for each way to read. The ways take turns, so that other load disturbs all alike."""

    def make(path: str, decode: bool, **changes: Any) -> list[Callable[[], Iterator[int]]]:
        data = DataConfig(path=path, seq_len=8192, num_workers=workers, **changes)
        return [partial(loading, data, hf, args.ranks, args.rows, decode)]

    stored, local = "msc://store/set", str(args.out / "set")
    shuffles: dict[str, dict[str, Any]] = {"data set's order": {"shuffle": False}}
    shuffles |= {f"blocks of {block}": {"shuffle_block": block} for block in args.blocks}
    ways: dict[tuple[str, str], list[Callable[[], Iterator[int]]]] = {}
    if "sequence" in args.kinds:
        ways["sequence", ""] = [partial(sequence, stored, worker, workers) for worker in range(workers)]
    for kind in args.kinds[1:] if "sequence" in args.kinds else args.kinds:
        for name, changes in shuffles.items():
            path = local if kind == "local" else stored
            ways[kind, name] = make(path, kind != "reading", **changes)

    rounds = []
    for _ in range(args.rounds):
        rounds.append({name: timed(way, args.seconds, counts) for name, way in ways.items()})

    first: dict[bool, float] = {}
    for kind, name in ways:
        speed, spent, requests, size = (
            statistics.median(each[kind, name][i] for each in rounds) for i in range(4)
        )
        # Rows are compared with those in the data set's order, bytes with the sequence.
        share = speed / first.setdefault(kind in ("loader", "local"), speed)
        print(
            f"  {kind:10}{name:18} {speed:8.0f} images/s {share:6.2f}"
            f" {1e3 * spent:6.2f} ms of a core, {requests:6.3f} requests and {size / 1e3:6.0f} kB an image",
            flush=True,
        )


if __name__ == "__main__":
    main()
