"""The GPUs of this machine as nvidia-smi reports them, so that neither CUDA nor torch is needed."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import subprocess
from dataclasses import dataclass

from megatron_vl.planning.calibration import (
    DATA_SHEETS,
    Calibration,
    find_calibration,
    parse_gpu_kind,
)


@dataclass(frozen=True)
class GpuInfo:
    """One GPU as nvidia-smi reports it; memory in MiB."""

    gpu_index: int
    gpu_name: str
    total_memory_mib: int
    used_memory_mib: int
    driver_version: str


def query_gpus() -> list[GpuInfo]:
    """The GPUs of this machine; empty without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    query_command = [
        "nvidia-smi",
        "--query-gpu=index,name,memory.total,memory.used,driver_version",
        "--format=csv,noheader,nounits",
    ]
    try:
        completed_process = subprocess.run(query_command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_nvidia_smi(completed_process.stdout) if completed_process.returncode == 0 else []


def parse_nvidia_smi(csv_text: str) -> list[GpuInfo]:
    """Parses ``nvidia-smi``'s table. Other lines, such as a text about a GPU that has failed, are skipped."""
    parsed_gpus = []
    for line in csv_text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 5 and fields[0].isdigit() and fields[2].isdigit() and fields[3].isdigit():
            parsed_gpus.append(GpuInfo(int(fields[0]), fields[1], int(fields[2]), int(fields[3]), fields[4]))
    return parsed_gpus


def read_local_calibration() -> Calibration | None:
    """The calibration for this machine's GPUs; None without a GPU.

    An unknown kind has the rates of H200 and its own memory. The kind decides and not the single card, so
    that all nodes of a cluster find the same calibration.
    """
    local_gpus = _cached_gpus()
    if not local_gpus:
        return None
    kind_name, memory_gib = parse_gpu_kind(local_gpus[0].gpu_name), local_gpus[0].total_memory_mib / 1024

    if kind_name in DATA_SHEETS:
        known_calibration = find_calibration(kind_name)
        if memory_gib >= 0.95 * known_calibration.memory_gib:
            return known_calibration
        # Some cards have less memory under a known name.
        return dataclasses.replace(known_calibration, memory_gib=memory_gib)

    return dataclasses.replace(
        find_calibration("H200"),
        gpu=kind_name,
        memory_gib=memory_gib,
        measured=False,
        provenance=(),
        source=f"nothing is known of {kind_name}, so the rates are H200's",
    )


@functools.cache
def _cached_gpus() -> tuple[GpuInfo, ...]:
    return tuple(query_gpus())


def calibration_for_platform(platform_name: str) -> Calibration:
    """The calibration that a run is planned with: that of this machine's GPUs, or of H200 without any.

    Args:
        platform_name: ``platform`` of the run.
    """
    on_cpu = platform_name == "cpu"
    return (None if on_cpu else read_local_calibration()) or find_calibration("H200")
