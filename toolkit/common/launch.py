"""Starts groups of Python processes, one per rank, as torchrun does for a training run."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from megatron_vl.system.errors import UsageError, UserError

REPOSITORY_ROOT = Path(__file__).resolve().parents[2]

GPU_ENVIRONMENT = {
    # Overlapping communication with tensor parallelism requires a single work queue.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # Sizes of images differ from row to row, which otherwise fragments the GPU's memory.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "OMP_NUM_THREADS": "1",
}
"""Environment variables of the ranks, unless the user has set them."""


def run_group(
    module_name: str,
    module_arguments: Sequence[str | Path],
    world_size: int,
    *,
    show: Literal["nothing", "all"] = "nothing",
    on_cpu: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m module arguments`` in processes on this machine and waits for them to end.

    Args:
        show: where the output of the processes goes. ``nothing``: into the result; ``all``: to the output of
            this process, which raises UserError if a signal ends them.
        on_cpu: whether they use no GPU, so that they may be forks of a process that imported the stack.
    """
    launcher = ["megatron_vl.launch", "--fork"] if on_cpu else ["torch.distributed.run"]
    launcher_arguments = ["-m", *launcher, "--standalone", "--nproc-per-node", str(world_size)]
    env = {
        **GPU_ENVIRONMENT,
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY_ROOT), os.environ.get("PYTHONPATH")))),
        **(single_rank_variables() if world_size == 1 else {}),
    }
    captured_output = subprocess.PIPE if show == "nothing" else None
    done = subprocess.run(
        [
            sys.executable,
            *(launcher_arguments if world_size > 1 else ()),
            *("-m", module_name, *map(str, module_arguments)),
        ],
        env=env,
        stdout=captured_output,
        stderr=captured_output,
        text=True,
        check=False,
    )
    if show == "all" and done.returncode < 0:
        raise UserError(f"signal {-done.returncode} ended the rank; if memory ran out, take fewer layers")
    return done


def usable_gpus(ranks: int | None = None) -> int:
    """The number of this machine's GPUs; 0 without any.

    Args:
        ranks: the ranks that are to run on them; None: as many as there are GPUs.

    Raises:
        UsageError: there are fewer GPUs than ranks.
    """
    # Importing torch takes seconds, and without a device file it finds no GPU.
    if not (any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()):
        return 0
    import torch

    gpu_count = torch.cuda.device_count()
    if gpu_count and ranks and ranks > gpu_count:
        raise UsageError(f"--nproc-per-node {ranks}: torch sees {gpu_count} GPUs here")
    return gpu_count


def single_rank_variables() -> dict[str, str]:
    """The variables that torchrun would set for a single rank, without its start-up time."""
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


def free_port() -> int:
    import socket

    with socket.socket() as server_socket:
        server_socket.bind(("127.0.0.1", 0))
        return server_socket.getsockname()[1]


def last_output_lines(completed_process: subprocess.CompletedProcess[str], line_count: int = 25) -> str:
    output = (completed_process.stderr or "") + (completed_process.stdout or "")
    output = output.partition("torch.distributed.elastic.multiprocessing.errors.ChildFailedError")[0]
    return "\n".join(output.splitlines()[-line_count:])
