"""What a rank says when it has no memory left. The lack itself is tested in test_faults.py and on GPUs."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from megatron_vl.config import TrainConfig, parse_config
from megatron_vl.planning.memory import RESERVE_GIB, peak_stage_gib
from megatron_vl.spec.families import read_spec
from megatron_vl.training.out_of_memory import (
    RankOutOfMemory,
    explain_memory_errors,
    memory_error_message,
    parse_gpu_message,
)
from megatron_vl.training.resolve import resolve_run
from megatron_vl.training.resolved_run import ResolvedRun
from tests.support.planned import estimate_stage_memory

HF = Path(__file__).parents[1] / "hf_configs" / "Qwen2.5-VL-7B-Instruct.json"
TORCH = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which"
    " 511.94 MiB is free. Process 4242 has {other} GiB memory in use. Including non-PyTorch memory, this"
    " process has {own} GiB memory in use. Of the allocated memory {allocated} GiB is allocated by PyTorch,"
    " and {unused} GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large"
    " try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
"""As torch 2.11.0 writes it."""


class OutOfMemoryError(RuntimeError):
    """As torch's own is called, of which no instance can be had without a GPU."""


def config(*options: str) -> TrainConfig:
    common = ["--model.hf", str(HF), "--global_batch_size", "8", "--data.seq_len", "8192"]
    return parse_config([*common, *options])


def run(*options: str, ranks: int = 4) -> ResolvedRun:
    return resolve_run(config(*options), ranks, show_only=True)


def test_torchs_message_is_read() -> None:
    said = TORCH.format(other="10.00", own="68.61", allocated="66.00", unused="1.50")
    memory = parse_gpu_message(said)
    assert memory is not None
    assert (memory.requested_gib, memory.allocated_gib, memory.reserved_gib, memory.total_gib) == (
        2.5,
        66.0,
        67.5,
        79.11,
    )
    assert memory.other_processes_gib == pytest.approx(79.11 - 511.94 / 1024 - 68.61)


@pytest.mark.parametrize(
    ("facts", "wanted", "unwanted"),
    [
        (
            {"other": "0.00", "own": "78.61", "allocated": "77.00", "unused": "1.00"},
            "",
            "expandable_segments",
        ),
        (
            {"other": "0.00", "own": "78.61", "allocated": "60.00", "unused": "18.00"},
            "18.0 GiB are reserved but not in use: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            "Other processes",
        ),
        (
            {"other": "30.00", "own": "48.61", "allocated": "47.00", "unused": "1.00"},
            "Other processes hold 30.0 GiB of this GPU: end them",
            "expandable_segments",
        ),
    ],
)
def test_the_message_says_what_was_there(facts, wanted, unwanted) -> None:
    said = memory_error_message(OutOfMemoryError(TORCH.format(**facts)), run("--parallel.pp", "2", ranks=2))
    assert said is not None
    assert f"out of GPU memory: {float(facts['allocated']):.1f} GiB were allocated and" in said
    assert "of 79.1 GiB when 2.50 GiB more were wanted" in said
    assert wanted in said and unwanted not in said
    of_stage = estimate_stage_memory(config("--parallel.pp", "2"), read_spec(HF), 2)[0].total_bytes / 2**30
    assert f"The estimate of pipeline stage 0 is {of_stage:.1f} GiB (weights " in said


def test_the_options_that_it_names_make_a_run_that_fits() -> None:
    """The estimate holds, and the GPU is too small: the planner's choice, same parallel sizes."""
    before = config("--parallel.pp", "4")
    said = memory_error_message(
        OutOfMemoryError(TORCH.format(other="0.0", own="78.6", allocated="70.0", unused="1.0")),
        run("--parallel.pp", "4"),
    )
    assert said is not None
    words = said.split("by `megatron-vl plan`: ")[1].split(" (")[0].split()
    assert not {"--parallel.tp", "--parallel.pp", "--parallel.vpp"} & set(words)
    after = config("--parallel.pp", "4", *words)
    assert (
        peak_stage_gib(estimate_stage_memory(after, read_spec(HF), 4)) + RESERVE_GIB
        <= 79.11
        < peak_stage_gib(estimate_stage_memory(before, read_spec(HF), 4))
    )


def test_other_sizes_are_named_where_no_change_of_the_same_fits() -> None:
    full = ["--recompute.language", "full", "--recompute.vision", "full", "--optimizer.offload_fraction", "1"]
    small = "30.0"  # of 79 GiB, others hold 49
    facts = {"other": "49.0", "own": small, "allocated": "29.5", "unused": "0.1"}
    said = memory_error_message(OutOfMemoryError(TORCH.format(**facts)), run(*full))
    assert said is not None and ("--parallel.tp" in said or "--parallel.pp" in said)
    nothing = facts | {"other": "74.0"}
    said = memory_error_message(
        OutOfMemoryError(TORCH.format(**nothing)), run(*full, "--data.seq_len", "65536")
    )
    assert said is not None and "No layout of 4 GPUs fits: take more, or lower data.seq_len" in said


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"
        ),
    ],
)
def test_lack_of_host_memory_is_told_as_such(error: Exception) -> None:
    with pytest.raises(RankOutOfMemory, match="out of host memory .*this process holds .*data.num_workers"):
        with explain_memory_errors(run()):
            raise error


def test_a_lost_process_of_the_loader_is_told_as_such() -> None:
    """torch raises its error wherever the main thread is, and others may wrap it."""
    killed = RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed. ")
    lost = RuntimeError("DataLoader worker (pid(s) 4711, 12) exited unexpectedly")
    wrapped = RuntimeError("backward failed")
    wrapped.__cause__ = killed
    for error in (killed, lost, wrapped):
        with pytest.raises(
            RankOutOfMemory, match=r"loader \(4711(, 12)?\) was killed from outside. .*memory"
        ):
            with explain_memory_errors(config()):
                raise error

    crashed = RuntimeError("DataLoader worker (pid 4711) is killed by signal: Segmentation fault. ")
    assert "was ended by a signal: Segmentation fault. A media file" in str(
        memory_error_message(crashed, config())
    )


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(OSError, match="No space left"), explain_memory_errors(run()):
        raise OSError(errno.ENOSPC, "No space left on device")
    told_before = RankOutOfMemory("out of host memory")
    with pytest.raises(RankOutOfMemory) as raised, explain_memory_errors(run()):
        raise told_before
    assert raised.value is told_before


def test_an_estimate_that_fails_does_not_hide_the_message(monkeypatch) -> None:
    monkeypatch.delattr("megatron_vl.training.out_of_memory.stage_memories")
    error = OutOfMemoryError(TORCH.format(other="0.0", own="78.6", allocated="70.0", unused="1.0"))
    said = memory_error_message(error, run())
    assert said is not None and said.startswith("out of GPU memory: 70.0 GiB were allocated")
