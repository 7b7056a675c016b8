"""Errors that a user can fix, and how every entry point shows them: one line and an exit code.

Any other error is a bug and is shown with its traceback.
"""

import contextlib
import errno
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator

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


_LOST_RANK_ERROR_NAMES = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_LIBRARY_ERROR_NAMES = {"OutOfMemoryError", "FatalSampleError", *_LOST_RANK_ERROR_NAMES}
"""Errors of torch and Energon about machine and storage. Names are compared: to import both takes seconds."""
_RECORD_ERRNOS = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EINVAL, errno.EILSEQ),  # a name that the file system cannot hold, or a damaged offset
}
"""What the system says about a path or a position that a record or an index names."""
DISK_REMEDIES = {
    errno.ENOSPC: "make room on its disk, or give a folder on another one",
    errno.EDQUOT: "delete files of yours there, or give a folder elsewhere",
    errno.EROFS: "give a folder that can be written to",
    errno.EACCES: "give a folder that belongs to you, or ask for access",
}
"""What to do about errors of the disk, whose message says only what is wrong."""
RETRY_WAITS_S = (0.1, 0.5, 2.0)
"""Seconds before each further attempt after a fault of the machine."""
HOST_MEMORY_PATTERN = re.compile(
    r"[Cc]an(no|')t allocate memory|std::bad_alloc|DefaultCPUAllocator: not enough memory"
)
_LOST_RANK_PATTERN = re.compile(r"gloo/transport|Connection (closed|reset) by peer|NCCL")
"""Errors of a collective on the remaining ranks when another rank has ended."""


def is_user_fixable(error: BaseException) -> bool:
    """Whether a user can fix the error.

    Fixable errors are refusals by this project, errors of files and disks, lack of memory, and a lost rank or
    network.
    """
    if isinstance(error, UserError | OSError | MemoryError) or type(error).__name__ in _LIBRARY_ERROR_NAMES:
        return True
    return type(error) is RuntimeError and bool(_LOST_RANK_PATTERN.search(str(error)))


def is_machine_fault(error: BaseException) -> bool:
    """Whether an error is the machine's (disk, network, memory, limits) and says nothing about the record.

    Such an error may not come again, so no record may be left out because of it. Errors without a number are
    those of decoders and parsers.
    """
    if isinstance(error, OSError):
        return error.errno is not None and error.errno not in _RECORD_ERRNOS
    return isinstance(error, MemoryError | ImportError) or bool(
        isinstance(error, RuntimeError) and HOST_MEMORY_PATTERN.search(str(error))
    )


@contextlib.contextmanager
def naming_file(file_path: object) -> Iterator[None]:
    """A context whose OSErrors name a file. Those of a write or of ``fsync`` (a full disk) name none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and not error.filename:
            error.filename = str(file_path)
        raise


def retry_machine_faults[Result](read: Callable[[], Result], file_name: object) -> Result:
    """The result of ``read``, which is called again after an OSError that is a fault of the machine.

    Raises:
        OSError: that of the record at once, and that of the machine after the last attempt. It names a file.
    """
    for wait_s in (*RETRY_WAITS_S, None):
        try:
            with naming_file(file_name):
                return read()
        except OSError as error:
            if wait_s is None or not is_machine_fault(error):
                raise
        time.sleep(wait_s)
    raise AssertionError  # the last attempt returns or raises


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
    if isinstance(error, OSError) and error.errno in DISK_REMEDIES and error.filename:
        message = f"{error.filename}: {error.strerror}; {DISK_REMEDIES[error.errno]}"
    if "Too many open files" in message and "ulimit" not in message:
        message += "; raise the limit of open files (`ulimit -n`) where the command is started"
    if is_user_fixable(error) and not os.environ.get(TRACEBACK_VARIABLE):
        return message

    traceback_text = "".join(traceback.format_exception(error)).rstrip()
    if is_user_fixable(error):
        return f"{message}\n{traceback_text}"
    error_summary = " ".join(f"{type(error).__name__}: {message}".split())
    return (
        f"{error_summary}\n{traceback_text}\n"
        "This is a bug in megatron-vl, or in a library that it uses: please report it with these lines."
    )


def exit_code_of_error(error: BaseException) -> int:
    """2 for an invalid command line, otherwise 1."""
    return error.exit_code if isinstance(error, UserError) else 1
