"""Messages for ranks that run out of memory, or lose a process of their loader, which often means the same.

They give the memory of the GPU, the estimate, and options that would fit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_vl import host_memory
from megatron_vl.data.planned_rows import PLANNER_ENDED_TEXT, SHARED_MEMORY_ADVICE
from megatron_vl.errors import HOST_MEMORY_PATTERN, UserError
from megatron_vl.planning.gpus import calibration_for_platform
from megatron_vl.planning.memory import GIB, GPU_MEMORY_PARTS, StageMemory, stage_memories
from megatron_vl.planning.memory_check import fitting_options_advice
from megatron_vl.training.resolved_run import ResolvedRun

FRAGMENTED_SHARE = 0.1
"""If more than this share of the GPU's memory is reserved but not in use, memory counts as fragmented."""

_GPU_OOM_PATTERN = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
    r"|cudaErrorMemoryAllocation|Cuda failure 2 'out of memory'"
)
_LOADER_DEATH_PATTERN = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: ([\w ]+)|exited unexpectedly)"
)
"""torch's errors for the death of a loader's process. They are raised at any point of the main thread."""


class RankOutOfMemory(UserError, MemoryError):
    """A rank has no memory left, or has lost a process of its loader. The message says what to change."""


@dataclass(frozen=True)
class GpuMemory:
    """The memory of a GPU in GiB when an allocation failed, as far as it is known."""

    requested_gib: float | None
    """The size of the allocation."""
    allocated_gib: float
    reserved_gib: float
    total_gib: float
    other_processes_gib: float = 0.0
    """Memory that other processes hold."""


@contextlib.contextmanager
def explain_memory_errors(resolved_run: ResolvedRun) -> Iterator[None]:
    """A context that replaces errors for lack of memory, or of a loader's process, with RankOutOfMemory."""
    try:
        yield
    except Exception as error:
        message = memory_error_message(error, resolved_run)
        if message is None:
            raise
        raise RankOutOfMemory(message) from error


def memory_error_message(error: Exception, resolved_run: ResolvedRun) -> str | None:
    """The message for an error caused by a lack of memory or a lost loader; None for any other error."""
    if isinstance(error, RankOutOfMemory):
        return None
    error_text = str(error)
    if type(error).__name__ == "OutOfMemoryError" or _GPU_OOM_PATTERN.search(error_text):
        return _gpu_memory_message(error_text, resolved_run)
    return host_memory_message(error)


def host_memory_message(error: BaseException) -> str | None:
    """The message for an error caused by a lack of host memory or a lost loader; None for any other error."""
    if message := _dead_loader_message(error):
        return message
    error_text = str(error)
    is_host_memory = (
        isinstance(error, MemoryError) or isinstance(error, OSError) and error.errno == errno.ENOMEM
    )
    if not is_host_memory and not HOST_MEMORY_PATTERN.search(error_text):
        return None
    host_advice = host_memory.LOWER_HOST_MEMORY_ADVICE
    return (
        f"out of host memory ({_first_line(error_text)}): {host_memory.memory_limits_text()}."
        f" {host_advice[:1].upper()}{host_advice[1:]}"
    )


def _dead_loader_message(error: BaseException | None) -> str:
    """The message for the death of a process of the loader; empty for any other error and cause."""
    if error is not None and PLANNER_ENDED_TEXT in str(error):
        return (
            f"{PLANNER_ENDED_TEXT}. If it printed no error, it was killed from outside."
            f" {host_memory.explain_kill()}"
        )
    while error is not None and not (death_match := _LOADER_DEATH_PATTERN.search(str(error))):
        error = error.__cause__ or error.__context__
    if error is None or not death_match:
        return ""

    signal_name = death_match[2] or "Killed"
    if signal_name == "Killed":
        return (
            f"a process of the loader ({death_match[1]}) was killed from outside."
            f" {host_memory.explain_kill()}"
        )
    death_advice = (
        "A media file may have crashed its decoder, or the shared memory (/dev/shm) is full: enlarge it"
        f" ({SHARED_MEMORY_ADVICE})"
    )
    return f"a process of the loader ({death_match[1]}) was ended by a signal: {signal_name}. {death_advice}"


