"""Loads a checkpoint into any layout, whichever layout wrote it."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from megatron_vl.data.source.bad_samples import BadSampleMeter
from megatron_vl.models.parameter_names import LiveTensor
from megatron_vl.parallel.process_grid import ProcessGrid
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import read_layout
from megatron_vl.system.json_files import check_format_version, manifest_digest, write_json
from megatron_vl.training.state.keep import remove_dir
from megatron_vl.training.state.optimizer_state import (
    MissingOptimizerStateError,
    OptimizerStateReader,
    check_file_hash,
    in_threads,
    optimizer_slices,
    restore_optimizer,
)
from megatron_vl.weights.canonical_weights import CanonicalWeights
from megatron_vl.weights.run_folder import CheckpointError, saved_checkpoints
from megatron_vl.weights.tensor_files import WeightsError
from megatron_vl.weights.weight_reader import WeightReader

LOADER_STATE_FILE = "loader/dp_00000.json"
"""The file of a step folder with the position in the data set. Without it, the data set is read from its
start."""
FORMAT_VERSION = 1
_STATE_FILE_PATTERN = re.compile(
    r"(optimizer/[\w.-]+\.safetensors)|(optimizer/index\.json)|(loader/[\w.-]+\.json)"
)


def state_file_name(rank: int, number: int = 0) -> str:
    return f"rank_{rank:05d}{f'_{number:03d}' if number else ''}.safetensors"


def read_run_metadata(checkpoint_path: Path) -> dict[str, Any]:
    """Reads ``run.json`` of a step folder. Raises CheckpointError if it cannot be used."""
    if not (path := checkpoint_path / "run.json").is_file():
        raise CheckpointError(f"{checkpoint_path} is not a checkpoint of a run: {path.name} is missing")

    try:
        metadata = json.loads(path.read_text())
        check_format_version(
            path, metadata["format"], FORMAT_VERSION, "resume from another checkpoint", CheckpointError
        )
        if metadata["digest"] != manifest_digest(metadata):
            raise CheckpointError(
                f"{path} was changed after it was written (its digest differs); resume from another step"
            )
        types = (("layout", dict), ("files", dict), ("step", int))
        if not all(isinstance(metadata[key], kind) for key, kind in types):
            raise CheckpointError(f"{path} is damaged: layout, files or step has a wrong type")
        for name in metadata["files"]:
            # A checkpoint may come from an untrusted source, so its names must stay inside its folder.
            if not _STATE_FILE_PATTERN.fullmatch(name):
                raise CheckpointError(f"{path}: {name!r} is not a file name of optimizer or loader state")
        if "bad_samples" in metadata:
            BadSampleMeter(1.0).load_state_dict(metadata["bad_samples"])  # checks the counts
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    return metadata


def drop_loader_state(checkpoint_path: Path) -> None:
    """Makes a run that resumes from a step folder read its data set from the start.

    It then counts bad samples anew. The new ``run.json`` takes the place of the old one at once. The next
    checkpoint has a state again.
    """
    metadata = read_run_metadata(checkpoint_path)
    metadata.pop("bad_samples", None)  # of a data set that the run may not read any more
    metadata["files"].pop(LOADER_STATE_FILE, None)
    write_json(checkpoint_path / "run.json", metadata | {"digest": manifest_digest(metadata)})
    remove_dir(checkpoint_path / "loader")


def load_checkpoint(
    checkpoint_path: Path,
    *,
    live_tensors: list[LiveTensor],
    optimizer: ChainedOptimizer,
    spec: ModelSpec,
    grid: ProcessGrid,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Restores weights and optimizer of a step folder, whatever layout wrote it. Collective.

    Returns its ``run.json`` and, on a rank that owns a loader, the loader's state; None if the data restart.
    Random numbers have no state: what draws them in a step is seeded by the step (``seed_dropout``).

    Args:
        live_tensors: the parameters to restore (:attr:`Trainer.saved_tensors`).

    Raises CheckpointError if files are missing or damaged.
    """
    # An error about any file names another checkpoint that can be used.
    with suggest_remedy(checkpoint_path):
        metadata, weight_reader = open_checkpoint_weights(checkpoint_path)
        load_weights(weight_reader, live_tensors, grid)

        files = metadata["files"]
        optimizer_files = {
            name.removeprefix("optimizer/"): record
            for name, record in files.items()
            if name.startswith("optimizer/")
        }
        optimizer_reader = OptimizerStateReader(
            checkpoint_path / "optimizer",
            optimizer_files,
            read_layout(spec, metadata["layout"]).sharding,
            state_file_name(grid.rank),
        )
        # A rank that fails waits for its threads, so these must end with the reading.
        with contextlib.closing(optimizer_reader):
            restore_optimizer(optimizer_reader, optimizer, live_tensors, weight_reader.tensor_infos, grid)

        loader_state = read_loader_state(checkpoint_path, files) if grid.owns_loader else None
    return metadata, loader_state


