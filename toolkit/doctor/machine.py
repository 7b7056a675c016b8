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

from megatron_vl.planning.gpus import Gpu, list_gpus, parse_gpus
from megatron_vl.words import counted
from toolkit.doctor import Finding, broken, note, ok

__all__ = ["Gpu", "list_gpus", "parse_gpus"]
GIB = 2**30
INSTALL_GPU = "pip install -e '.[gpu]' -c constraints.txt --no-build-isolation"
TE_PARTS = (
    "transformer-engine",
    "transformer-engine-torch",
    "transformer-engine-cu12",
    "transformer-engine-cu13",
)
"""Distributions that together form Transformer Engine."""
SLOW_NCCL = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_NVLS_DISABLE")
"""Switches that people set while they look for a fault, and then forget."""


def check_machine(folder: Path, with_nccl: bool = False) -> list[Finding]:
    """Returns all findings about this machine.

    Args:
        folder: where checkpoints are written; its disk is checked.
        with_nccl: also reduce a tensor over all GPUs (without GPUs, over two gloo processes).
    """
    imports = _start_imports()
    gpus = list_gpus()
    findings = [
        _python(),
        *_requirements(),
        *_gpu_findings(gpus),
        *_imports(imports, bool(gpus)),
        *_environment(bool(gpus)),
    ]
    findings += [_shared_memory(), _open_files(), check_disk(folder, 0)]
    if with_nccl:
        findings.append(all_reduce(len(gpus)))
    return findings


# --- Packages -----------------------------------------------------------------------------------------------


def _python() -> Finding:
    found = f"{sys.version.split()[0]} ({sys.executable})"
    good = sys.version_info >= (3, 12)
    return (
        ok("python", found)
        if good
        else broken("python", found, "use Python 3.12 or later; Megatron-core needs it")
    )


def _requirements() -> Iterator[Finding]:
    """Compares installed versions with the requirements of this package."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in importlib.metadata.requires("megatron-vl") or []]
    except importlib.metadata.PackageNotFoundError:
        yield note(
            "packages", "megatron-vl is not installed, so its requirements are unknown", "pip install -e ."
        )
        return

    versions = {}
    wrong = False
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed(requirement.name)
        versions[requirement.name] = version
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong = True
            advice = f"pip install '{requirement.name}{requirement.specifier}' -c constraints.txt"
            found = f"{version or 'not installed'}, required: {requirement.specifier or 'any version'}"
            yield broken(requirement.name, found, advice)

    if not wrong:
        named = ("torch", "megatron-core", "megatron-energon", "transformers", "safetensors")
        yield ok("packages", ", ".join(f"{name} {versions[name]}" for name in named if name in versions))


def installed(name: str) -> str | None:
    """The version of an installed distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


_PROBES = {
    "torch": (
        """import json, torch
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else ""
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus, "nccl": nccl}))"""
    ),
    "megatron.core": "import megatron.core; print('{}')",
    "transformer_engine": "import transformer_engine.pytorch; print('{}')",
    "flash_attn": "import flash_attn; print('{}')",
}


def _start_imports() -> dict[str, subprocess.Popen[str]]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return {name: subprocess.Popen([sys.executable, "-c", code], **pipes) for name, code in _PROBES.items()}  # type: ignore[call-overload]


def _imports(started: dict[str, subprocess.Popen[str]], has_gpu: bool) -> list[Finding]:
    results: dict[str, dict | None] = {}
    errors: dict[str, str] = {}
    for name, process in started.items():
        out, err = process.communicate()
        results[name] = json.loads(out.strip().splitlines()[-1]) if process.returncode == 0 else None
        errors[name] = err.strip().splitlines()[-1] if err.strip() else f"exit code {process.returncode}"
    return [
        _torch(results["torch"], errors["torch"], has_gpu),
        _transformer_engine(results["transformer_engine"] is not None, errors["transformer_engine"], has_gpu),
        _flash_attention(results["flash_attn"] is not None, errors["flash_attn"]),
        _core(results["megatron.core"] is not None, errors["megatron.core"]),
    ]


def _torch(facts: dict | None, error: str, has_gpu: bool) -> Finding:
    if facts is None:
        return broken(
            "torch", f"does not import: {error}", "make setup, or: pip install torch -c constraints.txt"
        )
    found = f"{facts['version']}, built for {'CUDA ' + facts['cuda'] if facts['cuda'] else 'CPU'}"
    if has_gpu and not facts["gpus"]:
        return broken(
            "torch",
            f"{found}, sees no GPU, but nvidia-smi does",
            "the driver is older than this CUDA, or CUDA_VISIBLE_DEVICES hides the GPUs: "
            "update the driver, or unset it",
        )
    return ok(
        "torch", found + (f", {facts['gpus']} GPUs, NCCL {facts['nccl']}" if facts["gpus"] else ", no GPU")
    )


def _transformer_engine(imports: bool, error: str, has_gpu: bool) -> Finding:
    parts = {name: version for name in TE_PARTS if (version := installed(name))}
    if imports:
        return ok(
            "transformer engine",
            ", ".join(f"{name} {version}" for name, version in parts.items()) or "found on the path",
        )
    if parts or "No module named 'transformer_engine'" not in error:
        found = f"half installed ({', '.join(parts) or 'no distribution'}): {error}"
        advice = f"pip uninstall -y {' '.join(TE_PARTS)}" + (
            f", then {INSTALL_GPU}" if has_gpu else "; it is not needed on CPU"
        )
        return broken("transformer engine", found, advice + ". Until then `import megatron.core` can fail")
    if has_gpu:
        return broken("transformer engine", "not installed; training on a GPU needs it", INSTALL_GPU)
    return ok("transformer engine", "not installed; needed only on GPUs")


