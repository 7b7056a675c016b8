"""Writes the sizes of samples that data sets lack, before a run or a command builds its loader.

The library does not import the data tools. A separate process (``megatron-vl data index``) reads and
tokenizes all text. It needs no GPU and is not part of the process group. Its results are kept, so a start
that is interrupted is continued by the next one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path

import torch.distributed as dist

from megatron_vl.config import DataConfig
from megatron_vl.data.source.dataset_description import LoaderError, read_description
from megatron_vl.data.source.sample_sizes import find_datasets_without_sizes
from megatron_vl.parallel.process_groups import broadcast_from_rank_0
from megatron_vl.parallel.start import exit_if_stop_requested
from megatron_vl.platform import Platform
from megatron_vl.system import progress
from megatron_vl.system.processes import python_path_with_tools
from megatron_vl.training.resolved_run import ResolvedRun

POLL_INTERVAL_S = 10.0
"""Seconds between two looks at the process. The other ranks wait in a collective for this long."""
_PROGRAM = """
from megatron_vl.system.processes import end_with_parent

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

    config = resolved_run.config
    process: AbstractContextManager[IndexingProcess | None] = nullcontext()
    if dist.get_rank() == 0:
        process = closing(IndexingProcess(config.data, config.model.hf, unsized_datasets))
    with process as indexing_process:
        while broadcast_from_rank_0(lambda: indexing_process is not None and indexing_process.is_running()):
            progress.note_progress()
            exit_if_stop_requested(platform)


def write_missing_sizes_alone(data_config: DataConfig, hf_dir: str | Path) -> None:
    """Writes the sizes that are missing for a command without a process group, and reports on standard error.

    Raises:
        LoaderError: there is no data set, or the sizes cannot be written.
    """
    dataset_description = read_description(data_config.path)
    unsized_datasets = find_datasets_without_sizes(dataset_description, hf_dir, data_config)
    if not unsized_datasets:
        return

    dataset_names = [str(dataset.path) for dataset in unsized_datasets]
    indexing_process = IndexingProcess(
        data_config, hf_dir, dataset_names, lambda line: print(line, file=sys.stderr)
    )
    with closing(indexing_process):
        while indexing_process.is_running():
            pass


class IndexingProcess:
    """The process that writes the sizes. The constructor starts it. It ends with the thread that started it.

    Args:
        unsized_datasets: names of the data sets without sizes.
        print_line: prints a line.
    """

    def __init__(
        self,
        data_config: DataConfig,
        hf_dir: str | Path,
        unsized_datasets: Sequence[str],
        print_line: Callable[[str], None] = lambda line: print(line, flush=True),
    ) -> None:
        core_count = len(os.sched_getaffinity(0))
        print_line(
            f"the sizes of the samples of {', '.join(unsized_datasets)} are not known for this tokenizer and"
            f" chat template: they are written now, once, on {core_count} cores (megatron-vl data index)"
        )
        config_fields = {
            "data.path": data_path
            if isinstance(data_path := data_config.path, str)
            else json.dumps(data_path),
            "model.hf": str(hf_dir),
        }
        option_words = ["--workers", str(core_count)]
        for field_name, field_value in config_fields.items():
            option_words += [f"--{field_name}", field_value]
        self._print_line, self._last_line = print_line, ""
        self._output = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM.format(parent=os.getpid()), "data", "index", *option_words],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path_with_tools()},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,  # Ctrl-C goes only to the ranks
        )

    def is_running(self) -> bool:
        """Waits a little for the process, reports its last line if it is new, and says whether it still runs.

        Raises LoaderError if the process failed.
        """
        try:
            exit_code = self._process.wait(POLL_INTERVAL_S)
        except subprocess.TimeoutExpired:
            exit_code = None

        self._output.seek(0)
        output_lines = self._output.read().split("\n")
        last_line = next((line for line in reversed(output_lines) if line.strip()), "")
        if exit_code:
            raise LoaderError(
                f"{last_line or f'data index ended with exit code {exit_code}'}. Training needs the sizes of"
                " all samples: write them with `megatron-vl data index` where the data set can be written,"
                " and copy the folder .nv-meta/sizes to it"
            )
        if last_line != self._last_line:
            self._print_line(f"  {last_line}")
        self._last_line = last_line
        return exit_code is None

    def close(self) -> None:
        """Ends the process if it still runs."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_TERMINATE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._output.close()
