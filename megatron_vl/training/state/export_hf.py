"""Exports saved steps as Hugging Face folders while training continues (``checkpoint.export_hf``).

A separate process (``toolkit.weights.export_step``) reads the
saved step from disk; it needs no GPU and is not part of the process group. It runs at low priority, streams
tensors, gives the folder its final name when it is complete, and ends when this process ends. If a folder is
missing at the next start, because of a kill or a full disk, it is exported then, as long as its checkpoint
still exists.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Literal

from megatron_vl.system import host_memory
from megatron_vl.system.partial_folder import remove_partial_folder
from megatron_vl.system.processes import python_path_with_tools
from megatron_vl.weights.manifest import MANIFEST_FILE
from megatron_vl.weights.run_folder import EXPORT_FACTS_FILE, EXPORTS_DIR, SavedCheckpoint, export_dir_path


class HfExporter:
    """Exports saved steps one after another, in the background; on rank 0.

    If an export fails, this is reported, and the run continues without that folder.
    """

    def __init__(
        self, run_dir: Path, hf_dir: Path, export_interval: int | Literal["last"], last_step: int
    ) -> None:
        self.run_dir, self.hf_dir = run_dir, hf_dir
        self.export_interval, self.last_step = 0 if export_interval == "last" else export_interval, last_step
        self._export_queue: deque[SavedCheckpoint] = deque()
        """The checkpoints to export. The first one is being exported if there is a process."""
        self._export_process: subprocess.Popen[str] | None = None
        self._start_time = 0.0
        self._outputs: list[IO[str]] = []

    def is_due(self, step: int) -> bool:
        return step == self.last_step or bool(self.export_interval) and step % self.export_interval == 0

    def enqueue_export(self, saved: SavedCheckpoint) -> None:
        """Lists a complete checkpoint for export, if it is due and not exported yet. Any thread may call."""
        if self.is_due(saved.step) and not self._is_exported(saved):
            self._export_queue.append(saved)

    def enqueue_missing_exports(self, checkpoints: Iterable[SavedCheckpoint]) -> None:
        """Lists those of the run's checkpoints, sorted by step, that an earlier start did not export."""
        for partial_dir in (self.run_dir / EXPORTS_DIR).glob("step_*.partial"):  # of a killed export
            remove_partial_folder(partial_dir)
        for saved in checkpoints:
            self.enqueue_export(saved)

    def pending_checkpoints(self) -> set[Path]:
        """The checkpoints that must be kept until they are exported."""
        return {saved.path for saved in list(self._export_queue)}

    def advance(self) -> None:
        """Reports an export that has ended, and starts the next one. Returns at once.

        Call it regularly in the main thread: a process ends with the thread that has started it.
        """
        if self._export_process is not None and self._export_process.poll() is not None:
            self._report_export(self._export_queue[0], self._export_process.returncode)
            self._export_process = None
            self._export_queue.popleft()
        if self._export_process is None and self._export_queue:
            try:
                self._start_export(self._export_queue[0])
            except OSError as error:  # of any kind: a run does not end because of an export
                step = self._export_queue.popleft().step
                print(f"NOTE: step {step} could not be exported: {error}", flush=True)

    def wait_for_exports(self, should_stop: Callable[[], object]) -> None:
        """Waits until all exports are done, or until ``should_stop()`` is true.

        The exports that are left are made at the next start of the run.
        """
        if self._export_queue:
            print(f"waiting for the export of step {self._queued_steps()}", flush=True)
        while self._export_queue:
            if should_stop():
                return self.stop_exports()
            self.advance()
            if self._export_process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._export_process.wait(0.2)

    def stop_exports(self) -> None:
        """Ends the current export. The checkpoints stay listed, so that the next start still has them."""
        if self._export_queue:
            print(
                f"the export of step {self._queued_steps()} is left to the next start of this run", flush=True
            )
        process, self._export_process = self._export_process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()

    def _queued_steps(self) -> str:
        return ", ".join(str(saved.step) for saved in self._export_queue)

    def _is_exported(self, saved: SavedCheckpoint) -> bool:
        """Whether the step's folder was exported from these weights."""
        facts_path = export_dir_path(self.run_dir, saved.step) / EXPORT_FACTS_FILE
        try:
            manifest = json.loads((saved.path / "weights" / MANIFEST_FILE).read_text())
            return json.loads(facts_path.read_text())["weights"] == manifest["digest"]
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _start_export(self, saved: SavedCheckpoint) -> None:
        job = {
            "checkpoint": str(saved.path),
            "hf": str(self.hf_dir),
            "out": str(export_dir_path(self.run_dir, saved.step)),
            "parent": os.getpid(),
            "is_last": saved.step == self.last_step,
            "facts": {"step": saved.step},
        }
        self._start_time = time.monotonic()
        # Files, because nobody reads a pipe meanwhile.
        self._outputs = [tempfile.TemporaryFile("w+") for _ in range(2)]
        self._export_process = subprocess.Popen(
            [sys.executable, "-P", "-m", "toolkit.weights.export_step", json.dumps(job)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path_with_tools()},
            stdin=subprocess.DEVNULL,
            stdout=self._outputs[0],
            stderr=self._outputs[1],
            text=True,
            start_new_session=True,  # Ctrl-C goes only to the ranks
        )

    def _report_export(self, saved: SavedCheckpoint, exit_code: int) -> None:
        texts = []
        for output in self._outputs:
            output.seek(0)
            texts.append(output.read())
            output.close()
        out, seconds = export_dir_path(self.run_dir, saved.step), time.monotonic() - self._start_time
        lines = [f"step {saved.step} is exported to {out} ({seconds:.0f} s)"]
        lines += [line for line in texts[0].splitlines() if line.startswith("NOTE: ")]
        if exit_code:
            lines = [
                f"NOTE: step {saved.step} could not be exported to {out}:"
                f" {_failure_reason(exit_code, texts[1])}. Training is not affected; the next start of"
                " this run tries again, as long as the checkpoint exists"
            ]
        print(*lines, sep="\n", flush=True)


def _failure_reason(exit_code: int, stderr_text: str) -> str:
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"{name} ended it" + (f". {host_memory.KILL_ADVICE}" if name == "SIGKILL" else "")
    lines = [line for line in stderr_text.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else f"it ended with exit code {exit_code}"
