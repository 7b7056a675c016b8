"""Writes the sizes of samples that a run or a command needs and its data sets lack, before a loader is built.

The library does not import the data tools. A separate process (``megatron-vl data index``) reads and
tokenizes all text; it needs no GPU and is not part of the process group. What it has measured stays, so that
a start that is interrupted continues at the next one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path

import torch.distributed as dist

from megatron_vl import progress
from megatron_vl.config import DataConfig
from megatron_vl.data.source.dataset_description import LoaderError, read_description
from megatron_vl.data.source.location import resolve_location
from megatron_vl.data.source.sample_sizes import find_datasets_without_sizes
from megatron_vl.parallel.process_groups import broadcast_from_rank_0
from megatron_vl.platform import Platform
from megatron_vl.processes import python_path_with_tools
from megatron_vl.training.resolved_run import ResolvedRun
from megatron_vl.training.setup import exit_if_stop_requested

POLL_INTERVAL_S = 10.0
"""Seconds between two looks at the process: the other ranks wait in a collective for so long."""
_PROGRAM = """
from megatron_vl.processes import end_with_parent

end_with_parent({parent})
from megatron_vl.__main__ import main

raise SystemExit(main())
"""
"""``python -m megatron_vl``, which is killed when the process with the id ``parent`` ends."""
_TERMINATE_TIMEOUT_S = 10.0
"""Seconds that the process has to end before it is killed."""


def write_missing_sizes(resolved_run: ResolvedRun, platform: Platform) -> None:
    """Lets rank 0 write the sizes that are missing, while all ranks wait. Collective.

    Raises:
        LoaderError: the sizes cannot be written. The message says where else to write them.
        SystemExit: a signal asked a rank to stop.
    """
    unsized_datasets = resolved_run.facts_by_split["train"].datasets_without_sizes
    if not unsized_datasets:
        return

    config, is_first = resolved_run.config, dist.get_rank() == 0
    process = (
        closing(IndexingProcess(config.data, config.model.hf, unsized_datasets))
        if is_first
        else nullcontext()
    )
    with process as indexing_process:
        while broadcast_from_rank_0(lambda: indexing_process is not None and indexing_process.is_running()):
            progress.note_progress()
            exit_if_stop_requested(platform)


def write_missing_sizes_alone(data: DataConfig, hf: str | Path) -> None:
    """Writes the sizes that are missing for a command without a process group, and reports on standard error.

    Raises:
        LoaderError: there is no data set, or the sizes cannot be written.
    """
    lacking = [
        str(one.path)
        for one in find_datasets_without_sizes(read_description(resolve_location(data.path)), hf, data)
    ]
    if not lacking:
        return

    with closing(IndexingProcess(data, hf, lacking, lambda line: print(line, file=sys.stderr))) as indexing:
        while indexing.is_running():
            pass


class IndexingProcess:
    """The process that writes the sizes. The constructor starts it. It ends with the thread that did.

    Args:
        lacking: the data sets without sizes.
        report: prints a line.
    """

    def __init__(
        self,
        data: DataConfig,
        hf: str | Path,
        lacking: Sequence[str],
        report: Callable[[str], None] = lambda line: print(line, flush=True),
    ) -> None:
        cores = len(os.sched_getaffinity(0))
        report(
            f"the sizes of the samples of {', '.join(lacking)} are not known for this tokenizer and chat"
            f" template: they are written now, once, on {cores} cores (megatron-vl data index)"
        )
        fields = {
            "data.path": data.path,
            "model.hf": str(hf),
            "data.video_prompt": data.video_prompt,
            "data.sample_timeout_s": str(data.sample_timeout_s),
        }
        words = [word for name, value in fields.items() for word in (f"--{name}", value)]
        self._report, self._last_line = report, ""
        self._output = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-c",
                _PROGRAM.format(parent=os.getpid()),
                "data",
                "index",
                "--workers",
                str(cores),
                *words,
            ],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path_with_tools()},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,  # Ctrl-C goes only to the ranks
        )

    def is_running(self) -> bool:
        """Waits a little for the process, reports its last line if it is new, and says whether it still runs.

        Raises:
            LoaderError: it failed.
        """
        try:
            code = self._process.wait(POLL_INTERVAL_S)
        except subprocess.TimeoutExpired:
            code = None
        self._output.seek(0)
        lines = self._output.read().split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        if code:
            raise LoaderError(
                f"{last or f'data index ended with exit code {code}'}. Training needs the sizes of all"
                " samples: write them with `megatron-vl data index` where the data set can be written, and"
                " copy the folder .nv-meta/sizes to it"
            )
        if last != self._last_line:
            self._report(f"  {last}")
        self._last_line = last
        return code is None

    def close(self) -> None:
        """Ends the process if it still runs."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_TERMINATE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._output.close()
