"""Messages for ranks that run out of memory, or lose a process of their loader, which often means the same.

They give torch's text, the estimate by part and the page of the documentation.
"""

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
    except RankOutOfMemory:
        raise
    except Exception as error:
        is_gpu_memory = type(error).__name__ == "OutOfMemoryError" or _GPU_OOM_PATTERN.search(str(error))
        message = (
            gpu_memory_message(str(error), resolved_run) if is_gpu_memory else host_memory_message(error)
        )
        if message is None:
            raise
        raise RankOutOfMemory(message) from error


def gpu_memory_message(error_text: str, run: ResolvedRun) -> str:
    parts = [f"out of GPU memory: {_first_line(error_text).removesuffix('.')}"]
    # An error in the estimate must not hide torch's text.
    with contextlib.suppress(Exception):
        from megatron.core import parallel_state as mpu

        stage = mpu.get_pipeline_model_parallel_rank() if mpu.model_parallel_is_initialized() else 0
        memory = [*stage_memories(run.config, run.spec, run.layout, run.dp)][stage]
        gib_by_part = {part: getattr(memory, part) / GIB for part in GPU_MEMORY_PARTS}
        parts_text = ", ".join(f"{part} {gib:.1f}" for part, gib in gib_by_part.items() if gib >= 0.1)
        total = memory.total_bytes / GIB
        parts.append(f"The estimate of pipeline stage {stage} is {total:.1f} GiB ({parts_text})")
    return ". ".join([*parts, "docs/pipelines.md says how to lower it: recompute, offload, more stages"])


def host_memory_message(error: BaseException) -> str | None:
    """The message for an error caused by a lack of host memory or a lost loader; None for any other error."""
    if READING_ENDED_TEXT in str(error):
        advice = f"If it printed no error, it was killed from outside. {host_memory.KILL_ADVICE}"
        return f"{READING_ENDED_TEXT}. {advice}"
    cause: BaseException | None = error
    while cause is not None:  # others may wrap torch's error
        if death := _LOADER_DEATH_PATTERN.search(str(cause)):
            pids, signal_name = death[1], death[2] or "Killed"
            if signal_name == "Killed":
                return f"a process of the loader ({pids}) was killed from outside. {host_memory.KILL_ADVICE}"
            return (
                f"a process of the loader ({pids}) was ended by a signal: {signal_name}. A media file may"
                " have crashed its decoder, or the shared memory (/dev/shm) is full: enlarge it"
                f" ({SHARED_MEMORY_ADVICE})"
            )
        cause = cause.__cause__ or cause.__context__

    is_host_memory = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    if not is_host_memory and not HOST_MEMORY_PATTERN.search(str(error)):
        return None
    advice = host_memory.LOWER_HOST_MEMORY_ADVICE
    limits = host_memory.memory_limits_text()
    return f"out of host memory ({_first_line(str(error))}): {limits}. {advice[:1].upper()}{advice[1:]}"


def _first_line(error_text: str) -> str:
    return " ".join(error_text.partition("\n")[0].split()) or "no more could be allocated"
