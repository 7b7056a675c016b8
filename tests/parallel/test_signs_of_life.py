"""Who is at fault when nothing goes on, and when that is said: decided from lines that are made here."""

from __future__ import annotations

import pdb
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable

import psutil
import pytest

from megatron_vl import progress
from megatron_vl.parallel import signs_of_life
from megatron_vl.parallel.signs_of_life import (
    Process,
    Sign,
    _Clock,
    dead,
    hanging,
    in_debugger,
    interval,
    own_process,
)
from megatron_vl.progress import COMPUTING, LOADING, SAVING, SHARING, WRITING, Progress


def sign(
    rank: int,
    phase: str,
    step: int = 7,
    *,
    age: float = 0.0,
    background: str = "",
    syncing: str = "",
    done: int = 3,
) -> Sign:
    where = Progress(f"tp {rank}, pp 0, dp 0", step, phase, background, syncing, done, count=1)
    process = Process("elsewhere", 1000 + rank, "another machine", 0.0)
    return Sign(rank, process, where, heard_at=time.monotonic() - age)


def signs(*given: Sign) -> dict[int, Sign]:
    return {one.rank: one for one in given}


def test_a_line_says_what_it_was_made_of() -> None:
    before = sign(3, LOADING, background=WRITING)
    after = Sign.of(before.line())
    assert (after.rank, after.process, after.progress) == (3, before.process, before.progress)


@pytest.mark.parametrize(
    ("heard", "rank"),
    [
        # Rank 2 loads; its replica waits for its rows, the others are in a collective.
        (lambda: [sign(0, COMPUTING), sign(1, SHARING), sign(2, LOADING), sign(3, COMPUTING)], 2),
        # One is a whole step less far.
        (lambda: [sign(0, LOADING, 8), sign(1, SAVING, 7), sign(2, LOADING, 8), sign(3, LOADING, 8)], 1),
        # All wait for a checkpoint, of which rank 3 still writes its part.
        (lambda: [sign(0, SAVING), sign(1, SAVING), sign(2, SAVING), sign(3, SAVING, background=WRITING)], 3),
        # A rank that says nothing is at fault, however far it was.
        (lambda: [sign(0, LOADING), sign(1, COMPUTING, age=300), sign(2, LOADING), sign(3, LOADING)], 1),
    ],
)
def test_the_rank_that_the_others_wait_for_is_named(heard: Callable[[], list[Sign]], rank: int) -> None:
    verdict = hanging(signs(*heard()), 600, 8, 600)
    assert verdict.rank == rank and verdict.where.startswith(f"tp {rank}, pp 0, dp 0; step ")
    assert "failures.timeout_s (600;" in verdict.message
    assert [process.pid for process in verdict.processes] == [1000 + rank]


def test_if_all_are_at_the_same_place_nobody_is_blamed() -> None:
    verdict = hanging(signs(*(sign(rank, COMPUTING) for rank in range(4))), 600, 8, 600)
    assert "all ranks are in the same phase" in verdict.message and verdict.processes == ()
    assert "NCCL_DEBUG=INFO" in verdict.message


def test_a_lost_node_is_one_message() -> None:
    verdict = dead([8, 12, 9, *range(13, 24)], signs(*(sign(rank, COMPUTING) for rank in range(24))))
    assert verdict.rank == 8 and len(verdict.silent) == 14 == len(verdict.processes)
    assert "; the same holds for rank 9, 12, 13, 14, 15, 16, 17, 18 and 5 more" in verdict.message


def test_rank_0_reads_at_most_so_many_lines() -> None:
    assert interval(8, 600) == 1
    for world in (256, 4096, 16384):
        assert world / interval(world, 600) <= signs_of_life.LINES_A_S
    assert interval(4096, 20) == 5, "a short limit asks for more lines"


