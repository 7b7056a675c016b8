"""Confines the process of VLMEvalKit, which evaluates cells and answers as Python, unpickles, and downloads.

Run as a program, this file removes network access and write access from another program, where the system
allows it (user namespaces, Linux 5.12). :func:`guard` refuses inside Python, on every system, and names the
cause in its messages.
"""

from __future__ import annotations

import ctypes
import dis
import os
import pickle
import re
import struct
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

DENIED: list[str] = []
"""Hosts that were requested and refused, for the message about a missing score."""
LITERAL = re.compile(
    "RESUME|LOAD_CONST|LOAD_SMALL_INT|BUILD_(LIST|TUPLE|SET|MAP|CONST_KEY_MAP)|RETURN_(VALUE|CONST)"
    "|(LIST|SET|DICT)_(EXTEND|APPEND|ADD|UPDATE)|MAP_ADD|UNARY_NEGATIVE"
)
"""Bytecode instructions of an expression that is only data: no name, no call, no arithmetic."""
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1


def command(work: Path, network: bool) -> list[str]:
    """Words to put before a Python program; it then has no network and writes no file outside ``work``."""
    return [sys.executable, "-I", __file__, str(work), "network" if network else "alone", sys.executable]


def close(work: str, network: bool) -> None:
    """Confines this single-threaded process and all that it starts. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: Any) -> None:
        if getattr(libc, name)(*arguments) < 0:
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    def set_read_only(path: bytes, on: int) -> None:
        attributes = struct.pack("4Q", READ_ONLY * on, READ_ONLY * (1 - on), 0, 0)  # to set, to clear
        call("syscall", MOUNT_SETATTR, AT_FDCWD, path, AT_RECURSIVE, attributes, len(attributes))

    user = os.getuid()
    group = os.getgid()
    os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS | (0 if network else os.CLONE_NEWNET))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user or 1} {user} 1")  # user 0 could undo all this
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")

    # CUDA names its threads in /proc; locks between processes lie in /dev/shm.
    writable = [os.fsencode(path) for path in (work, f"/proc/{os.getpid()}", "/dev/shm")]
    call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    for path in writable:
        call("mount", path, path, None, MS_BIND | MS_REC, None)
    set_read_only(b"/", 1)
    for path in writable:
        set_read_only(path, 0)


def guard(work: Path, judge_url: str | None = None) -> None:
    """Permanently refuses network access except to a judge's address, pickles outside ``work`` and the
    installed packages, and code that VLMEvalKit would execute unless it is a literal."""
    judge = urlsplit(judge_url or "").hostname
    python_load = pickle.load
    allowed = (work.resolve(), Path(sys.prefix))

    def load_own(file: Any, *rest: Any, **more: Any) -> Any:
        path = Path(file.name).resolve() if isinstance(getattr(file, "name", None), str) else None
        if path and not any(path.is_relative_to(folder) for folder in allowed):
            raise PermissionError(f"{path} is a pickle, which can execute anything; it was not read")
        return python_load(file, *rest, **more)

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "exec" and str(sys._getframe(1).f_globals.get("__name__")).split(".")[0] == "vlmeval":
            if not all(LITERAL.fullmatch(step.opname) for step in dis.get_instructions(arguments[0])):
                raise ValueError("VLMEvalKit would execute this text; only literals are read")
        if event == "socket.getaddrinfo" or (event == "socket.connect" and isinstance(arguments[1], tuple)):
            host = str(arguments[0] if event == "socket.getaddrinfo" else arguments[1][0])
            if judge is None or host not in (judge, "127.0.0.1", "::1"):
                DENIED.append(host)
                raise PermissionError(f"evaluation is offline; the connection to {host} was refused")

    pickle.load = load_own
    sys.addaudithook(refuse)


if __name__ == "__main__":
    close(sys.argv[1], sys.argv[2] == "network")
    os.execv(sys.argv[3], sys.argv[3:])
