"""Saves and resumes a run.

    DIR/latest.json                     the checkpoint saved last
                                        (see :mod:`megatron_vl.weights.run_folder`)
    DIR/step_00000120/run.json          step, layout, data-parallel size, loader topology, rule for videos,
                                        lineage, and files with their hashes
    DIR/step_00000120/lineage.json      what the checkpoint was trained from; a small file, because a start
                                        reads those of all checkpoints
    DIR/step_00000120/weights/          safetensors shards, read by merge, export and every later run
    DIR/step_00000120/optimizer/        one safetensors file per rank and an index of them
                                        (see :mod:`megatron_vl.training.optimizer_state`)
    DIR/step_00000120/loader/           one state per data-parallel replica

A save copies the state to host memory and returns; a thread writes it while training continues. Ranks agree
through marker files, not collectives, so that the thread never interferes with the training's communication.
Each rank writes a marker when its files are on disk, and rank 0 gives the folder its final name when all
markers exist. So a checkpoint has this name only when it is complete, and a crash at any moment leaves the
last good one. If another branch has saved the same step, its folder is renamed and not replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
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

from megatron_vl import durable, progress
from megatron_vl.data.source.bad_samples import BadSampleMeter, add_pending
from megatron_vl.json_files import check_version, manifest_digest, write_json
from megatron_vl.models.build import chunk_tensors
from megatron_vl.models.names import LiveTensor
from megatron_vl.parallel import failures
from megatron_vl.parallel.grid import ProcessGrid
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout, read_layout
from megatron_vl.spec.tensors import tensor_table
from megatron_vl.training.export_hf import HfExporter
from megatron_vl.training.optimizer_state import (
    INDEX,
    NoStateError,
    OptimizerReader,
    check_hash,
    host_copy,
    restore,
    slices_of,
    snapshot,
    write_hashed,
    write_index,
)
from megatron_vl.training.out_of_memory import host_message
from megatron_vl.weights.blocks import shard
from megatron_vl.weights.manifest import write_expert_file, write_manifest, write_rank_file
from megatron_vl.weights.reader import WeightReader
from megatron_vl.weights.run_folder import (
    LATEST,
    LINEAGE,
    CheckpointError,
    Lineage,
    Point,
    Saved,
    aside,
    folder_step,
    new_branch,
    parse_lineage,
    read_lineage,
    read_signed,
    saved_checkpoints,
    step_folder,
    write_lineage,
)
from megatron_vl.weights.tensor_files import WeightsError

__all__ = [
    "CheckpointError",
    "CheckpointSaver",
    "Restored",
    "Snapshot",
    "load",
    "load_weights",
    "take_snapshot",
]

_FORMAT = 1
"""The version of ``run.json``."""


def run_parameters(
    chunks: list[DistributedDataParallel], layout: Layout, grid: ProcessGrid
) -> list[LiveTensor]:
    """The parameters of this rank. A tied output layer is a second parameter under the embedding's name."""
    return chunk_tensors([chunk.module for chunk in chunks], layout, grid.pp_rank, grid.ep_rank)


@dataclass
class Snapshot:
    """One rank's part of a checkpoint: a copy in host memory, which training no longer changes."""

    step: int
    weights: dict[str, Tensor] | None
    """This rank's dense tensors by canonical name; None unless it is the first rank that holds them."""
    experts: dict[str, Tensor] | None
    """Stacks of this rank's experts. If several ranks hold the same experts, only the first has them."""
    optimizer: dict[str, Tensor]
    loader: dict[str, Any] | None
    facts: dict[str, Any]
    pending: dict[str, int] = field(default_factory=dict)
    """This rank's counts since the last printed step (see :func:`add_pending`)."""


