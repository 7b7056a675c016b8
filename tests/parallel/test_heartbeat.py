"""Who is at fault when nothing goes on, and when that is said: decided from lines that are made here."""

import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megatron_vl.parallel import heartbeat
from megatron_vl.parallel.heartbeat import (
    Heartbeat,
    HeartbeatMonitor,
    ProgressClock,
    diagnose_dead_ranks,
    diagnose_hang,
)
from megatron_vl.system.processes import RankProcess, own_process
from megatron_vl.system.progress import (
    FORWARD_BACKWARD,
    LOADING_ROWS,
    SAVING_CHECKPOINT,
    SHARING_ROWS,
    WRITING_CHECKPOINT,
    RankProgress,
)


def sign(rank: int, phase: str = FORWARD_BACKWARD, *, age: float = 0.0, **fields: Any) -> Heartbeat:
    fields = {"step": 7, "steps_done": 3, "progress_count": 1} | fields
    where = RankProgress(f"tp {rank}, pp 0, dp 0", phase=phase, **fields)
    process = RankProcess("elsewhere", 1000 + rank, "another machine", 0.0)
    return Heartbeat(rank, process, where, received_at=time.monotonic() - age)


def signs(*given: Heartbeat) -> dict[int, Heartbeat]:
    return {one.rank: one for one in given}


@pytest.mark.parametrize(
    ("phases", "fields", "rank"),
    [
        # Rank 2 loads; its replica waits for its rows, the others are in a collective.
        ((FORWARD_BACKWARD, SHARING_ROWS, LOADING_ROWS, FORWARD_BACKWARD), {}, 2),
        # One is a whole step less far.
        ((LOADING_ROWS, SAVING_CHECKPOINT, LOADING_ROWS, LOADING_ROWS), {"step": 6}, 1),
        # All wait for a checkpoint, of which rank 3 still writes its part.
        ((SAVING_CHECKPOINT,) * 4, {"background_task": WRITING_CHECKPOINT}, 3),
        # A rank that says nothing is at fault, however far it was.
        ((LOADING_ROWS, FORWARD_BACKWARD, LOADING_ROWS, LOADING_ROWS), {"age": 300}, 1),
    ],
)
def test_rank_that_the_others_wait_for_is_named(phases: Sequence[str], fields, rank: int) -> None:
    """``fields`` are those of the rank at fault."""
    heard = [sign(each, phase, **(fields if each == rank else {})) for each, phase in enumerate(phases)]
    diagnosis = diagnose_hang(signs(*heard), 600, 8, 600)
    assert diagnosis.rank == rank and diagnosis.position_text.startswith(f"tp {rank}, pp 0, dp 0; step ")
    assert "failures.timeout_s (600;" in diagnosis.message
    assert [process.pid for process in diagnosis.processes] == [1000 + rank]


def test_lost_node_is_one_message() -> None:
    diagnosis = diagnose_dead_ranks([8, 12, 9, *range(13, 24)], signs(*map(sign, range(24))))
    assert diagnosis.rank == 8 and len(diagnosis.silent) == 14 == len(diagnosis.processes)
    assert "; the same holds for rank 9, 12, 13, 14, 15, 16, 17, 18 and 5 more" in diagnosis.message


