"""Saves and resumes a run.

    DIR/step_00000120/run.json          step, layout, data-parallel size, loader topology,
                                        fields, and files with their hashes
    DIR/step_00000120/weights/          safetensors shards, read by merge, export and every later run
    DIR/step_00000120/optimizer/        one safetensors file per rank and an index of them
                                        (see :mod:`megatron_vl.training.state.optimizer_state`)
    DIR/step_00000120/loader/           the position in the data set

A save copies the state to host memory and returns; a thread writes it while training continues. Ranks agree
through marker files, not collectives, so that the thread never interferes with the training's communication.
Each rank writes a marker when its files are on disk, and rank 0 gives the folder its final name when all
markers exist. So a checkpoint has this name only when it is complete, and a crash at any moment leaves the
last good one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from megatron_vl.config import LoraConfig
from megatron_vl.data.source.bad_samples import BadSampleMeter, add_pending_counts
from megatron_vl.models.build import chunk_tensors
from megatron_vl.models.parameter_names import LiveTensor
from megatron_vl.parallel import failures
from megatron_vl.parallel.process_grid import ProcessGrid
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout, read_layout
from megatron_vl.spec.lora import trained_table
from megatron_vl.system import durable_files, progress
from megatron_vl.system.json_files import check_format_version, manifest_digest, write_json
from megatron_vl.system.processes import RankProcess, own_process
from megatron_vl.training.out_of_memory import host_memory_message
from megatron_vl.training.state.export_hf import HfExporter
from megatron_vl.training.state.optimizer_state import (
    INDEX_FILE,
    MissingOptimizerStateError,
    OptimizerStateReader,
    check_file_hash,
    host_copy,
    list_index_entries,
    optimizer_slices,
    restore_optimizer,
    snapshot_optimizer,
    write_hashed_safetensors,
    write_slice_index,
)
from megatron_vl.weights.canonical_weights import CanonicalWeights
from megatron_vl.weights.manifest import write_expert_file, write_manifest, write_rank_file
from megatron_vl.weights.matrix_blocks import cut_shard
from megatron_vl.weights.model_digest import recorded_base
from megatron_vl.weights.run_folder import (
    CheckpointError,
    SavedCheckpoint,
    saved_checkpoints,
    step_dir_path,
)
from megatron_vl.weights.tensor_files import WeightsError
from megatron_vl.weights.weight_reader import WeightReader

OWNER_FILE = ".owner.json"
"""The file in a run's folder that names the process that writes to it."""
LOADER_STATE_FILE = "loader/dp_00000.json"
"""The file of a step folder with the position in the data set. Without it, the data set is read from its
start."""
_FORMAT_VERSION = 1
"""The version of ``run.json``."""


def collect_live_tensors(
    model_chunks: list[DistributedDataParallel], layout: Layout, grid: ProcessGrid
) -> list[LiveTensor]:
    """The parameters of this rank that checkpoints hold: with LoRA, those that are trained, otherwise all.

    A tied output layer is a second parameter under the embedding's name.
    """
    live_tensors = chunk_tensors([chunk.module for chunk in model_chunks], layout, grid.pp_rank, grid.ep_rank)
    if not model_chunks[0].module.lora.rank:
        return live_tensors
    return [live_tensor for live_tensor in live_tensors if live_tensor.parameter.requires_grad]


@dataclass
class CheckpointSnapshot:
    """One rank's part of a checkpoint: copies in host memory, which training does not change."""

    step: int
    dense_weights: dict[str, Tensor] | None
    """This rank's dense tensors by canonical name; None unless it is the first rank that holds them."""
    expert_stacks: dict[str, Tensor] | None
    """Stacks of this rank's experts. If several ranks hold the same experts, only the first has them."""
    optimizer_state: dict[str, Tensor]
    loader_state: dict[str, Any] | None
    run_metadata: dict[str, Any]
    lora: LoraConfig
    unlogged_counts: dict[str, int] = field(default_factory=dict)
    """This rank's counts since the last printed step (see :func:`add_pending_counts`)."""


