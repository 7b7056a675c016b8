"""Times saves and loads of checkpoints beside torch's distributed checkpoints and ``dd``, in one run.

    python -m benchmarks.checkpoints FOLDER --nproc-per-node N --model.hf config.json [--language-layers N]

The options are those of ``megatron-vl bench``. A training saves twice and is killed; the next start resumes.
Torch saves and loads the same tensors; ``dd`` writes and reads as many bytes. What is read was dropped from
the page cache before. A stall is what a save adds to the times of two steps.
"""

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
from toolkit.bench.options import parse_bench_options
from toolkit.common.launch import GPU_ENVIRONMENT

SAVES, LAST_STEP = (4, 8), 11


def print_seconds(what: str, begin: float, folder: Path | None = None) -> None:
    """Prints the seconds since ``begin``, and the rate of a folder, whose files leave the page cache."""
    seconds, rate = time.time() - begin, ""
    if folder is not None:
        files = [path for path in folder.rglob("*") if path.is_file()]
        for path in files:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        gigabytes = sum(path.stat().st_size for path in files) / 1e9
        rate = f" for {gigabytes:.2f} GB, {gigabytes / seconds:.2f} GB/s"
    if os.environ.get("RANK", "0") == "0":
        print(f"{what}: {seconds:.2f} s{rate}", flush=True)


class Measure(Hook):
    """Reports the first step after a resume; or the saves of a run, then those of torch, and kills it."""

    def begin(self, trainer: Any) -> None:
        self.ends, self.save_starts, self.is_resumed, save = [], [], trainer.step > 0, trainer.save
        trainer.save = lambda: (self.save_starts.append(time.time()), save())

    def before_step(self, trainer: Any) -> None:
        if trainer.step == LAST_STEP:
            trainer.checkpoint_saver.wait_until_saved()
            dist.barrier()
            seconds = [end - begin for begin, end in itertools.pairwise(self.ends)]  # of steps 2, 3, ...
            median = statistics.median(seconds[:2] + seconds[-2:])
            for step, begin in zip(SAVES, self.save_starts, strict=True):
                path = step_dir_path(FOLDER / "run", step)
                print_seconds(f"save of step {step}", begin + time.time() - path.stat().st_ctime, path)
                begin = time.time() - sum(seconds[step - 2 : step]) + 2 * median
                print_seconds(f"  its stall, at a step of {median:.2f} s", begin)
            self.measure_torch(trainer)
            os.kill(os.getpid(), signal.SIGKILL)

    def after_step(self, trainer: Any, *_: Any) -> None:
        if self.is_resumed:
            print_seconds("first step after a kill, since the command", float(os.environ["BEGIN"]))
            trainer.stop_requested = True
        elif trainer.step == SAVES[1] - 1:  # so that the second save does not wait for the first
            trainer.checkpoint_saver.wait_until_saved()
        self.ends.append(time.time())

    def measure_torch(self, trainer: Any) -> None:
        """The same tensors, of each rank under its own names."""
        tensors = [live.parameter.detach() for live in trainer.saved_tensors]
        for piece in optimizer_slices(trainer.optimizer, trainer.live_tensors):
            chunked = piece.chunked_parameter
            states = [piece.main_param, *piece.adam_state.values()]
            tensors += filter(torch.is_tensor, states if chunked is None else chunked.state_tensors())
        by_id = {id(tensor): tensor for tensor in tensors}
        state = {f"{trainer.grid.rank}/{number}": each for number, each in enumerate(by_id.values())}
        trainer.checkpoint_saver._host_blocks = None  # leaves its memory to torch
        begin = time.time()
        group = dist.new_group(backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        future = dcp.async_save(state, checkpoint_id=FOLDER / "async", process_group=group)
        print_seconds("torch's async_save: its stall without a step", begin)
        future.result()
        dist.barrier()
        print_seconds("torch's async_save", begin, FOLDER / "async")
        shutil.rmtree(FOLDER / "async", ignore_errors=True)
        for name, function in (("save", dcp.save), ("load", dcp.load)):
            begin = time.time()
            function(state, checkpoint_id=FOLDER / "torch")
            dist.barrier()
            print_seconds(f"torch's {name}", begin, FOLDER / "torch")


def run() -> None:
    bench_run = parse_bench_options(WORDS)
    saves = CheckpointConfig(dir=str(FOLDER / "run"), interval=SAVES[0], keep=2)
    config = dataclasses.replace(bench_run.config, checkpoint=saves, steps=99, stop_after=99)
    train(config, bench_run.spec, [Measure()])


def main() -> None:
    ranks = parse_bench_options(WORDS).options.nproc_per_node or torch.cuda.device_count() or 1
    launch = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node {ranks} -m".split()
    for _ in range(2):
        environment = os.environ | {"BEGIN": str(time.time())} | GPU_ENVIRONMENT
        subprocess.run([*launch, "benchmarks.checkpoints", str(FOLDER), *WORDS], env=environment)
        shutil.rmtree(FOLDER / "torch", ignore_errors=True)
    step = step_dir_path(FOLDER / "run", SAVES[1])
    count = sum(path.stat().st_size for path in step.rglob("*") if path.is_file()) >> 24
    shutil.rmtree(FOLDER / "run")
    for what, files in (
        ("write", f"if=/dev/zero of={FOLDER}/dd conv=fsync"),
        ("read", f"if={FOLDER}/dd of=/dev/null"),
    ):
        begin = time.time()
        subprocess.run(f"dd bs=16M count={count} status=none {files}".split(), check=True)
        print_seconds(f"dd, {what}", begin, FOLDER)


if __name__ == "__main__":
    FOLDER, WORDS = Path(sys.argv[1]), sys.argv[2:]
    sys.exit(run_rank(run) if "RANK" in os.environ else main())