def _gpu_memory_message(error_text: str, resolved_run: ResolvedRun) -> str:
    gpu_memory = parse_gpu_message(error_text)
    if gpu_memory is None:
        return f"out of GPU memory: {_first_line(error_text)}"

    request_text = ""
    if gpu_memory.requested_gib is not None:
        request_text = f" when {gpu_memory.requested_gib:.2f} GiB more were wanted"
    message_parts = [
        f"out of GPU memory: {gpu_memory.allocated_gib:.1f} GiB were allocated and"
        f" {gpu_memory.reserved_gib:.1f} reserved of {gpu_memory.total_gib:.1f} GiB{request_text}"
    ]
    if gpu_memory.other_processes_gib > 1:
        message_parts.append(
            f"Other processes hold {gpu_memory.other_processes_gib:.1f} GiB of this GPU: end them"
        )
    if gpu_memory.reserved_gib - gpu_memory.allocated_gib > FRAGMENTED_SHARE * gpu_memory.total_gib:
        message_parts.append(
            f"{gpu_memory.reserved_gib - gpu_memory.allocated_gib:.1f} GiB are reserved but not in use: set"
            " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )

    # The estimate only adds to the message. An error in it must not hide the message.
    with contextlib.suppress(Exception):
        message_parts += _comparison_with_estimate(resolved_run, gpu_memory)
    return ". ".join(message_parts)


def parse_gpu_message(error_text: str) -> GpuMemory | None:
    """Reads the memory of the GPU from torch's message, or from torch itself if the message lacks numbers.

    Returns None if both are impossible, because there is no GPU.
    """
    requested_gib = _parse_gib(r"Tried to allocate ([\d.]+ \wi?B)", error_text)
    total_gib = _parse_gib(r"total capacity of ([\d.]+ \wi?B)", error_text)
    free_gib = _parse_gib(r"of which ([\d.]+ \wi?B) is free", error_text)
    in_use_gib = _parse_gib(r"this process has ([\d.]+ \wi?B) memory in use", error_text)
    allocated_gib = _parse_gib(r"([\d.]+ \wi?B) is allocated by PyTorch", error_text)
    unused_gib = _parse_gib(r"([\d.]+ \wi?B) is reserved by PyTorch but unallocated", error_text)

    if total_gib is None or allocated_gib is None or unused_gib is None:
        import torch

        if not torch.cuda.is_available():
            return None
        allocated_gib, total_gib = torch.cuda.memory_allocated() / GIB, torch.cuda.mem_get_info()[1] / GIB
        unused_gib = torch.cuda.memory_reserved() / GIB - allocated_gib

    other_processes_gib = (
        total_gib - free_gib - in_use_gib if free_gib is not None and in_use_gib is not None else 0.0
    )
    return GpuMemory(
        requested_gib, allocated_gib, allocated_gib + unused_gib, total_gib, max(0.0, other_processes_gib)
    )


def _parse_gib(size_pattern: str, error_text: str) -> float | None:
    size_match = re.search(size_pattern, error_text)
    if not size_match:
        return None
    number, size_unit = size_match[1].split()
    return float(number) * {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}[size_unit[0]] / GIB


# --- The estimate and options that would fit


def _comparison_with_estimate(resolved_run: ResolvedRun, gpu_memory: GpuMemory) -> list[str]:
    """Two sentences: the estimate for this stage, and the change that would fit."""
    config, spec, layout, dp = resolved_run.config, resolved_run.spec, resolved_run.layout, resolved_run.dp
    stage, gpu_calibration = own_pipeline_stage(), calibration_for_platform(config.platform)
    estimated_memory = stage_memories(config, spec, layout, dp)[stage]
    estimate_sentences = [
        f"The estimate of pipeline stage {stage} is {estimated_memory.total_bytes / GIB:.1f} GiB"
        f" ({_memory_parts_text(estimated_memory)})"
    ]

    # Memory beyond the estimate is assumed to be needed after any change, too.
    unestimated_gib = max(
        0.0, gpu_memory.allocated_gib + (gpu_memory.requested_gib or 0.0) - estimated_memory.total_bytes / GIB
    )
    reduced_calibration = dataclasses.replace(
        gpu_calibration, memory_gib=gpu_memory.total_gib - gpu_memory.other_processes_gib - unestimated_gib
    )
    return [
        *estimate_sentences,
        fitting_options_advice(
            config, spec, dp * layout.replica_ranks, reduced_calibration, keep_parallel_sizes=True
        ).removesuffix("."),
    ]


def own_pipeline_stage() -> int:
    from megatron.core import parallel_state as mpu

    return mpu.get_pipeline_model_parallel_rank() if mpu.model_parallel_is_initialized() else 0


def _memory_parts_text(stage_memory: StageMemory) -> str:
    gib_by_part = {part: getattr(stage_memory, part) / GIB for part in GPU_MEMORY_PARTS}
    return ", ".join(f"{part} {size:.1f}" for part, size in gib_by_part.items() if size >= 0.1)


def _first_line(error_text: str) -> str:
    return " ".join(error_text.partition("\n")[0].split()) or "no more could be allocated"
