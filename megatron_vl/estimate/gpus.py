"""The GPUs that are known, from ``gpus.json``, and those of this machine as nvidia-smi reports them.

Neither CUDA nor torch is needed. Memory is what CUDA reports, links and host are the bandwidths that are
reached in one direction, and the peak is the dense one of bf16. A GPU without efficiencies was not measured
and is taken to reach those of H200.
"""

import dataclasses
import functools
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from megatron_vl.system.errors import UserError


@dataclass(frozen=True)
class Efficiencies:
    """Shares of a GPU's peak that the needed FLOPs of a part reach, with all that runs beside them.

    ``decoder`` is that of the decoder layers without experts and the delta rule, which moves more than it
    computes; ``output`` is that of the output layer with the loss.
    """

    tower: float
    decoder: float
    experts: float
    delta_rule: float
    output: float


@dataclass(frozen=True)
class Gpu:
    name: str
    marketed_gb: int
    """Memory by its vendor's name."""
    memory_gib: float
    peak_tflops: float
    link_gb_s: float
    """Between the GPUs of a node."""
    network_gb_s: float
    """Between nodes, for each GPU; assumed."""
    host_gb_s: float
    """Between GPU and host memory, with copies in both directions."""
    efficiencies: Efficiencies
    is_measured: bool = True

    @property
    def is_hopper_or_later(self) -> bool:
        """FlashAttention-4 and FP8 need it."""
        return self.name.startswith(("H", "B"))

    @property
    def label(self) -> str:
        return f"{self.name} ({self.marketed_gb} GB)"


def reserve_gib(gpu_gib: float) -> float:
    """GiB of a GPU that an estimate must leave free, for CUDA, NCCL and what the allocator cannot use."""
    return min(8.0, gpu_gib / 9)


@functools.cache
def known_gpus() -> dict[str, Gpu]:
    table = json.loads((Path(__file__).parent / "gpus.json").read_text())
    return {
        name: Gpu(
            **facts
            | {"name": name, "is_measured": facts["efficiencies"] is not None}
            | {"efficiencies": Efficiencies(**(facts["efficiencies"] or table["H200"]["efficiencies"]))}
        )
        for name, facts in table.items()
    }


def find_gpu(device_name: str = "H200") -> Gpu:
    """The GPU of a name such as ``h200`` or ``NVIDIA H200``.

    Raises:
        UserError: it is unknown. The message names those that are known.
    """
    # H800 and A800 differ from these in their links alone.
    kind = device_name.upper().replace("H800", "H100").replace("A800", "A100")
    for name, gpu in known_gpus().items():
        if re.search(rf"{name}(?!\d)", kind):  # an A1000 is no A100
            return gpu
    raise UserError(f"GPU {device_name} is unknown; known: {', '.join(known_gpus())}")


def peak_tflops(device_name: str, stated_tflops: float = 0.0) -> float:
    """Peak for MFU: ``stated_tflops`` if given, else by device name, else 0 (MFU is then not shown)."""
    try:
        return stated_tflops or find_gpu(device_name).peak_tflops
    except UserError:
        return 0.0


@dataclass(frozen=True)
class GpuInfo:
    """One GPU as nvidia-smi reports it; memory in MiB."""

    gpu_index: int
    gpu_name: str
    total_memory_mib: int
    used_memory_mib: int
    driver_version: str


def query_gpus() -> list[GpuInfo]:
    fields = "index,name,memory.total,memory.used,driver_version"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        table = subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_nvidia_smi(table)


def parse_nvidia_smi(csv_text: str) -> list[GpuInfo]:
    """Parses ``nvidia-smi``'s table. Other lines, such as a text about a GPU that has failed, are skipped."""
    rows = ([field.strip() for field in line.split(",")] for line in csv_text.splitlines())
    return [
        GpuInfo(int(row[0]), row[1], int(row[2]), int(row[3]), row[4])
        for row in rows
        if len(row) == 5 and row[0].isdigit() and row[2].isdigit() and row[3].isdigit()
    ]


@functools.cache
def local_gpu() -> Gpu | None:
    """The GPU of this machine; None without any. An unknown one is an H200 with its own name and memory.

    The kind decides and not the single card, so that all nodes of a cluster find the same one.
    """
    if not (local_gpus := query_gpus()):
        return None
    name, memory_gib = local_gpus[0].gpu_name, local_gpus[0].total_memory_mib / 1024
    try:
        gpu = find_gpu(name)
    except UserError:
        return dataclasses.replace(find_gpu(), name=name, memory_gib=memory_gib, is_measured=False)
    # Some cards have less memory under a known name.
    return gpu if memory_gib >= 0.95 * gpu.memory_gib else dataclasses.replace(gpu, memory_gib=memory_gib)
