"""The processes that another one has started, and what they need to find the tools."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil


def children(parent: int) -> dict[int, tuple[str, ...]]:
    """The living children of a process: id -> words of the command line. One that ends meanwhile is left
    out."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(parent).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # a dead one that nobody waited for, too
                found[process.pid] = tuple(process.cmdline())
    return found


def tools_folder() -> Path:
    """The folder that holds ``toolkit``."""
    package = Path(__file__).resolve().parent
    installed = package / "_tools"
    return installed if installed.is_dir() else package.parent


def python_path_with_tools() -> str:
    """``PYTHONPATH`` of a process that is to find the tools."""
    paths = [str(tools_folder()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.pathsep.join(dict.fromkeys(paths))
