"""Times saves and loads of checkpoints beside torch's distributed checkpoints and ``dd``, in one run.

    python -m benchmarks.checkpoints FOLDER --nproc-per-node N --model.hf config.json [--language-layers N]

The options are those of ``megatron-vl bench``. A training with random weights saves twice and is killed; the
next start resumes. Torch saves and loads the same tensors; ``dd`` writes and reads as many bytes. What is
read was dropped from the page cache before. A stall is what a save adds to the times of two steps.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from megatron_vl.config import CheckpointConfig
from megatron_vl.train import run_rank, train
from megatron_vl.training.hooks import Hook
from megatron_vl.training.state.optimizer_state import optimizer_slices
from megatron_vl.weights.run_folder import step_dir_path
from toolkit.bench.command import ALLOCATOR_VARIABLES
from toolkit.bench.options import parse_bench_options

LAST_STEP = 11
SAVES = (4, 8)
"""The first save, and one whose memory is there."""


def say(what: str, seconds: float, num_bytes: float = 0) -> None:
    rate = f" for {num_bytes / 1e9:.2f} GB, {num_bytes / 1e9 / seconds:.2f} GB/s" if num_bytes else ""
    if os.environ.get("RANK", "0") == "0":
        print(f"{what}: {seconds:.2f} s{rate}", flush=True)


def forget(folder: Path) -> int:
    """Drops a folder's files from the page cache. Returns their size."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return sum(path.stat().st_size for path in files)


class Measure(Hook):
    """Reports the first step after a resume; or the saves of a run, then those of torch, and kills it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ends, self.save_starts = folder, [], []

    def begin(self, trainer: Any) -> None:
        self.is_resumed, save = trainer.step > 0, trainer.save
        trainer.save = lambda: (self.save_starts.append(time.time()), save())

    def before_step(self, trainer: Any) -> None:
        if trainer.step == LAST_STEP:
            trainer.checkpoint_saver.wait_until_saved()
            dist.barrier()
            self.report_saves(trainer)
            self.measure_torch(trainer)
            os.kill(os.getpid(), signal.SIGKILL)

    def after_step(self, trainer: Any, *_: Any) -> None:
        self.ends.append(time.time())
        if self.is_resumed:
            say("first step after a kill, since the command", time.time() - float(os.environ["BEGIN"]))
            trainer.stop_requested = True
        elif trainer.step == SAVES[1] - 1:  # so that the second save does not wait for the first
            trainer.checkpoint_saver.wait_until_saved()
            self.ends[-1] = time.time()

    def report_saves(self, trainer: Any) -> None:
        seconds = [end - begin for begin, end in itertools.pairwise(self.ends)]  # of steps 2, 3, ...
        median = statistics.median(seconds[:2] + seconds[-2:])
        for step, begin in zip(SAVES, self.save_starts, strict=True):
            path = step_dir_path(self.folder / "run", step)
            say(f"save of step {step}", path.stat().st_ctime - begin, forget(path))
            say(f"  its stall, at a step of {median:.2f} s", sum(seconds[step - 2 : step]) - 2 * median)

    def measure_torch(self, trainer: Any) -> None:
        """The same tensors, of each rank under its own names."""
        tensors = [live.parameter.detach() for live in trainer.saved_tensors]
        for piece in optimizer_slices(trainer.optimizer, trainer.live_tensors):
            chunked = piece.chunked_parameter
            states = piece.adam_state.values() if chunked is None else chunked.state_tensors()
            tensors += [piece.main_param] * (chunked is None) + [t for t in states if torch.is_tensor(t)]
        tensors = list({id(tensor): tensor for tensor in tensors}.values())
        state = {f"{trainer.grid.rank}/{number}": tensor for number, tensor in enumerate(tensors)}
        trainer.checkpoint_saver._host_blocks = None  # leaves its memory to torch
        begin = time.time()
        future = dcp.async_save(state, checkpoint_id=self.folder / "async")
        say("torch's async_save: its stall without a step", time.time() - begin)
        future.result()
        dist.barrier()
        say("torch's async_save", time.time() - begin, forget(self.folder / "async"))
        shutil.rmtree(self.folder / "async", ignore_errors=True)
        for name, function in (("save", dcp.save), ("load", dcp.load)):
            begin = time.time()
            function(state, checkpoint_id=self.folder / "torch")
            dist.barrier()
            say(f"torch's {name}", time.time() - begin, forget(self.folder / "torch"))


def run(folder: Path, words: list[str]) -> None:
    bench_run = parse_bench_options(words)
    saves = CheckpointConfig(dir=str(folder / "run"), interval=SAVES[0], keep=2)
    config = dataclasses.replace(bench_run.config, checkpoint=saves, steps=99, stop_after=99)
    data = dataclasses.replace(config.data, path=next(iter(bench_run.workloads.values())).path)
    train(dataclasses.replace(config, data=data), bench_run.spec, [Measure(folder)])


def main(folder: Path, words: list[str]) -> None:
    bench_run = parse_bench_options(words)
    ranks = str(bench_run.options.nproc_per_node or torch.cuda.device_count() or 1)
    launch = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node".split(), ranks]
    for _ in range(2):
        environment = os.environ | {"BEGIN": str(time.time())} | ALLOCATOR_VARIABLES
        subprocess.run([*launch, "-m", "benchmarks.checkpoints", str(folder), *words], env=environment)
        for path in (folder / "run").glob("step_*"):
            forget(path)
    count = f"count={forget(step_dir_path(folder / 'run', SAVES[1])) >> 24}"
    shutil.rmtree(folder / "run")
    for what, words in (
        ("write", ["if=/dev/zero", f"of={folder}/dd", "conv=fsync"]),
        ("read", [f"if={folder}/dd", "of=/dev/null"]),
    ):
        begin = time.time()
        subprocess.run(["dd", "bs=16M", count, "status=none", *words], check=True)
        say(f"dd, {what}", time.time() - begin, forget(folder))
    shutil.rmtree(folder)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if "RANK" in os.environ:
        sys.exit(run_rank(lambda: run(folder, sys.argv[2:])))
    main(folder, sys.argv[2:])
