"""Measures convert, split, merge and export, speed and memory, against a copy of the same bytes.

    python benchmarks/conversion.py

The benchmark writes a Hugging Face folder of random bf16 data with the structure of Qwen2.5-VL-7B (or of
another ``config.json``) and as many decoder layers as fill the requested size. Each command runs as users run
it, in its own process and including its start, after everything was written back to the disk and dropped from
the page cache. RssAnon is memory that no file backs, sampled every 10 ms.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from converters import make_conversion_rules
from converters.tensor_folder import WEIGHT_INDEX_FILE
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.tensors import Sharding
from megatron_vl.weights.tensor_files import TensorWriter, make_safetensors_header, row_regions
from megatron_vl.weights.weight_reader import WeightReader

QWEN2_5_VL_7B = Path(__file__).parents[1] / "tests" / "hf_configs" / "Qwen2.5-VL-7B-Instruct.json"
FILE_BYTES = 4_000_000_000
DENSE = ["--parallel.tp", "4", "--parallel.pp", "2"]
EXPERTS = ["--parallel.tp", "2", "--parallel.pp", "2", "--parallel.ep", "4"]


def shapes_of(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {name: shape for rule in make_conversion_rules(spec) for name, shape in rule.hf_shapes.items()}


def size_of(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(2 * torch.Size(shape).numel() for shape in shapes.values())


def write_hf(folder: Path, released: ModelSpec, gigabytes: float) -> ModelSpec:
    """Writes a HF folder of about this size. Returns the model with its number of decoder layers."""
    sizes = [released.replace_layers(num_language_layers=layers) for layers in range(3, 100)]
    spec = min(sizes, key=lambda spec: abs(size_of(shapes_of(spec)) - gigabytes * 1e9))
    shapes = shapes_of(spec)
    groups: list[list[str]] = [[]]

    for name in shapes:
        if size_of({n: shapes[n] for n in [*groups[-1], name]}) > FILE_BYTES:
            groups.append([])
        groups[-1].append(name)

    random = torch.randint(-(2**15), 2**15, (1 << 24,), dtype=torch.int16).view(torch.bfloat16)

    def pieces(shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
        for region in row_regions(shape, 2):
            count = (region.row_end - region.row) * (region.col_end - region.col)
            start = int(torch.randint(0, max(1, random.numel() - count), ()))
            yield random[start : start + count]

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(spec.hf_config))
    where = {}
    for i, names in enumerate(groups, 1):
        file = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        writer = TensorWriter(
            folder / file, make_safetensors_header({name: (torch.bfloat16, shapes[name]) for name in names})
        )
        for name in names:
            writer.write_tensor(name, pieces(shapes[name]))
            where[name] = file
        writer.commit()

    (folder / WEIGHT_INDEX_FILE).write_text(
        json.dumps({"metadata": {"total_size": size_of(shapes)}, "weight_map": where})
    )
    return spec


def settle(folder: Path) -> None:
    """Waits until nothing is left to write, and drops the folder from the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def anonymous(pid: int) -> int:
    """Bytes of a process that no file backs."""
    try:
        found = psutil.Process(pid).memory_info()
    except psutil.NoSuchProcess:
        return 0
    return found.rss - found.shared


def timed(words: list[str], root: Path) -> dict[str, float]:
    """Runs a command. Returns its seconds and its peak of RssAnon in bytes."""
    settle(root)
    begin = time.monotonic()
    peak = 0
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while process.poll() is None:
        peak = max(peak, anonymous(process.pid))
        time.sleep(0.01)
    seconds = time.monotonic() - begin
    if process.returncode:
        assert process.stderr
        raise SystemExit(f"{' '.join(words)} failed:\n{process.stderr.read().decode()}")
    return {"seconds": seconds, "rss_anon": peak}


def load_rank(checkpoint: Path, verify: bool) -> None:
    """Reads rank 0 of tensor parallel size 2 (and expert parallel size 2) as the trainer does,
    from any layout."""
    reader = WeightReader(checkpoint, should_verify=verify)
    ep = 2 if reader.spec.language.moe else 1
    for name in reader.tensor_names():
        reader.read_shard(name, 0, Sharding(tp=2, ep=ep))


