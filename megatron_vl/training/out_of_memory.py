"""Messages for ranks that run out of memory, or lose a process of their loader, which often means the same.

They give torch's text, the estimate by part and the page of the documentation.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator

from megatron_vl.data.planned_rows import SHARED_MEMORY_ADVICE
from megatron_vl.data.source.store_reading import READING_ENDED_TEXT
from megatron_vl.estimate.memory import GIB, GPU_MEMORY_PARTS, stage_memories
from megatron_vl.system import host_memory
from megatron_vl.system.errors import HOST_MEMORY_PATTERN, UserError
from megatron_vl.training.resolved_run import ResolvedRun

MEMORY_PAGE_TEXT = "docs/pipelines.md says how to lower it: recompute, offload, more stages"

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
    is_host_memory = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    if not is_host_memory and not HOST_MEMORY_PATTERN.search(error_text):
        return None
    host_advice = host_memory.LOWER_HOST_MEMORY_ADVICE
    return (
        f"out of host memory ({_first_line(error_text)}): {host_memory.memory_limits_text()}."
        f" {host_advice[:1].upper()}{host_advice[1:]}"
    )


def _dead_loader_message(error: BaseException | None) -> str:
    """The message for the death of a process of the loader; empty for any other error and cause."""
    if error is not None and READING_ENDED_TEXT in str(error):
        return (
            f"{READING_ENDED_TEXT}. If it printed no error, it was killed from outside."
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
    message_parts = [f"out of GPU memory: {_first_line(error_text).removesuffix('.')}"]
    # An error in the estimate must not hide torch's text.
    with contextlib.suppress(Exception):
        message_parts.append(_estimate_text(resolved_run))
    return ". ".join([*message_parts, MEMORY_PAGE_TEXT])


def _estimate_text(resolved_run: ResolvedRun) -> str:
    from megatron.core import parallel_state as mpu

    stage = mpu.get_pipeline_model_parallel_rank() if mpu.model_parallel_is_initialized() else 0
    run = resolved_run
    stage_memory = stage_memories(run.config, run.spec, run.layout, run.dp)[stage]
    gib_by_part = {part: getattr(stage_memory, part) / GIB for part in GPU_MEMORY_PARTS}
    parts_text = ", ".join(f"{part} {size:.1f}" for part, size in gib_by_part.items() if size >= 0.1)
    total_gib = stage_memory.total_bytes / GIB
    return f"The estimate of pipeline stage {stage} is {total_gib:.1f} GiB ({parts_text})"


def _first_line(error_text: str) -> str:
    return " ".join(error_text.partition("\n")[0].split()) or "no more could be allocated"
