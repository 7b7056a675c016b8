"""What a rank says when it has no memory left. The lack itself is tested in test_faults.py and on GPUs."""

import errno
import re
from pathlib import Path

import pytest

from megatron_vl.config import TrainConfig, parse_config
from megatron_vl.spec.families import read_spec
from megatron_vl.training.out_of_memory import RankOutOfMemory, explain_memory_errors
from tests.support.planned import estimate_stage_memory, planned_run

HF = Path(__file__).parents[1] / "hf_configs" / "Qwen2.5-VL-7B-Instruct.json"
TORCH = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which"
    " 511.94 MiB is free. Including non-PyTorch memory, this process has 48.61 GiB memory in use."
)
"""The beginning of what torch 2.11.0 writes."""


class OutOfMemoryError(RuntimeError):
    """As torch's own is called, of which no instance can be had without a GPU."""


def config(*options: str) -> TrainConfig:
    common = ["--model.hf", str(HF), "--global_batch_size", "8", "--data.seq_len", "8192"]
    return parse_config([*common, *options])


def message_of(error: Exception, *options: str, ranks: int = 4) -> str:
    run = planned_run(config(*options), read_spec(HF), ranks)
    with pytest.raises(RankOutOfMemory) as raised, explain_memory_errors(run):
        raise error
    return str(raised.value)


def test_message_gives_torchs_text_the_estimate_and_the_page() -> None:
    said = message_of(OutOfMemoryError(TORCH), "--parallel.pp", "2", ranks=2)
    of_stage = estimate_stage_memory(config("--parallel.pp", "2"), read_spec(HF), 2)[0].total_bytes / 2**30
    assert said.startswith(f"out of GPU memory: {TORCH} ")
    assert f" The estimate of pipeline stage 0 is {of_stage:.1f} GiB (weights " in said
    assert said.endswith("docs/pipelines.md says how to lower it: recompute, offload, more stages")


WORKER = "DataLoader worker (pid 4711) is killed by signal: "
KILLED = RuntimeError(f"{WORKER}Killed. ")
WRAPPED = RuntimeError("backward failed")
WRAPPED.__cause__ = KILLED
NO_HOST_MEMORY = r"out of host memory \(.*this process holds.*data.num_workers"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), NO_HOST_MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), NO_HOST_MEMORY),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] can't allocate memory: you"), NO_HOST_MEMORY),
        # torch raises its error wherever the main thread is, and others may wrap it.
        (KILLED, r"a process of the loader \(4711\) was killed from outside\. "),
        (WRAPPED, r"a process of the loader \(4711\) was killed from outside\. "),
        (RuntimeError(f"{WORKER}Segmentation fault. "), r".* by a signal: Segmentation fault\. A media file"),
    ],
)
def test_lack_of_host_memory_and_lost_processes_are_named(error: Exception, message: str) -> None:
    assert re.match(message, message_of(error))


def test_other_errors_stay_what_they_are() -> None:
    run = planned_run(config(), read_spec(HF), 4)
    for error in (OSError(errno.ENOSPC, "No space left on device"), RankOutOfMemory("out of host memory")):
        with pytest.raises(type(error)) as raised, explain_memory_errors(run):
            raise error
        assert raised.value is error


def test_estimate_that_fails_does_not_hide_the_message(monkeypatch) -> None:
    monkeypatch.delattr("megatron_vl.training.out_of_memory.stage_memories")
    said = message_of(OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."))
    assert said.startswith("out of GPU memory: CUDA out of memory. Tried to allocate")