def take_snapshot(
    step: int,
    *,
    chunks: list[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    spec: ModelSpec,
    layout: Layout,
    grid: ProcessGrid,
    loader_state: dict[str, Any] | None,
    run: dict[str, Any],
    pending: dict[str, int] | None = None,
) -> Snapshot:
    """Copies this rank's state to the host. Collective if parameters are still being gathered.

    Args:
        run: facts for ``run.json``; those of rank 0 are written.
        pending: this rank's counts that ``run["bad_samples"]`` does not include yet.
    """
    for chunk in chunks:
        # With the overlapped gather, the weights of the last update arrive only in the next forward pass.
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)

    parameters, table = run_parameters(chunks, layout, grid), tensor_table(spec)
    weights = experts = None
    if grid.is_first_dense_copy:
        dense = [t for t in parameters if t.expert is None and layout.stage_of(table[t.name]) == grid.pp_rank]
        # Weights are stored as for a tower on the first stage, so that readers need not know the placement.
        cut, stored = layout.cut, layout.cut._replace(whole_vision=False)
        weights = {}
        for tensor in dense:
            weights[tensor.name] = host_copy(tensor.parameter)
            if cut.on_every_rank(info := table[tensor.name]):
                part = shard(weights[tensor.name], info, grid.tp_rank, stored)
                weights[tensor.name] = part.contiguous()
    if spec.language.moe and grid.edp_rank == 0:
        experts = stack_experts([tensor for tensor in parameters if tensor.expert is not None])

    facts = {"format": _FORMAT, "step": step, "layout": layout.as_dict(), **run}
    return Snapshot(
        step, weights, experts, snapshot(optimizer, parameters), loader_state, facts, pending or {}
    )


@torch.no_grad()
def stack_experts(tensors: list[LiveTensor]) -> dict[str, Tensor]:
    """Copies a rank's experts to the host, by canonical name and stacked [E / ep, ...] by expert number."""
    numbers: dict[str, list[int]] = {}
    for name, _, expert in tensors:
        numbers.setdefault(name, []).append(expert)  # type: ignore[arg-type]

    stacks: dict[str, Tensor] = {}
    for name, parameter, expert in tensors:
        if name not in stacks:
            stacks[name] = torch.empty(len(numbers[name]), *parameter.shape, dtype=parameter.dtype)
        stacks[name][expert - min(numbers[name])].copy_(parameter)  # type: ignore[operator]
    return stacks


