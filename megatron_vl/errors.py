"""Errors that a user can fix, and how every entry point shows them: one line and an exit code.

Any other error is a bug and is shown with its traceback.
"""

from __future__ import annotations

import os
import re
import traceback

TRACEBACK_VARIABLE = "MEGATRON_VL_TRACEBACK"
"""Environment variable: if it is set, errors that a user can fix are shown with a traceback too."""


class UserError(Exception):
    """An error that a user can fix.

    The message names the file, sample, option or field, and says what to do.
    """

    exit_code = 1


class UsageError(UserError):
    """The command line is invalid."""

    exit_code = 2


_TORCH_ERROR_NAMES = {"OutOfMemoryError", "DistBackendError", "DistNetworkError", "DistStoreError"}
"""Errors of torch about the machine. Only names are compared, because importing torch takes seconds."""
_LOST_RANK_ERROR_NAMES = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_LOST_RANK_PATTERN = re.compile(r"gloo/transport|Connection (closed|reset) by peer|NCCL")
"""Errors of a collective on the remaining ranks when another rank has ended."""


def is_user_fixable(error: BaseException) -> bool:
    """Whether a user can fix the error.

    Fixable errors are refusals by this project, errors of files and disks, lack of memory, and a lost rank or
    network.
    """
    if isinstance(error, UserError | OSError | MemoryError) or type(error).__name__ in _TORCH_ERROR_NAMES:
        return True
    return type(error) is RuntimeError and bool(_LOST_RANK_PATTERN.search(str(error)))


def traceback_helps(error: BaseException) -> bool:
    """Whether the traceback of a fixable error says more than its message.

    That is so for errors of the system. Messages of this project are complete without a traceback.
    """
    is_own_message = isinstance(error, UserError) or isinstance(error, OSError) and error.errno is None
    return is_user_fixable(error) and not is_own_message


def follows_lost_rank(error: BaseException) -> bool:
    """Whether an error usually follows from the end of another rank, which then is the cause."""
    return type(error).__name__ in _LOST_RANK_ERROR_NAMES or bool(_LOST_RANK_PATTERN.search(str(error)))


def describe_error(error: BaseException) -> str:
    """The text to show for an error: its message, and for a bug its traceback and how to report it."""
    message = str(error) or type(error).__name__
    if is_user_fixable(error) and not os.environ.get(TRACEBACK_VARIABLE):
        return message

    traceback_text = "".join(traceback.format_exception(error)).rstrip()
    if is_user_fixable(error):
        return f"{message}\n{traceback_text}"
    error_summary = " ".join(f"{type(error).__name__}: {message}".split())
    report_advice = (
        "This is a bug in megatron-vl, or in a library that it uses: please report it with these lines."
    )
    return f"{error_summary}\n{traceback_text}\n{report_advice}"


def exit_code_of_error(error: BaseException) -> int:
    """2 for an invalid command line, otherwise 1."""
    return error.exit_code if isinstance(error, UserError) else 1
