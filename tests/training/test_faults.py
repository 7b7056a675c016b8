"""A rank dies, is stopped, or runs out of memory in the middle of a real training of four ranks: all end in
time, with a message that says who and where, nothing of the job stays alive, and the last checkpoint is good.

Nobody ends the ranks here, as if each had its own node: a launcher would only be quicker.
"""

import contextlib
import json
import random
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatron_vl.weights.run_folder import find_latest_checkpoint
from tests.support import ranks
from tests.support.tiny_run import LAYOUT, metrics, options_of, trained
from tests.test_processes import has_ended
from toolkit.checkpoint.contents import verify_checkpoint

pytestmark = pytest.mark.ranks

STEPS = 10
TIMEOUT_S = 8
"""``failures.timeout_s`` of these runs: no step of theirs takes as long."""
DEAD_S, HANG_S = 20, TIMEOUT_S + 20
"""Limits between the fault and the end of the last rank on a busy machine."""
OPTIONS = [*LAYOUT, "--checkpoint.interval", "2", "--failures.timeout_s", str(TIMEOUT_S)]
PP2 = ["--parallel.tp", "1", "--parallel.sequence_parallel", "false"]
EXACT = ("loss", "grad_norm", "loss_tokens", "samples", "images", "lr")


@pytest.fixture(scope="module")
def slow_run(prepared: dict[str, Path]) -> Path:
    """A whole run, in which a save that training waits for takes longer than the timeout. It is no hang."""
    run = prepared["folder"] / "slow"
    run.mkdir()
    words = options_of(prepared, run, *OPTIONS, "--data.num_workers", "0", steps=STEPS)
    words = ["slow_disk", "1", "1", "step", *words]
    done = ranks.run_apart("tests.support.faulty_rank", words, 4, one_node=True)
    assert [rank.code for rank in done] == [0] * 4, "".join(rank.stderr for rank in done)
    return run


def numbers(run: Path) -> dict[int, list]:
    return {line["step"]: [line[name] for name in EXACT] for line in metrics(run)}


def disturb(prepared, run: Path, fault, rank, step, moment, *options: str, num_ranks=4) -> SimpleNamespace:
    """Starts the run, or goes on with it, until something happens to a rank after ``step`` more steps.

    Returns the exit codes, what was written, the one line that says why, the seconds from the fault to the
    end of the last rank, and whether it came during a save.
    """
    run.mkdir(exist_ok=True)
    words = [fault, rank, step, moment, *options_of(prepared, run, *OPTIONS, *options, steps=STEPS)]
    done = ranks.run_apart("tests.support.faulty_rank", words, num_ranks, one_node=True)
    ended = SimpleNamespace(codes=[rank.code for rank in done], stdout=done[0].stdout)
    ended.stderr = "".join(rank.stderr for rank in done)
    told = json.loads((run / "fault.json").read_text())
    ended.seconds, ended.during_save = time.time() - told["at"], told["saving"]
    [ended.message] = [line for line in ended.stderr.splitlines() if line.startswith("megatron_vl.train: ")]
    nothing_is_left(told["children"])
    return ended


def nothing_is_left(children: list[int]) -> None:
    """No rank or loader of the job is alive; the children of a killed rank see it within seconds."""
    deadline = time.monotonic() + 6
    for pid in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            while not has_ended(process):
                assert time.monotonic() < deadline, process
                time.sleep(0.05)


def last_is_good(run: Path) -> int:
    """The latest step, all of whose files are what was written."""
    good = find_latest_checkpoint(run)
    assert good is not None and verify_checkpoint(good.path) == []
    return good.step


WHERE = r"\(tp {tp}, pp {pp}, dp 0; step \d+, [a-z ]+(\(in the background: [a-z ]+\))?\): "


def test_run_after_a_kill_a_stop_and_a_lack_of_memory_is_the_undisturbed_one(
    prepared: dict[str, Path], slow_run: Path, tmp_path: Path
) -> None:
    """One run with three faults, one after the other, each of another rank."""
    run = tmp_path / "run"

    ended = disturb(prepared, run, "kill", 3, 3, "save")
    assert ended.codes == [1, 1, 1, -signal.SIGKILL] and ended.seconds < DEAD_S, ended
    assert re.search("train: rank 3 " + WHERE.format(tp=1, pp=1) + "process", ended.message), ended
    assert "ended without a message: it was killed from outside" in ended.message
    assert "If `dmesg` there shows that the kernel killed it for lack of memory, lower" in ended.message
    assert ended.during_save
    first = last_is_good(run)

    ended = disturb(prepared, run, "stop", 1, 2, "step")
    assert f"resumed at step {first} " in ended.stdout
    assert ended.codes == [1, -signal.SIGKILL, 1, 1] and TIMEOUT_S < ended.seconds < HANG_S, ended
    assert re.search("train: rank 1 " + WHERE.format(tp=1, pp=0) + "no sign of life for", ended.message)
    assert "its state is 'stopped'" in ended.message and "raise failures.timeout_s (8;" in ended.message
    second = last_is_good(run)
    assert second >= first

    ended = disturb(prepared, run, "exhaust", 2, 2, "step")
    assert ended.codes == [1, 1, 1, 1] and ended.seconds < DEAD_S, (ended, ended.stderr)
    assert re.search("train: rank 2 " + WHERE.format(tp=0, pp=1) + "out of host memory", ended.message), ended
    last_is_good(run)

    trained(prepared, run, *OPTIONS, "--data.num_workers", "0", steps=STEPS)
    assert numbers(run) == numbers(slow_run)


