"""A rank of a real training to which something happens; started by test_faults.py.

    python -m tests.support.faulty_rank FAULT RANK STEP MOMENT OPTIONS OF THE TRAINING

As soon as the log has STEP more lines and, after that, MOMENT has come (``step``, ``save``, ``saved``
or a number of seconds), a thread of rank RANK does it: the fault is real, only its cause is not.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import psutil
import torch

from megatron_vl.weights.run_folder import find_latest_checkpoint


def send(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def stop_loader() -> None:
    """The loader's processes hang, and the rank waits for a row."""
    workers = psutil.Process().children(recursive=True)
    assert workers
    for worker in workers:
        worker.suspend()


def kill_loader() -> None:
    """The system kills a process of the loader that makes rows; the one that plans them began before."""
    psutil.Process().children()[-1].kill()


def exhaust_gpu() -> None:
    """A thread takes all memory of the GPU, the allocator's cache included."""
    # A new thread begins on the first GPU, whatever the main thread has chosen.
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    held: list[torch.Tensor] = []
    while True:
        torch.cuda.empty_cache()
        with contextlib.suppress(torch.OutOfMemoryError):
            free = torch.cuda.mem_get_info()[0]
            held.append(torch.empty(max(1 << 20, free - (4 << 20)), dtype=torch.uint8, device="cuda"))
        time.sleep(0.002)


def slow_disk() -> None:
    """From now on the disk takes longer for a file of tensors than ``failures.timeout_s``, once."""
    real, slow_once = os.fsync, iter([True])

    def fsync(handle: int) -> None:
        if ".safetensors" in os.readlink(f"/proc/self/fd/{handle}") and next(slow_once, False):
            time.sleep(16)
        real(handle)

    os.fsync = fsync


def take_all(number: int, frame: FrameType | None) -> None:
    """The main thread allocates until there is no more."""
    most = psutil.Process().memory_info().vms + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    held = []
    while True:
        held.append(torch.ones(4 << 20))


FAULTS: dict[str, Callable[[], None]] = {
    "kill": send(signal.SIGKILL),
    "stop": send(signal.SIGSTOP),
    "exhaust": send(signal.SIGUSR2),
    **{fault.__name__: fault for fault in (stop_loader, kill_loader, exhaust_gpu, slow_disk)},
}


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def wait_and_do(fault: str, run: Path, count: int, moment: str) -> None:
    while lines(run) < count:
        time.sleep(0.002)
    if moment == "save":
        while not list(run.glob("step_*.partial")):
            time.sleep(0.0005)
    elif moment == "saved":
        while find_latest_checkpoint(run) is None:
            time.sleep(0.01)
    elif moment != "step":
        time.sleep(float(moment))
    told = {"at": time.time(), "saving": bool(list(run.glob("step_*.partial")))}
    (run / "fault.json").write_text(json.dumps(told | {"children": pids()}))
    FAULTS[fault]()


def pids() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]


def main() -> int:
    fault, rank, step, moment, *options = sys.argv[1:]
    run = Path(options[options.index("--checkpoint.dir") + 1])
    if os.environ["RANK"] == rank:
        signal.signal(signal.SIGUSR2, take_all)
        count = lines(run) + int(step)
        threading.Thread(target=wait_and_do, args=(fault, run, count, moment), daemon=True).start()

    from megatron_vl.train import main as train

    return train(options)


if __name__ == "__main__":
    sys.exit(main())
