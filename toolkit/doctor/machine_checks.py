"""Checks Python packages, GPUs, communication and limits of this machine.

Packages are imported in separate processes, so that one that crashes at import is reported as a finding.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_vl.planning.gpus import GpuInfo, query_gpus
from megatron_vl.plurals import pluralize
from toolkit.doctor import Finding, broken_finding, note_finding, ok_finding

BYTES_PER_GIB = 2**30
INSTALL_GPU = "pip install -e '.[gpu]' -c constraints.txt --no-build-isolation"
TE_DISTRIBUTIONS = (
    "transformer-engine",
    "transformer-engine-torch",
    "transformer-engine-cu12",
    "transformer-engine-cu13",
)
"""Distributions that together form Transformer Engine."""
SLOW_NCCL_SWITCHES = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_NVLS_DISABLE")
"""Switches that people set while they look for a fault, and then forget."""
WATCHED_VARIABLES = (
    "NCCL_",
    "TORCH_NCCL_",
    "CUDA_VISIBLE",
    "CUDA_DEVICE_MAX",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
"""Beginnings of the names of variables that are shown."""


def check_machine(checkpoint_dir: Path, with_nccl: bool = False) -> list[Finding]:
    """Returns all findings about this machine.

    Args:
        checkpoint_dir: where checkpoints are written; its disk is checked.
        with_nccl: also reduce a tensor over all GPUs (without GPUs, over two gloo processes).
    """
    import_processes = _start_imports()
    gpus = query_gpus()
    findings = [
        _check_python(),
        *_check_requirements(),
        *_gpu_findings(gpus),
        *_check_imports(import_processes, bool(gpus)),
        *_check_environment(bool(gpus)),
        _check_shared_memory(),
        _check_open_files(),
        check_disk(checkpoint_dir, 0),
    ]
    if with_nccl:
        findings.append(check_all_reduce(len(gpus)))
    return findings


# --- Packages -----------------------------------------------------------------------------------------------


def _check_python() -> Finding:
    version_text = f"{sys.version.split()[0]} ({sys.executable})"
    return (
        ok_finding("python", version_text)
        if sys.version_info >= (3, 12)
        else broken_finding("python", version_text, "use Python 3.12 or later; Megatron-core needs it")
    )


def _check_requirements() -> Iterator[Finding]:
    """Compares installed versions with the requirements of this package."""
    from packaging.requirements import Requirement

    try:
        required_packages = [Requirement(text) for text in importlib.metadata.requires("megatron-vl") or []]
    except importlib.metadata.PackageNotFoundError:
        yield note_finding(
            "packages", "megatron-vl is not installed, so its requirements are unknown", "pip install -e ."
        )
        return

    version_by_name = {}
    has_mismatch = False
    for requirement in required_packages:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        package_version = installed_version(requirement.name)
        version_by_name[requirement.name] = package_version
        if package_version is None or not requirement.specifier.contains(package_version, prereleases=True):
            has_mismatch = True
            advice = f"pip install '{requirement.name}{requirement.specifier}' -c constraints.txt"
            mismatch_text = (
                f"{package_version or 'not installed'}, required: {requirement.specifier or 'any version'}"
            )
            yield broken_finding(requirement.name, mismatch_text, advice)

    if not has_mismatch:
        shown_names = ("torch", "megatron-core", "megatron-energon", "transformers", "safetensors")
        yield ok_finding(
            "packages",
            ", ".join(f"{name} {version_by_name[name]}" for name in shown_names if name in version_by_name),
        )


def installed_version(distribution_name: str) -> str | None:
    """The version of an installed distribution, None if it is not installed."""
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
    "megatron.core": "import megatron.core; print('{}')",
    "transformer_engine": "import transformer_engine.pytorch; print('{}')",
    "flash_attn": "import flash_attn.cute.interface; print('{}')",
}


def _start_imports() -> dict[str, subprocess.Popen[str]]:
    popen_arguments = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return {
        name: subprocess.Popen([sys.executable, "-c", code], **popen_arguments)  # type: ignore[call-overload]
        for name, code in _IMPORT_PROBES.items()
    }


def _check_imports(import_processes: dict[str, subprocess.Popen[str]], has_gpu: bool) -> list[Finding]:
    result_by_module: dict[str, dict | None] = {}
    error_by_module: dict[str, str] = {}
    for name, process in import_processes.items():
        stdout_text, stderr_text = process.communicate()
        error_lines = stderr_text.strip().splitlines()
        error_by_module[name] = error_lines[-1] if error_lines else f"exit code {process.returncode}"
        result_by_module[name] = None
        if process.returncode == 0:
            result_by_module[name] = json.loads(stdout_text.strip().splitlines()[-1])

    is_importable = {name: result is not None for name, result in result_by_module.items()}
    te_name = "transformer_engine"
    return [
        _check_torch(result_by_module["torch"], error_by_module["torch"], has_gpu),
        _check_transformer_engine(is_importable[te_name], error_by_module[te_name], has_gpu),
        _check_flash_attention(is_importable["flash_attn"], error_by_module["flash_attn"], has_gpu),
        _check_core(is_importable["megatron.core"], error_by_module["megatron.core"]),
    ]


def _check_torch(torch_facts: dict | None, error_text: str, has_gpu: bool) -> Finding:
    if torch_facts is None:
        return broken_finding(
            "torch", f"does not import: {error_text}", "make setup, or: pip install torch -c constraints.txt"
        )
    cuda_text = f"CUDA {torch_facts['cuda']}" if torch_facts["cuda"] else "CPU"
    version_text = f"{torch_facts['version']}, built for {cuda_text}"
    if has_gpu and not torch_facts["gpus"]:
        return broken_finding(
            "torch",
            f"{version_text}, sees no GPU, but nvidia-smi does",
            "the driver is older than this CUDA, or CUDA_VISIBLE_DEVICES hides the GPUs: "
            "update the driver, or unset it",
        )
    gpus_text = f"{torch_facts['gpus']} GPUs, NCCL {torch_facts['nccl']}" if torch_facts["gpus"] else "no GPU"
    return ok_finding("torch", f"{version_text}, {gpus_text}")


def _check_transformer_engine(is_importable: bool, error_text: str, has_gpu: bool) -> Finding:
    version_by_name = {}
    for name in TE_DISTRIBUTIONS:
        if distribution_version := installed_version(name):
            version_by_name[name] = distribution_version

    if is_importable:
        version_texts = [f"{name} {version}" for name, version in version_by_name.items()]
        return ok_finding("transformer engine", ", ".join(version_texts) or "found on the path")
    if version_by_name or "No module named 'transformer_engine'" not in error_text:
        finding_text = f"half installed ({', '.join(version_by_name) or 'no distribution'}): {error_text}"
        advice = f"pip uninstall -y {' '.join(TE_DISTRIBUTIONS)}" + (
            f", then {INSTALL_GPU}" if has_gpu else "; it is not needed on CPU"
        )
        return broken_finding(
            "transformer engine", finding_text, advice + ". Until then `import megatron.core` can fail"
        )
    if has_gpu:
        return broken_finding("transformer engine", "not installed; training on a GPU needs it", INSTALL_GPU)
    return ok_finding("transformer engine", "not installed; needed only on GPUs")


def _check_flash_attention(is_importable: bool, error_text: str, has_gpu: bool) -> Finding:
    name = "flash-attn-4"
    package_version = installed_version(name)
    if is_importable:
        return ok_finding(name, package_version or "found on the path")
    if package_version:
        return broken_finding(
            name,
            f"installed, but does not import: {error_text}",
            f"pip uninstall -y {name}, then {INSTALL_GPU}",
        )
    if has_gpu:
        return note_finding(
            name, "not installed; on Hopper and Blackwell, attention is slower without it", INSTALL_GPU
        )
    return ok_finding(name, "not installed; needed only on GPUs")


def _check_core(is_importable: bool, error_text: str) -> Finding:
    package_version = installed_version("megatron-core")
    if is_importable:
        return ok_finding("megatron.core", f"{package_version} imports")
    return broken_finding(
        "megatron.core",
        f"{package_version} does not import: {error_text}",
        "fix the packages above, then run make setup",
    )


# --- GPUs ---------------------------------------------------------------------------------------------------


def _gpu_findings(gpus: list[GpuInfo]) -> Iterator[Finding]:
    if not gpus:
        yield ok_finding(
            "gpus", "none; training runs on the CPU (platform: cpu), and nothing but training needs GPUs"
        )
        return

    gpu_kinds = {
        f"{gpu.gpu_name}, {gpu.total_memory_mib / 1024:.0f} GiB, driver {gpu.driver_version}" for gpu in gpus
    }
    if len(gpu_kinds) > 1:
        yield note_finding(
            "gpus",
            f"{len(gpus)} GPUs of several kinds: {'; '.join(sorted(gpu_kinds))}",
            "the slowest and smallest of them limits the run",
        )
    else:
        yield ok_finding("gpus", f"{len(gpus)} x {gpu_kinds.pop()}")

    memory_texts = []
    for gpu in gpus:
        if gpu.used_memory_mib > 1024:
            memory_texts.append(f"GPU {gpu.gpu_index} {gpu.used_memory_mib / 1024:.1f} GiB")
    if memory_texts:
        yield note_finding(
            "gpus in use",
            ", ".join(memory_texts),
            "another program uses their memory; nvidia-smi names it: stop it, or set CUDA_VISIBLE_DEVICES",
        )


def _check_environment(has_gpu: bool) -> Iterator[Finding]:
    """Checks the variables that change how NCCL and the allocator work."""
    set_variables = {}
    for name, value in sorted(os.environ.items()):
        if name.startswith(WATCHED_VARIABLES):
            set_variables[name] = value

    variables_text = ", ".join(f"{name}={value}" for name, value in set_variables.items()) or "none set"
    slow_switches = [name for name in SLOW_NCCL_SWITCHES if set_variables.get(name, "0") not in ("0", "")]
    if slow_switches:
        yield note_finding(
            "nccl environment",
            variables_text,
            f"unset {' '.join(slow_switches)}: they switch off fast communication",
        )
    else:
        yield ok_finding("nccl environment", variables_text)

    allocator_settings = set_variables.get(
        "PYTORCH_ALLOC_CONF", set_variables.get("PYTORCH_CUDA_ALLOC_CONF", "")
    )
    if has_gpu and "expandable_segments:True" not in allocator_settings:
        yield note_finding(
            "allocator",
            "expandable_segments is off; pictures of different sizes fragment the memory",
            "start with megatron-vl train, or export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )


def check_all_reduce(num_gpus: int) -> Finding:
    """Runs a real all-reduce over all GPUs, or over two gloo processes if there are none."""
    from toolkit.launch import last_output_lines, run_group

    num_ranks = num_gpus or 2
    completed_group = run_group("toolkit.doctor.all_reduce", ["nccl" if num_gpus else "gloo"], num_ranks)
    if completed_group.returncode:
        advice = (
            "run again with NCCL_DEBUG=INFO; check the network interface (NCCL_SOCKET_IFNAME), "
            "/dev/shm and the driver"
        )
        return broken_finding(
            "all-reduce", f"over {num_ranks} ranks failed: {last_output_lines(completed_group, 3)}", advice
        )
    reduce_facts = json.loads(
        [line for line in completed_group.stdout.splitlines() if line.startswith("{")][-1]
    )
    speed_text = (
        f"{reduce_facts['bytes'] / 2**20:.0f} MiB in {reduce_facts['seconds'] * 1e3:.2f} ms, "
        f"{reduce_facts['bus_gb_s']:.1f} GB/s on the bus"
    )
    return ok_finding(
        "all-reduce", f"{reduce_facts['backend']} over {pluralize(num_ranks, 'rank')}: correct, {speed_text}"
    )


# --- Limits -------------------------------------------------------------------------------------------------


def _check_shared_memory(shared_memory_path: Path = Path("/dev/shm")) -> Finding:
    if not shared_memory_path.is_dir():
        return note_finding(
            "shared memory", f"{shared_memory_path} is missing", "set data.num_workers to 0, or mount it"
        )
    disk_usage = shutil.disk_usage(shared_memory_path)
    usage_text = (
        f"{shared_memory_path} {disk_usage.total / BYTES_PER_GIB:.1f} GiB, "
        f"{disk_usage.free / BYTES_PER_GIB:.1f} free"
    )
    advice = (
        "loader workers pass rows through it, NCCL its buffers: use docker run --ipc=host, or --shm-size=16g"
    )
    if disk_usage.free < BYTES_PER_GIB // 4:
        return broken_finding("shared memory", usage_text, advice)
    return (
        note_finding("shared memory", usage_text, advice)
        if disk_usage.free < 4 * BYTES_PER_GIB
        else ok_finding("shared memory", usage_text)
    )


def _check_open_files() -> Finding:
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits_text = f"{soft_limit} (this shell), {hard_limit} (maximum)"
    return (
        note_finding("open files", limits_text, "run ulimit -n 65536; each loader worker opens many shards")
        if soft_limit < 4096
        else ok_finding("open files", limits_text)
    )


def check_disk(checkpoint_dir: Path, needed_bytes: int) -> Finding:
    """Checks the free space where checkpoints go, and whether that folder is writable.

    Args:
        needed_bytes: bytes that will be written; 0 if unknown.
    """
    existing_dir = checkpoint_dir.absolute()
    while not existing_dir.exists():
        existing_dir = existing_dir.parent
    free_bytes = shutil.disk_usage(existing_dir).free
    space_text = f"{free_bytes / BYTES_PER_GIB:.0f} GiB free at {checkpoint_dir}" + (
        f", checkpoints need {needed_bytes / BYTES_PER_GIB:.1f} GiB" if needed_bytes else ""
    )
    if not os.access(existing_dir, os.W_OK):
        return broken_finding(
            "disk", f"{existing_dir} is not writable", "give another checkpoint.dir or write permission"
        )
    if needed_bytes > free_bytes:
        return broken_finding(
            "disk", space_text, "free some space, give another checkpoint.dir, or lower checkpoint.keep"
        )

    return (
        note_finding("disk", space_text, "checkpoints of a real-size model need tens of GiB")
        if free_bytes < 20 * BYTES_PER_GIB and not needed_bytes
        else ok_finding("disk", space_text)
    )