def _flash_attention(imports: bool, error: str) -> Finding:
    version = installed("flash-attn")
    if imports:
        return ok("flash-attn", version or "found on the path")
    if version or "No module named 'flash_attn'" not in error:
        return broken(
            "flash-attn",
            f"installed, but does not import: {error}",
            f"pip uninstall -y flash-attn, then {INSTALL_GPU}",
        )
    return ok("flash-attn", "not installed; needed only for the attention backend flash_attn")


def _core(imports: bool, error: str) -> Finding:
    version = installed("megatron-core")
    if imports:
        return ok("megatron.core", f"{version} imports")
    return broken(
        "megatron.core", f"{version} does not import: {error}", "fix the packages above, then run make setup"
    )


# --- GPUs ---------------------------------------------------------------------------------------------------


def _gpu_findings(gpus: list[Gpu]) -> Iterator[Finding]:
    if not gpus:
        yield ok(
            "gpus", "none; training runs on the CPU (platform: cpu), and nothing but training needs GPUs"
        )
        return

    kinds = sorted({f"{gpu.name}, {gpu.memory / 1024:.0f} GiB, driver {gpu.driver}" for gpu in gpus})
    if len(kinds) > 1:
        yield note(
            "gpus",
            f"{len(gpus)} GPUs of several kinds: {'; '.join(kinds)}",
            "the slowest and smallest of them limits the run",
        )
    else:
        yield ok("gpus", f"{len(gpus)} x {kinds[0]}")

    busy = [gpu for gpu in gpus if gpu.used > 1024]
    if busy:
        used = ", ".join(f"GPU {gpu.index} {gpu.used / 1024:.1f} GiB" for gpu in busy)
        yield note(
            "gpus in use",
            used,
            "another program uses their memory; nvidia-smi names it: stop it, or set CUDA_VISIBLE_DEVICES",
        )


def _environment(has_gpu: bool) -> Iterator[Finding]:
    """Checks the variables that change how NCCL and the allocator work."""
    prefixes = (
        "NCCL_",
        "TORCH_NCCL_",
        "CUDA_VISIBLE",
        "CUDA_DEVICE_MAX",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
    )

    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}
    shown = ", ".join(f"{name}={value}" for name, value in found.items()) or "none set"
    slow = [name for name in SLOW_NCCL if found.get(name, "0") not in ("0", "")]
    if slow:
        yield note(
            "nccl environment",
            shown,
            f"unset {' '.join(slow)}: they switch off fast communication",
        )
    else:
        yield ok("nccl environment", shown)

    alloc = found.get("PYTORCH_ALLOC_CONF", found.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    if has_gpu and "expandable_segments:True" not in alloc:
        yield note(
            "allocator",
            "expandable_segments is off; pictures of different sizes fragment the memory",
            "start with megatron-vl train, or export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )


def all_reduce(gpus: int) -> Finding:
    """Runs a real all-reduce over all GPUs; without GPUs, over two gloo processes."""
    from toolkit.launch import end_of, run_group

    ranks = gpus or 2
    done = run_group("toolkit.doctor.all_reduce", ["nccl" if gpus else "gloo"], ranks)
    if done.returncode:
        advice = (
            "run again with NCCL_DEBUG=INFO; check the network interface (NCCL_SOCKET_IFNAME), "
            "/dev/shm and the driver"
        )
        return broken("all-reduce", f"over {ranks} ranks failed: {end_of(done, 3)}", advice)
    facts = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    speed = (
        f"{facts['bytes'] / 2**20:.0f} MiB in {facts['seconds'] * 1e3:.2f} ms, {facts['bus_gb_s']:.1f} GB/s "
        "on the bus"
    )
    return ok("all-reduce", f"{facts['backend']} over {counted(ranks, 'rank')}: correct, {speed}")


# --- Limits -------------------------------------------------------------------------------------------------


def _shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    if not path.is_dir():
        return note("shared memory", f"{path} is missing", "set data.num_workers to 0, or mount it")
    usage = shutil.disk_usage(path)
    found = f"{path} {usage.total / GIB:.1f} GiB, {usage.free / GIB:.1f} free"
    advice = (
        "loader workers pass rows through it, NCCL its buffers: use docker run --ipc=host, or --shm-size=16g"
    )
    if usage.free < GIB // 4:
        return broken("shared memory", found, advice)
    return note("shared memory", found, advice) if usage.free < 4 * GIB else ok("shared memory", found)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} (this shell), {hard} (maximum)"
    return (
        note("open files", found, "run ulimit -n 65536; each loader worker opens many shards")
        if soft < 4096
        else ok("open files", found)
    )


def check_disk(folder: Path, needed: int) -> Finding:
    """Checks the free space where checkpoints go, and whether that folder is writable.

    Args:
        needed: bytes that will be written; 0 if unknown.
    """
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    found = f"{free / GIB:.0f} GiB free at {folder}" + (
        f", checkpoints need {needed / GIB:.1f} GiB" if needed else ""
    )
    if not os.access(existing, os.W_OK):
        return broken(
            "disk", f"{existing} is not writable", "give another checkpoint.dir or write permission"
        )
    if needed > free:
        return broken("disk", found, "free some space, give another checkpoint.dir, or lower checkpoint.keep")

    return (
        note("disk", found, "checkpoints of a real-size model need tens of GiB")
        if free < 20 * GIB and not needed
        else ok("disk", found)
    )
