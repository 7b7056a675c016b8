"""A rank on a GPU is killed, stopped, or runs out of memory: all ranks must end in time and say why.

    python -m tests.gpu.faults --ranks 2 [--out FOLDER] [--platform cpu]

It prints one line a fault and returns exit code 1 if one is not as it should be. Ninety seconds on two H200.
"""

import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_vl.system.processes import kill_process_tree
from megatron_vl.weights.run_folder import find_latest_checkpoint
from tests.gpu.parity import SIZES
from tests.gpu.results import Results, option_parser, work_folders
from tests.support.tiny_run import environment, options_of, prepare
from toolkit.checkpoint.contents import verify_checkpoint
from toolkit.common.tiny_checkpoint import write_tiny_checkpoint

TIMEOUT_S = 20
STEPS = 100_000


class Fault(NamedTuple):
    """A fault of :mod:`tests.support.faulty_rank`, what the one message must hold, and the seconds in which
    the launcher, which waits for all ranks, must end."""

    name: str
    message: str
    seconds: float


KILL = Fault("kill", "ended without a message: it was killed from outside", 20)
STOP = Fault("stop", "no sign of life for .* its state is 'stopped'", TIMEOUT_S + 20)
EXHAUST_GPU = Fault("exhaust_gpu", r"out of GPU memory: .*Tried to allocate .*The estimate of", 20)
EXHAUST = Fault("exhaust", "out of host memory", 20)


def run(fault: Fault, prepared: dict[str, Path], out: Path, ranks: int, platform: str) -> tuple[bool, str]:
    """Trains until the last rank has its fault. Returns whether all ended as they should, and how."""
    folder = out / fault.name
    folder.mkdir(parents=True)
    options = ["--parallel.tp", ranks, "--parallel.sequence_parallel", "true", "--checkpoint.interval", "5"]
    options += ["--failures.timeout_s", TIMEOUT_S, "--platform", platform]
    options += ["--dtype", "bfloat16" if platform == "cuda" else "float32"]
    words = options_of(prepared, folder / "run", *map(str, options), steps=STEPS)
    launch = [sys.executable, "-m", "megatron_vl.launch", "--standalone", "--nproc-per-node", str(ranks)]
    program = ["-m", "tests.support.faulty_rank", fault.name, str(ranks - 1), "7", "saved"]

    (folder / "run").mkdir()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*launch, *program, *words], env=environment(), stdout=log, stderr=log)
        try:
            code = process.wait(150 if platform == "cuda" else 600)
        except subprocess.TimeoutExpired:
            kill_process_tree(process.pid)
            return False, "did not end; its processes were killed"
    ended = time.time()
    return judge(fault, folder, code, ended)


def judge(fault: Fault, folder: Path, code: int, ended: float) -> tuple[bool, str]:
    said = (folder / "log").read_text(errors="replace")
    if not (folder / "run" / "fault.json").is_file():
        return False, f"ended with {code} before anything happened to it: {folder / 'log'}"
    seconds = ended - json.loads((folder / "run" / "fault.json").read_text())["at"]
    messages = [line for line in said.splitlines() if line.startswith("megatron_vl.train: ")]
    good = find_latest_checkpoint(folder / "run")

    problems = []
    if code == 0:
        problems.append("exit code 0")
    if seconds > fault.seconds:
        problems.append(f"slower than {fault.seconds:.0f} s")
    if len(messages) != 1 or not re.search(fault.message, messages[0]):
        problems.append(f"{len(messages)} messages, or not the right one")
    if messages and not re.search(r"rank \d+ \(tp \d, pp \d, dp \d; step \d+, ", messages[0]):
        problems.append("no place, step or phase")
    if good is None or verify_checkpoint(good.path):
        problems.append("the last checkpoint is not whole")
    how = f"exit {code} after {seconds:.1f} s, {', '.join(problems) or 'as it should be'}"
    return not problems, "\n    ".join([how, *messages])


def main() -> int:
    args = option_parser(__doc__, ranks=2, platform=True).parse_args()
    (_, out), results = work_folders(args.out, "faults"), Results()

    sizes = SIZES if args.platform == "cuda" else {}
    dtype = torch.bfloat16 if args.platform == "cuda" else torch.float32
    hf = write_tiny_checkpoint(out / "hf", "qwen2_5_vl", tied=True, dtype=dtype, **sizes)
    prepared = prepare(out / "prepared", hf)

    def one(fault: Fault) -> bool:
        return results.add(fault.name, *run(fault, prepared, out, args.ranks, args.platform))

    # The first two leave room for each other; the third takes all memory.
    with ThreadPoolExecutor() as pool:
        list(pool.map(one, [KILL, STOP]))
    one(EXHAUST_GPU if args.platform == "cuda" else EXHAUST)
    print(f"logs in {out}")
    return results.exit_code()


if __name__ == "__main__":
    sys.exit(main())
