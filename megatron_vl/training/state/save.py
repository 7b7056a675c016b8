"""Saves a run.

    DIR/step_00000120/run.json          step, layout, data-parallel size, loader topology,
                                        fields, and files with their hashes
    DIR/step_00000120/weights/          safetensors shards, read by merge, export and every later run
    DIR/step_00000120/optimizer/        one safetensors file per rank and an index of them
                                        (see :mod:`megatron_vl.training.state.optimizer_state`)
    DIR/step_00000120/loader/           the position in the data set

A save returns at once. A thread copies the state to host memory during the next forward and backward passes,
for which the next update waits, and then writes it while training continues. Ranks agree through marker
files, not collectives, so that the thread never interferes with the training's communication. Each rank
writes a marker when its files are on disk, and rank 0 gives the folder its final name when all markers exist.
So a checkpoint has this name only when it is complete, and a crash at any moment leaves the last good one.
"""

import contextlib
import dataclasses
import json
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_vl.config import LoraConfig
from megatron_vl.data.source.bad_samples import add_pending_counts
from megatron_vl.models.parameter_names import LiveTensor
from megatron_vl.parallel import failures
from megatron_vl.parallel.process_grid import ProcessGrid
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.spec.lora import trained_table
from megatron_vl.spec.tensors import TensorInfo
from megatron_vl.system import durable_files, progress
from megatron_vl.system.errors import describe_error
from megatron_vl.system.json_files import manifest_digest, write_json
from megatron_vl.training.out_of_memory import host_memory_message
from megatron_vl.training.state.export_hf import HfExporter
from megatron_vl.training.state.host_copies import HostBlocks, HostCopies
from megatron_vl.training.state.keep import (
    best_steps,
    delete_checkpoint,
    last_good_text,
    lock_run_dir,
    read_owner,
    remove_dir,
    unlock_run_dir,
)
from megatron_vl.training.state.load import FORMAT_VERSION, LOADER_STATE_FILE, state_file_name
from megatron_vl.training.state.optimizer_state import (
    INDEX_FILE,
    SavedTensor,
    list_index_entries,
    num_file_threads,
    snapshot_optimizer,
    split_state,
    write_hashed_safetensors,
    write_slice_index,
)
from megatron_vl.weights.manifest import write_manifest, write_rank_file
from megatron_vl.weights.matrix_blocks import cut_shard
from megatron_vl.weights.model_digest import recorded_base
from megatron_vl.weights.run_folder import CheckpointError, SavedCheckpoint, saved_checkpoints, step_dir_path


@dataclass
class CheckpointSnapshot:
    """One rank's part of a checkpoint, which can be read once its copies are made."""

    step: int
    copies: HostCopies
    dense_weights: dict[str, Callable[[], Tensor]] | None
    """This rank's dense tensors by canonical name; None unless it is the first rank that holds them."""
    expert_stacks: dict[str, Callable[[], Tensor]] | None
    """Stacks [E / ep, ...] of this rank's experts. If several ranks hold the same experts, only the first has
    them."""
    optimizer_state: dict[str, SavedTensor]
    loader_state: dict[str, Any] | None
    run_metadata: dict[str, Any]
    lora: LoraConfig
    unlogged_counts: dict[str, int] = field(default_factory=dict)
    """This rank's counts since the last printed step (see :func:`add_pending_counts`)."""


def take_snapshot(
    trainer: Any,
    loader_state: dict[str, Any] | None,
    run_metadata: dict[str, Any],
    unlogged_counts: dict[str, int] | None = None,
) -> CheckpointSnapshot:
    """This rank's state, to be copied before the next update. Collective if parameters are being gathered.

    Args:
        loader_state: the loader's ``state_dict()`` on rank 0, which is that of all; None elsewhere.
        run_metadata: entries for ``run.json``; those of rank 0 are written.
        unlogged_counts: this rank's counts that ``run_metadata["bad_samples"]`` does not include yet.
    """
    for chunk in trainer.model_chunks:
        # With the overlapped gather, the weights of the last update arrive only in the next forward pass.
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)

    grid, layout, live_tensors = trainer.grid, trainer.layout, trainer.saved_tensors
    lora, copies = trainer.model_chunks[0].module.lora, HostCopies()
    dense_weights = expert_stacks = None
    if grid.is_first_dense_copy:
        dense_weights = _dense_weights(live_tensors, trainer.spec, layout, grid, lora, copies)
    # Experts are spread over other ranks than dense tensors, so their first copies may be on other ranks.
    if trainer.spec.language.moe and grid.edp_rank == 0:
        expert_stacks = _expert_stacks(live_tensors, copies)

    return CheckpointSnapshot(
        trainer.step,
        copies,
        dense_weights,
        expert_stacks,
        snapshot_optimizer(trainer.optimizer, live_tensors, copies),
        loader_state,
        {"format": FORMAT_VERSION, "step": trainer.step, "layout": layout.as_dict(), **run_metadata},
        lora,
        unlogged_counts or {},
    )


