"""Image-text pairs in tars that exist: samples a second of the loader, and of webdataset with Hugging Face.

    python -m benchmarks.tars --hf HF_DIR --out FOLDER              one core: the loader beside webdataset
    python -m benchmarks.tars --hf HF_DIR --out FOLDER --store      a store that answers after 20 ms
    python -m benchmarks.tars --memory --tars N --out FOLDER        an index, then a start: time, peak memory

The tars hold JPEGs of 224 to 448 pixels a side with captions. On one core, the loader reads them in place,
with planned rows of 8,192 tokens; webdataset reads them in order, Pillow decodes, and the processor of
Hugging Face makes pixels and tokens. The two take turns, so that other load disturbs both alike. Processor
time counts.

With ``--store``, an S3 server in a process of its own serves the tars. Samples are read and not decoded: in
the order of a run (blocks of a tar, shuffled), in the order of the tars through the same loader, and tar by
tar, each with one request.

With ``--memory``, images have 32 pixels a side, and all tars are one file with several names. The first
call makes the index, the next one starts a loader on it.
"""

import argparse
import io
import multiprocessing
import os
import random
import re
import resource
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import torch
import webdataset
from PIL import Image

from benchmarks.samples import random_crop
from data_tools.sample_sources import open_encoder
from data_tools.tar_index import TarIndex, find_tars, index_tars
from megatron_vl.config import DataConfig
from megatron_vl.data.loader import build_loader
from megatron_vl.data.row_encoder import RawSample, RowEncoder
from megatron_vl.data.source.location import resolve_location
from megatron_vl.data.source.sample_sizes import compute_tokenization_id
from megatron_vl.data.source.tar_list import parse_fields
from megatron_vl.spec.families import read_spec
from toolkit.common.hf_loading import load_hf_processor
from toolkit.demo.demo_data import load_images

BUCKET = "pairs"
SECONDS = 0.02
DOCUMENT = "<|vision_start|><|image_pad|><|vision_end|>{}<|endoftext|>"
ROWS = 8
"""Rows of a step."""
IMAGES = 256
"""Number of different JPEGs; pairs share them."""


def write_tars(folder: Path, tars: int, pairs: int, sides: tuple[int, int] = (224, 448)) -> None:
    """Writes tars as img2dataset does. ``sides``: least and largest side of an image."""
    rng, jpegs = random.Random(5), []
    sources = [Image.fromarray(load()).convert("RGB") for load in load_images().values()]
    for _ in range(IMAGES):
        size = rng.randint(*sides), rng.randint(*sides)
        random_crop(rng.choice(sources), size, rng).save(file := io.BytesIO(), "JPEG", quality=92)
        jpegs.append(file.getvalue())
    words = Path(__file__).parents[1].joinpath("README.md").read_text().replace("<", "").split()
    folder.mkdir(parents=True)
    for number in range(tars):
        with tarfile.open(folder / f"{number:05d}.tar", "w") as tar_file:
            for i in range(pairs):
                caption = " ".join(rng.choices(words, k=rng.randint(5, 30))).encode()
                for suffix, content in (("jpg", rng.choice(jpegs)), ("txt", caption)):
                    info = tarfile.TarInfo(f"{number:05d}{i:05d}.{suffix}")
                    info.size = len(content)
                    tar_file.addfile(info, io.BytesIO(content))


def index(out: Path, hf: Path, tars: str, workers: int = 1) -> None:
    data, spec = DataConfig(path=str(out)), read_spec(hf)
    encoder, sizes_name = open_encoder(data, spec, hf), compute_tokenization_id(hf, spec, data)
    index_tars(TarIndex(*find_tars([tars]), out, parse_fields([]), encoder, sizes_name), workers)


def measure_memory(out: Path, hf: Path, workers: int) -> None:
    """Prints the time of an index, or of a start with its first row, and the peak memory of this process and
    of one that it started."""
    started = time.perf_counter()
    if (out / "index").exists():
        next(loader_samples(DataConfig(path=str(out / "index"), seq_len=8192, num_workers=0), hf))
    else:
        index(out / "index", hf, str(out / "tars"), workers)
    print(f"{time.perf_counter() - started:.1f} s")
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        print(f"{resource.getrusage(who).ru_maxrss / 1024:.0f} MiB")


# --- One core -----------------------------------------------------------------------------------------------


def loader_samples(data: DataConfig, hf: Path) -> Iterator[int]:
    """Numbers of samples of rows as a run gets them."""
    with closing(build_loader(data, read_spec(hf), hf, rows_per_step=ROWS)) as loader:
        for row in loader:
            assert not row.dropped_counts, row.dropped_samples
            yield row.num_samples


def webdataset_samples(tars: list[str], hf: Path) -> Iterator[int]:
    processor = load_hf_processor(hf)
    while True:
        pairs = webdataset.WebDataset(tars, shardshuffle=False).decode("pilrgb").to_tuple("jpg", "txt")
        for image, caption in pairs:
            processor(text=[DOCUMENT.format(caption)], images=[image], return_tensors="pt")
            yield 1


def rate(samples: Iterator[int], count: int, clock: Callable[[], float]) -> float:
    """Samples a second for about ``count`` samples."""
    start, done = clock(), 0
    while done < count:
        done += next(samples)
    return done / (clock() - start)


