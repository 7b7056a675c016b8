"""Errors that a user can fix, and how every entry point shows them: one line and an exit code.

Any other error is a bug and is shown with its traceback.
"""

from __future__ import annotations

import os
import re
import traceback

TRACEBACK = "MEGATRON_VL_TRACEBACK"
"""Environment variable: if it is set, errors that a user can fix are shown with a traceback too."""


class UserError(Exception):
    """An error that a user can fix.

    The message names the file, sample, option or field, and says what to do.
    """

    exit_code = 1


class UsageError(UserError):
    """The command line is invalid."""

    exit_code = 2


_OF_TORCH = {"OutOfMemoryError", "DistBackendError", "DistNetworkError", "DistStoreError"}
"""Errors of torch that are about the machine.
They are compared by name, because importing torch takes seconds."""
_OF_LOST_RANK = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_LOST_RANK = re.compile(r"gloo/transport|Connection (closed|reset) by peer|NCCL")
"""What a collective reports on the remaining ranks when another rank has ended."""


def is_fixable(error: BaseException) -> bool:
    """Whether a user can fix the error.

    Fixable errors are our own refusals, errors of files and disks,
    lack of memory, and a lost rank or network.
    """
    if isinstance(error, UserError | OSError | MemoryError):
        return True
    if type(error).__name__ in _OF_TORCH:
        return True
    return type(error) is RuntimeError and bool(_LOST_RANK.search(str(error)))


def traceback_helps(error: BaseException) -> bool:
    """Whether the place of an error that a user can fix may say more than its message, as with errors of the
    system. Messages of this project say all that there is to say."""
    ours = isinstance(error, UserError) or isinstance(error, OSError) and error.errno is None
    return is_fixable(error) and not ours


def follows(error: BaseException) -> bool:
    """Whether an error usually follows from the end of another rank, which then is the cause."""
    return type(error).__name__ in _OF_LOST_RANK or bool(_LOST_RANK.search(str(error)))


def describe(error: BaseException) -> str:
    """The text to show for an error:
    its message, or for a bug its traceback and a line that says what to do."""
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
    """2 for an invalid command line, otherwise 1."""
    return error.exit_code if isinstance(error, UserError) else 1
