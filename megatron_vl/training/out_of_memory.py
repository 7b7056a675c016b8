"""Messages for ranks that run out of memory, or lose a process of their loader, which often means the same.
They say how much memory there was, what was estimated, and what would fit."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_vl import host_memory
from megatron_vl.data.planned_rows import PLANNER_ENDED
from megatron_vl.errors import UserError
from megatron_vl.planning.fit import advice
from megatron_vl.planning.gpus import calibration_for
from megatron_vl.planning.memory import PARTS, StageMemory, stage_memories
from megatron_vl.training.resolved_run import ResolvedRun

GIB = 2**30
FRAGMENTED = 0.1
"""If more than this share of the GPU's memory is reserved but not in use, memory counts as fragmented."""

_OF_GPU = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
    r"|cudaErrorMemoryAllocation|Cuda failure 2 'out of memory'"
)
_OF_HOST = re.compile(r"[Cc]an(no|')t allocate memory|std::bad_alloc|DefaultCPUAllocator: not enough memory")
_LOADER_PROCESS = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: ([\w ]+)|exited unexpectedly)"
)
"""torch's errors for the death of a process. It raises them in the main thread, wherever that is."""


class OutOfMemory(UserError, MemoryError):
    """A rank has no memory left, or has lost a process of its loader. The message says what to change."""


@dataclass(frozen=True)
class GpuMemory:
    """The memory of a GPU in GiB when an allocation failed, as far as it is known."""

    wanted: float | None
    """The size of the allocation."""
    allocated: float
    reserved: float
    total: float
    others: float = 0.0
    """Memory that other processes hold."""


@contextlib.contextmanager
def explained(resolved: ResolvedRun) -> Iterator[None]:
    """A context that replaces errors caused by a lack of memory, or by the death of a process of the loader,
    with :class:`OutOfMemory`."""
    try:
        yield
    except Exception as error:
        message = explain(error, resolved)
        if message is None:
            raise
        raise OutOfMemory(message) from error


def explain(error: Exception, resolved: ResolvedRun) -> str | None:
    """The message for an error caused by a lack of memory or a lost loader; None for any other error."""
    if isinstance(error, OutOfMemory):
        return None
    said = str(error)
    if type(error).__name__ == "OutOfMemoryError" or _OF_GPU.search(said):
        return _gpu_message(said, resolved)
    return host_message(error)


def host_message(error: BaseException) -> str | None:
    """The message for an error caused by a lack of host memory or a lost loader; None for any other error."""
    if message := _loader_message(error):
        return message
    said = str(error)
    of_host = isinstance(error, MemoryError) or isinstance(error, OSError) and error.errno == errno.ENOMEM
    if not of_host and not _OF_HOST.search(said):
        return None
    advice = _upper(host_memory.LESS_HOST_MEMORY)
    return f"out of host memory ({_first_line(said)}): {host_memory.limits()}. {advice}"


def _loader_message(error: BaseException | None) -> str:
    """The message for the death of a process of the loader; empty for any other error and cause."""
    if error is not None and PLANNER_ENDED in str(error):
        return (
            f"{PLANNER_ENDED}. If it printed no error, it was killed from outside. {host_memory.about_kill()}"
        )
    while error is not None and not (found := _LOADER_PROCESS.search(str(error))):
        error = error.__cause__ or error.__context__
    if error is None or not found:
        return ""

    signal_name = found[2] or "Killed"
    if signal_name == "Killed":
        return f"a process of the loader ({found[1]}) was killed from outside. {host_memory.about_kill()}"
    advice = "A media file may have crashed its decoder, or the shared memory (/dev/shm) is full"
    return f"a process of the loader ({found[1]}) was ended by a signal: {signal_name}. {advice}"


def _gpu_message(said: str, resolved: ResolvedRun) -> str:
    memory = read_gpu_message(said)
    if memory is None:
        return f"out of GPU memory: {_first_line(said)}"

    wanted = f" when {memory.wanted:.2f} GiB more were wanted" if memory.wanted is not None else ""
    parts = [
        f"out of GPU memory: {memory.allocated:.1f} GiB were allocated and {memory.reserved:.1f} reserved of"
        f" {memory.total:.1f} GiB{wanted}"
    ]
    if memory.others > 1:
        parts.append(f"Other processes hold {memory.others:.1f} GiB of this GPU: end them")
    if memory.reserved - memory.allocated > FRAGMENTED * memory.total:
        parts.append(
            f"{memory.reserved - memory.allocated:.1f} GiB are reserved but not in use: set"
            " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )

    # The estimate only adds to the message. An error in it must not hide the message.
    with contextlib.suppress(Exception):
        parts += _by_the_estimate(resolved, memory)
    return ". ".join(parts)


def read_gpu_message(said: str) -> GpuMemory | None:
    """Reads torch's message. Torch's statistics replace what it does not say. None without a GPU."""
    wanted = _gib(r"Tried to allocate ([\d.]+ \wi?B)", said)
    total = _gib(r"total capacity of ([\d.]+ \wi?B)", said)
    free = _gib(r"of which ([\d.]+ \wi?B) is free", said)
    in_use = _gib(r"this process has ([\d.]+ \wi?B) memory in use", said)
    allocated = _gib(r"([\d.]+ \wi?B) is allocated by PyTorch", said)
    unused = _gib(r"([\d.]+ \wi?B) is reserved by PyTorch but unallocated", said)

    if total is None or allocated is None or unused is None:
        import torch

        if not torch.cuda.is_available():
            return None
        allocated, total = torch.cuda.memory_allocated() / GIB, torch.cuda.mem_get_info()[1] / GIB
        unused = torch.cuda.memory_reserved() / GIB - allocated

    others = total - free - in_use if free is not None and in_use is not None else 0.0
    return GpuMemory(wanted, allocated, allocated + unused, total, max(0.0, others))


def _gib(pattern: str, said: str) -> float | None:
    found = re.search(pattern, said)
    if not found:
        return None
    number, unit = found[1].split()
    return float(number) * {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}[unit[0]] / GIB


# --- What would fit


def _by_the_estimate(resolved: ResolvedRun, memory: GpuMemory) -> list[str]:
    """Two sentences: the estimate for this stage, and the change that would fit."""
    config, spec, layout, dp = resolved.config, resolved.spec, resolved.layout, resolved.dp
    stage, rates = own_stage(), calibration_for(config.platform)
    expected = stage_memories(config, spec, layout, dp)[stage]
    said = [f"The estimate of pipeline stage {stage} is {expected.total / GIB:.1f} GiB ({_parts(expected)})"]

    # Memory beyond the estimate is assumed to be needed after any change, too.
    beyond = max(0.0, memory.allocated + (memory.wanted or 0.0) - expected.total / GIB)
    left = dataclasses.replace(rates, memory_gib=memory.total - memory.others - beyond)
    world_size = dp * layout.replica_ranks
    return [*said, advice(config, spec, world_size, left, near=True).removesuffix(".")]


def own_stage() -> int:
    from megatron.core import parallel_state as mpu

    return mpu.get_pipeline_model_parallel_rank() if mpu.model_parallel_is_initialized() else 0


def _parts(stage: StageMemory) -> str:
    gib = {part: getattr(stage, part) / GIB for part in PARTS}
    return ", ".join(f"{part} {size:.1f}" for part, size in gib.items() if size >= 0.1)


def _first_line(said: str) -> str:
    return " ".join(said.partition("\n")[0].split()) or "no more could be allocated"


def _upper(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