class CheckpointSaver:
    """Writes snapshots in the background, one at a time.

    Args:
        keep: number of latest checkpoints to keep; 0 keeps all. Only checkpoints from which the current
            weights were trained are counted and deleted. Users delete those that a roll-back abandoned. The
            checkpoint that the current branch was rolled back to is kept too, so that the roll-back can be
            repeated.
        keep_every: checkpoints whose step is a multiple of this are never deleted; 0: there are none.
        lineage: lineage of the checkpoints to save (see :func:`megatron_vl.weights.run_folder.choose`);
            None: a new branch.
        exporter: on rank 0, receives each complete checkpoint. Those that it still needs are not deleted.

    Raises:
        CheckpointError: another run is writing to the folder, or the folder's checkpoints cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        layout: Layout,
        grid: ProcessGrid,
        keep: int,
        keep_every: int = 0,
        lineage: Lineage | None = None,
        exporter: HfExporter | None = None,
    ) -> None:
        self.folder, self.spec, self.layout, self.grid = folder, spec, layout, grid
        self.keep, self.keep_every = keep, keep_every
        self.exporter = exporter
        self._lineage = lineage or Lineage(branch=new_branch())
        self._thread: threading.Thread | None = None
        self._error: str | None = None
        self._lock: Any = None

        if grid.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(folder)
            for left in folder.glob("step_*.partial"):  # from a run that was killed while it saved
                shutil.rmtree(left, ignore_errors=True)
            try:
                saved = saved_checkpoints(folder)
            except BaseException:
                self.close()
                raise
            self._lineage = dataclasses.replace(
                self._lineage, serial=saved[-1].lineage.serial if saved else 0
            )

    def start(self, take: Callable[[], Snapshot], step: int) -> None:
        """Waits for an unfinished earlier save, takes a snapshot, and starts to write it. Collective."""
        self.wait()
        partial = self._partial(step)
        if self.grid.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            for name in ("weights", "optimizer", "loader", "done"):
                (partial / name).mkdir(parents=True)

        try:
            dist.barrier()
            snapshot = take()
            self._thread = threading.Thread(target=self._write, args=(snapshot,), name=f"checkpoint-{step}")
            self._thread.start()
        except BaseException as error:
            self._mark_failed(partial, error)  # other ranks may already be writing
            raise

    def error(self) -> str | None:
        """Why a save failed on this rank; None if none failed."""
        return self._error

    def wait(self) -> None:
        """Waits until this rank's part (on rank 0: the whole checkpoint) is on disk.

        Raises:
            CheckpointError: the save failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error:
            raise CheckpointError(self._error)

    def close(self) -> None:
        """Lets other runs write to the folder, unless a save that failed still goes on in this process."""
        if self._lock is not None and (self._thread is None or not self._thread.is_alive()):
            unlock(self._lock)
            self._lock = None

    def _partial(self, step: int) -> Path:
        return self.folder / f"{step_folder(self.folder, step).name}.partial"

    def _write(self, snapshot: Snapshot) -> None:
        """Writes this rank's part in the background thread and, on rank 0, completes the checkpoint."""
        partial, rank = self._partial(snapshot.step), self.grid.rank
        progress.in_background(progress.WRITING)
        try:
            grid = self.grid
            slices = slices_of(snapshot.optimizer, grid.tp_rank, grid.etp_rank, grid.cut.whole_vision)
            marker = {
                "weights": self._write_weights(partial, snapshot),
                "files": self._write_state(partial, snapshot),
                "slices": {state_file(rank): slices},
                "pending": snapshot.pending,
            }
            write_json(partial / "done" / f"rank_{rank:05d}.json", marker)
            progress.in_background("")
            if rank == 0:
                self._commit(partial, snapshot)

        except BaseException as error:  # a thread's exception would be lost, so the loop reads _error
            progress.in_background("")
            why = host_message(error) or f"{type(error).__name__}: {error}"
            self._error = f"checkpoint of step {snapshot.step} could not be written: {why}"
            self._mark_failed(partial, error)

    def _mark_failed(self, partial: Path, error: BaseException) -> None:
        """Tells rank 0 that this rank cannot write its part."""
        failed = partial / "done" / f"rank_{self.grid.rank:05d}.failed"
        try:
            try:
                write_json(failed, f"{type(error).__name__}: {error}")
            except (OSError, MemoryError):  # the message does not fit on the disk, or into memory
                failed.touch()
        except (OSError, MemoryError):
            pass  # rank 0 will see the missing marker when this rank stops

    def _write_weights(self, partial: Path, snapshot: Snapshot) -> list[dict[str, Any]]:
        """Writes the weights in the snapshot. Returns the manifest's entries of the files."""
        grid, folder, entries = self.grid, partial / "weights", []
        if snapshot.weights is not None:
            entries.append(write_rank_file(folder, grid.tp_rank, grid.pp_rank, snapshot.weights))
        if snapshot.experts is not None:
            entries.append(
                write_expert_file(folder, grid.ep_rank, grid.etp_rank, grid.pp_rank, snapshot.experts)
            )
        return entries

    def _write_state(self, partial: Path, snapshot: Snapshot) -> dict[str, Any]:
        """Writes this rank's optimizer and loader state. Returns path in the checkpoint -> size and hash."""
        ranks = {
            axis: str(getattr(self.grid, f"{axis}_rank")) for axis in ("tp", "cp", "pp", "dp", "ep", "etp")
        }
        name = f"optimizer/{state_file(self.grid.rank)}"
        files = {name: write_hashed(partial / name, snapshot.optimizer, ranks)}
        if snapshot.loader is not None:
            name = f"loader/dp_{self.grid.dp_rank:05d}.json"
            files[name] = write_json(partial / name, snapshot.loader)
        return files

    def _commit(self, partial: Path, snapshot: Snapshot) -> None:
        """On rank 0: waits for all ranks' markers, completes the checkpoint and gives it its final name."""
        markers = self._wait_for_markers(partial / "done")
        entries = [entry for marker in markers for entry in marker["weights"]]
        weights = write_manifest(
            partial / "weights",
            self.spec,
            dataclasses.replace(self.layout, decoupled=False, cp=1),
            entries,
            {"step": snapshot.step},
        )
        files = {name: facts for marker in markers for name, facts in marker["files"].items()}
        slices = {name: found for marker in markers for name, found in marker["slices"].items()}
        files[f"optimizer/{INDEX}"] = write_index(partial / "optimizer", slices)

        lineage = dataclasses.replace(self._lineage, serial=self._lineage.serial + 1)
        facts = {**snapshot.facts, "files": files, "weights": weights, "lineage": lineage.as_json()}
        if "bad_samples" in facts:
            facts["bad_samples"] = add_pending(
                facts["bad_samples"], [marker["pending"] for marker in markers]
            )
        write_lineage(partial, snapshot.step, lineage)
        write_json(partial / "run.json", facts | {"digest": manifest_digest(facts)})
        shutil.rmtree(partial / "done")
        durable.sync(partial)

        self._name(partial, snapshot.step)
        write_json(
            self.folder / LATEST, {"step": snapshot.step, "serial": lineage.serial, "branch": lineage.branch}
        )
        self._lineage = dataclasses.replace(lineage, parent=Point(lineage.branch, snapshot.step))
        if self.exporter is not None:
            self.exporter.add(Saved(step_folder(self.folder, snapshot.step), snapshot.step, lineage))
        self.prune()

    def _name(self, partial: Path, step: int) -> None:
        """Gives a complete checkpoint its final name. If a checkpoint already has it, that one is renamed."""
        final = step_folder(self.folder, step)
        if final.exists():
            # If the old checkpoint was the latest, it stays the latest until the new one has the name. A kill
            # between the two renames loses only the new one.
            os.replace(final, aside(Saved(final, step, lineage_or_none(final, step))))
        os.replace(partial, final)
        durable.sync(self.folder)

    def _wait_for_markers(self, done: Path) -> list[dict[str, Any]]:
        """Waits for the markers of all ranks. Raises CheckpointError if a rank failed or ended."""
        while True:
            failed = sorted(done.glob("*.failed"))
            if failed:
                rank, said = int(failed[0].stem.split("_")[1]), failed[0].read_text()
                raise CheckpointError(
                    f"rank {rank}: {json.loads(said) if said else 'its part could not be written'}"
                )
            present = sorted(done.glob("rank_*.json"))
            if len(present) == self.grid.world_size:
                return [json.loads(path.read_text()) for path in present]
            lost = [rank for rank in failures.lost() if done / f"rank_{rank:05d}.json" not in present]
            if lost:
                raise CheckpointError(f"rank {lost[0]} ended before its part was written")
            time.sleep(0.05)

    def prune(self) -> None:
        """On rank 0: of the checkpoints that led to the newest one, deletes those that need not be kept."""
        newest = self._lineage.parent
        held = self.exporter.held() if self.exporter is not None else set()
        try:
            saved = saved_checkpoints(self.folder)
        except CheckpointError:
            return  # the lineage is not known, so nothing is deleted; the next start reports it
        if newest is None:
            return

        line = sorted((s for s in saved if self._lineage.holds(newest.step, s.point)), key=lambda s: s.step)
        kept = line[-self.keep :] if self.keep else line
        if back := self._lineage.rollback:
            kept = [*kept, *(one for one in line if one.point == Point(back.branch, back.step))]
        for one in line:
            for_good = self.keep_every and one.step % self.keep_every == 0
            if one not in kept and one.path not in held and not for_good:
                _delete(one.path)