def benchmark(root: Path, released: ModelSpec, gigabytes: float) -> dict[str, Any]:
    print(f"writing {gigabytes:g} GB to {root}", file=sys.stderr, flush=True)
    spec = write_hf(root / "hf", released, gigabytes)
    layout = EXPERTS if spec.language.moe else DENSE
    size = sum(path.stat().st_size for path in (root / "hf").iterdir())

    paths = {name: str(root / name) for name in ("hf", "copy", "shards", "split", "full", "back")}
    copy = ["cp", "-r", paths["hf"], paths["copy"]]

    def command(name: str, *words: str, out: str) -> list[str]:
        return [sys.executable, "-m", "toolkit", name, *words, "--out", out]

    from_hf, from_shards = ["--hf", paths["hf"]], ["--checkpoint", paths["shards"]]
    from_full = ["--checkpoint", paths["full"]]
    steps = {
        f"convert {' '.join(layout)}": command("convert", *from_hf, *layout, out=paths["shards"]),
        "merge": command("merge", *from_shards, out=paths["full"]),
        f"split {' '.join(layout)}": command("split", *from_full, *layout, out=paths["split"]),
        "export": command("export", *from_shards, *from_hf, out=paths["back"]),
    }

    results: dict[str, dict[str, float]] = {}
    for name, words in steps.items():
        # A copy right before each command, because other disk activity changes from minute to minute.
        before = timed(copy, root)
        shutil.rmtree(root / "copy")
        results[name] = timed(words, root) | {"cp_seconds": before["seconds"]}
        results[name]["ratio"] = results[name]["seconds"] / before["seconds"]
        print(
            f"{name}: {results[name]['seconds']:.1f} s, cp {before['seconds']:.1f} s",
            file=sys.stderr,
            flush=True,
        )
        if name.startswith("split"):
            same_files(root / "shards", root / "split")
            shutil.rmtree(root / "full")
            shutil.rmtree(root / "split")

    same_files(root / "hf", root / "back")
    for verify in (True, False):
        settle(root)
        begin = time.monotonic()
        load_rank(root / "shards", verify)
        results[f"load a rank of TP 2 from shards, {'verified' if verify else 'not verified'}"] = {
            "seconds": time.monotonic() - begin
        }

    return {
        "bytes": size,
        "layers": spec.language.num_layers,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "results": results,
    }


def same_files(a: Path, b: Path) -> None:
    """Compares the folders byte for byte; the speed of a wrong result would be meaningless."""
    if subprocess.run(["diff", "-rq", str(a), str(b)], stdout=subprocess.DEVNULL).returncode:
        raise SystemExit(f"{a} and {b} differ")


def table(report: dict[str, Any]) -> str:
    size = report["bytes"]
    lines = [
        (
            f"{size / 1e9:.2f} GB bf16, {report['layers']} decoder layers, {report['cores']} cores, "
            f" Python {report['python']}, torch {report['torch']}"
        ),
        f"{'':<48}{'s':>8}{'MB/s':>8}{'cp s':>8}{'x cp':>7}{'RssAnon MiB':>13}",
    ]
    for name, result in report["results"].items():
        line = f"{name:<48}{result['seconds']:8.1f}{size / result['seconds'] / 1e6:8.0f}"
        if "rss_anon" in result:
            line += f"{result['cp_seconds']:8.1f}{result['ratio']:7.2f}{result['rss_anon'] / 2**20:13.0f}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--gb",
        type=float,
        default=8,
        help="size of the folder in GB (1e9 bytes); at least about 5 (default 8)",
    )
    parser.add_argument(
        "--config", type=Path, default=QWEN2_5_VL_7B, help="config.json that gives structure and widths"
    )
    parser.add_argument(
        "--dir", type=Path, help="folder with room for 4 times the size (default: the temporary folder)"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        report = benchmark(Path(folder), read_spec(args.config), args.gb)

    print(table(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
