"""A confined program has no network, writes no file outside its folder, and cannot free itself."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from toolkit.evaluate import cage
from toolkit.evaluate.comparison import why_open

REACH = """
import socket, subprocess, sys
code = "import socket; socket.create_connection(('127.0.0.1', int(__import__('sys').argv[1])), 5)"
sys.exit(subprocess.run([sys.executable, "-c", code, sys.argv[1]], capture_output=True).returncode)
"""
WRITE = """
import pathlib, subprocess, sys
sys.exit(subprocess.run(["touch", sys.argv[1]], capture_output=True).returncode)
"""
UNDO = """
import ctypes, os, pathlib, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
writable = struct.pack("4Q", 0, 1, 0, 0)
print("undone:", libc.syscall(442, -100, b"/", 0x8000, writable, 32))
try:
    os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS)  # a name space of its own, in which it has all rights
    print("undone:", libc.syscall(442, -100, b"/", 0x8000, writable, 32))
except OSError as error:
    print("undone:", error)
pathlib.Path(sys.argv[1]).touch()
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    if why := why_open(folder, False):
        pytest.skip(f"this system closes no program in: {why}")
    return folder


@pytest.fixture
def port() -> Iterator[str]:
    """The port of a server on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


def ended(command: list[str], *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command, "-c", *map(str, words)], capture_output=True, text=True)


def test_what_a_closed_in_program_starts_reaches_no_network(work, port):
    assert ended([sys.executable], REACH, port).returncode == 0, "the control failed"
    assert ended(cage.command(work, network=False), REACH, port).returncode == 1
    assert ended(cage.command(work, network=True), REACH, port).returncode == 0


def test_what_a_closed_in_program_starts_writes_in_its_folder_only(work, tmp_path):
    for network in (False, True):
        command = cage.command(work, network)
        assert ended(command, WRITE, work / "inside").returncode == 0 and (work / "inside").exists()
        assert ended(command, WRITE, tmp_path / "outside").returncode == 1
    assert ended([sys.executable], WRITE, tmp_path / "outside").returncode == 0, "the control failed"


def test_it_cannot_open_itself_again(work, tmp_path):
    done = ended(cage.command(work, network=False), UNDO, tmp_path / "outside")
    assert done.stdout.count("undone:") == 2 and "undone: 0" not in done.stdout, done.stdout
    assert "Read-only file system" in done.stderr and not (tmp_path / "outside").exists()


NOT_ALLOWED = """
import sys
from pathlib import Path
from toolkit.evaluate.comparison import _isolation
print("said:", _isolation(Path(sys.argv[1]), False))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None, reason="util-linux's unshare takes the right away")
def test_a_system_that_does_not_allow_it_is_named_at_the_start(tmp_path):
    """Runs in a name space that may not hold others, as in most containers."""
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    words = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh", sys.executable]
    if subprocess.run([*words, "-c", ""], capture_output=True).returncode:
        pytest.skip("this system allows no name spaces at all")
    done = subprocess.run(
        [*words, "-c", NOT_ALLOWED, tmp_path], cwd=REPOSITORY, capture_output=True, text=True
    )
    said = done.stdout.partition("said: ")[2]
    assert said.startswith("with Python's guards only: this system cannot confine a process (OSError"), (
        done.stderr
    )
