"""Writes the sizes of samples that a run needs and its data sets lack, before its loader is built.

The library does not import the data tools. A separate process (``megatron-vl data index``) reads and
tokenizes all text; it needs no GPU and is not part of the process group. What it has measured stays, so that
a start that is interrupted continues at the next one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import torch.distributed as dist

from megatron_vl import progress
from megatron_vl.data.source.description import LoaderError
from megatron_vl.parallel.groups import from_first_rank
from megatron_vl.platform import Platform
from megatron_vl.processes import python_path_with_tools
from megatron_vl.training.resolved_run import ResolvedRun
from megatron_vl.training.setup import end_if_asked

WAIT_S = 10.0
"""Seconds between two looks at the process: the other ranks wait in a collective for so long."""
_END_S = 10.0
"""Seconds that the process has to end before it is killed."""


def write_missing_sizes(resolved: ResolvedRun, platform: Platform) -> None:
    """Lets rank 0 write the sizes that are missing, while all ranks wait. Collective.

    Raises:
        LoaderError: the sizes cannot be written. The message says where else to write them.
        SystemExit: a signal asked a rank to stop.
    """
    lacking = resolved.data["train"].without_sizes
    if not lacking:
        return

    indexing = _Indexing(resolved) if dist.get_rank() == 0 else None
    try:
        while from_first_rank(lambda: indexing is not None and indexing.goes_on()):
            progress.tick()
            end_if_asked(platform)
    finally:
        if indexing is not None:
            indexing.end()


class _Indexing:
    """The process that writes the sizes. The constructor starts it."""

    def __init__(self, resolved: ResolvedRun) -> None:
        config = resolved.config
        lacking = resolved.data["train"].without_sizes
        cores = len(os.sched_getaffinity(0))
        print(
            f"the sizes of the samples of {', '.join(lacking)} are not known for this tokenizer and chat"
            f" template: they are written now, once, on {cores} cores (megatron-vl data index)",
            flush=True,
        )
        fields = {
            "data.path": config.data.path,
            "model.hf": config.model.hf,
            "data.video_prompt": config.data.video_prompt,
            "data.sample_timeout_s": str(config.data.sample_timeout_s),
        }
        words = [word for name, value in fields.items() for word in (f"--{name}", value)]
        self._said = tempfile.TemporaryFile("w+")
        self._last = ""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "megatron_vl", "data", "index", "--workers", str(cores), *words],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path_with_tools()},
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
            start_new_session=True,  # Ctrl-C goes only to the ranks
        )

    def goes_on(self) -> bool:
        """Waits a little for the process, shows its last line if it is new, and says whether it goes on.

        Raises:
            LoaderError: it failed.
        """
        try:
            code = self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            code = None
        self._said.seek(0)
        lines = self._said.read().split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        if code:
            raise LoaderError(
                f"{last or f'data index ended with exit code {code}'}. Training needs the sizes of all"
                " samples: write them with `megatron-vl data index` where the data set can be written, and"
                " copy the folder .nv-meta/sizes to it"
            )
        if last != self._last:
            print(f"  {last}", flush=True)
        self._last = last
        return code is None

    def end(self) -> None:
        """Ends the process if it still runs."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._said.close()
