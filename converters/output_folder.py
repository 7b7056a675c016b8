"""The output of a conversion: which folder it may replace, and its files, which threads fill.

Tensors are copied a few megabytes at a time. Memory is limited to a small constant times
:data:`~megatron_vl.weights.tensor_files.CHUNK_BYTES` times the number of workers, and does not depend on the
size of the model: regions of mapped files are read, and files are filled in place.
"""

import contextlib
import ctypes
import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_vl.spec.lora import trained_table
from megatron_vl.system.partial_folder import open_partial_folder
from megatron_vl.system.progress_bar import progress
from megatron_vl.weights.canonical_weights import CanonicalWeights
from megatron_vl.weights.manifest import MANIFEST_FILE, WEIGHTS_FORMAT
from megatron_vl.weights.run_folder import EXPORT_FACTS_FILE
from megatron_vl.weights.tensor_files import MatrixRegion, TensorWriter, WeightsError, row_regions
from megatron_vl.weights.trained_media import read_json_object

MEGATRON_FILE_PATTERN = re.compile(
    r"manifest\.json|(weights-\d+-of-\d+|tp\d+_pp\d+|ep\d+_etp\d+_pp\d+)\.safetensors"
)
HF_FILE_PATTERN = re.compile(
    r"(adapter_)?model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|adapter_config\.json"
    rf"|chat_template\.jinja|{re.escape(EXPORT_FACTS_FILE)}"
)
"""Names of the files that a conversion (above) or an export writes. ``--force`` removes no other files."""


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the output."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source_name: str
    """The canonical tensor, or the one of the original, that it is read from."""
    read_region: Callable[[MatrixRegion], Tensor]
    follows_last: bool = False
    """Whether it can be read only after the tensor before it in a list."""


@dataclass
class ConversionOutput:
    """The files of a conversion while they are being written.

    Attributes:
        path: the folder that gets the name of the output when it is complete.
        digests: (file, tensor) -> SHA-256 of the tensors written so far; None for a Hugging Face folder,
            which has no place for them.
    """

    path: Path
    writer_by_file: dict[str, TensorWriter]
    digests: dict[tuple[str, str], str] | None

    def commit_files(self) -> None:
        """Gives all files their final names, once their bytes are on the disk."""
        for writer in self.writer_by_file.values():
            writer.commit()


@contextlib.contextmanager
def open_output(
    output_dir: Path,
    input_dirs: Sequence[Path],
    header_by_file: dict[str, bytes],
    *,
    force_overwrite: bool,
    is_hf_export: bool = False,
) -> Iterator[ConversionOutput]:
    """A context with an open file for each header, in a folder that becomes ``output_dir`` at its end.

    The caller writes the tensors, commits the files and completes the folder. An error leaves nothing.

    Args:
        input_dirs: the folders that are read.
        header_by_file: file -> its header.
        force_overwrite: whether to replace the weights in ``output_dir`` (a HF checkpoint if
            ``is_hf_export``). They stay until the new ones are complete.
        is_hf_export: whether ``output_dir`` becomes a Hugging Face folder.

    Raises:
        FileExistsError: ``output_dir`` holds something that is not to be replaced, or is being written.
        WeightsError: ``output_dir`` is one of ``input_dirs``, or the disk has too little space.
    """
    if any(output_dir.resolve() == path.resolve() for path in input_dirs):
        raise WeightsError(f"--out {output_dir} is the input folder")
    is_own_file = (HF_FILE_PATTERN if is_hf_export else MEGATRON_FILE_PATTERN).fullmatch

    check_replaceable = partial(_check_replaceable, force_overwrite, is_hf_export)
    with open_partial_folder(output_dir, check_replaceable, lambda name: bool(is_own_file(name))) as new_dir:
        writer_by_file: dict[str, TensorWriter] = {}
        try:
            for file_name, header in header_by_file.items():
                writer_by_file[file_name] = TensorWriter(new_dir / file_name, header)
            free_bytes = shutil.disk_usage(new_dir).free
            needed_bytes = sum(writer.file_size_bytes for writer in writer_by_file.values())
            if free_bytes < needed_bytes:
                raise WeightsError(
                    f"{output_dir}: {needed_bytes / 1e9:.1f} GB must be written, "
                    f"but the disk has {free_bytes / 1e9:.1f} GB free"
                )
            yield ConversionOutput(new_dir, writer_by_file, None if is_hf_export else {})
        finally:
            for tensor_writer in writer_by_file.values():
                tensor_writer.close()


