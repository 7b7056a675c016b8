"""The child processes of a process, and the paths that they need to find the tools."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

import psutil


def list_children(parent_pid: int) -> dict[int, tuple[str, ...]]:
    """The living children of a process: id -> words of the command line.

    A child that ends during the call is left out.
    """
    commands_by_pid = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child_process in psutil.Process(parent_pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # also raised for a zombie
                commands_by_pid[child_process.pid] = tuple(child_process.cmdline())
    return commands_by_pid


def kill_descendants() -> None:
    """Sends SIGKILL to all descendants of this process."""
    with contextlib.suppress(psutil.Error):
        for child_process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child_process.kill()


_PR_SET_PDEATHSIG = 1
"""Linux's prctl: the signal that a process gets when its parent ends."""


def end_with_parent(parent: int = 0) -> None:
    """Lets the kernel kill this process when the thread that started it ends, for whatever reason.

    Args:
        parent: id of the process that started this one, which may have ended already; 0: it is alive.
    """
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(1)


def tools_dir() -> Path:
    """The folder that holds ``toolkit``."""
    package_dir = Path(__file__).resolve().parents[1]
    installed_tools = package_dir / "_tools"
    return installed_tools if installed_tools.is_dir() else package_dir.parent


def python_path_with_tools() -> str:
    """``PYTHONPATH`` of a process that is to find the tools."""
    paths = [str(tools_dir()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.pathsep.join(dict.fromkeys(paths))
