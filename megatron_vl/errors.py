"""What a user can fix, and how every entry point shows it: one line and an exit code. All else is a bug, with
its traceback."""

from __future__ import annotations

import os
import re
import traceback

TRACEBACK = "MEGATRON_VL_TRACEBACK"
"""Environment variable: set to anything, users' errors are shown with their traceback too."""


class UserError(Exception):
    """Something that a user can fix. The message names the file, sample, option or field, and says what to
    do."""

    exit_code = 1


class UsageError(UserError):
    """The command line itself cannot be used."""

    exit_code = 2


_OF_TORCH = {"OutOfMemoryError", "DistBackendError", "DistNetworkError", "DistStoreError"}
"""Errors of torch that are about the machine; compared by name, because importing torch takes seconds."""
_LOST_RANK = re.compile(r"gloo/transport|Connection (closed|reset) by peer|NCCL")
"""What a collective says on the ranks that are left when another rank has ended."""


def is_fixable(error: BaseException) -> bool:
    """Whether a user can fix it: our refusals, files and disks, memory, and a rank or a network that is
    gone."""
    if isinstance(error, UserError | OSError | MemoryError):
        return True
    if type(error).__name__ in _OF_TORCH:
        return True
    return type(error) is RuntimeError and bool(_LOST_RANK.search(str(error)))


def describe(error: BaseException) -> str:
    """What is shown of an error: its message, or the traceback of a bug with a line on what to do about
    it."""
    message = str(error) or type(error).__name__
    if is_fixable(error) and not os.environ.get(TRACEBACK):
        return message

    trace = "".join(traceback.format_exception(error)).rstrip()
    if is_fixable(error):
        return f"{message}\n{trace}"
    summary = " ".join(f"{type(error).__name__}: {message}".split())
    advice = "This is a bug in megatron-vl, or in a library that it uses: please report it with these lines."
    return f"{summary}\n{trace}\n{advice}"


def exit_code(error: BaseException) -> int:
    """2 for a command line that cannot be used, else 1."""
    return error.exit_code if isinstance(error, UserError) else 1