def read_loader_state(checkpoint_path: Path, files: dict[str, Any]) -> dict[str, Any] | None:
    """The loader's state in a step folder; None if the data set is to be read from its start."""
    if LOADER_STATE_FILE not in files:
        return None
    check_file_hash(checkpoint_path / LOADER_STATE_FILE, files[LOADER_STATE_FILE])
    return json.loads((checkpoint_path / LOADER_STATE_FILE).read_text())


def restore_loader(data_loader: Any, loader_state: dict[str, Any], run_dir: str) -> None:
    """Lets a loader continue at a saved state. Raises CheckpointError if it belongs to other data."""
    try:
        data_loader.load_state_dict(loader_state)
    except ValueError as error:
        raise CheckpointError(
            f"{error}. Or keep weights and optimizer and read the data set from its start: run"
            f" `megatron-vl checkpoint restart-data {run_dir}`, then start again"
        ) from error


def open_checkpoint_weights(checkpoint_path: Path) -> tuple[dict[str, Any], WeightReader]:
    """Reads ``run.json`` of a step folder, and opens the weights that belong to it."""
    metadata = read_run_metadata(checkpoint_path)
    weight_reader = WeightReader(checkpoint_path / "weights", takes_lora=True)
    if weight_reader.manifest["digest"] != metadata.get("weights"):
        raise CheckpointError(
            f"{weight_reader.path / 'manifest.json'} does not belong to {checkpoint_path / 'run.json'} (its"
            " digest differs)"
        )
    return metadata, weight_reader


@contextlib.contextmanager
def suggest_remedy(checkpoint_path: Path) -> Iterator[None]:
    """A context that raises CheckpointError in place of any error about files of a checkpoint.

    The message adds another checkpoint that the run can resume from.
    """
    try:
        yield
    except MissingOptimizerStateError:
        raise
    except (CheckpointError, WeightsError, OSError) as error:
        run_dir = checkpoint_path.parent
        remedy = f"{run_dir} has no other whole one: fetch this one again, or begin in another checkpoint.dir"
        for other in reversed(saved_checkpoints(run_dir)):
            if other.path != checkpoint_path and has_all_files(other.path):
                remedy = (
                    "Go back to the last one whose files are all there:"
                    f" `megatron-vl checkpoint rollback {run_dir} {other.step}`"
                )
                break
        raise CheckpointError(f"{error}. {remedy}") from error


def has_all_files(checkpoint_path: Path) -> bool:
    """Whether a step folder has all its files in their sizes. Their content is not read."""
    try:
        WeightReader(checkpoint_path / "weights", takes_lora=True)
        files = read_run_metadata(checkpoint_path)["files"]
        return all((checkpoint_path / name).stat().st_size == files[name]["bytes"] for name in files)
    except (CheckpointError, WeightsError, OSError, KeyError, TypeError):
        return False


def load_weights(weight_reader: CanonicalWeights, live_tensors: list[LiveTensor], grid: ProcessGrid) -> None:
    """Fills those of this rank's parameters that weights of any layout hold, each rank its own slices."""

    def load(live_tensor: LiveTensor) -> None:
        live_tensor.parameter.copy_(read_live_shard(weight_reader, live_tensor, grid))

    in_threads(load, [each for each in live_tensors if each.tensor_name in weight_reader.tensor_infos])


@torch.no_grad()
def load_main_weights(
    weight_reader: CanonicalWeights,
    optimizer: ChainedOptimizer,
    live_tensors: list[LiveTensor],
    grid: ProcessGrid,
) -> None:
    """Fills this rank's main weights from LoRA: matrices in float32 start as float32, not as the parameters
    in which they were rounded."""
    for piece in optimizer_slices(optimizer, live_tensors):
        if piece.live_tensor.tensor_name in weight_reader.tensor_infos:
            shard = read_live_shard(weight_reader, piece.live_tensor, grid).float().reshape(-1)
            piece.write_state("main", shard[piece.start : piece.end])


def read_live_shard(weight_reader: CanonicalWeights, live_tensor: LiveTensor, grid: ProcessGrid) -> Tensor:
    """A parameter's values in weights of any layout."""
    tensor_info = weight_reader.tensor_infos[live_tensor.tensor_name]
    if (expert := live_tensor.expert_index) is not None:
        expert %= tensor_info.num_experts // grid.sharding.ep
    return weight_reader.read_shard(tensor_info.name, grid.shard_index(tensor_info), grid.sharding, expert)


def verify_files(checkpoint_path: Path) -> list[str]:
    """Lists problems of a step folder's files but weights. Raises CheckpointError without ``run.json``."""
    problems = []
    for name, record in sorted(read_run_metadata(checkpoint_path)["files"].items()):
        try:
            check_file_hash(checkpoint_path / name, record)
        except CheckpointError as error:
            problems.append(str(error))
    return problems
