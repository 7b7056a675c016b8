"""Folders that get their name when they are complete: written as ``OUT.partial``, then renamed to ``OUT``.

``OUT.partial`` holds the new folder as ``new``, the one that it replaces as ``old``, and the file ``owner``,
which the writing process keeps locked. A killed job leaves it behind. The next job for ``OUT`` finds the lock
free, removes it and starts again.
"""

import contextlib
import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import psutil

from megatron_vl.system import durable_files

OWNER_FILE, NEW_DIR, OLD_DIR = "owner", "new", "old"


@contextlib.contextmanager
def open_partial_folder(
    output_dir: Path,
    check_replaceable: Callable[[Path], None] | None = None,
    is_replaced: Callable[[str], bool] = lambda name: False,
) -> Iterator[Path]:
    """A context with an empty folder that becomes ``output_dir`` at its end. An error removes it.

    If ``output_dir`` exists, it stays as it is until then. Its other files move to the new folder.

    Args:
        check_replaceable: raises an error if ``output_dir``, which is not empty, must not be replaced. By
            default, none may.
        is_replaced: whether a file or folder of this name in ``output_dir`` goes even if there is no new one.

    Raises:
        FileExistsError: another process writes to ``output_dir``, or it cannot be renamed.
    """
    output_dir = output_dir.resolve()
    if output_dir == Path.cwd() or os.path.ismount(output_dir):
        raise FileExistsError(
            f"--out {output_dir} is the current folder or a mount point, and a folder that is renamed to it"
            " could not take its place; give another folder"
        )
    partial_dir = output_dir.with_name(output_dir.name + durable_files.PARTIAL_SUFFIX)
    owner_file = _claim_folder(partial_dir)
    try:
        _settle_earlier_job(partial_dir, output_dir, is_replaced)
        if output_dir.exists() and not (output_dir.is_dir() and not any(output_dir.iterdir())):
            if check_replaceable is None:
                raise FileExistsError(f"--out {output_dir} exists; remove it, or give another --out")
            check_replaceable(output_dir)
        new_dir, is_replacing = partial_dir / NEW_DIR, output_dir.exists()
        new_dir.mkdir()
        try:
            yield new_dir
            durable_files.fsync_tree(new_dir)
            if is_replacing:
                shutil.copymode(output_dir, new_dir)
                durable_files.rename_path(output_dir, partial_dir / OLD_DIR)
            durable_files.rename_path(new_dir, output_dir)
        finally:
            _settle_earlier_job(partial_dir, output_dir, is_replaced)
    finally:
        # The owner goes last, so that whatever a kill leaves has one.
        if not (partial_dir / NEW_DIR).exists() and not (partial_dir / OLD_DIR).exists():
            (partial_dir / OWNER_FILE).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another process has already taken it
                partial_dir.rmdir()
        owner_file.close()


def remove_partial_folder(partial_dir: Path) -> None:
    """Removes what a killed job left. What a living process owns, and what is something else, stays."""
    with contextlib.suppress(OSError), _claim_folder(partial_dir):
        shutil.rmtree(partial_dir)


def _claim_folder(partial_dir: Path) -> TextIO:
    """Makes ``partial_dir``, or takes over that of a dead process. Returns its locked file."""
    durable_files.make_dirs(partial_dir)
    if not (partial_dir / OWNER_FILE).is_file() and any(partial_dir.iterdir()):
        raise FileExistsError(
            f"{partial_dir} is needed for the unfinished output, and holds something else; rename it"
        )
    owner_file = (partial_dir / OWNER_FILE).open("a+")
    try:
        owner_file.seek(0)
        host, _, pid = owner_file.read().partition(" ")
        owner_text = f"process {pid} on {host}" if pid else "another process"
        try:
            # Not flock: forked workers would keep that after a kill.
            fcntl.lockf(owner_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_owned = False
        except (BlockingIOError, PermissionError):
            is_owned = True
        except OSError:  # the file system has no locks
            is_owned = bool(pid) and (host != socket.gethostname() or psutil.pid_exists(int(pid)))
        if is_owned:
            raise FileExistsError(
                f"{partial_dir} is being written by {owner_text}; wait for it, or give another --out"
            )
        owner_path = partial_dir / OWNER_FILE
        if not owner_path.exists() or not os.path.samestat(os.fstat(owner_file.fileno()), owner_path.stat()):
            raise FileExistsError(f"{partial_dir}: {owner_text} has just finished; look at its output")
        owner_file.truncate(0)
        owner_file.write(f"{socket.gethostname()} {os.getpid()}")
        owner_file.flush()
    except BaseException:
        owner_file.close()
        raise
    return owner_file


def _settle_earlier_job(partial_dir: Path, output_dir: Path, is_replaced: Callable[[str], bool]) -> None:
    """Ends a job, wherever it stopped: removes an incomplete new folder, and the old one once it is replaced.

    If the new folder did not get the name, the old one gets it back.
    """
    if (partial_dir / NEW_DIR).is_dir():
        shutil.rmtree(partial_dir / NEW_DIR)
    if not (old_dir := partial_dir / OLD_DIR).is_dir():
        return
    if output_dir.is_dir() and any(output_dir.iterdir()):
        _keep_other_files(old_dir, output_dir, is_replaced)
        shutil.rmtree(old_dir)
    else:
        durable_files.rename_path(old_dir, output_dir)


def _keep_other_files(old_dir: Path, new_dir: Path, is_replaced: Callable[[str], bool]) -> None:
    """Moves what the new folder neither has nor replaces."""
    for old_path in old_dir.iterdir():
        new_path = new_dir / old_path.name
        if not is_replaced(old_path.name) and not os.path.lexists(new_path):
            os.rename(old_path, new_path)
        elif new_path.is_dir() and old_path.is_dir() and not old_path.is_symlink():
            _keep_other_files(old_path, new_path, lambda _: False)
    durable_files.fsync_path(new_dir)
