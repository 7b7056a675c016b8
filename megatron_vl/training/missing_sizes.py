"""Writes the sizes of samples that data sets lack, before a run or ``bench`` builds its loader.

The library does not import the data tools. A separate process (``megatron-vl data index``) reads and
tokenizes all text. It needs no GPU and is not part of the process group. Its results are kept, so a start
that is interrupted is continued by the next one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megatron_vl.config import DataConfig
from megatron_vl.data.source.dataset_description import read_description
from megatron_vl.data.source.location import LoaderError
from megatron_vl.data.source.sample_sizes import find_datasets_without_sizes
from megatron_vl.parallel.process_groups import broadcast_from_rank_0
from megatron_vl.parallel.start import exit_if_stop_requested
from megatron_vl.platform import Platform
from megatron_vl.system import progress
from megatron_vl.system.processes import python_path_with_tools
from megatron_vl.training.resolved_run import ResolvedRun

POLL_INTERVAL_S = 10.0
"""Seconds between two looks at the process. The other ranks wait in a collective for this long."""
_PROGRAM = (
    "from megatron_vl.system.processes import end_with_parent; end_with_parent({parent});"
    " from megatron_vl.__main__ import main; raise SystemExit(main())"
)


def write_missing_sizes(resolved_run: ResolvedRun, platform: Platform) -> None:
    """Lets rank 0 write the sizes that are missing, while all ranks wait. Collective."""
    if not (unsized := resolved_run.facts_by_split["train"].datasets_without_sizes):
        return
    config, process = resolved_run.config, None
    if dist.get_rank() == 0:
        process = _start_indexing(config.data, config.model.hf, unsized, output=1)
    try:
        while broadcast_from_rank_0(lambda: process is not None and _is_running(process)):
            progress.note_progress()
            exit_if_stop_requested(platform)
    finally:
        if process is not None:
            process.kill()


def write_missing_sizes_alone(data_config: DataConfig, hf_dir: str | Path) -> None:
    """Writes the sizes that are missing for a command without a process group; reports on standard error."""
    if unsized := find_datasets_without_sizes(read_description(data_config.path), hf_dir, data_config):
        process = _start_indexing(data_config, hf_dir, [str(dataset.path) for dataset in unsized], output=2)
        try:
            while _is_running(process):
                pass
        finally:
            process.kill()


def _start_indexing(
    data_config: DataConfig, hf_dir: str | Path, unsized: Sequence[str], output: int
) -> subprocess.Popen[bytes]:
    """Starts the process, which ends with the thread that started it and writes to descriptor ``output``."""
    num_workers = len(os.sched_getaffinity(0))
    print(
        f"the sizes of the samples of {', '.join(unsized)} are not known for this tokenizer and chat"
        f" template: they are written now, once, on {num_workers} cores (megatron-vl data index)",
        file=sys.stdout if output == 1 else sys.stderr,
        flush=True,
    )
    path = data_config.path if isinstance(data_config.path, str) else json.dumps(data_config.path)
    run_args = [
        *("data", "index", "--workers", str(num_workers), "--data.path", path, "--model.hf", str(hf_dir)),
        f"--data.chat_template={data_config.chat_template}",
        f"--data.template_arguments={json.dumps(data_config.template_arguments)}",
    ]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM.format(parent=os.getpid()), *run_args],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path_with_tools()},
        stdin=subprocess.DEVNULL,
        stdout=output,
        start_new_session=True,  # Ctrl-C goes only to the ranks
    )


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    """Waits a little for the process. Raises LoaderError if it failed."""
    try:
        exit_code = process.wait(POLL_INTERVAL_S)
    except subprocess.TimeoutExpired:
        return True
    if exit_code:
        raise LoaderError(
            f"the sizes of the samples could not be written (data index ended with exit code {exit_code})."
            " Training needs them: write them with `megatron-vl data index` where the data set can be"
            " written, and copy the folder .nv-meta/sizes to it"
        )
    return False
