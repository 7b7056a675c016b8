"""The GPUs of this machine, as nvidia-smi reports them: known without CUDA, torch or an allocation."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import subprocess
from dataclasses import dataclass

from megatron_vl.planning.calibration import (
    DATA_SHEETS,
    HOW,
    Calibration,
    kind_of,
    known,
    shipped,
    stored_path,
)


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


def calibration_here() -> Calibration | None:
    """The calibration for this machine's GPUs; None without a GPU.

    An unknown kind counts as H200 with the memory that it has. The kind decides, not the single card, so that
    all nodes of a cluster of one kind find the same.

    Raises:
        CalibrationError: the stored calibration of this kind is damaged.
    """
    gpus = _gpus_once()
    if not gpus:
        return None
    kind, memory_gib = kind_of(gpus[0].name), gpus[0].memory / 1024

    if kind in DATA_SHEETS or stored_path(kind).is_file():
        found = known(kind)
        # Some cards have less memory under a known name.
        smaller = memory_gib < 0.95 * found.memory_gib
        return dataclasses.replace(found, memory_gib=memory_gib) if smaller else found

    return dataclasses.replace(
        shipped(),
        gpu=kind,
        memory_gib=memory_gib,
        measured=False,
        provenance=(),
        source=f"nothing is known of {kind}, so the rates are H200's; {HOW}",
    )


@functools.cache
def _gpus_once() -> tuple[Gpu, ...]:
    return tuple(list_gpus())


def calibration_for(platform: str) -> Calibration:
    """With what a run is planned: the calibration of this machine's GPUs, or H200's without any.

    Args:
        platform: of the run; for ``cpu``, the stored calibration of CPUs counts, if there is one.
    """
    if platform == "cpu":
        return known("cpu") if stored_path("cpu").is_file() else known("H200")
    return calibration_here() or known("H200")