def _check_replaceable(force_overwrite: bool, is_hf_export: bool, output_dir: Path) -> None:
    """Raises FileExistsError unless ``output_dir`` has weights that may be replaced."""
    if is_hf_export:
        is_checkpoint = any((output_dir / f"{name}.json").is_file() for name in ("config", "adapter_config"))
    else:
        is_checkpoint = read_json_object(output_dir / MANIFEST_FILE).get("format") == WEIGHTS_FORMAT
    if not is_checkpoint:
        raise FileExistsError(
            f"--out {output_dir} is not empty and holds no checkpoint of "
            "this kind, so nothing in it is replaced; give another folder"
        )
    if not force_overwrite:
        raise FileExistsError(
            f"--out {output_dir} is not empty; give another "
            "folder, or --force to replace the checkpoint there"
        )


class _StoppedError(Exception):
    """Raised in a worker whose work is no longer needed."""


def write_tensors(
    command_name: str,
    source: CanonicalWeights,
    outputs: Sequence[OutputTensor],
    conversion_output: ConversionOutput,
    worker_count: int,
) -> float:
    """Writes all tensors in ``worker_count`` threads, ordered by the tensor that they are read from.

    The first failure stops all threads and is raised. Returns the seconds that this took.
    """
    tensor_infos = trained_table(source.spec, source.lora)
    # What is read from one tensor comes together, in model order, so that it is read only once.
    groups_by_source: dict[str, list[list[OutputTensor]]] = {name: [] for name in tensor_infos}
    for output in outputs:
        groups = groups_by_source.setdefault(output.source_name, [])
        if output.follows_last:
            groups[-1].append(output)
        else:
            groups.append([output])

    # glibc keeps freed memory up to a limit that grows with the freed sizes, 20 MB per thread. From here on,
    # it returns freed chunks to the system at once.
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not glibc
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
    digests, stop_event = conversion_output.digests, threading.Event()

    def read_chunks(output: OutputTensor) -> Iterator[Tensor]:
        # FP8 is computed in float32, from whole blocks of 128 rows.
        is_fp8 = output.dtype.itemsize == 1
        itemsize = 4 if is_fp8 else output.dtype.itemsize
        for region in row_regions(output.shape, itemsize, rows_multiple=128 if is_fp8 else 1):
            if stop_event.is_set():
                raise _StoppedError
            chunk = output.read_region(region)
            yield chunk
            advance(chunk.numel() * output.dtype.itemsize)

    def write_group(group: Sequence[OutputTensor]) -> None:
        for output in group:
            writer = conversion_output.writer_by_file[output.file]
            digest = writer.write_tensor(output.name, read_chunks(output), hashes=digests is not None)
            if digests is not None:
                digests[output.file, output.name] = digest

    # The workers would wait for each other if all of them started with one tensor, which the first of them
    # checks. So the check of a tensor runs ``worker_count`` tensors ahead. Tensors that are no part of the
    # model come last; they are copied from a folder without hashes.
    checks = [partial(source.verify_tensor, name) for name in tensor_infos]
    tasks: list[Callable[[], None]] = [*checks[:worker_count]]
    for i, groups in enumerate(groups_by_source.values(), worker_count):
        tasks += [*checks[i : i + 1], *(partial(write_group, group) for group in groups)]

    total_bytes = sum(math.prod(output.shape) * output.dtype.itemsize for output in outputs)
    start_time = time.monotonic()
    with (
        progress(total_bytes, "bytes", command_name) as advance,
        ThreadPoolExecutor(max(1, worker_count)) as thread_pool,
    ):
        try:
            for future in as_completed([thread_pool.submit(task) for task in tasks]):
                future.result()
        except BaseException:  # including an interrupt from the keyboard
            # Their output is removed: running tasks stop at their next region, and no other one starts.
            stop_event.set()
            thread_pool.shutdown(cancel_futures=True)
            raise
    return time.monotonic() - start_time