class Time:
    """A clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(heartbeat.time, "monotonic", lambda: self.now)


def test_clock_counts_only_while_nothing_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = Time(monkeypatch)
    clock, given = ProgressClock(60), [sign(rank) for rank in range(3)]

    def after(seconds: float) -> float:
        moved.now += seconds
        return clock.seconds_idle(given, 2)

    after(1)
    assert after(2) == 2 and after(2) == 4
    given[1].rank_progress.progress_count += 1  # one rank is enough
    assert after(2) == 0 and after(2) == 2
    assert after(500) == 0, "the whole job was stopped for a while"
    assert after(2) == 2


def test_limit_is_longer_before_the_first_step_and_zero_is_none() -> None:
    warm, cold = [[sign(rank, steps_done=done) for rank in range(2)] for done in (1, 0)]
    clock = ProgressClock(600)
    assert clock.has_timed_out(601, warm) and not clock.has_timed_out(599, warm)
    stopped_at_once = [warm[0], cold[1]]
    assert clock.has_timed_out(601, stopped_at_once), "it did the first step too, and could not say so"
    assert clock.has_timed_out(1801, cold) and not clock.has_timed_out(1799, cold)
    assert not ProgressClock(20).has_timed_out(299, cold), "compiling takes its minutes"
    assert not ProgressClock(0).has_timed_out(1e9, warm)


def test_disk_has_longer_to_sync_a_file_that_training_waits_for() -> None:
    waiting = [
        sign(0, SAVING_CHECKPOINT),
        sign(1, SAVING_CHECKPOINT, background_task=WRITING_CHECKPOINT),
        sign(2, SAVING_CHECKPOINT, syncing_file="/a/b.part"),
    ]
    clock = ProgressClock(600)
    assert not clock.has_timed_out(1799, waiting) and clock.has_timed_out(1801, waiting)
    trained_meanwhile = [sign(0), sign(2, FORWARD_BACKWARD, syncing_file="/a/b.part")]
    assert clock.has_timed_out(601, trained_meanwhile), "the sync does not keep them"

    diagnosis = diagnose_hang(signs(*waiting), 1801, 8, 600)
    assert diagnosis.rank == 2 and "The disk has not confirmed /a/b.part" in diagnosis.message


def test_heartbeat_kills_only_the_very_process() -> None:
    """Stopped, of this machine, and not one that has got its number since."""
    child = subprocess.Popen(["sleep", "60"])
    child.send_signal(signal.SIGSTOP)
    own = own_process()
    started = psutil.Process(child.pid).create_time()
    try:
        RankProcess(own.host_name, child.pid, "another machine", started).kill_tree()
        RankProcess(own.host_name, child.pid, own.machine_id, started - 100).kill_tree()
        time.sleep(0.1)
        assert child.poll() is None
        this = RankProcess(own.host_name, child.pid, own.machine_id, started)
        assert this.system_state() == "stopped"
        this.kill_tree()
        assert child.wait(10) == -signal.SIGKILL
        assert this.system_state() == "gone"
    finally:
        child.kill()


def test_line_without_the_token_is_ignored() -> None:
    monitor = HeartbeatMonitor.__new__(HeartbeatMonitor)
    monitor.token, monitor.heartbeats = "secret", {}
    for line in (b"guess " + sign(1, LOADING_ROWS).to_line(), b"secret {}", b"secret [1]", b"", b"\xff\xfe"):
        assert monitor._accept_line(line) is None
    assert monitor.heartbeats == {}
    assert monitor._accept_line(b"secret " + sign(1, LOADING_ROWS).to_line()) == 1
    assert list(monitor.heartbeats) == [1]


def test_first_rank_that_says_nothing_is_named_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It judges them as long as it sends lines, and they judge its silence."""
    moved, found = Time(monkeypatch), []
    monitor: Any = HeartbeatMonitor.__new__(HeartbeatMonitor)
    monitor.rank, monitor.rank_process, monitor.token = 1, own_process(), "secret"
    monitor.timeout_s, monitor.interval_s, monitor.silence_limit_s = 20, 1.0, 8
    monitor.end_event, monitor.diagnosis_ready = threading.Event(), threading.Event()
    monitor.heartbeats, monitor.on_diagnosis = signs(sign(0)), found.append

    def receive(seconds: float) -> None:
        moved.now += seconds
        if moved.now > 1100:
            monitor.end_event.set()

    monitor.links = SimpleNamespace(receive=receive, lost_ranks=[], send_to_all=lambda line: None)
    monitor._connect_to_rank_0 = lambda port: True
    monitor._watch(0)
    assert [(each.rank, each.silent) for each in found] == [(0, (0,))]
    assert 1020 < moved.now <= 1023
