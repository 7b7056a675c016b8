"""Exports saved steps as Hugging Face folders while training continues (``checkpoint.export_hf``).

The library does not import the converters. A separate process (``toolkit.weights.export_step``) reads the
saved step from disk; it needs no GPU and is not part of the process group. It runs at low priority, streams
tensors, gives the folder its final name when it is complete, and ends when this process ends. If a folder is
missing at the next start, because of a kill or a full disk, it is exported then, as long as its checkpoint
still exists.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from megatron_vl import host_memory
from megatron_vl.processes import python_path_with_tools
from megatron_vl.weights.manifest import MANIFEST
from megatron_vl.weights.run_folder import EXPORTED, EXPORTS, Saved, export_folder

PROGRAM = "toolkit.weights.export_step"
WAITING_TOLD = 2
"""If at least this many checkpoints wait for their export, a line says so."""
_END_S = 10.0
"""Seconds that an export has to end before it is killed."""


class HfExporter:
    """Exports saved steps one after another, in the background; on rank 0.

    If an export fails, this is reported, and the run continues without that folder.

    Args:
        folder: the folder of the run's checkpoints.
        hf: the Hugging Face folder that the model comes from.
        every: ``checkpoint.export_hf``.
        last: last step of the run, which is always exported.
    """

    def __init__(self, folder: Path, hf: Path, every: int | Literal["last"], last: int) -> None:
        self.folder, self.hf = folder, hf
        self.every, self.last = 0 if every == "last" else every, last
        self._waiting: deque[Saved] = deque()
        """The checkpoints to export. The first one is being exported."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    def due(self, step: int) -> bool:
        """Whether a step is to be exported."""
        return step == self.last or bool(self.every) and step % self.every == 0

    def add(self, saved: Saved) -> None:
        """Starts the export of a complete checkpoint, if it is due and not exported yet. Returns at once."""
        if not self.due(saved.step) or self._is_exported(saved):
            return

        with self._lock:
            if self._stopped:
                return
            self._waiting.append(saved)
            waiting = len(self._waiting) - 1
            if self._thread is None:
                # A daemon thread, so that a rank that fails does not wait for it.
                self._thread = threading.Thread(target=self._work, name="export-hf", daemon=True)
                self._thread.start()
        if waiting >= WAITING_TOLD:
            _say(f"NOTE: {waiting} checkpoints wait for their export and are kept until then")

    def make_up(self, line: Iterable[Saved]) -> None:
        """Exports the checkpoints that an earlier start of the run did not export.

        Args:
            line: the checkpoints that led to the current weights, sorted by step.
        """
        due = [saved for saved in line if self.due(saved.step)]
        continued = {_partial(self.folder, saved.step) for saved in due}
        for partial in (self.folder / EXPORTS).glob("step_*.partial"):
            if partial not in continued:  # its checkpoint is gone
                shutil.rmtree(partial, ignore_errors=True)
        for saved in due:
            self.add(saved)

    def held(self) -> set[Path]:
        """The checkpoints that must be kept until they are exported."""
        with self._lock:
            return {saved.path for saved in self._waiting}

    def wait(self, stop: Callable[[], object]) -> None:
        """Waits until all exports are done. If ``stop()`` becomes true, leaves the rest to the next start."""
        told = False
        while (thread := self._thread) is not None:
            if stop():
                return self.stop()
            if not told:
                told = True
                _say(f"waiting for the export of step {', '.join(self._steps())}")
            thread.join(0.2)

    def stop(self) -> None:
        """Ends the current export and starts no more."""
        with self._lock:
            self._stopped, thread, process = True, self._thread, self._process
        if thread is None:
            return
        _say(f"the export of step {', '.join(self._steps())} is left to the next start of this run")
        if process is not None:
            process.terminate()
        thread.join(_END_S)
        if thread.is_alive() and process is not None:
            process.kill()

    def _steps(self) -> list[str]:
        with self._lock:
            return [str(saved.step) for saved in self._waiting]

    def _is_exported(self, saved: Saved) -> bool:
        """Whether the step's folder was exported from these weights, and not from those of another branch."""
        try:
            made_of = json.loads((export_folder(self.folder, saved.step) / EXPORTED).read_text())["weights"]
            return made_of == json.loads((saved.path / "weights" / MANIFEST).read_text())["digest"]
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _work(self) -> None:
        """Exports one checkpoint after another until none is left. Runs in the thread."""
        while True:
            with self._lock:
                if self._stopped or not self._waiting:
                    self._thread = None
                    return
                saved = self._waiting[0]
            try:
                self._export(saved)
            except Exception as error:  # a thread's exception would be lost
                _say(f"NOTE: step {saved.step} could not be exported: {type(error).__name__}: {error}")
            with self._lock:
                if not self._stopped:
                    self._waiting.popleft()

    def _export(self, saved: Saved) -> None:
        """Runs the program on one checkpoint and waits until it ends."""
        start = time.monotonic()
        out = export_folder(self.folder, saved.step)
        job = {
            "checkpoint": str(saved.path),
            "hf": str(self.hf),
            "out": str(out),
            "parent": os.getpid(),
            "leave_free": 0 if saved.step == self.last else _size(saved.path),
            "facts": {"step": saved.step, "branch": saved.lineage.branch, "serial": saved.lineage.serial},
        }
        with self._lock:
            if self._stopped:
                return
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", PROGRAM, json.dumps(job)],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path_with_tools()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C goes only to the ranks
            )
        _, said = process.communicate()
        if self._stopped:
            return

        seconds = time.monotonic() - start
        if process.returncode == 0:
            _say(f"step {saved.step} is exported to {out} ({seconds:.0f} s)")
            return
        why = _why(process.returncode, said)
        _say(
            f"NOTE: step {saved.step} could not be exported to {out}: {why}. Training is not affected; the"
            " next start of this run tries again, as long as the checkpoint exists"
        )


def _why(exit_code: int, said: str) -> str:
    """Why an export failed, from its process's exit code and standard error."""
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"{name} ended it" + (f". {host_memory.about_kill()}" if name == "SIGKILL" else "")
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else f"it ended with exit code {exit_code}"


def _partial(folder: Path, step: int) -> Path:
    path = export_folder(folder, step)
    return path.with_name(f"{path.name}.partial")


def _size(folder: Path) -> int:
    """Size of a checkpoint in bytes, which the next checkpoint will need too."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _say(message: str) -> None:
    print(message, flush=True)
