"""Reads tensors, or any parts of them, from weights of any layout."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import torch
from torch import Tensor

from megatron_vl.config import RunConfigError
from megatron_vl.spec.families import ConfigError, read_spec
from megatron_vl.spec.layout import read_layout
from megatron_vl.spec.lora import stored_lora, trained_table
from megatron_vl.spec.tensors import UNSHARDED, LayoutError, Sharding
from megatron_vl.system.folder_kind import folder_kind
from megatron_vl.weights import run_folder
from megatron_vl.weights.canonical_weights import CanonicalWeights
from megatron_vl.weights.manifest import MANIFEST_FILE, locate_shards, read_manifest
from megatron_vl.weights.matrix_blocks import gather_region, shard_blocks
from megatron_vl.weights.model_digest import LoraBase, recorded_base
from megatron_vl.weights.tensor_files import DTYPE_BY_NAME, MatrixRegion, TensorReader, WeightsError
from megatron_vl.weights.trained_media import read_json_object


def find_weights_dir(given_path: str | Path) -> Path:
    """Finds the folder of weights for a path: that folder itself, a step folder, or a run folder.

    For a run folder, it is the folder of the latest checkpoint.
    """
    given_path = Path(given_path)
    for candidate_dir in (given_path, given_path / "weights"):
        if (candidate_dir / MANIFEST_FILE).is_file():
            return candidate_dir

    try:
        latest_checkpoint = run_folder.find_latest_checkpoint(given_path)
    except run_folder.CheckpointError as error:
        raise WeightsError(str(error)) from error
    if latest_checkpoint is None and (given_path / "config.json").is_file():
        raise FileNotFoundError(
            f"{given_path} is a Hugging Face folder, not a folder of Megatron weights; write one with"
            f" `megatron-vl convert --hf {given_path} --out DIR`"
        )
    if latest_checkpoint is None:
        raise FileNotFoundError(
            folder_kind(given_path)
            or f"{given_path} holds no weights: looked for {MANIFEST_FILE}, weights/{MANIFEST_FILE} and step_"
            " folders"
        )

    weights_dir = latest_checkpoint.path / "weights"
    if not (weights_dir / MANIFEST_FILE).is_file():
        raise FileNotFoundError(
            f"{weights_dir / MANIFEST_FILE} is missing, although step "
            f"{latest_checkpoint.step} is the latest of {given_path}"
        )
    return weights_dir


def read_lora(path: str | Path) -> WeightReader:
    """Opens the weights of adapters in any layout."""
    weight_reader = WeightReader(path, takes_lora=True)
    if not weight_reader.lora.rank:
        raise WeightsError(
            f"{weight_reader.path} holds a whole model and no adapters; give it as --checkpoint alone"
            " (model.checkpoint of a run)"
        )
    return weight_reader


class WeightReader(CanonicalWeights):
    """Reads weights of any layout as if they had any other layout.

    Args:
        should_verify: whether to compare each stored tensor with its SHA-256 before any part of it is first
            returned. This reads the whole stored tensor, even for a slice (1 to 2 GB/s per core).
        takes_lora: whether the weights may be the factors of adapters. Otherwise, they are refused.

    Attributes:
        path: the folder of weights, found from a run or step folder.
        manifest: the content of the manifest.
        spec: the model.
        layout: the layout of the weights; None for unsplit weights.
        sharding: how the layout cuts the tensors of a stage.
    """

    def __init__(self, path: str | Path, *, should_verify: bool = True, takes_lora: bool = False) -> None:
        self.path = find_weights_dir(path)
        self.manifest = read_manifest(self.path / MANIFEST_FILE)
        try:
            self.spec = read_spec(self.manifest["hf_config"]).with_mtp(bool(self.manifest.get("mtp")))
            layout = self.manifest["layout"]
            self.layout = None if layout is None else read_layout(self.spec, layout)
            self.sharding = self.layout.sharding if self.layout else UNSHARDED
            self.lora = stored_lora(self.manifest["lora"] or {})
            if self.lora.rank and not takes_lora:
                raise WeightsError(
                    f"{self.path} holds LoRA adapters and no whole model; `megatron-vl export` writes them"
                    " for PEFT (--adapter) or merged into a whole model (--merge), and a run starts from"
                    " them with lora.adapter"
                )
            self.tensor_infos = trained_table(self.spec, self.lora)
            self._file_by_shard = self._locate_shards()
            self._dtypes = {
                name: DTYPE_BY_NAME[self.manifest["tensors"][name]["dtype"]] for name in self.tensor_infos
            }
        except (WeightsError, FileNotFoundError):  # they name the file already
            raise
        except (ConfigError, LayoutError, RunConfigError) as error:
            raise WeightsError(f"{self.path / MANIFEST_FILE}: {error}") from error
        except (KeyError, TypeError, AttributeError, ValueError) as error:  # a field has an unexpected type
            raise WeightsError(
                f"{self.path / MANIFEST_FILE} is damaged: {type(error).__name__}: {error}"
            ) from error

        if self.path.name == "weights" and (run_json := self.path.parent / "run.json").exists():
            if read_json_object(run_json).get("weights", self.manifest["digest"]) != self.manifest["digest"]:
                raise WeightsError(
                    f"{self.path / MANIFEST_FILE} does not belong to {run_json} (its digest differs)"
                )

        self._should_verify = should_verify
        self._open_readers: dict[str, TensorReader] = {}
        self._verified_tensors: set[tuple[str, str]] = set()
        self._verify_locks: dict[tuple[str, str], threading.Lock] = {}
        self._files_lock = threading.Lock()

    def _locate_shards(self) -> dict[tuple[int, str], str]:
        """(part, tensor) -> file, after checking that the manifest describes the whole model."""
        manifest_path = self.path / MANIFEST_FILE
        for file_name in self.manifest["files"]:
            # A manifest may come from an untrusted source, so its names must stay inside its folder.
            if not re.fullmatch(r"[\w.-]+\.safetensors", file_name):
                raise WeightsError(f"{manifest_path}: {file_name!r} is not a file name of weights")
            if not (self.path / file_name).is_file():
                raise WeightsError(f"{self.path / file_name} is missing, although {MANIFEST_FILE} names it")

        entries = [{**entry, "file": name} for name, entry in self.manifest["files"].items()]
        try:
            return locate_shards(self.tensor_infos, self.layout, entries)
        except WeightsError as error:
            raise WeightsError(f"{manifest_path}: {error}") from error

    def tensor_names(self) -> list[str]:
        return list(self.tensor_infos)

    def dtype(self, tensor_name: str) -> torch.dtype:
        return self._dtypes[tensor_name]

    def _open_shard(self, shard_index: int, tensor_name: str) -> TensorReader:
        """The file that holds one part of a tensor.

        Each file is opened and checked once, and each tensor in it is verified once.
        """
        file_name = self._file_by_shard[shard_index, tensor_name]
        with self._files_lock:
            tensor_reader = self._reader_of(file_name)
            verify_lock = self._verify_locks.setdefault((file_name, tensor_name), threading.Lock())

        if self._should_verify and (file_name, tensor_name) not in self._verified_tensors:
            with verify_lock:  # only threads that read this tensor wait
                expected_sha256 = self.manifest["files"][file_name]["tensors"][tensor_name]
                is_verified = (file_name, tensor_name) in self._verified_tensors
                if not is_verified and tensor_reader.sha256(tensor_name) != expected_sha256:
                    raise WeightsError(
                        f"{tensor_reader.path} is damaged: tensor {tensor_name!r} is not what was written "
                        f"(SHA-256 differs from {MANIFEST_FILE}); fetch or write the weights again"
                    )
                self._verified_tensors.add((file_name, tensor_name))

        return tensor_reader

    def _reader_of(self, file_name: str) -> TensorReader:
        if file_name not in self._open_readers:
            self._open_readers[file_name] = self.open_file(file_name)
        return self._open_readers[file_name]

    def open_file(self, file_name: str) -> TensorReader:
        """Opens one of the manifest's files and checks that it holds the manifest's tensors."""
        tensor_reader = TensorReader(self.path / file_name)
        stored_names = set(tensor_reader.tensor_names())
        for tensor_name in self.manifest["files"][file_name]["tensors"]:
            expected_shape = self.tensor_infos[tensor_name].shard_shape(self.sharding)
            if (
                tensor_name not in stored_names
                or tensor_reader.shape(tensor_name) != expected_shape
                or tensor_reader.dtype(tensor_name) != self.dtype(tensor_name)
            ):
                raise WeightsError(
                    f"{tensor_reader.path}: tensor {tensor_name!r} is missing or differs from {MANIFEST_FILE}"
                )
        return tensor_reader

    def verify_tensor(self, tensor_name: str) -> None:
        """Raises WeightsError unless all parts of this tensor that :meth:`read_region` reads are whole."""
        blocks = shard_blocks(self.tensor_infos[tensor_name], self.sharding)
        for shard_index in {int(block.part_id) for block in blocks}:
            self._open_shard(shard_index, tensor_name)

    def expect_scattered_reads(self, is_scattered: bool) -> None:
        for file_name in self.manifest["files"]:
            self._reader_of(file_name).expect_scattered_reads(is_scattered)

    @property
    def lora_base(self) -> LoraBase:
        return recorded_base(self.manifest["origin"])

    def read_region(self, tensor_name: str, region: MatrixRegion) -> Tensor:
        def read_part(shard_index: str | int, part_region: MatrixRegion) -> Tensor:
            return self._open_shard(int(shard_index), tensor_name).read_region(tensor_name, part_region)

        tensor_blocks = shard_blocks(self.tensor_infos[tensor_name], self.sharding)
        return gather_region(tensor_blocks, region, read_part, self.dtype(tensor_name))

    def _read_shard_region(
        self, tensor_name: str, shard_index: int, sharding: Sharding, region: MatrixRegion
    ) -> Tensor:
        # A part that is stored in the same cut needs no other file and no rearrangement.
        tensor_info = self.tensor_infos[tensor_name]
        if tensor_info.num_experts:
            has_stored_sharding = sharding[1:3] == self.sharding[1:3]
        else:
            stored_ways = self.sharding.tensor_parallel_ways(tensor_info)
            has_stored_sharding = sharding.tensor_parallel_ways(tensor_info) == stored_ways
        if has_stored_sharding:
            return self._open_shard(shard_index, tensor_name).read_region(tensor_name, region)

        return super()._read_shard_region(tensor_name, shard_index, sharding, region)
