"""The output of a conversion: its files while they are written, and which folder it may replace."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_vl.system.partial_folder import open_partial_folder
from megatron_vl.weights.manifest import MANIFEST_FILE, WEIGHTS_FORMAT
from megatron_vl.weights.run_folder import EXPORT_FACTS_FILE
from megatron_vl.weights.tensor_files import TensorWriter, WeightsError
from megatron_vl.weights.trained_media import read_json_object

MEGATRON_FILE_PATTERN = re.compile(
    r"manifest\.json|(weights-\d+-of-\d+|tp\d+_pp\d+|ep\d+_etp\d+_pp\d+)\.safetensors"
)
HF_FILE_PATTERN = re.compile(
    r"(adapter_)?model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|adapter_config\.json"
    rf"|chat_template\.jinja|{re.escape(EXPORT_FACTS_FILE)}"
)
"""Names of the files that a conversion (above) or an export writes. ``--force`` removes no other files."""


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


@contextmanager
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

    def check_replaceable(output_dir: Path) -> None:
        _check_replaceable(output_dir, force_overwrite, is_hf_export)

    with open_partial_folder(output_dir, check_replaceable, lambda name: bool(is_own_file(name))) as new_dir:
        writer_by_file: dict[str, TensorWriter] = {}
        try:
            for file_name, header in header_by_file.items():
                writer_by_file[file_name] = TensorWriter(new_dir / file_name, header)
            _check_disk_space(output_dir, new_dir, writer_by_file)
            yield ConversionOutput(new_dir, writer_by_file, None if is_hf_export else {})
        finally:
            for tensor_writer in writer_by_file.values():
                tensor_writer.close()


def _check_replaceable(output_dir: Path, force_overwrite: bool, is_hf_export: bool) -> None:
    """Raises FileExistsError unless ``output_dir`` has weights that may be replaced."""
    if is_hf_export:
        marker_files = ("config.json", "adapter_config.json")
        is_checkpoint = any((output_dir / name).is_file() for name in marker_files)
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


def _check_disk_space(output_dir: Path, new_dir: Path, writer_by_file: Mapping[str, TensorWriter]) -> None:
    free_bytes = shutil.disk_usage(new_dir).free
    needed_bytes = sum(writer.file_size_bytes for writer in writer_by_file.values())
    if free_bytes < needed_bytes:
        raise WeightsError(
            f"{output_dir}: {needed_bytes / 1e9:.1f} GB must be written, "
            f"but the disk has {free_bytes / 1e9:.1f} GB free"
        )