def _dense_weights(
    live_tensors: list[LiveTensor],
    spec: ModelSpec,
    layout: Layout,
    grid: ProcessGrid,
    lora: LoraConfig,
    copies: HostCopies,
) -> dict[str, Callable[[], Tensor]]:
    # Weights are stored as for a tower on the first stage, so that readers need not know the placement.
    stored_sharding = layout.sharding._replace(is_tower_replicated=False)
    tensor_infos = trained_table(spec, lora)

    def read(info: TensorInfo, parameter: Tensor) -> Tensor:
        weight = copies(parameter).view(parameter.shape)
        if layout.sharding.is_on_every_rank(info):
            return cut_shard(weight, info, grid.tp_rank, stored_sharding).contiguous()
        return weight

    weights: dict[str, Callable[[], Tensor]] = {}
    for name, parameter, expert_index in live_tensors:
        # A tied embedding is on two stages, and each tensor is written by one of them.
        if expert_index is None and layout.owning_pipeline_rank(tensor_infos[name]) == grid.pp_rank:
            copies.add(parameter)
            weights[name] = partial(read, tensor_infos[name], parameter)
    return weights


def _expert_stacks(live_tensors: list[LiveTensor], copies: HostCopies) -> dict[str, Callable[[], Tensor]]:
    """The stacks of this rank's experts, in their order, by canonical name."""
    experts_by_name: dict[str, dict[int, Tensor]] = {}
    for name, parameter, expert_index in live_tensors:
        if expert_index is not None:
            experts_by_name.setdefault(name, {})[expert_index] = parameter

    def read(experts: list[Tensor]) -> Tensor:
        return copies(*experts).view(len(experts), *experts[0].shape)

    stacks: dict[str, Callable[[], Tensor]] = {}
    for name, by_index in experts_by_name.items():
        experts = [by_index[index] for index in sorted(by_index)]
        copies.add(*experts)
        stacks[name] = partial(read, experts)
    return stacks


