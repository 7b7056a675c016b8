"""The GPUs of this machine, as nvidia-smi reports them: known without CUDA, torch or an allocation."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import subprocess
from dataclasses import dataclass

from megatron_vl.planning.calibration import DATA_SHEETS, Calibration, shipped


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi reports it; memory in MiB."""

    index: int
    name: str
    memory: int
    used: int
    driver: str


def list_gpus() -> list[Gpu]:
    """The GPUs of this machine; empty without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = [
        "nvidia-smi",
        "--query-gpu=index,name,memory.total,memory.used,driver_version",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_gpus(done.stdout) if done.returncode == 0 else []


def parse_gpus(text: str) -> list[Gpu]:
    """Parses ``nvidia-smi``'s table; skips other lines, such as the text about a GPU that has failed."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 5 and fields[0].isdigit() and fields[2].isdigit() and fields[3].isdigit():
            gpus.append(Gpu(int(fields[0]), fields[1], int(fields[2]), int(fields[3]), fields[4]))
    return gpus


@functools.cache
def calibration_here() -> Calibration | None:
    """The calibration for this machine's GPUs; None without a GPU.

    An unknown kind counts as H200 with the memory that it has. The kind decides, not the single card, so that
    all nodes of a cluster of one kind find the same.
    """
    gpus = list_gpus()
    if not gpus:
        return None
    for kind in DATA_SHEETS:
        if kind in gpus[0].name:
            known = shipped(kind)
            # Some cards have less memory under a known name.
            smaller = gpus[0].memory / 1024 < 0.95 * known.memory_gib
            return dataclasses.replace(known, memory_gib=gpus[0].memory / 1024) if smaller else known
    return dataclasses.replace(
        shipped(), gpu=gpus[0].name, memory_gib=gpus[0].memory / 1024, measured=False, provenance=()
    )
