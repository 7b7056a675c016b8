"""Checks Python packages, GPUs, communication and limits of this machine.

Packages are imported in separate processes, so that one that crashes at import is reported as a finding.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_vl.estimate.gpus import GpuInfo, query_gpus
from megatron_vl.system.plurals import pluralize

GIB = 2**30
INSTALL_GPU = "pip install -e '.[gpu]' -c constraints.txt --no-build-isolation"
TE_DISTRIBUTIONS = tuple(f"transformer-engine{part}" for part in ("", "-torch", "-cu12", "-cu13"))
SHOWN_PACKAGES = ("torch", "megatron-core", "megatron-energon", "transformers", "safetensors")
SLOW_NCCL_SWITCHES = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_NVLS_DISABLE")
"""Switches that people set while they look for a fault, and then forget."""
WATCHED_VARIABLES = ("NCCL_", "TORCH_NCCL_", "CUDA_VISIBLE", "CUDA_DEVICE_MAX", "PYTORCH_")


State = Literal["ok", "note", "broken"]


@dataclass(frozen=True)
class Finding:
    name: str
    found: str
    state: State = "ok"
    """``note``: it works, but deserves a look; ``broken``: something that training needs does not work."""
    advice: str = ""


def check_machine(with_nccl: bool = False) -> list[Finding]:
    """Returns all findings about this machine. A start raises the limit of open files, sets the allocator,
    and compares the disk with its checkpoints.

    Args:
        with_nccl: also reduce a tensor over all GPUs (without GPUs, over two gloo processes).
    """
    import_processes = {
        name: subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for name, code in _IMPORT_PROBES.items()
    }
    gpus = query_gpus()
    findings = [
        Finding("python", f"{sys.version.split()[0]} ({sys.executable})"),
        *_check_requirements(),
        *_check_gpus(gpus),
        *_check_imports(import_processes, bool(gpus)),
        _check_environment(),
        _check_shared_memory(),
    ]
    return [*findings, check_all_reduce(len(gpus))] if with_nccl else findings


# --- Packages -----------------------------------------------------------------------------------------------


def _check_requirements() -> list[Finding]:
    from packaging.requirements import Requirement

    if installed_version("megatron-vl") is None:
        unknown = "megatron-vl is not installed, so its requirements are unknown"
        return [Finding("packages", unknown, "note", "pip install -e .")]
    findings = []
    for requirement in map(Requirement, importlib.metadata.requires("megatron-vl") or []):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed_version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            found = f"{version or 'not installed'}, required: {requirement.specifier or 'any version'}"
            advice = f"pip install '{requirement.name}{requirement.specifier}' -c constraints.txt"
            findings.append(Finding(requirement.name, found, "broken", advice))
    versions_text = ", ".join(f"{name} {installed_version(name)}" for name in SHOWN_PACKAGES)
    return findings or [Finding("packages", versions_text)]


def installed_version(distribution_name: str) -> str | None:
    try:
        return importlib.metadata.version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        return None


def transformer_engine_version() -> str | None:
    """The version of the first installed distribution of Transformer Engine, None if there is none."""
    return next(filter(None, map(installed_version, TE_DISTRIBUTIONS)), None)


_IMPORT_PROBES = {
    "torch": (
        """import json, torch
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else ""
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus, "nccl": nccl}))"""
    ),
    "megatron.core": "import megatron.core",
    "transformer_engine": "import transformer_engine.pytorch",
    "flash_attn": "import flash_attn.cute.interface",
    "triton": "import triton",
}


def _check_imports(import_processes: dict[str, subprocess.Popen[str]], has_gpu: bool) -> list[Finding]:
    outputs, errors = dict[str, str](), dict[str, str]()
    for name, process in import_processes.items():
        outputs[name], stderr_text = process.communicate()
        error_lines = stderr_text.strip().splitlines() or [f"exit code {process.returncode}"]
        errors[name] = error_lines[-1] if process.returncode else ""
    core = Finding("megatron.core", "imports")
    if error := errors["megatron.core"]:
        advice = "fix the packages above, then run make setup"
        core = Finding("megatron.core", f"does not import: {error}", "broken", advice)
    packages = {
        "transformer_engine": (TE_DISTRIBUTIONS, "training on a GPU needs it"),
        "flash_attn": (
            ("flash-attn-4",),
            "attention is slower on Hopper and Blackwell, and for heads of 256 (Qwen3.5)",
        ),
        "triton": (("triton",), "linear attention (Qwen3.5) is slow without it"),
    }
    return [
        _check_torch(outputs["torch"], errors["torch"], has_gpu),
        *(_check_gpu_package(*facts, errors[name], has_gpu) for name, facts in packages.items()),
        core,
    ]


def _check_torch(torch_text: str, error_text: str, has_gpu: bool) -> Finding:
    if error_text:
        advice = "make setup, or: pip install torch -c constraints.txt"
        return Finding("torch", f"does not import: {error_text}", "broken", advice)
    facts = json.loads(torch_text.strip().splitlines()[-1])
    found = f"{facts['version']}, built for {'CUDA ' + facts['cuda'] if facts['cuda'] else 'CPU'}"
    if has_gpu and not facts["gpus"]:
        advice = "update the driver, which may be older than this CUDA, or unset CUDA_VISIBLE_DEVICES"
        return Finding("torch", f"{found}, sees no GPU, but nvidia-smi does", "broken", advice)
    gpus_text = f"{facts['gpus']} GPUs, NCCL {facts['nccl']}" if facts["gpus"] else "no GPU"
    return Finding("torch", f"{found}, {gpus_text}")


def _check_gpu_package(
    distributions: tuple[str, ...], without_text: str, error_text: str, has_gpu: bool
) -> Finding:
    name = distributions[0]
    versions = [f"{each} {version}" for each in distributions if (version := installed_version(each))]
    if not error_text:
        return Finding(name, ", ".join(versions) or "found on the path")
    if versions or "No module named" not in error_text:
        then = f", then {INSTALL_GPU}" if has_gpu else "; it is not needed on CPU"
        found = f"{', '.join(versions) or 'no distribution'}, does not import: {error_text}"
        return Finding(name, found, "broken", f"pip uninstall -y {' '.join(distributions)}{then}")
    if has_gpu:
        state: State = "broken" if distributions is TE_DISTRIBUTIONS else "note"
        return Finding(name, f"not installed; {without_text}", state, INSTALL_GPU)
    return Finding(name, "not installed; needed only on GPUs")


# --- GPUs ---------------------------------------------------------------------------------------------------


def _check_gpus(gpus: list[GpuInfo]) -> Iterator[Finding]:
    if not gpus:
        yield Finding("gpus", "none; training runs on the CPU (platform: cpu), and only training needs GPUs")
        return

    kinds = Counter(
        f"{gpu.gpu_name}, {gpu.total_memory_mib / 1024:.0f} GiB, driver {gpu.driver_version}" for gpu in gpus
    )
    found = "; ".join(f"{count} x {kind}" for kind, count in kinds.items())
    limit = "the slowest and smallest of them limits the run" if len(kinds) > 1 else ""
    yield Finding("gpus", found, "note" if limit else "ok", limit)
    if used := [
        f"GPU {g.gpu_index} {g.used_memory_mib / 1024:.1f} GiB" for g in gpus if g.used_memory_mib > 1024
    ]:
        advice = "stop the program that nvidia-smi names, or set CUDA_VISIBLE_DEVICES"
        yield Finding("gpus in use", ", ".join(used), "note", advice)


def _check_environment() -> Finding:
    shown = sorted(
        f"{name}={value}" for name, value in os.environ.items() if name.startswith(WATCHED_VARIABLES)
    )
    switches = [name for name in SLOW_NCCL_SWITCHES if os.environ.get(name, "0") not in ("0", "")]
    advice = f"unset {' '.join(switches)}: they switch off fast communication" if switches else ""
    return Finding("nccl environment", ", ".join(shown) or "none set", "note" if advice else "ok", advice)


def check_all_reduce(num_gpus: int) -> Finding:
    from toolkit.common.launch import last_output_lines, run_group

    num_ranks, backend = num_gpus or 2, "nccl" if num_gpus else "gloo"
    reduced = run_group("toolkit.doctor.all_reduce", [backend], num_ranks)
    if reduced.returncode:
        return Finding(
            "all-reduce",
            f"over {num_ranks} ranks failed: {last_output_lines(reduced, 3)}",
            "broken",
            "run again with NCCL_DEBUG=INFO; check NCCL_SOCKET_IFNAME, /dev/shm and the driver",
        )
    speed = reduced.stdout.rpartition("RESULT ")[2].strip()
    return Finding("all-reduce", f"{backend} over {pluralize(num_ranks, 'rank')}: correct, {speed}")


# --- Limits -------------------------------------------------------------------------------------------------


def _check_shared_memory() -> Finding:
    usage = shutil.disk_usage("/dev/shm")
    found = f"/dev/shm {usage.total / GIB:.1f} GiB, {usage.free / GIB:.1f} free"
    if usage.free >= 4 * GIB:
        return Finding("shared memory", found)
    advice = "loader workers and NCCL pass data through it: use docker run --ipc=host, or --shm-size=16g"
    return Finding("shared memory", found, "broken" if usage.free < GIB // 4 else "note", advice)