def short_text(error: BaseException) -> str:
    return describe_error(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


class CheckpointSaver:
    """Writes snapshots in the background, one at a time.

    Args:
        num_latest_kept: number of latest checkpoints to keep; 0 keeps all.
        keep_every: checkpoints whose step is a multiple of this are never deleted; 0: there are none.
        hf_exporter: on rank 0, receives each complete checkpoint. Those that it still needs are not deleted.
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
        self.save_error: str | None = None
        self._writer_thread: threading.Thread | None = None
        self._host_blocks = HostBlocks()
        self.no_copy_running = threading.Event()
        """Set unless a state is being copied. Wait for it before each update, which changes the state."""
        self.no_copy_running.set()
        self._lock_file: Any = None
        self._last_step_updated = False
        """Whether the latest step has moved the weights, so that loss and gradients were finite."""
        self._may_have_old = grid.rank == 0

        if grid.rank == 0:
            durable_files.make_dirs(run_dir)
            self._lock_file = lock_run_dir(run_dir)
            # As it was written: the system's start time of a process moves when its clock is set.
            self._owner = read_owner(run_dir)
            for leftover in run_dir.glob("step_*.partial"):  # from a run that was killed while it saved
                with contextlib.suppress(OSError):
                    remove_dir(leftover)

    def start_save(self, make_snapshot: Callable[[], CheckpointSnapshot], step: int) -> None:
        """Waits for an unfinished earlier save, takes a snapshot, and starts to write it. Collective."""
        self.wait_until_saved()
        self._check_owner()
        partial_dir = self._partial_dir(step)
        if self.grid.rank == 0:
            with contextlib.suppress(OSError):
                remove_dir(partial_dir)
            for name in ("weights", "optimizer", "loader", "done"):
                (partial_dir / name).mkdir(parents=True)

        try:
            dist.barrier()  # no rank writes before rank 0 has made the folders
            snapshot = make_snapshot()
            self.no_copy_running.clear()
            self._writer_thread = threading.Thread(
                target=self._write_snapshot, args=(snapshot,), name=f"checkpoint-{step}"
            )
            self._writer_thread.start()
        except BaseException as error:
            self._mark_failed(partial_dir, error)  # other ranks may already be writing
            raise

    def reserve_memory(self, snapshot: CheckpointSnapshot) -> None:
        """Pins the memory that the copies of a save will take, in the background. Later saves keep it.

        Memory that is not pinned is taken for each save instead.
        """
        if not snapshot.copies.is_pinned:
            return
        earlier_thread = self._writer_thread

        def reserve() -> None:
            if earlier_thread is not None:
                earlier_thread.join()
            with contextlib.suppress(MemoryError):  # the save reports it
                snapshot.copies.reserve(self._host_blocks)

        self._writer_thread = threading.Thread(target=reserve, name="checkpoint-memory")
        self._writer_thread.start()

    def wait_until_saved(self) -> None:
        """Waits until this rank's part (on rank 0: the whole checkpoint) is on disk.

        Raises CheckpointError if the save failed.
        """
        if self._writer_thread is not None:
            self._writer_thread.join()
            self._writer_thread = None
        if self.save_error:
            raise CheckpointError(f"{self.save_error}; {last_good_text(self.run_dir)}")

    def note_step(self, is_updated: bool) -> None:
        """Deletes old checkpoints, in the background, once a step has shown that the newest one is good.

        Only the step after a save shows whether the saved weights can be used: if not, it is skipped.
        """
        self._last_step_updated = is_updated
        if is_updated and self._may_have_old and not self._is_writing():
            self._may_have_old = False
            self._writer_thread = threading.Thread(target=self.delete_old_checkpoints, name="old-checkpoints")
            self._writer_thread.start()

    def delete_old_checkpoints(self) -> None:
        """On rank 0: deletes the checkpoints that need not be kept.

        If the latest step was skipped, the newest one may be of no use, and none is deleted.
        """
        if self.grid.rank or not self._last_step_updated or not self.num_latest_kept:
            return
        pending_exports = self.hf_exporter.pending_checkpoints() if self.hf_exporter is not None else set()
        try:
            self._check_owner()
        except CheckpointError:
            return  # the next save reports the other owner
        checkpoints = saved_checkpoints(self.run_dir)
        best = best_steps(self.run_dir, [saved.step for saved in checkpoints])
        for saved in checkpoints[: -self.num_latest_kept]:
            is_permanent = saved.step in best or self.keep_every and saved.step % self.keep_every == 0
            if saved.path not in pending_exports and not is_permanent:
                delete_checkpoint(saved.path)

    def close(self) -> None:
        """Lets other runs write to the folder, unless a save that failed still goes on in this process."""
        if self._lock_file is not None and not self._is_writing():
            unlock_run_dir(self._lock_file)
            self._lock_file = None

    def _is_writing(self) -> bool:
        return self._writer_thread is not None and self._writer_thread.is_alive()

    def _check_owner(self) -> None:
        """On rank 0: raises CheckpointError if another run has begun to write to the folder."""
        if self.grid.rank == 0 and (owner := read_owner(self.run_dir)) not in (None, self._owner):
            raise CheckpointError(
                f"another run ({owner}) has begun to write to {self.run_dir}, so this one saves nothing more"
                " there; give each run a checkpoint.dir of its own"
            )

    def _partial_dir(self, step: int) -> Path:
        return step_dir_path(self.run_dir, step).with_suffix(".partial")

    # --- In the thread --------------------------------------------------------------------------------------

    def _write_snapshot(self, snapshot: CheckpointSnapshot) -> None:
        """Writes this rank's part and, on rank 0, completes the checkpoint."""
        partial_dir = self._partial_dir(snapshot.step)
        progress.set_background_task(progress.WRITING_CHECKPOINT)
        try:
            try:
                snapshot.copies.copy(self._host_blocks)
            finally:
                self.no_copy_running.set()
            marker = self._write_rank_files(partial_dir, snapshot)
            write_json(partial_dir / "done" / f"rank_{self.grid.rank:05d}.json", marker)
            progress.set_background_task("")
            if self.grid.rank == 0:
                self._commit_checkpoint(partial_dir, snapshot)

        except BaseException as error:  # a thread's exception would be lost, so the loop reads save_error
            progress.set_background_task("")
            error_text = host_memory_message(error) or short_text(error)
            try:
                self._check_owner()
            except CheckpointError as owner_error:  # its start has deleted the files of this save
                error_text = str(owner_error)
            self.save_error = (
                f"checkpoint of step {snapshot.step} could not be written to {self.run_dir}: {error_text}"
            )
            self._mark_failed(partial_dir, error)
        finally:
            self._host_blocks.release()

    def _mark_failed(self, partial_dir: Path, error: BaseException) -> None:
        """Writes a marker for rank 0, which says that this rank cannot write its part."""
        marker = partial_dir / "done" / f"rank_{self.grid.rank:05d}.failed"
        # If not even an empty file can be made, rank 0 will see the missing marker when this rank stops.
        with contextlib.suppress(OSError, MemoryError):
            try:
                write_json(marker, short_text(error))
            except (OSError, MemoryError):  # the message does not fit on the disk, or into memory
                marker.touch()

    def _write_rank_files(self, partial_dir: Path, snapshot: CheckpointSnapshot) -> dict[str, Any]:
        """Writes this rank's weights, optimizer and loader state. Returns the content of its marker."""
        grid = self.grid
        position = {
            axis: str(getattr(grid, f"{axis}_rank")) for axis in ("tp", "cp", "pp", "dp", "ep", "etp")
        }

        def write_weights(read: dict[str, Callable[[], Tensor]], pool: Executor, **ranks: int) -> Any:
            tensors = {name: each() for name, each in read.items()}
            return write_rank_file(partial_dir / "weights", tensors, pool.map, **ranks, pp=grid.pp_rank)

        def write_state(name: str, tensors: dict[str, SavedTensor]) -> dict[str, Any]:
            return write_hashed_safetensors(partial_dir / "optimizer" / name, tensors, position)

        parts = {
            state_file_name(grid.rank, number): tensors
            for number, tensors in enumerate(split_state(snapshot.optimizer_state))
        }
        # One thread hashes and writes more slowly than a disk takes the bytes.
        with ThreadPoolExecutor(num_file_threads()) as pool, contextlib.ExitStack() as on_end:
            # An error drops what waits for a thread, as the disk may be full.
            on_end.callback(pool.shutdown, wait=False, cancel_futures=True)
            states = pool.map(write_state, parts.keys(), parts.values())
            weights, ep_ranks = [], {"ep": grid.ep_rank, "etp": grid.etp_rank}
            if snapshot.dense_weights is not None:
                weights.append(write_weights(snapshot.dense_weights, pool, tp=grid.tp_rank))
            if snapshot.expert_stacks is not None:
                weights.append(write_weights(snapshot.expert_stacks, pool, **ep_ranks))
            files = {f"optimizer/{name}": record for name, record in zip(parts, states, strict=True)}

        if snapshot.loader_state is not None:
            files[LOADER_STATE_FILE] = write_json(partial_dir / LOADER_STATE_FILE, snapshot.loader_state)
        slices = {
            name: list_index_entries(tensors, grid.tp_rank, grid.etp_rank, grid.sharding.is_tower_replicated)
            for name, tensors in parts.items()
        }
        return {"weights": weights, "files": files, "slices": slices, "pending": snapshot.unlogged_counts}

    def _commit_checkpoint(self, partial_dir: Path, snapshot: CheckpointSnapshot) -> None:
        """On rank 0: waits for all ranks' markers, completes the checkpoint and gives it its final name."""
        markers = self._wait_for_markers(partial_dir / "done")
        files, slices_by_file = (
            {name: value for marker in markers for name, value in marker[part].items()}
            for part in ("files", "slices")
        )
        weights_digest = write_manifest(
            partial_dir / "weights",
            self.spec,
            dataclasses.replace(self.layout, decoupled=False, cp=1, key_ranks=1),
            [entry for marker in markers for entry in marker["weights"]],
            {"step": snapshot.step, **recorded_base(snapshot.run_metadata).entry()},
            snapshot.lora,
        )
        files[f"optimizer/{INDEX_FILE}"] = write_slice_index(partial_dir / "optimizer", slices_by_file)

        # The digest covers the hashes of all other files, so it shows a change in any of them.
        metadata = {**snapshot.run_metadata, "files": files, "weights": weights_digest}
        if "bad_samples" in metadata:
            metadata["bad_samples"] = add_pending_counts(
                metadata["bad_samples"], [marker["pending"] for marker in markers]
            )
        write_json(partial_dir / "run.json", metadata | {"digest": manifest_digest(metadata)})
        shutil.rmtree(partial_dir / "done")
        durable_files.fsync_path(partial_dir)

        self._check_owner()  # writing may have taken minutes
        # Until here, a crash leaves a `.partial` folder, which the next start deletes.
        final_dir = step_dir_path(self.run_dir, snapshot.step)
        durable_files.rename_path(partial_dir, final_dir)
        if self.hf_exporter is not None:
            self.hf_exporter.enqueue_export(SavedCheckpoint(final_dir, snapshot.step))
        self._may_have_old = True

    def _wait_for_markers(self, marker_dir: Path) -> list[dict[str, Any]]:
        """Waits for the markers of all ranks. Raises CheckpointError if a rank failed or ended."""
        while True:
            for failed in sorted(marker_dir.glob("*.failed")):
                rank, text = int(failed.stem.split("_")[1]), failed.read_text()
                raise CheckpointError(
                    f"rank {rank}: {json.loads(text) if text else 'its part could not be written'}"
                )
            markers = sorted(marker_dir.glob("rank_*.json"))
            if len(markers) == self.grid.world_size:
                return [json.loads(path.read_text()) for path in markers]

            # A rank that has died writes no marker any more.
            for lost_rank in failures.lost_ranks():
                if marker_dir / f"rank_{lost_rank:05d}.json" not in markers:
                    raise CheckpointError(f"rank {lost_rank} ended before its part was written")
            time.sleep(0.05)
