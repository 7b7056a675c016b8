"""The differences between CUDA and CPU.

:func:`get_platform` decides once per process. On CPU it also makes Megatron-core's CUDA calls work (see
:mod:`megatron_vl.platform.cpu`), so it must be called before a Megatron-core module is built.
"""

from dataclasses import dataclass

import torch

from megatron_vl.core_fixes.core_version import check_core_version
from megatron_vl.system.errors import UserError

OLDEST_CAPABILITY = (8, 0)
"""Ampere. Volta (7.0) and Turing (7.5) have no bfloat16 in Tensor Cores, and no fused attention."""


class PlatformError(UserError, RuntimeError):
    """This machine or process cannot run on the requested platform."""


@dataclass(frozen=True)
class Platform:
    """The platform of a process: its name, its communication and its memory."""

    name: str
    """``cuda`` or ``cpu``."""
    distributed_backend: str
    has_transformer_engine: bool
    capability: tuple[int, int] = (0, 0)
    """Compute capability of this process's GPU: (9, 0) is Hopper. (0, 0) on CPU."""

    @property
    def device(self) -> torch.device:
        if self.name == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def synchronize(self) -> None:
        """Waits until the GPU has finished. On CPU, it does nothing."""
        if self.name == "cuda":
            torch.cuda.synchronize()

    def total_memory_gib(self) -> float | None:
        """The total memory of this rank's GPU; None on CPU."""
        return torch.cuda.mem_get_info()[1] / 2**30 if self.name == "cuda" else None

    def memory_usage(self) -> tuple[int, int]:
        """(bytes that tensors use on the GPU, their peak); on CPU, 0 and a very large number."""
        if self.name != "cuda":
            return 0, 1 << 60
        allocated_bytes = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]
        return allocated_bytes["current"], allocated_bytes["peak"]

    def peak_memory_gib(self) -> float:
        """Peak memory of the process so far: allocated on the GPU, or resident on the CPU."""
        if self.name == "cuda":
            return torch.cuda.max_memory_allocated() / 2**30
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


_process_platform: Platform | None = None


def get_platform(platform_name: str = "auto") -> Platform:
    """The platform of this process. The first call decides.

    Args:
        platform_name: ``auto`` (CUDA if there is a GPU), ``cuda`` or ``cpu``.
    """
    global _process_platform
    if _process_platform is None:
        check_core_version()
        _process_platform = _make_platform(
            ("cuda" if torch.cuda.is_available() else "cpu") if platform_name == "auto" else platform_name
        )
    elif platform_name not in ("auto", _process_platform.name):
        raise PlatformError(
            f"platform {platform_name} was requested, but this process already runs on"
            f" {_process_platform.name}"
        )
    return _process_platform


def _make_platform(platform_name: str) -> Platform:
    if platform_name == "cpu":
        from megatron_vl.platform import cpu

        cpu.install_cpu_platform()
        return Platform("cpu", "gloo", False)
    if not torch.cuda.is_available():
        raise PlatformError("platform cuda was requested, but torch sees no GPU; use platform: cpu")
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST_CAPABILITY:
        raise PlatformError(
            f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]};"
            " Transformer Engine and bfloat16 need 8.0 (Ampere) or later. Use another GPU, or platform: cpu"
        )
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError as error:
        raise PlatformError(
            f"Transformer Engine cannot be imported ({error}); install it with: pip install -e .[gpu]"
        ) from error
    return Platform("cuda", "nccl", True, capability)
