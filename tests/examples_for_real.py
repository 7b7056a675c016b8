"""Runs all scripts of the examples for real on CPU, on small checkpoints of the same structure.

    python -m tests.examples_for_real [--only qwen3_vl_8b ...] [--out FOLDER]

For each YAML it makes a narrow checkpoint with the released family, layer count and tying. Then it runs
convert_then_split.sh in the YAML's own layout; pretrain.sh for two steps on the demo's conversations (layouts
of more than four ranks in a smaller one, read from the same shards); and, where VLMEvalKit is installed (make
eval), evaluate.sh of the original, the round trip and the trained checkpoint. The exit code is 1 if a script
fails. An example takes some minutes, so these runs are not among the tests.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from megatron_vl.config import ParallelConfig, parse_config
from megatron_vl.spec.families import ModelSpec, read_spec
from toolkit.common.tiny_checkpoint import write_tiny_checkpoint
from toolkit.demo.demo_data import write_raw_data

ROOT = Path(__file__).resolve().parents[1]
NARROW = {
    "hidden_size": 128,
    "heads": 8,
    "kv_heads": 2,
    "mrope_section": (2, 3, 3),
    "vision_hidden_size": 160,
    "vision_heads": 8,
}
RANKS = 4


def small_checkpoint(folder: Path, spec: ModelSpec) -> None:
    """Eight heads and sixteen experts: enough for every layout of the examples."""
    experts = {"experts": 16} if spec.language.moe else {}
    write_tiny_checkpoint(
        folder,
        spec.family,
        tied=spec.language.tied_embeddings,
        dtype=torch.float32,
        layers=spec.language.num_layers,
        **NARROW,
        **experts,
    )


def smaller(parallel: ParallelConfig, layers: int) -> list[str]:
    """Options for a layout of four ranks with as many kinds of parallelism."""
    if parallel.tp * parallel.pp <= RANKS and max(parallel.ep, 1) <= RANKS:
        return []
    tp, pp, ep = (min(size, 2) for size in (parallel.tp, parallel.pp, parallel.ep))
    options = ["--parallel.tp", str(tp), "--parallel.pp", str(pp), "--parallel.ep", str(ep)]
    if pp > 1:
        entries = pp * parallel.vpp
        counts = [layers // entries - 1, *[layers // entries] * (entries - 2)]
        options += ["--parallel.layers", str([*counts, layers - sum(counts)])]
    return options


def scripts(
    example: Path, work: Path, data: Path, table: Path | None
) -> dict[str, tuple[list[str], dict[str, Path | str]]]:
    """Script -> its options and environment."""
    config = parse_config(["--config", str(example)])
    spec = read_spec(ROOT / "tests" / "hf_configs" / f"{Path(config.model.hf).name}.json")
    small_checkpoint(work / "hf", spec)
    paths: dict[str, Path | str] = {
        "HF": work / "hf",
        "FULL": work / "full",
        "SHARDS": work / "shards",
        "RUN": work / "run",
    }

    options = ["--model.hf", work / "hf", "--model.checkpoint", work / "shards"]
    options += ["--checkpoint.dir", work / "run", "--data.path", data, "--log.tensorboard", ""]
    options += "--data.seq_len 1024 --data.num_workers 1 --steps 2 --global_batch_size 4".split()
    options += "--optimizer.warmup_steps 0 --dtype float32 --platform cpu".split()
    options += smaller(config.parallel, spec.language.num_layers)
    given: dict[str, tuple[list[str], dict[str, Path | str]]] = {
        "convert_then_split.sh": ([], paths),
        "pretrain.sh": (list(map(str, options)), {"GPUS": str(RANKS), "NNODES": "1"}),
    }
    if table is not None:
        quick = ["--limit", "4", "--max-new-tokens", "1"]
        given["evaluate.sh"] = (quick, paths | {"DATA": table, "OUT": work / "evaluation"})

    return given


def run(script: Path, options: list[str], variables: dict[str, Path | str], log: Path) -> tuple[bool, float]:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    environment |= {name: str(value) for name, value in variables.items()}
    start = time.perf_counter()
    with log.open("w") as file:
        done = subprocess.run(
            [str(script), *options], env=environment, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
        )
    return done.returncode == 0, time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="names of examples")
    parser.add_argument(
        "--out", type=Path, default=None, help="folder for checkpoints and logs; default: a temporary one"
    )
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="examples-"))
    examples = sorted((ROOT / "examples").glob("*.yaml"))
    write_raw_data(out / "raw")
    source = ["--input", str(out / "raw" / "conversations.json"), "--media-root", str(out / "raw" / "media")]
    convert = [sys.executable, *"-m toolkit data convert --val-fraction 0 --out".split(), str(out / "data")]
    subprocess.run([*convert, *source], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    table = None
    if importlib.util.find_spec("vlmeval"):
        from tests.toolkit.test_evaluate import photograph_table

        table = photograph_table(out / "tables" / "photographs.tsv")

    failed = False
    for example in examples:
        if args.only and example.stem not in args.only:
            continue
        work = out / example.stem
        work.mkdir()
        for name, (options, variables) in scripts(example, work, out / "data", table).items():
            fine, seconds = run(
                ROOT / "examples" / name, [example.stem, *options], variables, work / f"{name}.log"
            )
            print(f"{'ok    ' if fine else 'FAILED'} {name} {example.stem} {seconds:.0f} s", flush=True)
            if not fine:
                failed = True
                print("\n".join((work / f"{name}.log").read_text().splitlines()[-12:]), flush=True)
                break

    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
