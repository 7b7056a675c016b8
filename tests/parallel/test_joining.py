"""Ranks and nodes that never come are named, at their address, and a signal ends the wait for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.support.ranks import python_path
from toolkit.common.launch import free_port

RANK = """
import os, sys
from megatron_vl.parallel import joining
from megatron_vl.system.signals import handle_stop_signals
joining.NOTE_AFTER_S = 0.2
handle_stop_signals()
joining.join_store(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), float(sys.argv[1]))
"""
NODE = """
import sys
from megatron_vl import launch
launch.joining.NOTE_AFTER_S = 0.2
limit_s = float(sys.argv.pop(1))
launch.join_limit_s = lambda timeout_s: limit_s
sys.exit(launch.main())
"""
NO_NAME = "no-such-host.invalid"


def start(program: str, *words: object, **environment: object) -> subprocess.Popen[str]:
    variables = {**os.environ, "PYTHONPATH": python_path(), **{k: str(v) for k, v in environment.items()}}
    command = [sys.executable, "-c", program, *map(str, words)]
    return subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)


def start_rank(rank: int, limit_s: float, port: int, host: str = "127.0.0.1", **more: Any) -> Any:
    place = {"MASTER_ADDR": host, "MASTER_PORT": port, "RANK": rank}
    return start(RANK, limit_s, **{"WORLD_SIZE": 2, **place, **more})


def start_node(limit_s: float, endpoint: str) -> subprocess.Popen[str]:
    meeting = ["--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    return start(NODE, limit_s, *meeting, "-m", "megatron_vl.train", "--platform", "cpu")


def start_static_node(node: int, port: int, *program: str) -> subprocess.Popen[str]:
    meeting = ["--nnodes", 2, "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", port]
    return start(NODE, 60, *meeting, *program)


def note_of(process: subprocess.Popen[str]) -> str:
    return next(line for line in process.stderr if line.startswith("NOTE: "))


def ends_at_sigterm(process: subprocess.Popen[str]) -> bool:
    process.send_signal(signal.SIGTERM)
    return process.wait(timeout=20) == 128 + signal.SIGTERM


def test_a_missing_rank_is_named_and_may_come_late() -> None:
    port = free_port()
    first = start_rank(0, 60, port)
    there = f"NOTE: 1 of 2 ranks have come to 127.0.0.1:{port}; missing: rank 1. Start them"
    assert note_of(first).startswith(there)
    assert start_rank(1, 60, port).wait(timeout=60) == first.wait(timeout=60) == 0


def test_the_wait_for_a_rank_ends_at_a_signal_and_at_its_limit() -> None:
    stopped, late = start_rank(0, 60, free_port(), WORLD_SIZE=12), start_rank(0, 0.5, free_port())
    assert "missing: rank 1, 2, 3, 4, 5, 6, 7, 8 and 3 more. Start" in note_of(stopped)
    assert ends_at_sigterm(stopped)
    _, err = late.communicate(timeout=60)
    assert late.returncode == 1 and "JoinError: 1 of 2 ranks" in err and "raise failures.timeout_s" in err


@pytest.mark.parametrize("rank", [0, 1])
def test_the_wait_for_an_address_without_a_name_ends_at_a_signal(rank: int) -> None:
    process = start_rank(rank, 60, free_port(), NO_NAME)
    assert f"does not reach {NO_NAME}:" in note_of(process)
    assert ends_at_sigterm(process)


def test_a_node_that_waits_for_others_says_so_and_ends_at_a_signal() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    alone = start_node(60, endpoint)
    assert note_of(alone) == f"NOTE: not all 2 nodes have come to {endpoint}; start the others\n"
    assert ends_at_sigterm(alone)


def test_a_node_that_waits_in_vain_fails_with_a_line() -> None:
    alone, lost = start_node(1, f"127.0.0.1:{free_port()}"), start_node(1, f"{NO_NAME}:1")
    for process, said in ((alone, "not all 2 nodes came in time"), (lost, f"does not reach {NO_NAME}:1,")):
        _, err = process.communicate(timeout=120)
        assert process.returncode == 1 and said in err and "Traceback" not in err


def test_a_missing_node_with_a_given_rank_is_named_and_may_come_late() -> None:
    port = free_port()
    alone = start_static_node(0, port, "--no-python", "true")
    assert note_of(alone).startswith(
        f"NOTE: 1 of 2 nodes have come to 127.0.0.1:{port}; missing: node 1. Start"
    )
    assert start_static_node(1, port, "--no-python", "true").wait(timeout=120) == alone.wait(timeout=120) == 0


@pytest.mark.parametrize("node", [0, 1])
def test_the_wait_for_a_node_with_a_given_rank_ends_at_a_signal(node: int) -> None:
    alone = start_static_node(node, free_port(), "-m", "megatron_vl.train", "--platform", "cpu")
    assert note_of(alone)
    assert ends_at_sigterm(alone)