def compare(ways: dict[str, Iterator[int]], count: int, rounds: int, clock: Callable[[], float]) -> None:
    """Prints the rate of each way, and the ratio of the first to the others. They take turns."""
    for samples in ways.values():
        rate(samples, max(count // 4, 1), clock)
    first, *others = ways
    ratios: dict[str, list[float]] = {name: [] for name in others}
    for _ in range(rounds):
        rates = {name: rate(samples, count, clock) for name, samples in ways.items()}
        print("  ".join(f"{name}: {value:.1f} samples/s" for name, value in rates.items()), flush=True)
        for name in others:
            ratios[name].append(rates[first] / rates[name])
    for name, values in ratios.items():
        print(f"{first} / {name}: median {median(values):.3f}, {min(values):.3f} to {max(values):.3f}")


# --- A store ------------------------------------------------------------------------------------------------


class Store(BaseHTTPRequestHandler):
    """Objects of one bucket, which are the files of a folder."""

    protocol_version = "HTTP/1.1"
    folder: Path

    def do_GET(self) -> None:
        time.sleep(SECONDS)
        path = self.folder / unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}").lstrip("/")
        size = path.stat().st_size if path.is_file() else 0
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(asked[1]), min(int(asked[2]), size - 1)) if asked else (0, size - 1)
        self.send_response(404 if not size else 206 if asked else 200)
        self.send_header("Content-Length", str(last + 1 - first))
        self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("ETag", f'"{size}"')
        self.end_headers()
        if self.command == "HEAD" or not size:
            return
        self.wfile.flush()
        with path.open("rb") as file:
            while first <= last:
                first += os.sendfile(self.connection.fileno(), file.fileno(), first, last + 1 - first)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


def serve(folder: Path, port: Any) -> None:
    Store.folder = folder
    server = ThreadingHTTPServer(("127.0.0.1", 0), Store)
    server.daemon_threads = True
    port.send(server.server_port)
    server.serve_forever()


class ReadOnly(RowEncoder):
    """Decodes and encodes nothing."""

    def preencode_sample(self, sample: RawSample) -> RawSample:
        assert not sample.refused and len(sample.media_bytes) == 1, sample.refused
        return sample

    def make_row(self, samples: Any, source_index: int = 0) -> Any:
        return SimpleNamespace(num_samples=len(samples), dropped_counts={})


def stored_samples(data: DataConfig, hf: Path) -> Iterator[int]:
    with closing(build_loader(data, read_spec(hf), hf, rows_per_step=ROWS)) as loader:
        loader._planning_context.row_encoder.__class__ = ReadOnly
        for row in loader:
            yield row.num_samples


def whole_tars(tars: list[str]) -> Iterator[int]:
    while True:
        for name in tars:
            path = resolve_location(name)
            content = path.fs.read(str(path.internal_path))  # type: ignore[union-attr]
            with tarfile.open(fileobj=io.BytesIO(content)) as tar_file:
                for member in tar_file:
                    assert tar_file.extractfile(member).read()  # type: ignore[union-attr]
                    if member.name.endswith(".jpg"):
                        yield 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hf", type=Path, help="folder of tokenizer and processor; default: a small one")
    parser.add_argument("--out", type=Path, help="folder of the tars, which are written if it is new")
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--tars", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=1000, help="of a tar; 10,000 for a store")
    parser.add_argument("--count", type=int, default=1000, help="samples of a turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=1, help="loader or index processes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    out = args.out or Path(tempfile.mkdtemp())
    if args.hf is None:
        from toolkit.common.tiny_checkpoint import write_tiny_checkpoint

        args.hf = write_tiny_checkpoint(Path(tempfile.mkdtemp()) / "hf", "qwen2_5_vl")
    if not (out / "tars").exists():
        sizes: dict[str, Any] = {"tars": 1, "sides": (32, 32)} if args.memory else {"tars": args.tars}
        write_tars(out / "tars", pairs=args.pairs, **sizes)
        for number in range(1, args.tars if args.memory else 0):
            os.link(out / "tars" / "00000.tar", out / "tars" / f"{number:05d}.tar")
    if args.memory:
        return measure_memory(out, args.hf, args.workers)
    names = sorted(path.name for path in (out / "tars").iterdir())
    settings: dict[str, Any] = {"seq_len": 8192, "num_workers": 0}
    if not args.store:
        index(out / "index", args.hf, str(out / "tars"))
        ways = {
            "loader": loader_samples(DataConfig(path=str(out / "index"), **settings), args.hf),
            "webdataset": webdataset_samples([str(out / "tars" / name) for name in names], args.hf),
        }
        compare(ways, args.count, args.rounds, time.process_time)
        return

    here, there = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(out / "tars", there), daemon=True)
    server.start()
    access = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {**access, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{here.recv()}"}
    stored = [f"s3://{BUCKET}/{name}" for name in names]
    (out / "names.txt").write_text("\n".join(stored))
    index(out / "store-index", args.hf, str(out / "names.txt"))
    data = partial(DataConfig, path=str(out / "store-index"), seq_len=8192, num_workers=args.workers)
    ways = {
        "shuffled": stored_samples(data(), args.hf),
        "in order": stored_samples(data(shuffle=False), args.hf),
        "tar by tar": whole_tars(stored),
    }
    compare(ways, args.count, args.rounds, time.monotonic)
    server.terminate()


if __name__ == "__main__":
    main()
