"""Processes: which of them run, how they end together, and the paths that they need to find the tools."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class RankProcess:
    """A process, identified so that it cannot be confused with a later one of the same id."""

    host_name: str
    pid: int
    machine_id: str
    """The boot of the machine and the namespace of process ids. Where it is equal, ``pid`` means the same."""
    start_time: float

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host_name}"

    def is_local(self) -> bool:
        return self.machine_id == _machine_id()

    def system_state(self) -> str:
        """The system's name of the process's state, or ``gone``; empty if it runs on another machine."""
        if not self.is_local():
            return ""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.start_time) <= 1:
                return process.status()
        return "gone"

    def is_running(self) -> bool:
        """Whether the process is known to run, which only the machine of the current process can tell."""
        return self.system_state() not in ("", "gone", psutil.STATUS_ZOMBIE)

    def kill_tree(self) -> None:
        """Kills the process and its children, if it runs on this machine."""
        if self.is_running():
            kill_process_tree(self.pid)


def available_cores() -> int:
    """The cores of this process, at most 8: so many workers saturate a disk."""
    return min(8, len(os.sched_getaffinity(0)))


def own_process() -> RankProcess:
    try:
        process = psutil.Process()
    except psutil.Error:  # there is no /proc, so that no process can find this one
        return RankProcess(socket.gethostname(), os.getpid(), "", 0.0)
    return RankProcess(socket.gethostname(), process.pid, _machine_id(), process.create_time())


def _machine_id() -> str:
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {os.readlink('/proc/self/ns/pid')} {socket.gethostname()}"
    except OSError:
        return socket.gethostname()


def list_children(parent_pid: int) -> dict[int, tuple[str, ...]]:
    """The living children of a process: id -> words of the command line.

    A child that ends during the call is left out.
    """
    commands_by_pid = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(parent_pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # also raised for a zombie
                commands_by_pid[child.pid] = tuple(child.cmdline())
    return commands_by_pid


def kill_process_tree(root_pid: int) -> None:
    """Sends SIGKILL to a process and all its descendants. A stopped process does not react to SIGTERM.

    Ranks run in their own sessions, so killing the launcher's process group is not enough. All
    are stopped first: a launcher that sees a rank die could start another one, or end as if all were well.
    """
    with contextlib.suppress(psutil.Error):
        for process in list(_stopped_tree(psutil.Process(root_pid))):
            with contextlib.suppress(psutil.Error):
                process.kill()


def _stopped_tree(parent: psutil.Process) -> Iterator[psutil.Process]:
    """Stops a process and everything below it, parents first: what is stopped starts no further process."""
    with contextlib.suppress(psutil.Error):
        parent.suspend()
        yield parent
        for child in parent.children():
            yield from _stopped_tree(child)


def kill_descendants() -> None:
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children():
            kill_process_tree(child.pid)


_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int = 0) -> None:
    """Lets the kernel kill this process when the thread that started it ends, for whatever reason.

    Args:
        parent: id of the process that started this one; 0: ``multiprocessing`` knows it, or it is alive.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have ended before the kernel was asked.
    parent = parent or getattr(multiprocessing.parent_process(), "pid", 0)
    if parent and os.getppid() != parent:
        os._exit(1)


def tools_dir() -> Path:
    """The folder that holds ``toolkit``."""
    package_dir = Path(__file__).resolve().parents[1]
    installed_tools = package_dir / "_tools"
    return installed_tools if installed_tools.is_dir() else package_dir.parent


def python_path_with_tools() -> str:
    paths = [str(tools_dir()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.pathsep.join(dict.fromkeys(paths))