class Time:
    """A clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(signs_of_life.time, "monotonic", lambda: self.now)


def test_the_clock_counts_only_while_nothing_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = Time(monkeypatch)
    clock, given = _Clock(60), [sign(rank, COMPUTING) for rank in range(3)]

    def after(seconds: float) -> float:
        moved.now += seconds
        return clock.look(given, 2)

    after(1)
    assert after(2) == 2 and after(2) == 4
    given[1].progress.count += 1  # one rank is enough
    assert after(2) == 0 and after(2) == 2
    given[2].debugged = True
    assert after(2) == 0 == after(2)
    given[2].debugged = False
    assert after(2) == 2
    assert after(500) == 0, "the whole job was stopped for a while"
    assert after(2) == 2


def test_before_the_first_step_the_limit_is_longer_and_zero_is_none() -> None:
    warm, cold = [[sign(rank, COMPUTING, done=done) for rank in range(2)] for done in (1, 0)]
    clock = _Clock(600)
    assert clock.is_over(601, warm) and not clock.is_over(599, warm)
    stopped_at_once = [warm[0], cold[1]]
    assert clock.is_over(601, stopped_at_once), "it did the first step with the others, and could not say so"
    assert clock.is_over(1801, cold) and not clock.is_over(1799, cold)
    assert not _Clock(20).is_over(299, cold), "compiling takes its minutes"
    assert not _Clock(0).is_over(1e9, warm)


def test_a_disk_has_longer_to_sync_a_file_that_training_waits_for() -> None:
    waiting = [sign(0, SAVING), sign(1, SAVING, background=WRITING), sign(2, SAVING, syncing="/a/b.part")]
    clock = _Clock(600)
    assert not clock.is_over(1799, waiting) and clock.is_over(1801, waiting)
    trained_meanwhile = [sign(0, COMPUTING), sign(2, COMPUTING, syncing="/a/b.part")]
    assert clock.is_over(601, trained_meanwhile), "the sync does not keep them"

    verdict = hanging(signs(*waiting), 1801, 8, 600)
    assert verdict.rank == 2 and "The disk has not confirmed /a/b.part" in verdict.message


def test_only_the_very_process_is_killed() -> None:
    """Stopped, of this machine, and not one that has got its number since."""
    child = subprocess.Popen(["sleep", "60"])
    child.send_signal(signal.SIGSTOP)
    own = own_process()
    started = psutil.Process(child.pid).create_time()
    try:
        Process(own.host, child.pid, "another machine", started).kill()
        Process(own.host, child.pid, own.machine, started - 100).kill()
        time.sleep(0.1)
        assert child.poll() is None
        this = Process(own.host, child.pid, own.machine, started)
        assert this.state() == "stopped"
        this.kill()
        assert child.wait(10) == -signal.SIGKILL
        assert this.state() == "gone"
    finally:
        child.kill()


def test_a_debugger_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    class Asked(pdb.Pdb):
        def interaction(self, *arguments: object) -> None:
            thread = threading.Thread(target=lambda: seen.append(in_debugger()))
            thread.start()
            thread.join()
            self.set_continue()

    assert not in_debugger()
    Asked(nosigint=True).set_trace()
    assert seen == [True] and not in_debugger()


def test_what_a_rank_does_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "now", Progress())
    assert progress.where() == ""
    progress.now.place = "tp 1, pp 0, dp 2"
    assert progress.where() == "tp 1, pp 0, dp 2; setting up"
    progress.enter(LOADING, 17)
    progress.rows_are_read()
    assert progress.where() == "tp 1, pp 0, dp 2; step 17, sharing rows"
    progress.enter(progress.EVALUATING)
    progress.rows_are_read()
    assert progress.where().endswith("step 17, evaluating")
    progress.in_background(WRITING)
    assert progress.where().endswith("(in the background: writing its part of a checkpoint)")


def test_a_stranger_at_the_port_is_not_heard() -> None:
    first = signs_of_life._FirstRank.__new__(signs_of_life._FirstRank)
    first.token, first.signs, first.ranks = "secret", {}, {}
    here, there = socket.socketpair()
    for line in (b"guess " + sign(1, LOADING).line(), b"secret {}", b"secret [1]", b"", b"\xff\xfe"):
        first._hear(here, line)
    assert first.signs == {} == first.ranks
    first._hear(here, b"secret " + sign(1, LOADING).line())
    assert list(first.signs) == [1]
    here.close()
    there.close()
