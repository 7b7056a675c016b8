"""Exports saved steps as Hugging Face folders while training continues (``checkpoint.export_hf``).

A separate process (``toolkit.weights.export_step``) reads the
saved step from disk; it needs no GPU and is not part of the process group. It runs at low priority, streams
tensors, gives the folder its final name when it is complete, and ends when this process ends. If a folder is
missing at the next start, because of a kill or a full disk, it is exported then, as long as its checkpoint
still exists.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from megatron_vl.system import host_memory
from megatron_vl.system.partial_folder import remove_partial_folder
from megatron_vl.system.processes import python_path_with_tools
from megatron_vl.weights.manifest import MANIFEST_FILE
from megatron_vl.weights.run_folder import EXPORT_FACTS_FILE, EXPORTS_DIR, SavedCheckpoint, export_dir_path

EXPORT_PROGRAM = "toolkit.weights.export_step"
REPORTED_QUEUE_LENGTH = 2
"""If at least this many checkpoints wait for their export, a line says so."""
_TERMINATE_TIMEOUT_S = 10.0
"""Seconds that an export has to end before it is killed."""


class HfExporter:
    """Exports saved steps one after another, in the background; on rank 0.

    If an export fails, this is reported, and the run continues without that folder.

    Args:
        run_dir: the folder of the run's checkpoints.
        hf_dir: the Hugging Face folder that the model comes from.
        export_interval: ``checkpoint.export_hf``.
        last_step: last step of the run, which is always exported.
    """

    def __init__(
        self, run_dir: Path, hf_dir: Path, export_interval: int | Literal["last"], last_step: int
    ) -> None:
        self.run_dir, self.hf_dir = run_dir, hf_dir
        self.export_interval, self.last_step = 0 if export_interval == "last" else export_interval, last_step
        self._export_queue: deque[SavedCheckpoint] = deque()
        """The checkpoints to export. The first one is being exported."""
        self._lock = threading.Lock()
        self._export_thread: threading.Thread | None = None
        self._export_process: subprocess.Popen[str] | None = None
        self._is_stopped = False

    def is_due(self, step: int) -> bool:
        """Whether a step is to be exported."""
        return step == self.last_step or bool(self.export_interval) and step % self.export_interval == 0

    def enqueue_export(self, saved: SavedCheckpoint) -> None:
        """Starts the export of a complete checkpoint, if it is due and not exported yet. Returns at once."""
        if not self.is_due(saved.step) or self._is_exported(saved):
            return

        with self._lock:
            if self._is_stopped:
                return
            self._export_queue.append(saved)
            waiting_count = len(self._export_queue) - 1
            if self._export_thread is None:
                # A daemon thread, so that a rank that fails does not wait for it.
                self._export_thread = threading.Thread(target=self._run_queue, name="export-hf", daemon=True)
                self._export_thread.start()
        if waiting_count >= REPORTED_QUEUE_LENGTH:
            _print_message(f"NOTE: {waiting_count} checkpoints wait for their export and are kept until then")

    def enqueue_missing_exports(self, checkpoints: Iterable[SavedCheckpoint]) -> None:
        """Exports those of the run's checkpoints, sorted by step, that an earlier start did not export."""
        for partial_dir in (self.run_dir / EXPORTS_DIR).glob("step_*.partial"):  # of a killed export
            remove_partial_folder(partial_dir)
        for saved in checkpoints:
            self.enqueue_export(saved)

    def pending_checkpoints(self) -> set[Path]:
        """The checkpoints that must be kept until they are exported."""
        with self._lock:
            return {saved.path for saved in self._export_queue}

    def wait_for_exports(self, should_stop: Callable[[], object]) -> None:
        """Waits until all exports are done, or until ``should_stop()`` is true.

        The exports that are left are made at the next start of the run.
        """
        has_printed = False
        while (thread := self._export_thread) is not None:
            if should_stop():
                return self.stop_exports()
            if not has_printed:
                has_printed = True
                _print_message(f"waiting for the export of step {', '.join(self._queued_steps())}")
            thread.join(0.2)

    def stop_exports(self) -> None:
        """Ends the current export, and starts no further ones."""
        with self._lock:
            self._is_stopped, thread, process = True, self._export_thread, self._export_process
        if thread is None:
            return
        _print_message(
            f"the export of step {', '.join(self._queued_steps())} is left to the next start of this run"
        )
        if process is not None:
            process.terminate()
        thread.join(_TERMINATE_TIMEOUT_S)
        if thread.is_alive() and process is not None:
            process.kill()

    def _queued_steps(self) -> list[str]:
        with self._lock:
            return [str(saved.step) for saved in self._export_queue]

    def _is_exported(self, saved: SavedCheckpoint) -> bool:
        """Whether the step's folder was exported from these weights."""
        facts_path = export_dir_path(self.run_dir, saved.step) / EXPORT_FACTS_FILE
        manifest_path = saved.path / "weights" / MANIFEST_FILE
        try:
            exported_digest = json.loads(facts_path.read_text())["weights"]
            return exported_digest == json.loads(manifest_path.read_text())["digest"]
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _run_queue(self) -> None:
        """Exports one checkpoint after another until none is left. Runs in the thread."""
        while True:
            with self._lock:
                if self._is_stopped or not self._export_queue:
                    self._export_thread = None
                    return
                saved = self._export_queue[0]
            try:
                self._export_checkpoint(saved)
            except Exception as error:  # a thread's exception would be lost
                _print_message(
                    f"NOTE: step {saved.step} could not be exported: {type(error).__name__}: {error}"
                )
            with self._lock:
                if not self._is_stopped:
                    self._export_queue.popleft()

    def _export_checkpoint(self, saved: SavedCheckpoint) -> None:
        """Runs the program on one checkpoint and waits until it ends."""
        start = time.monotonic()
        out = export_dir_path(self.run_dir, saved.step)
        job = {
            "checkpoint": str(saved.path),
            "hf": str(self.hf_dir),
            "out": str(out),
            "parent": os.getpid(),
            "leave_free": 0 if saved.step == self.last_step else _dir_size_bytes(saved.path),
            "facts": {"step": saved.step},
        }
        with self._lock:
            if self._is_stopped:
                return
            process = self._export_process = subprocess.Popen(
                [sys.executable, "-P", "-m", EXPORT_PROGRAM, json.dumps(job)],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path_with_tools()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C goes only to the ranks
            )
        stdout, stderr = process.communicate()
        if self._is_stopped:
            return
        if process.returncode:
            _print_message(
                f"NOTE: step {saved.step} could not be exported to {out}:"
                f" {_failure_reason(process.returncode, stderr)}. Training is not affected; the next start of"
                " this run tries again, as long as the checkpoint exists"
            )
            return
        _print_message(f"step {saved.step} is exported to {out} ({time.monotonic() - start:.0f} s)")
        for line in stdout.splitlines():
            if line.startswith("NOTE: "):
                _print_message(line)


def _failure_reason(exit_code: int, stderr_text: str) -> str:
    """Why an export failed, from its process's exit code and standard error."""
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"{name} ended it" + (f". {host_memory.explain_kill()}" if name == "SIGKILL" else "")
    lines = [line for line in stderr_text.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else f"it ended with exit code {exit_code}"


def _dir_size_bytes(checkpoint_path: Path) -> int:
    """Size of a checkpoint in bytes, which the next checkpoint will need too."""
    return sum(path.stat().st_size for path in checkpoint_path.rglob("*") if path.is_file())


def _print_message(message: str) -> None:
    print(message, flush=True)