def take_snapshot(
    step: int,
    *,
    model_chunks: list[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    spec: ModelSpec,
    layout: Layout,
    grid: ProcessGrid,
    loader_state: dict[str, Any] | None,
    run_metadata: dict[str, Any],
    unlogged_counts: dict[str, int] | None = None,
) -> CheckpointSnapshot:
    """Copies this rank's state to the host. Collective if parameters are still being gathered.

    Args:
        loader_state: the loader's ``state_dict()`` on rank 0, which is that of all; None elsewhere.
        run_metadata: entries for ``run.json``; those of rank 0 are written.
        unlogged_counts: this rank's counts that ``run_metadata["bad_samples"]`` does not include yet.
    """
    for model_chunk in model_chunks:
        # With the overlapped gather, the weights of the last update arrive only in the next forward pass.
        if model_chunk.ddp_config.overlap_param_gather:
            model_chunk.start_param_sync(force_sync=True)

    lora = model_chunks[0].module.lora
    live_tensors, tensor_infos = collect_live_tensors(model_chunks, layout, grid), trained_table(spec, lora)
    dense_weights = expert_stacks = None
    if grid.is_first_dense_copy:
        # Weights are stored as for a tower on the first stage, so that readers need not know the placement.
        sharding, stored_sharding = layout.sharding, layout.sharding._replace(is_tower_replicated=False)
        dense_weights = {}
        for live_tensor in live_tensors:
            tensor_info = tensor_infos[live_tensor.tensor_name]
            # A tied embedding is on two stages, and each tensor is written by one of them.
            is_elsewhere = layout.owning_pipeline_rank(tensor_info) != grid.pp_rank
            if is_elsewhere or live_tensor.expert_index is not None:
                continue
            weight = host_copy(live_tensor.parameter)
            if sharding.is_on_every_rank(tensor_info):
                weight = cut_shard(weight, tensor_info, grid.tp_rank, stored_sharding).contiguous()
            dense_weights[live_tensor.tensor_name] = weight

    # Experts are spread over other ranks than dense tensors, so their first copies may be on other ranks.
    if spec.language.moe and grid.edp_rank == 0:
        expert_stacks = stack_experts([tensor for tensor in live_tensors if tensor.expert_index is not None])

    snapshot_metadata = {"format": _FORMAT_VERSION, "step": step, "layout": layout.as_dict(), **run_metadata}
    return CheckpointSnapshot(
        step,
        dense_weights,
        expert_stacks,
        snapshot_optimizer(optimizer, live_tensors),
        loader_state,
        snapshot_metadata,
        lora,
        unlogged_counts or {},
    )


@torch.no_grad()
def stack_experts(live_tensors: list[LiveTensor]) -> dict[str, Tensor]:
    """Copies a rank's experts to the host: canonical name -> stack [E / ep, ...] in the order of the experts.

    Args:
        live_tensors: the rank's expert tensors alone.
    """
    experts_by_name: dict[str, dict[Any, Tensor]] = {}
    for tensor_name, parameter, expert_index in live_tensors:
        experts_by_name.setdefault(tensor_name, {})[expert_index] = parameter

    expert_stacks: dict[str, Tensor] = {}
    for tensor_name, experts in experts_by_name.items():
        first_expert = next(iter(experts.values()))
        stack = torch.empty(len(experts), *first_expert.shape, dtype=first_expert.dtype)
        for stack_entry, expert_index in zip(stack, sorted(experts), strict=True):
            stack_entry.copy_(experts[expert_index])
        expert_stacks[tensor_name] = stack
    return expert_stacks


class CheckpointSaver:
    """Writes snapshots in the background, one at a time.

    Args:
        num_latest_kept: number of latest checkpoints to keep; 0 keeps all.
        keep_every: checkpoints whose step is a multiple of this are never deleted; 0: there are none.
        hf_exporter: on rank 0, receives each complete checkpoint. Those that it still needs are not deleted.

    Raises:
        CheckpointError: another run is writing to the folder.
    """

    def __init__(
        self,
        run_dir: Path,
        spec: ModelSpec,
        layout: Layout,
        grid: ProcessGrid,
        num_latest_kept: int,
        keep_every: int = 0,
        hf_exporter: HfExporter | None = None,
    ) -> None:
        self.run_dir, self.spec, self.layout, self.grid = run_dir, spec, layout, grid
        self.num_latest_kept, self.keep_every = num_latest_kept, keep_every
        self.hf_exporter = hf_exporter
        self._writer_thread: threading.Thread | None = None
        self._write_error: str | None = None
        self._lock_file: Any = None
        self._is_newest_proven = False
        """Whether the latest step has moved the weights, so that loss and gradients were finite."""
        self._may_have_old = grid.rank == 0
        """Whether there may be checkpoints to delete."""

        if grid.rank == 0:
            durable_files.make_dirs(run_dir)
            self._lock_file = lock_run_dir(run_dir)
            # As it was written: the system's start time of a process moves when its clock is set.
            self._owner = read_owner(run_dir)
            for leftover_dir in run_dir.glob("step_*.partial"):  # from a run that was killed while it saved
                with contextlib.suppress(OSError):
                    _remove_dir(leftover_dir)

    def start_save(self, make_snapshot: Callable[[], CheckpointSnapshot], step: int) -> None:
        """Waits for an unfinished earlier save, takes a snapshot, and starts to write it. Collective."""
        self.wait_until_saved()
        self._check_owner()
        partial_dir = self._partial_dir(step)
        if self.grid.rank == 0:
            with contextlib.suppress(OSError):
                _remove_dir(partial_dir)
            for subdir_name in ("weights", "optimizer", "loader", "done"):
                (partial_dir / subdir_name).mkdir(parents=True)

        try:
            dist.barrier()
            checkpoint_snapshot = make_snapshot()
            self._writer_thread = threading.Thread(
                target=self._write_snapshot, args=(checkpoint_snapshot,), name=f"checkpoint-{step}"
            )
            self._writer_thread.start()
        except BaseException as error:
            self._mark_failed(partial_dir, error)  # other ranks may already be writing
            raise

    def _check_owner(self) -> None:
        """On rank 0: raises CheckpointError if another run has begun to write to the folder."""
        if self.grid.rank == 0 and (owner := read_owner(self.run_dir)) not in (None, self._owner):
            raise CheckpointError(
                f"another run ({owner}) has begun to write to {self.run_dir}, so this one saves nothing more"
                " there; give each run a checkpoint.dir of its own"
            )

    def save_error(self) -> str | None:
        """Why a save failed on this rank; None if none failed."""
        return self._write_error

    def wait_until_saved(self) -> None:
        """Waits until this rank's part (on rank 0: the whole checkpoint) is on disk.

        Raises CheckpointError if the save failed.
        """
        if self._writer_thread is not None:
            self._writer_thread.join()
            self._writer_thread = None
        if self._write_error:
            raise CheckpointError(f"{self._write_error}; {last_good_text(self.run_dir)}")

    def note_step(self, is_updated: bool) -> None:
        """Deletes old checkpoints, in the background, once a step has shown that the newest one is good.

        A step on its weights shows it. The update before a save may have spoilt them, which only the next
        step notices: it is skipped.

        Args:
            is_updated: whether the latest step was not skipped.
        """
        self._is_newest_proven = is_updated
        is_writing = self._writer_thread is not None and self._writer_thread.is_alive()
        if is_updated and self._may_have_old and not is_writing:
            self._may_have_old = False
            self._writer_thread = threading.Thread(target=self.delete_old_checkpoints, name="old-checkpoints")
            self._writer_thread.start()

    def close(self) -> None:
        """Lets other runs write to the folder, unless a save that failed still goes on in this process."""
        if self._lock_file is not None and (
            self._writer_thread is None or not self._writer_thread.is_alive()
        ):
            unlock_run_dir(self._lock_file)
            self._lock_file = None

    def _partial_dir(self, step: int) -> Path:
        return step_dir_path(self.run_dir, step).with_suffix(".partial")

    def _write_snapshot(self, checkpoint_snapshot: CheckpointSnapshot) -> None:
        """Writes this rank's part in the background thread and, on rank 0, completes the checkpoint."""
        grid, partial_dir = self.grid, self._partial_dir(checkpoint_snapshot.step)
        progress.set_background_task(progress.WRITING_CHECKPOINT)
        try:
            index_entries = list_index_entries(
                checkpoint_snapshot.optimizer_state,
                grid.tp_rank,
                grid.etp_rank,
                grid.sharding.is_tower_replicated,
            )
            rank_marker = {
                "weights": self._write_weights(partial_dir, checkpoint_snapshot),
                "files": self._write_state(partial_dir, checkpoint_snapshot),
                "slices": {state_file_name(grid.rank): index_entries},
                "pending": checkpoint_snapshot.unlogged_counts,
            }
            write_json(partial_dir / "done" / f"rank_{grid.rank:05d}.json", rank_marker)
            progress.set_background_task("")
            if grid.rank == 0:
                self._commit_checkpoint(partial_dir, checkpoint_snapshot)

        except BaseException as error:  # a thread's exception would be lost, so the loop asks save_error
            progress.set_background_task("")
            error_text = host_memory_message(error) or f"{type(error).__name__}: {error}"
            try:
                self._check_owner()
            except CheckpointError as owner_error:  # its start has deleted the files of this save
                error_text = str(owner_error)
            self._write_error = (
                f"checkpoint of step {checkpoint_snapshot.step} could not be written: {error_text}"
            )
            self._mark_failed(partial_dir, error)

    def _mark_failed(self, partial_dir: Path, error: BaseException) -> None:
        """Writes a marker for rank 0, which says that this rank cannot write its part."""
        failure_marker = partial_dir / "done" / f"rank_{self.grid.rank:05d}.failed"
        # If not even an empty file can be made, rank 0 will see the missing marker when this rank stops.
        with contextlib.suppress(OSError, MemoryError):
            try:
                write_json(failure_marker, f"{type(error).__name__}: {error}")
            except (OSError, MemoryError):  # the message does not fit on the disk, or into memory
                failure_marker.touch()

    def _write_weights(
        self, partial_dir: Path, checkpoint_snapshot: CheckpointSnapshot
    ) -> list[dict[str, Any]]:
        """Writes the weights in the snapshot. Returns the entries of the files for the manifest."""
        grid, weights_dir, file_entries = self.grid, partial_dir / "weights", []
        if checkpoint_snapshot.dense_weights is not None:
            file_entries.append(
                write_rank_file(weights_dir, grid.tp_rank, grid.pp_rank, checkpoint_snapshot.dense_weights)
            )
        if checkpoint_snapshot.expert_stacks is not None:
            file_entries.append(
                write_expert_file(
                    weights_dir, grid.ep_rank, grid.etp_rank, grid.pp_rank, checkpoint_snapshot.expert_stacks
                )
            )
        return file_entries

    def _write_state(self, partial_dir: Path, checkpoint_snapshot: CheckpointSnapshot) -> dict[str, Any]:
        """Writes this rank's optimizer and loader state. Returns path in the checkpoint -> size and hash."""
        grid_position = {}
        for axis in ("tp", "cp", "pp", "dp", "ep", "etp"):
            grid_position[axis] = str(getattr(self.grid, f"{axis}_rank"))
        file_name = f"optimizer/{state_file_name(self.grid.rank)}"
        file_records = {
            file_name: write_hashed_safetensors(
                partial_dir / file_name, checkpoint_snapshot.optimizer_state, grid_position
            )
        }
        if checkpoint_snapshot.loader_state is not None:
            file_records[LOADER_STATE_FILE] = write_json(
                partial_dir / LOADER_STATE_FILE, checkpoint_snapshot.loader_state
            )
        return file_records

    def _commit_checkpoint(self, partial_dir: Path, checkpoint_snapshot: CheckpointSnapshot) -> None:
        """On rank 0: waits for all ranks' markers, completes the checkpoint and gives it its final name."""
        manifest_entries: list[dict[str, Any]] = []
        file_records: dict[str, Any] = {}
        entries_by_file: dict[str, Any] = {}
        rank_markers = self._wait_for_markers(partial_dir / "done")
        for rank_marker in rank_markers:
            manifest_entries += rank_marker["weights"]
            file_records |= rank_marker["files"]
            entries_by_file |= rank_marker["slices"]

        weights_digest = write_manifest(
            partial_dir / "weights",
            self.spec,
            dataclasses.replace(self.layout, decoupled=False, cp=1, key_ranks=1),
            manifest_entries,
            {"step": checkpoint_snapshot.step, **recorded_base(checkpoint_snapshot.run_metadata).entry()},
            checkpoint_snapshot.lora,
        )
        file_records[f"optimizer/{INDEX_FILE}"] = write_slice_index(
            partial_dir / "optimizer", entries_by_file
        )

        # The digest covers the hashes of all other files, so it shows a change in any of them.
        metadata = {
            **checkpoint_snapshot.run_metadata,
            "files": file_records,
            "weights": weights_digest,
        }
        if "bad_samples" in metadata:
            metadata["bad_samples"] = add_pending_counts(
                metadata["bad_samples"], [marker["pending"] for marker in rank_markers]
            )
        write_json(partial_dir / "run.json", metadata | {"digest": manifest_digest(metadata)})
        shutil.rmtree(partial_dir / "done")
        durable_files.fsync_path(partial_dir)

        self._check_owner()  # writing may have taken minutes
        # Until here, a crash leaves a `.partial` folder, which the next start deletes.
        final_dir = step_dir_path(self.run_dir, checkpoint_snapshot.step)
        durable_files.rename_path(partial_dir, final_dir)
        if self.hf_exporter is not None:
            self.hf_exporter.enqueue_export(SavedCheckpoint(final_dir, checkpoint_snapshot.step))
        self._may_have_old = True

    def _wait_for_markers(self, marker_dir: Path) -> list[dict[str, Any]]:
        """Waits for the markers of all ranks. Raises CheckpointError if a rank failed or ended."""
        while True:
            failure_markers = sorted(marker_dir.glob("*.failed"))
            if failure_markers:
                rank = int(failure_markers[0].stem.split("_")[1])
                failure_text = failure_markers[0].read_text()
                raise CheckpointError(
                    f"rank {rank}:"
                    f" {json.loads(failure_text) if failure_text else 'its part could not be written'}"
                )
            rank_markers = sorted(marker_dir.glob("rank_*.json"))
            if len(rank_markers) == self.grid.world_size:
                return [json.loads(path.read_text()) for path in rank_markers]

            # A rank that has died writes no marker any more.
            for lost_rank in failures.lost_ranks():
                if marker_dir / f"rank_{lost_rank:05d}.json" not in rank_markers:
                    raise CheckpointError(f"rank {lost_rank} ended before its part was written")
            time.sleep(0.05)

    def delete_old_checkpoints(self) -> None:
        """On rank 0: deletes the checkpoints that need not be kept.

        If the latest step was skipped, the newest one may be of no use, and none is deleted.
        """
        if self.grid.rank or not self._is_newest_proven:
            return
        pending_exports = self.hf_exporter.pending_checkpoints() if self.hf_exporter is not None else set()
        try:
            self._check_owner()
        except CheckpointError:
            return  # the next save reports the other owner

        checkpoints = saved_checkpoints(self.run_dir)
        for saved_checkpoint in checkpoints[: -self.num_latest_kept] if self.num_latest_kept else ():
            is_permanent = self.keep_every and saved_checkpoint.step % self.keep_every == 0
            if saved_checkpoint.path not in pending_exports and not is_permanent:
                _delete_checkpoint(saved_checkpoint.path)


def _delete_checkpoint(checkpoint_path: Path) -> None:
    """Deletes a checkpoint. A failure is only printed, because the new checkpoint is good all the same."""
    removal_path = checkpoint_path.with_name(f"{checkpoint_path.name}.old.partial")
    try:
        _remove_dir(removal_path)  # an earlier start could not delete it
        # A checkpoint that is only partly deleted must not look complete.
        os.replace(checkpoint_path, removal_path)
        _remove_dir(removal_path)
    except OSError as error:
        print(
            f"NOTE: {checkpoint_path} is not needed any more and could not be deleted ({error})", flush=True
        )


def last_good_text(run_dir: Path) -> str:
    """Names the checkpoint from which a run continues whose last save has failed."""
    checkpoints = saved_checkpoints(run_dir)
    if not checkpoints:
        return "there is no earlier checkpoint"
    return f"the last good checkpoint is step {checkpoints[-1].step}"


def _remove_dir(dir_path: Path) -> None:
    """Deletes a folder if it exists. Of a link, only the link goes: what it leads to belongs to the user."""
    if dir_path.is_symlink():
        dir_path.unlink()
    elif dir_path.exists():
        shutil.rmtree(dir_path)


def state_file_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def lock_run_dir(run_dir: Path) -> Any:
    """Keeps other runs from writing to ``run_dir`` until :func:`unlock_run_dir`, or until the process ends.

    Some file systems have no locks, or only those of one node. So this process also enters itself as the
    owner of the folder. Whoever was the owner before stops at its next save.

    Returns the open lock file. Raises CheckpointError if another run holds the lock, or is known to go on.
    """
    lock_file = (run_dir / ".lock").open("w")
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # of any other number: the file system has no locks
        owner = read_owner(run_dir)
        is_owned = owner is not None and owner.pid != os.getpid() and owner.is_running()
        if is_owned or error.errno in (errno.EAGAIN, errno.EACCES):
            lock_file.close()
            raise CheckpointError(
                f"another run ({owner or 'of an unknown process'}) is writing to {run_dir}; end it, or give"
                " another checkpoint.dir"
            ) from error
    # In place: other nodes see the new content of a known file sooner than another file of the same name.
    (run_dir / OWNER_FILE).write_text(json.dumps(dataclasses.asdict(own_process())))
    return lock_file


def read_owner(run_dir: Path) -> RankProcess | None:
    """The process that last began to write to a run's folder; None if that is not known."""
    try:
        return RankProcess(**json.loads((run_dir / OWNER_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def unlock_run_dir(lock_file: Any) -> None:
    """Undoes :func:`lock_run_dir`. Closing alone would not: forked processes hold the file too."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock_file, fcntl.LOCK_UN)
    lock_file.close()


def read_run_metadata(checkpoint_path: Path) -> dict[str, Any]:
    """Reads ``run.json`` of a step folder. Raises CheckpointError if it cannot be used."""
    metadata_path = checkpoint_path / "run.json"
    if not metadata_path.is_file():
        raise CheckpointError(
            f"{checkpoint_path} is not a checkpoint of a run: {metadata_path.name} is missing"
        )

    try:
        run_metadata = json.loads(metadata_path.read_text())
        check_format_version(
            metadata_path,
            run_metadata["format"],
            _FORMAT_VERSION,
            "resume from another checkpoint",
            CheckpointError,
        )
        if run_metadata["digest"] != manifest_digest(run_metadata):
            raise CheckpointError(
                f"{metadata_path} was changed after it was written (its digest differs); resume from another"
                " step"
            )

        if not all(isinstance(run_metadata[key], dict) for key in ("layout", "files")) or not isinstance(
            run_metadata["step"], int
        ):
            raise CheckpointError(f"{metadata_path} is damaged: layout, files or step has a wrong type")
        for file_name in run_metadata["files"]:
            # A checkpoint may come from an untrusted source, so its names must stay inside its folder.
            if not re.fullmatch(
                r"(optimizer/[\w.-]+\.safetensors)|(optimizer/index\.json)|(loader/[\w.-]+\.json)", file_name
            ):
                raise CheckpointError(
                    f"{metadata_path}: {file_name!r} is not a file name of optimizer or loader state"
                )
        if "bad_samples" in run_metadata:
            BadSampleMeter(1.0).load_state_dict(run_metadata["bad_samples"])  # checks the counts

    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{metadata_path} is damaged: {type(error).__name__}: {error}") from error
    return run_metadata


@dataclass
class RestoredState:
    """The parts of a checkpoint that :func:`load_checkpoint` returns instead of restoring them itself."""

    loader_state: dict[str, Any] | None
    """The loader's state, on a rank that owns a loader; None elsewhere, or if the data restart."""
    restarts_data: bool
    """Whether the data set is read from its start (:func:`drop_loader_state`)."""
    bad_sample_counts: dict[str, Any] | None
    """Counts over all ranks (see :class:`~megatron_vl.data.source.bad_samples.BadSampleMeter`); None if the
    program that saved the checkpoint counts none. A training run counts them."""


def drop_loader_state(checkpoint_path: Path) -> None:
    """Makes a run that resumes from a step folder read its data set from the start.

    It then counts bad samples anew. The new ``run.json`` takes the place of the old one at once. The next
    checkpoint has a state again.
    """
    run_metadata = read_run_metadata(checkpoint_path)
    run_metadata.pop("bad_samples", None)  # of a data set that the run may not read any more
    run_metadata["files"].pop(LOADER_STATE_FILE, None)
    write_json(checkpoint_path / "run.json", run_metadata | {"digest": manifest_digest(run_metadata)})
    _remove_dir(checkpoint_path / "loader")


def load_checkpoint(
    checkpoint_path: Path,
    *,
    model_chunks: list[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    spec: ModelSpec,
    grid: ProcessGrid,
    layout: Layout,
) -> RestoredState:
    """Restores weights and optimizer of a step folder, whatever layout wrote it. Collective.

    Random numbers have no state: what draws them in a step is seeded by the step (``seed_dropout``).

    Raises CheckpointError if files are missing or damaged.
    """
    with suggest_remedy(checkpoint_path):
        saved_metadata = read_run_metadata(checkpoint_path)
    live_tensors = collect_live_tensors(model_chunks, layout, grid)
    saved_layout = read_layout(spec, saved_metadata["layout"])
    optimizer_files = {}
    for file_name, file_record in saved_metadata["files"].items():
        if file_name.startswith("optimizer/"):
            optimizer_files[file_name.removeprefix("optimizer/")] = file_record

    # An error about any of these files names another checkpoint that can be used.
    weight_reader = open_checkpoint_weights(checkpoint_path, saved_metadata)
    with suggest_remedy(checkpoint_path):
        load_weights(weight_reader, live_tensors, grid)
        optimizer_reader = OptimizerStateReader(
            checkpoint_path / "optimizer", optimizer_files, saved_layout.sharding, state_file_name(grid.rank)
        )
        restore_optimizer(optimizer_reader, optimizer, live_tensors, weight_reader.tensor_infos, grid)

    optimizer_reader.close()

    loader_record, loader_state = saved_metadata["files"].get(LOADER_STATE_FILE), None
    if grid.owns_loader and loader_record is not None:
        with suggest_remedy(checkpoint_path):
            check_file_hash(checkpoint_path / LOADER_STATE_FILE, loader_record)
        loader_state = json.loads((checkpoint_path / LOADER_STATE_FILE).read_text())
    return RestoredState(loader_state, loader_record is None, saved_metadata.get("bad_samples"))


def open_checkpoint_weights(checkpoint_path: Path, saved_metadata: dict[str, Any]) -> WeightReader:
    """Opens the weights of a step folder.

    Raises:
        CheckpointError: they are not the weights that ``run.json`` names.
        WeightsError: they cannot be read.
    """
    with suggest_remedy(checkpoint_path):
        weight_reader = WeightReader(checkpoint_path / "weights", takes_adapters=True)
        if weight_reader.manifest["digest"] != saved_metadata.get("weights"):
            raise CheckpointError(
                f"{weight_reader.path / 'manifest.json'} does not belong to {checkpoint_path / 'run.json'}"
                " (its digest differs)"
            )
    return weight_reader


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
        raise CheckpointError(f"{error}. {_remedy_text(checkpoint_path)}") from error


def _remedy_text(checkpoint_path: Path) -> str:
    """A sentence that says how a run can go on without the damaged checkpoint ``checkpoint_path``."""
    run_dir = checkpoint_path.parent
    for other in reversed(saved_checkpoints(run_dir)):
        if other.path != checkpoint_path and has_all_files(other.path):
            return (
                "Go back to the last one whose files are all there: `megatron-vl checkpoint rollback"
                f" {run_dir} {other.step}`"
            )
    return f"{run_dir} has no other whole one: fetch this one again, or begin in another checkpoint.dir"


def has_all_files(checkpoint_path: Path) -> bool:
    """Whether a step folder has all its files in their sizes. Their content is not read."""
    try:
        WeightReader(checkpoint_path / "weights", takes_adapters=True)
        for file_name, file_record in read_run_metadata(checkpoint_path)["files"].items():
            if (checkpoint_path / file_name).stat().st_size != file_record["bytes"]:
                return False
        return True
    except (CheckpointError, WeightsError, OSError, KeyError, TypeError):
        return False


@torch.no_grad()
def load_weights(weight_reader: CanonicalWeights, live_tensors: list[LiveTensor], grid: ProcessGrid) -> None:
    """Fills this rank's parameters from weights of any layout. Each rank reads only its own slices."""
    for live_tensor in live_tensors:
        live_tensor.parameter.copy_(read_live_shard(weight_reader, live_tensor, grid))
        progress.note_progress()


@torch.no_grad()
def load_main_weights(
    weight_reader: CanonicalWeights,
    optimizer: ChainedOptimizer,
    live_tensors: list[LiveTensor],
    grid: ProcessGrid,
) -> None:
    """Fills this rank's main weights from adapters: those in float32 start as float32, not as the parameters
    in which they were rounded."""
    for optimizer_slice in optimizer_slices(optimizer, live_tensors):
        if optimizer_slice.live_tensor.tensor_name in weight_reader.tensor_infos:
            shard = read_live_shard(weight_reader, optimizer_slice.live_tensor, grid).float().reshape(-1)
            optimizer_slice.write_state("main", shard[optimizer_slice.start : optimizer_slice.end])


def read_live_shard(weight_reader: CanonicalWeights, live_tensor: LiveTensor, grid: ProcessGrid) -> Tensor:
    """A parameter's values in weights of any layout."""
    tensor_info = weight_reader.tensor_infos[live_tensor.tensor_name]
    expert = live_tensor.expert_index
    local_expert = None if expert is None else expert % (tensor_info.num_experts // grid.sharding.ep)
    shard_index = grid.shard_index(tensor_info)
    return weight_reader.read_shard(tensor_info.name, shard_index, grid.sharding, local_expert)


def verify_files(checkpoint_path: Path) -> list[str]:
    """Lists problems of a step folder's files but weights. Raises CheckpointError without ``run.json``."""
    problems, saved_metadata = [], read_run_metadata(checkpoint_path)
    for file_name, file_record in sorted(saved_metadata["files"].items()):
        try:
            check_file_hash(checkpoint_path / file_name, file_record)
        except CheckpointError as error:
            problems.append(str(error))
    return problems
