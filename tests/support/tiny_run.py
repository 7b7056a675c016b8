"""A small run of the trainer: model, weights, data, and the command line that starts it."""

import contextlib
import gc
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from converters.convert import convert_weights
from data_tools.convert import ConversionOptions
from data_tools.convert import convert_dataset as convert_data
from data_tools.sample_sizes import index_datasets
from megatron_vl.config import DataConfig, parse_config
from megatron_vl.spec.families import read_spec
from megatron_vl.train import train as train_run
from tests.data.media import encoded
from tests.support.ranks import call, python_path, run_module

LAYOUT = "--parallel.tp 2 --parallel.pp 2 --parallel.layers [1,3] --parallel.sequence_parallel true".split()
"""Four ranks with uneven layers."""


def prepare(folder: Path, hf: Path, samples: int = 24, val_fraction: float = 0.0) -> dict[str, Path]:
    """Writes a data set of images and text, and the weights of ``hf`` in a layout that no run has."""
    (folder / "media").mkdir(parents=True)
    records = []
    for i in range(samples):
        question = "<image>\nWhat is this?" if i % 4 else "Hello, how are you?"
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": f"Number {i}."}]
        records.append({"conversations": turns} | ({"image": f"{i}.png"} if i % 4 else {}))
        if i % 4:
            image = encoded(60 + 14 * (i % 5), 80 + 28 * (i % 3), seed=i)
            (folder / "media" / f"{i}.png").write_bytes(image)

    (folder / "data.json").write_text(json.dumps(records))
    options = ConversionOptions(
        out=folder / "data", media_root=folder / "media", workers=1, val_fraction=val_fraction
    )
    convert_data([folder / "data.json"], options)
    index_datasets(DataConfig(path=str(folder / "data")), read_spec(hf), hf)
    convert_weights(hf, folder / "weights", {"tp": 1, "pp": 4})

    paths = {name: folder / name for name in ("weights", "data", "media")}
    return {**paths, "hf": hf, "records": folder / "data.json", "folder": folder}


def command(prepared: dict[str, Path], run: Path, *options: str, ranks: int = 4, steps: int = 6) -> list[str]:
    """The command line of a run in separate processes; later ``options`` override earlier ones."""
    return [*torchrun(ranks), "-m", "megatron_vl.train", *options_of(prepared, run, *options, steps=steps)]


def torchrun(ranks: int) -> list[str]:
    return [sys.executable, *f"-m torch.distributed.run --standalone --nproc-per-node {ranks}".split()]


def options_of(prepared: dict[str, Path], run: Path, *options: str, steps: int = 6) -> list[str]:
    """The options of a run; later ``options`` override earlier ones."""
    paths = ["--model.hf", prepared["hf"], "--model.checkpoint", prepared["weights"]]
    paths += ["--data.path", prepared["data"], "--checkpoint.dir", run]
    shape = f"--data.seq_len 128 --global_batch_size 4 --steps {steps}"
    rest = "--dtype float32 --platform cpu --optimizer.lr 1e-3 --optimizer.warmup_steps 2"
    return [*map(str, paths), *shape.split(), *rest.split(), *options]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}


def train(
    prepared: dict[str, Path], run: Path, *options: str, ranks: int = 4, steps: int = 6
) -> subprocess.CompletedProcess[str]:
    arguments = options_of(prepared, run, *options, steps=steps)
    return run_module("megatron_vl.train", arguments, ranks, cwd=prepared["folder"])


def trained(prepared: dict[str, Path], run: Path, *options: str, ranks: int = 4, steps: int = 6) -> str:
    """The standard output of a training that has ended well."""
    done = train(prepared, run, *options, ranks=ranks, steps=steps)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def metrics(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The complete lines of a run's log, without a last one that a kill cut short."""
    path = run / name
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def trainings(prepared: dict[str, Path], *starts: tuple[Path, list[str]]) -> list[str]:
    """The outputs of a process that trains again and again, each with the message that a start ended with."""
    return call(what_trainings_say, starts=[options_of(prepared, run, *options) for run, options in starts])


def what_trainings_say(starts: list[list[str]]) -> list[str]:
    gc.disable()  # nothing may rest on when it runs, such as the lock of a run's folder
    said = []
    for run_args in starts:
        out, problem = io.StringIO(), ""
        with contextlib.redirect_stdout(out):
            try:
                train_run(parse_config(run_args))
            except (ValueError, OSError, RuntimeError) as error:
                problem = f"{type(error).__name__}: {error}"
        said.append(out.getvalue() + problem)
    return said