@pytest.mark.full
@pytest.mark.parametrize(("fault", "seconds"), [("kill", DEAD_S), ("stop", HANG_S)])
def test_death_or_stop_of_the_first_rank_ends_the_others(prepared, tmp_path: Path, fault, seconds) -> None:
    """The others listen to it as it listens to them; with it the store is gone."""
    ended = disturb(prepared, tmp_path / "run", fault, 0, 3, "step")
    assert ended.codes == [-signal.SIGKILL, 1, 1, 1] and ended.seconds < seconds, ended
    assert "train: rank 0 (tp 0, pp 0, dp 0; step" in ended.message
    assert ("ended without" if fault == "kill" else "no sign of life for") in ended.message


def test_hanging_loader_is_named_and_ended(prepared: dict[str, Path], tmp_path: Path) -> None:
    """Its rank is alive and says where it stands; the processes that hang do not outlive it."""
    ended = disturb(prepared, tmp_path / "run", "stop_loader", 0, 3, "step", *PP2, num_ranks=2)
    assert ended.codes == [1, 1] and TIMEOUT_S < ended.seconds < HANG_S, ended
    said = r"train: rank 0 \(tp 0, pp 0, dp 0; step \d+, loading rows\): it has made no progress for"
    assert re.search(said, ended.message)
    assert "the loader's worker processes" in ended.message
    assert "batch_broadcast.py" in ended.stderr and "_next_row" in ended.stderr


def test_killed_loader_is_no_bug(prepared: dict[str, Path], tmp_path: Path) -> None:
    ended = disturb(prepared, tmp_path / "run", "kill_loader", 0, 3, "step", *PP2, num_ranks=2)
    assert ended.codes == [1, 1] and ended.seconds < DEAD_S, ended
    # Other ranks of its replica learn of it in the same moment, and one of them may be the first to say it.
    assert re.search(r"train: rank \d " + WHERE.format(tp=r"\d", pp=r"\d"), ended.message), ended
    assert re.search(r"a process of the loader \(\d+\) was killed from outside. If `dmesg`", ended.message)
    assert "Traceback" not in ended.stderr and "please report" not in ended.stderr


def test_slow_disk_in_a_save_that_training_waits_for_is_no_hang(slow_run: Path) -> None:
    assert last_is_good(slow_run) == STEPS and (slow_run / "fault.json").is_file()


KILLS = 10
LONG = ["--steps", "120", "--log.samples", "true"]


@pytest.mark.full
def test_run_killed_at_any_moment_is_the_undisturbed_one(prepared, tmp_path) -> None:
    """Of a random rank, often within a save. Each start may have another share of the optimizer state in host
    memory. Losses, norms and samples of every step are equal, those that were lost and taken again too."""
    whole, run, rng = tmp_path / "whole", tmp_path / "run", random.Random(3)
    trained(prepared, whole, *OPTIONS, *LONG)

    def share() -> list[str]:
        return ["--optimizer.offload_fraction", rng.choice(["0.3", "1.0", "0.0"])]

    for _ in range(KILLS):
        rank, moment = rng.randrange(4), f"{rng.uniform(0, 1.5):.2f}"
        ended = disturb(prepared, run, "kill", rank, 1, moment, *LONG, *share())
        assert ended.codes[rank] == -signal.SIGKILL and max(numbers(run)) < 120, ended
    trained(prepared, run, *OPTIONS, *LONG, *share())

    expected, samples = numbers(whole), {line["step"]: line for line in metrics(whole, "samples.jsonl")}
    assert numbers(run).keys() == expected.keys()
    for line in metrics(run):
        assert [line[name] for name in EXACT] == expected[line["step"]], line["step"]
    assert all(line == samples[line["step"]] for line in metrics(run, "samples.jsonl"))
