"""Ranks and nodes that never come are named, at their address, and a signal ends the wait for them."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_vl import launch
from megatron_vl.config import parse_config
from megatron_vl.parallel import joining, start
from megatron_vl.system.signals import handle_stop_signals
from toolkit.common.launch import free_port

NO_NAME = "no-such-host.invalid"


class Forked:
    """A function that runs in a fork of this process, and what it writes to standard error."""

    def __init__(self, work: Callable[[], object], **environment: object) -> None:
        reader, writer = os.pipe()

        def run() -> None:
            os.dup2(writer, 2)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            os.environ.update({name: str(value) for name, value in environment.items()})
            joining.NOTE_AFTER_S = 0.2
            work()

        self.process = multiprocessing.get_context("fork").Process(target=run)
        self.process.start()
        os.close(writer)
        self.stderr = os.fdopen(reader)

    def wait(self) -> int | None:
        self.process.join(60)
        return self.process.exitcode


def start_rank(rank: int, port: int, host: str = "127.0.0.1", world_size: int = 2) -> Forked:
    def join() -> None:
        handle_stop_signals()
        joining.join_store(rank, world_size, limit_s=60)

    return Forked(join, MASTER_ADDR=host, MASTER_PORT=port, RANK=rank)


TRAIN = ("-m", "megatron_vl.train", "--platform", "cpu")


def start_node(limit_s: float, *words: object) -> Forked:
    def run() -> None:
        launch._ranks_seen.clear()  # what other tests have left
        launch.join_limit_s = lambda timeout_s: limit_s  # type: ignore[assignment]
        sys.exit(launch.main(["--nnodes", "2", *map(str, words)]))

    return Forked(run)


def start_elastic_node(port: int, limit_s: float = 60) -> Forked:
    return start_node(limit_s, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", *TRAIN)


def start_static_node(node: int, port: int, *program: str) -> Forked:
    program = program or TRAIN
    return start_node(60, "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", port, *program)


def note_of(forked: Forked) -> str:
    return next(line for line in forked.stderr if line.startswith("NOTE: "))


def ends_at_sigterm(forked: Forked) -> bool:
    os.kill(forked.process.pid, signal.SIGTERM)
    return forked.wait() == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("kind", "start"),
    [("rank", start_rank), ("node", lambda node, port: start_static_node(node, port, "--no-python", "true"))],
)
def test_missing_one_is_named_and_may_come_late(kind: str, start: Callable) -> None:
    port = free_port()
    first = start(0, port)
    there = f"NOTE: 1 of 2 {kind}s have come to 127.0.0.1:{port}; missing: {kind} 1. Start"
    assert note_of(first).startswith(there)
    assert start(1, port).wait() == first.wait() == 0


@pytest.mark.parametrize(
    ("start", "note"),
    [
        (partial(start_rank, 0, world_size=12), "missing: rank 1, 2, 3, 4, 5, 6, 7, 8 and 3 more. Start"),
        (partial(start_rank, 0, host=NO_NAME), f"does not reach {NO_NAME}:"),
        (partial(start_rank, 1, host=NO_NAME), f"does not reach {NO_NAME}:"),
        (start_elastic_node, "NOTE: not all 2 nodes have come to 127.0.0.1:{port}; start the others\n"),
        (partial(start_static_node, 0), "missing: node 1. Start"),
        (partial(start_static_node, 1), "NOTE: "),
    ],
    ids=["rank 0", "no name, rank 0", "no name, rank 1", "elastic node", "node 0", "node 1"],
)
def test_wait_for_others_says_so_and_ends_at_a_signal(start: Callable, note: str) -> None:
    port = free_port()
    alone = start(port)
    assert note.format(port=port) in note_of(alone)
    assert ends_at_sigterm(alone)


RENDEZVOUS = f"--rdzv-backend c10d --rdzv-endpoint {NO_NAME}"


@pytest.mark.parametrize(
    ("waiting", "timeout_s", "limit_s"),
    [
        ("rank", 0, 1800),
        ("rank", 60, 300),
        ("--node-rank 0", 60, 300),
        ("--node-rank 1", 600, 1800),
        (RENDEZVOUS, 700, 2100),
    ],
)
def test_wait_for_others_follows_the_timeout_of_failures(waiting: str, timeout_s: int, limit_s: int) -> None:
    """The clock of the wait is a thousand times as fast."""
    option, port = f"--failures.timeout_s={timeout_s}", free_port()

    def wait() -> None:
        clock = SimpleNamespace(monotonic=lambda: 1000 * time.monotonic(), sleep=time.sleep)
        joining.time = clock  # type: ignore[assignment]
        joining.NOTE_AFTER_S = 1e6
        if waiting == "rank":
            start.join_ranks(parse_config(["--platform=cpu", option]))
        sys.exit(launch.main(["--nnodes", "2", "--master-port", str(port), *waiting.split(), *TRAIN, option]))

    alone = Forked(wait, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=0, WORLD_SIZE=2)
    text = alone.stderr.read()
    assert alone.wait() == 1 and f"To wait longer than {limit_s} s, raise failures.timeout_s" in text
    assert ("Traceback" in text) == (waiting == "rank"), "run_rank prints a message alone"


def test_rank_that_comes_after_another_was_asked_to_stop_does_not_wait_for_it(monkeypatch) -> None:
    """Its launcher would kill it before it says that the run has stopped."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    first = start_rank(1, store.port)
    assert note_of(first) and ends_at_sigterm(first)
    assert start_rank(0, store.port).wait() == 128 + signal.SIGTERM


def test_server_that_is_asked_to_stop_tells_those_that_wait() -> None:
    port = free_port()
    server = start_rank(0, port, world_size=3)
    assert note_of(server)
    waiting = start_rank(1, port, world_size=3)
    time.sleep(2)
    assert ends_at_sigterm(server)
    assert waiting.wait() == 128 + signal.SIGTERM, waiting.stderr.read()


def test_node_that_waits_in_vain_fails_with_a_line() -> None:
    alone = start_elastic_node(free_port(), limit_s=1)
    err = alone.stderr.read()
    assert alone.wait() == 1 and "not all 2 nodes came in time" in err and "Traceback" not in err