def _delete(path: Path) -> None:
    """Deletes a checkpoint. If that is not possible, a line says so: it is no reason to lose a good save."""
    going = path.with_name(f"{path.name}.old.partial")
    try:
        if going.exists():  # an earlier start could not delete it
            shutil.rmtree(going)
        os.replace(path, going)  # a checkpoint that is only partly deleted must not look complete
        shutil.rmtree(going)
    except OSError as error:
        print(f"NOTE: {path} is not needed any more and could not be deleted ({error})", flush=True)


def lineage_or_none(path: Path, step: int) -> Lineage:
    """Reads a checkpoint's lineage, which is needed only for its new name.

    If it cannot be read, the name says so.
    """
    try:
        return read_lineage(path, step)
    except CheckpointError:
        return Lineage()


def state_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def lock_folder(folder: Path) -> Any:
    """Keeps other runs from writing to ``folder`` until :func:`unlock`, or until the process ends.

    Returns the open lock file.

    Raises:
        CheckpointError: another run holds the lock.
    """
    file = (folder / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CheckpointError(
            f"another run is writing to {folder}; end it, or give another checkpoint.dir"
        ) from error
    except OSError:
        pass  # a file system without locks
    return file


def unlock(file: Any) -> None:
    """Undoes :func:`lock_folder`. Closing alone would not: forked processes hold the file too."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


def read_run(source: Path) -> dict[str, Any]:
    """Reads ``run.json`` of a step folder.

    Raises:
        CheckpointError: the file is missing, damaged, or of another format.
    """
    path = source / "run.json"
    if not path.is_file():
        raise CheckpointError(f"{source} is not a checkpoint of a run: {path.name} is missing")

    try:
        saved = json.loads(path.read_text())
        check_version(path, saved["format"], _FORMAT, "resume from another checkpoint", CheckpointError)
        if saved["digest"] != manifest_digest(saved):
            raise CheckpointError(
                f"{path} was changed after it was written (its digest differs); resume from another step"
            )

        if not all(isinstance(saved[key], dict) for key in ("layout", "files")) or not isinstance(
            saved["step"], int
        ):
            raise CheckpointError(f"{path} is damaged: layout, files or step has a wrong type")
        for name in saved["files"]:
            # A checkpoint may come from an untrusted source, so its names must stay inside its folder.
            if not re.fullmatch(
                r"(optimizer/[\w.-]+\.safetensors)|(optimizer/index\.json)|(loader/[\w.-]+\.json)", name
            ):
                raise CheckpointError(f"{path}: {name!r} is not a file name of optimizer or loader state")
        if "bad_samples" in saved:
            BadSampleMeter(1.0).load_state_dict(saved["bad_samples"])  # checks the counts

    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    return saved


class LoaderStates:
    """The loader states of a checkpoint, one for each data-parallel rank that saved it."""

    def __init__(self, source: Path, files: dict[str, Any]) -> None:
        self.source, self.files = source, files
        self.ranks = sum(name.startswith("loader/") for name in files)

    def read(self, rank: int) -> dict[str, Any]:
        """Reads the state of a rank. Raises CheckpointError if it is missing or damaged."""
        name = f"loader/dp_{rank:05d}.json"
        if name not in self.files:
            raise CheckpointError(f"{self.source} has no {name}: data-parallel rank {rank} did not save")
        with remedied(self.source):
            check_hash(self.source / name, self.files[name])
        return json.loads((self.source / name).read_text())


@dataclass
class Restored:
    """The parts of a checkpoint that :func:`load` returns instead of restoring them itself."""

    loader: LoaderStates | None
    """The states of all loaders, on a rank that owns a loader; None elsewhere, or if the data restarts."""
    bad_samples: dict[str, Any] | None
    """Counts over all ranks (see
    :class:`~megatron_vl.data.source.bad_samples.BadSampleMeter`); None if the program that saved counts none,
    unlike a training run."""


def load(
    source: Path,
    *,
    chunks: list[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    spec: ModelSpec,
    grid: ProcessGrid,
    layout: Layout,
    run: dict[str, Any],
    restart_data: bool = False,
) -> Restored:
    """Restores weights, optimizer and random numbers of a step folder, whatever layout wrote it. Collective.

    Args:
        run: facts that decide which samples are read (see :func:`megatron_vl.training.preflight.run_facts`).
            Those in :data:`SAME` must equal the saved ones.
        restart_data: whether to read the data set from its start. The facts may then differ.

    Raises:
        CheckpointError: files are missing or damaged, or the order of samples would change.
    """
    saved = check_resumable(source, run, restart_data)
    parameters = run_parameters(chunks, layout, grid)
    written = read_layout(spec, saved["layout"])
    files = {
        name.removeprefix("optimizer/"): facts
        for name, facts in saved["files"].items()
        if name.startswith("optimizer/")
    }
    weights = open_weights(source, saved)
    with remedied(source):
        load_weights(weights, parameters, grid)
        state = OptimizerReader(source / "optimizer", files, written.cut, state_file(grid.rank))
        restore(state, optimizer, parameters, tensor_table(spec), grid)
    if written == layout and saved["dp"] == grid.dp:
        for name, value in state.rng(state_file(grid.rank)).items():
            if name == "rng/cpu":
                torch.set_rng_state(value)
            elif torch.cuda.is_available():
                torch.cuda.set_rng_state(value)
    state.close()

    loader = None
    if grid.owns_loader and not restart_data:
        loader = LoaderStates(source, saved["files"])
    return Restored(loader, saved.get("bad_samples"))


def open_weights(source: Path, saved: dict[str, Any]) -> WeightReader:
    """Opens the weights of a step folder.

    Raises:
        CheckpointError: they are not the weights that ``run.json`` names.
        WeightsError: they cannot be read.
    """
    with remedied(source):
        reader = WeightReader(source / "weights")
        if reader.manifest["digest"] != saved.get("weights"):
            raise CheckpointError(
                f"{reader.path / 'manifest.json'} does not belong to {source / 'run.json'} (its digest"
                " differs)"
            )
    return reader


@contextlib.contextmanager
def remedied(source: Path) -> Iterator[None]:
    """A context that adds to the message about a damaged checkpoint from which other one a run can resume.

    Raises:
        CheckpointError: in place of any error about files of ``source``.
    """
    try:
        yield
    except NoStateError:
        raise
    except (CheckpointError, WeightsError, OSError) as error:
        raise CheckpointError(f"{error}. {_remedy(source)}") from error


def _remedy(source: Path) -> str:
    """A sentence that says how a run can go on without the checkpoint ``source``, which is damaged."""
    step, folder = folder_step(source) or 0, source.parent
    try:
        lineage = read_lineage(source, step)
        others = [saved for saved in saved_checkpoints(folder) if saved.path != source]
    except CheckpointError:
        return f"Fetch the checkpoint again, or move {source} away"

    # Those that led to the damaged one go before those of abandoned branches.
    others.sort(key=lambda one: (lineage.holds(step, one.point), one.lineage.serial), reverse=True)
    for saved in others:
        if _seems_whole(saved.path):
            back = lineage.rollback
            again = f" --checkpoint.attempt {back.attempt + 1}" if back and back.step == saved.step else ""
            option = f"--checkpoint.step {saved.step}{again}"
            return f"Resume with {option}, the last one whose files are all there"
    return f"{folder} has no other whole one: fetch this one again, or begin in another checkpoint.dir"


def _seems_whole(source: Path) -> bool:
    """Whether a step folder has all its files in their sizes. Their content is not read."""
    try:
        files = read_run(source)["files"]
        WeightReader(source / "weights")
        return all((source / name).stat().st_size == facts["bytes"] for name, facts in files.items())
    except (CheckpointError, WeightsError, OSError, KeyError, TypeError):
        return False


SAME = ("seq_len",)
"""The facts of a run that must not change if it is to continue in the data where it stopped."""


def check_resumable(source: Path, now: dict[str, Any], restart_data: bool) -> dict[str, Any]:
    """Reads ``run.json`` of a step folder, and checks that a run with the facts ``now`` can resume from it.

    Raises:
        CheckpointError: the file is missing or damaged, or the order of samples would change.
    """
    with remedied(source):
        saved = read_run(source)
    for name in () if restart_data else SAME:
        value = now[name]
        if saved.get(name) != value:
            raise CheckpointError(
                f"{source} was saved with {name} {saved.get(name)}, this run has {value}: the order of"
                f" samples would change. Resume with the same {name}, or give --checkpoint.restart_data true"
                " to keep weights and optimizer and read the data set from its start"
            )
    return saved


@torch.no_grad()
def load_weights(reader: WeightReader, parameters: list[LiveTensor], grid: ProcessGrid) -> None:
    """Fills this rank's parameters from weights of any layout. Each rank reads only its own slices."""
    for name, parameter, expert in parameters:
        info = reader.table[name]
        local = None if expert is None else expert % (info.experts // grid.cut.ep)
        parameter.copy_(reader.get(name, grid.part(info), grid.cut, local))
        progress.tick()


def verify_files(source: Path) -> list[str]:
    """Lists what is wrong with the optimizer, loader and lineage files of a step folder.

    Raises:
        CheckpointError: ``run.json`` cannot be used.
    """
    problems, saved = [], read_run(source)
    for name, facts in sorted(saved["files"].items()):
        try:
            check_hash(source / name, facts)
        except CheckpointError as error:
            problems.append(str(error))
    if not _is_same_lineage(source, saved):
        problems.append(
            f"{source / LINEAGE} is missing or damaged; run.json holds a copy, so nothing is lost"
        )
    return problems


def _is_same_lineage(source: Path, saved: dict[str, Any]) -> bool:
    """Whether ``lineage.json`` exists and has the same lineage as ``run.json``."""
    try:
        return parse_lineage(read_signed(source / LINEAGE, saved["step"])) == parse_lineage(saved["lineage"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
