"""The safetensors files of a Hugging Face folder, and its other files."""

import json
import os
import re
from pathlib import Path

import torch
from torch import Tensor

from megatron_vl.spec.families.hf_folder import SINGLE_FILE, WEIGHT_INDEX_FILE
from megatron_vl.weights.run_folder import EXPORT_FACTS_FILE
from megatron_vl.weights.tensor_files import MatrixRegion, TensorReader, WeightsError

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")


class TensorFolder:
    """The safetensors files of a HF folder, with the names that the files use. It needs no config.

    Raises:
        FileNotFoundError: the folder has no safetensors weights.
        WeightsError: index and files disagree; the message names the file or tensor.
    """

    def __init__(self, hf_dir: str | Path) -> None:
        self.path = Path(hf_dir)
        self.weight_map: dict[str, str] | None = self._read_index()
        file_names = sorted(set(self.weight_map.values())) if self.weight_map is not None else [SINGLE_FILE]
        self.reader_by_file = {name: TensorReader(self.path / name) for name in file_names}
        self.file_by_tensor = {
            name: file for file, reader in self.reader_by_file.items() for name in reader.tensor_names()
        }
        self._check_index()

    def _read_index(self) -> dict[str, str] | None:
        if not self.path.is_dir():
            raise FileNotFoundError(f"{self.path} is not a folder")

        index_path = self.path / WEIGHT_INDEX_FILE
        if not index_path.is_file():
            if not (self.path / SINGLE_FILE).is_file():
                raise FileNotFoundError(
                    f"{self.path} holds neither {SINGLE_FILE} nor "
                    f"{WEIGHT_INDEX_FILE}; only safetensors weights are read"
                )
            return None

        try:
            weight_map = json.loads(index_path.read_text())
        except ValueError as error:
            raise WeightsError(f"{index_path} is not JSON ({error}); copy it again") from error

        weight_map = weight_map.get("weight_map") if isinstance(weight_map, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise WeightsError(f"{index_path}: field 'weight_map' is missing or empty")
        for tensor_name, file_name in weight_map.items():
            # An index may come from an untrusted source, so its names must stay inside its folder.
            if not isinstance(file_name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file_name):
                raise WeightsError(
                    f"{index_path} says tensor {tensor_name!r} is in "
                    f"{file_name!r}, which is not a file name of weights"
                )

        return weight_map

    def _check_index(self) -> None:
        for file_name, reader in self.reader_by_file.items():
            for tensor_name in reader.tensor_names():
                if self.file_by_tensor[tensor_name] != file_name:
                    raise WeightsError(
                        f"{self.path}: tensor {tensor_name!r} is in both "
                        f"{file_name} and {self.file_by_tensor[tensor_name]}"
                    )
        if self.weight_map is None or self.weight_map == self.file_by_tensor:
            return

        for tensor_name in sorted(self.weight_map.keys() | self.file_by_tensor.keys()):
            indexed_file = self.weight_map.get(tensor_name, "no file")
            actual_file = self.file_by_tensor.get(tensor_name, "no file")
            if indexed_file != actual_file:
                raise WeightsError(
                    f"{self.path}: {WEIGHT_INDEX_FILE} says tensor {tensor_name!r} "
                    f"is in {indexed_file}, but it is in {actual_file}"
                )

    def shape(self, tensor_name: str) -> tuple[int, ...]:
        return self.reader_by_file[self.file_by_tensor[tensor_name]].shape(tensor_name)

    def dtype(self, tensor_name: str) -> torch.dtype:
        return self.reader_by_file[self.file_by_tensor[tensor_name]].dtype(tensor_name)

    def dtype_code(self, tensor_name: str) -> str:
        return self.reader_by_file[self.file_by_tensor[tensor_name]].dtype_code(tensor_name)

    def read_region(self, tensor_name: str, region: MatrixRegion) -> Tensor:
        return self.reader_by_file[self.file_by_tensor[tensor_name]].read_region(tensor_name, region)

    def companion_files(self) -> tuple[list[Path], list[Path]]:
        """Relative paths of the checkpoint's other files, and of files with weights that are not read.

        The other files include config, tokenizer, processor, chat templates and the index. Version control
        folders are in neither list.

        Raises:
            WeightsError: one of the other files is a link to a file outside the folder, which an export would
                copy.
        """
        kept_paths: list[Path] = []
        weight_paths: list[Path] = []
        for current_dir, subdirs, file_names in os.walk(self.path):
            subdirs[:] = [entry_name for entry_name in subdirs if entry_name not in (".git", ".cache")]
            for entry_name in file_names:
                relative_path = (Path(current_dir) / entry_name).relative_to(self.path)
                if str(relative_path) == EXPORT_FACTS_FILE:  # it describes another export
                    continue
                has_weights = entry_name.endswith((*WEIGHT_SUFFIXES, ".index.json"))
                if not has_weights or str(relative_path) == WEIGHT_INDEX_FILE:
                    kept_paths.append(relative_path)
                elif str(relative_path) not in self.reader_by_file:
                    weight_paths.append(relative_path)

        allowed_dirs = [self.path.resolve()]
        if allowed_dirs[0].parent.name == "snapshots":
            # In the cache of huggingface_hub, a snapshot consists of links to files in a folder blobs.
            allowed_dirs.append(allowed_dirs[0].parents[1] / "blobs")
        for path in kept_paths:
            link_target = (self.path / path).resolve()
            if not any(map(link_target.is_relative_to, allowed_dirs)):
                raise WeightsError(
                    f"{self.path / path} is a link to {link_target}, "
                    "outside the folder; put the file itself there"
                )
        return sorted(kept_paths), sorted(weight_paths)
