"""Saving and resuming one's own run.

    DIR/latest.json                     {"step": 120}
    DIR/step_00000120/run.json          step, layout, data-parallel size, loader topology, files with their hashes
    DIR/step_00000120/weights/          safetensors shards, read by merge, export and every later run
    DIR/step_00000120/optimizer/        one safetensors file a rank (see :mod:`megatron_vl.training.optimizer_state`)
    DIR/step_00000120/loader/           one state a data-parallel replica

A save copies the state to host memory and returns; a thread writes it while training goes on. Ranks agree through marker
files, not collectives, so that the thread never meets the training's communication: each rank leaves a marker when its
files are on disk, and rank 0 gives the folder its name when all are there. A checkpoint therefore exists under its
name only when all of it does, and a crash at any moment leaves the last good one.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from megatron_vl.models.build import chunk_tensors
from megatron_vl.models.families import ModelSpec
from megatron_vl.models.names import LiveTensor
from megatron_vl.models.tensors import tensor_table
from megatron_vl.parallel.grid import Grid
from megatron_vl.parallel.layout import Layout, read_layout
from megatron_vl.weights import WeightReader, manifest_digest, write_expert_file, write_manifest, write_rank_file

from .optimizer_state import CheckpointError, OptimizerReader, check_hash, host_copy, restore, snapshot, write_hashed

__all__ = ["CheckpointError", "CheckpointSaver", "Snapshot", "latest_step", "load", "load_weights", "take_snapshot"]

_FORMAT = 1


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def run_parameters(chunks: list[DistributedDataParallel], layout: Layout, grid: Grid) -> list[LiveTensor]:
    """The parameters of this rank. A tied output layer is a second parameter of the embedding's name."""
    return chunk_tensors([chunk.module for chunk in chunks], layout, grid.pp_rank, grid.ep_rank)


@dataclass
class Snapshot:
    """One rank's part of a checkpoint, on the host, independent of the running training."""

    step: int
    weights: dict[str, Tensor] | None
    """None on all but the first data-parallel replica."""
    experts: dict[str, Tensor] | None
    """Stacks of this rank's experts; None on all but the first of the ranks that hold the same ones."""
    optimizer: dict[str, Tensor]
    loader: dict[str, Any] | None
    facts: dict[str, Any]


def take_snapshot(
    step: int,
    *,
    chunks: list[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    spec: ModelSpec,
    layout: Layout,
    grid: Grid,
    loader_state: dict[str, Any] | None,
    run: dict[str, Any],
) -> Snapshot:
    """Copies this rank's state to the host; collective where parameters are still being gathered."""
    for chunk in chunks:
        # With the overlapped gather the weights of the last update arrive only with the next forward pass.
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
    parameters, table = run_parameters(chunks, layout, grid), tensor_table(spec)
    weights = experts = None
    if grid.dp_rank == 0:
        dense = [t for t in parameters if t.expert is None and layout.stage_of(table[t.name]) == grid.pp_rank]
        weights = {tensor.name: host_copy(tensor.parameter) for tensor in dense}
    if spec.language.moe and grid.edp_rank == 0:
        experts = stack_experts([tensor for tensor in parameters if tensor.expert is not None])
    facts = {"format": _FORMAT, "step": step, "layout": layout.as_dict(), **run}
    return Snapshot(step, weights, experts, snapshot(optimizer, parameters), loader_state, facts)


@torch.no_grad()
def stack_experts(tensors: list[LiveTensor]) -> dict[str, Tensor]:
    """Host copies of a rank's experts by canonical name, stacked [E / ep, ...] in the order of their numbers."""
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
        keep: latest checkpoints kept; 0 keeps all.
        keep_every: checkpoints of multiples of this step are kept for good; 0: none.
    """

    def __init__(self, folder: Path, spec: ModelSpec, layout: Layout, grid: Grid, keep: int, keep_every: int = 0) -> None:
        self.folder, self.spec, self.layout, self.grid = folder, spec, layout, grid
        self.keep, self.keep_every = keep, keep_every
        self._thread: threading.Thread | None = None
        self._error: str | None = None
        self._lock: Any = None
        if grid.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(folder)
            for left in folder.glob("step_*.partial"):  # of a run that was killed while it saved
                shutil.rmtree(left, ignore_errors=True)

    def start(self, take: Callable[[], Snapshot], step: int) -> None:
        """Takes a snapshot and begins to write it; collective. Waits for an earlier save that is not done yet."""
        self.wait()
        partial = self._partial(step)
        if self.grid.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            for name in ("weights", "optimizer", "loader", "done"):
                (partial / name).mkdir(parents=True)
        dist.barrier()
        snapshot = take()
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name=f"checkpoint-{step}")
        self._thread.start()

    def error(self) -> str | None:
        """What went wrong with a save on this rank, if anything has."""
        return self._error

    def wait(self) -> None:
        """Until this rank's part (on rank 0: the whole checkpoint) is on disk. Raises CheckpointError when it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error:
            raise CheckpointError(self._error)

    def _partial(self, step: int) -> Path:
        return self.folder / f"{step_folder(self.folder, step).name}.partial"

    def _write(self, snapshot: Snapshot) -> None:
        partial, rank = self._partial(snapshot.step), self.grid.rank
        try:
            marker = {"weights": self._write_weights(partial, snapshot), "files": self._write_state(partial, snapshot)}
            write_json(partial / "done" / f"rank_{rank:05d}.json", marker)
            if rank == 0:
                self._commit(partial, snapshot)
        except BaseException as error:  # a thread's exception would vanish: the loop asks for it
            self._error = f"checkpoint of step {snapshot.step} could not be written: {type(error).__name__}: {error}"
            try:
                failed = partial / "done" / f"rank_{rank:05d}.failed"
                try:
                    write_json(failed, f"{type(error).__name__}: {error}")
                except OSError:  # not even that fits on the disk
                    failed.touch()
            except OSError:
                pass  # rank 0 will see the missing marker when this rank stops

    def _write_weights(self, partial: Path, snapshot: Snapshot) -> list[dict[str, Any]]:
        """The manifest's entries of what this rank writes: none, its dense tensors, its experts, or both."""
        grid, folder, entries = self.grid, partial / "weights", []
        if snapshot.weights is not None:
            entries.append(write_rank_file(folder, grid.tp_rank, grid.pp_rank, snapshot.weights))
        if snapshot.experts is not None:
            entries.append(write_expert_file(folder, grid.ep_rank, grid.etp_rank, grid.pp_rank, snapshot.experts))
        return entries

    def _write_state(self, partial: Path, snapshot: Snapshot) -> dict[str, Any]:
        """Optimizer and loader state of this rank. Returns path in the checkpoint -> size and hash."""
        place = {axis: str(getattr(self.grid, f"{axis}_rank")) for axis in ("tp", "pp", "dp", "ep", "etp")}
        name = f"optimizer/rank_{self.grid.rank:05d}.safetensors"
        files = {name: write_hashed(partial / name, snapshot.optimizer, place)}
        if snapshot.loader is not None:
            name = f"loader/dp_{self.grid.dp_rank:05d}.json"
            files[name] = write_json(partial / name, snapshot.loader)
        return files

    def _commit(self, partial: Path, snapshot: Snapshot) -> None:
        """Waits for all ranks' markers, completes the checkpoint and gives it its name. On rank 0."""
        markers = self._wait_for_markers(partial / "done")
        entries = [entry for marker in markers for entry in marker["weights"]]
        weights = write_manifest(partial / "weights", self.spec, self.layout, entries, {"step": snapshot.step})
        files = {name: facts for marker in markers for name, facts in marker["files"].items()}
        facts = {**snapshot.facts, "files": files, "weights": weights}
        write_json(partial / "run.json", facts | {"digest": manifest_digest(facts)})
        shutil.rmtree(partial / "done")
        final = step_folder(self.folder, snapshot.step)
        if final.exists():  # the same step saved again by a run that was started anew from an earlier one
            shutil.rmtree(final)
        os.replace(partial, final)
        sync_folder(self.folder)
        write_json(self.folder / "latest.json", {"step": snapshot.step})
        self._prune(snapshot.step)

    def _wait_for_markers(self, done: Path) -> list[dict[str, Any]]:
        while True:
            failed = sorted(done.glob("*.failed"))
            if failed:
                rank, said = int(failed[0].stem.split("_")[1]), failed[0].read_text()
                raise CheckpointError(f"rank {rank}: {json.loads(said) if said else 'its part could not be written'}")
            if len(list(done.glob("rank_*.json"))) == self.grid.world_size:
                return [json.loads(path.read_text()) for path in sorted(done.glob("rank_*.json"))]
            time.sleep(0.05)

    def _prune(self, newest: int) -> None:
        steps = [step for step in saved_steps(self.folder) if step <= newest]
        kept = set(steps[-self.keep :]) if self.keep else set(steps)
        kept |= {step for step in steps if self.keep_every and step % self.keep_every == 0}
        for step in steps:
            if step not in kept:
                shutil.rmtree(step_folder(self.folder, step), ignore_errors=True)


def lock_folder(folder: Path) -> Any:
    """Keeps other runs from writing to ``folder`` for the life of this process; the lock dies with it, however it dies.

    Raises:
        CheckpointError: another run holds it.
    """
    file = (folder / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CheckpointError(f"another run is writing to {folder}; end it, or give another checkpoint.dir") from error
    except OSError:
        pass  # a file system without locks
    return file


def saved_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints of a run, in order."""
    return sorted(int(path.name[5:]) for path in folder.glob("step_*") if path.is_dir() and path.name[5:].isdigit())


def latest_step(folder: Path) -> int | None:
    """The step of the last complete checkpoint of a run, None when there is none.

    Raises:
        CheckpointError: ``latest.json`` names a checkpoint that is not there.
    """
    path = folder / "latest.json"
    if not path.is_file():
        steps = saved_steps(folder) if folder.is_dir() else []
        return steps[-1] if steps else None  # killed between the checkpoint's name and this file
    try:
        step = int(json.loads(path.read_text())["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); remove it to use the newest step_ folder") from error
    if not step_folder(folder, step).is_dir():
        raise CheckpointError(f"{path} names step {step}, but {step_folder(folder, step)} is not there; set checkpoint.step")
    return max([step, *saved_steps(folder)])


def read_run(source: Path) -> dict[str, Any]:
    """``run.json`` of a step folder. Raises CheckpointError when it cannot be used."""
    path = source / "run.json"
    if not path.is_file():
        raise CheckpointError(f"{source} is not a checkpoint of a run: {path.name} is missing")
    try:
        saved = json.loads(path.read_text())
        if saved["format"] != _FORMAT:
            raise CheckpointError(f"{path} has format {saved['format']}; this version reads format {_FORMAT}")
        if saved["digest"] != manifest_digest(saved):
            raise CheckpointError(f"{path} was changed after it was written (its digest differs); resume from another step")
        if not all(isinstance(saved[key], dict) for key in ("layout", "files")) or not isinstance(saved["step"], int):
            raise CheckpointError(f"{path} is damaged: layout, files or step has another type")
        for name in saved["files"]:
            # A checkpoint may come from anybody: its names stay inside its folder.
            if not re.fullmatch(r"(optimizer/[\w.-]+\.safetensors)|(loader/[\w.-]+\.json)", name):
                raise CheckpointError(f"{path}: {name!r} is not a file name of optimizer or loader state")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    return saved


def load(
    folder: Path,
    step: int,
    *,
    chunks: list[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    spec: ModelSpec,
    grid: Grid,
    layout: Layout,
    run: dict[str, Any],
    restart_data: bool = False,
) -> dict[str, Any] | None:
    """Restores weights, optimizer and random numbers of ``step`` in this run's layout, whatever layout wrote it.

    Args:
        run: facts that decide which samples are read (see :func:`megatron_vl.training.check.run_facts`); they must be equal.
        restart_data: the data set starts anew instead; the facts may then differ.

    Returns:
        The loader state of this replica on the rank that owns its loader.

    Raises:
        CheckpointError: files are missing or damaged, or the order of samples could not be kept.
    """
    source = step_folder(folder, step)
    saved = check_resumable(source, run, restart_data)
    parameters = run_parameters(chunks, layout, grid)
    reader = WeightReader(source / "weights")
    if reader.manifest["digest"] != saved["weights"]:
        raise CheckpointError(f"{reader.path / 'manifest.json'} is not the one that {source / 'run.json'} was written with")
    load_weights(reader, parameters, grid)
    states = {name.removeprefix("optimizer/"): f for name, f in saved["files"].items() if name.startswith("optimizer/")}
    written = read_layout(spec, saved["layout"])
    state = OptimizerReader(source / "optimizer", states, written.cut)
    restore(state, optimizer, parameters, tensor_table(spec), grid)
    if written == layout and saved["dp"] == grid.dp:
        for name, value in state.rng(f"rank_{grid.rank:05d}.safetensors").items():
            if name == "rng/cpu":
                torch.set_rng_state(value)
            elif torch.cuda.is_available():
                torch.cuda.set_rng_state(value)
    state.close()
    if restart_data or not grid.owns_loader:
        return None
    name = f"loader/dp_{grid.dp_rank:05d}.json"
    if name not in saved["files"]:
        return None
    check_hash(source / name, saved["files"][name])
    return json.loads((source / name).read_text())


def check_resumable(source: Path, now: dict[str, Any], restart_data: bool) -> dict[str, Any]:
    """``run.json`` of a step folder, once a run with the facts ``now`` can go on from it.

    Raises:
        CheckpointError: it is missing or damaged, or the order of samples could not be kept.
    """
    saved = read_run(source)
    for name, value in () if restart_data else now.items():
        if saved.get(name) != value:
            raise CheckpointError(
                f"{source} was saved with {name} {saved.get(name)}, this run has {value}: the order of samples would change. "
                f"Resume with the same {name}, or give --checkpoint.restart_data true to keep weights and optimizer and read "
                "the data set from its start"
            )
    return saved


@torch.no_grad()
def load_weights(reader: WeightReader, parameters: list[LiveTensor], grid: Grid) -> None:
    """Fills this rank's parameters from weights of any layout, each rank reading only its own slices."""
    for name, parameter, expert in parameters:
        info = reader.table[name]
        local = None if expert is None else expert % (info.experts // grid.cut.ep)
        parameter.copy_(reader.get(name, grid.part(info), grid.cut, local))


def verify_files(source: Path) -> list[str]:
    """What is wrong with the optimizer and loader files of a step folder; empty when nothing is."""
    problems = []
    for name, facts in sorted(read_run(source)["files"].items()):
        try:
            check_hash(source / name, facts)
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def write_json(path: Path, value: Any) -> dict[str, Any]:
    """Atomic and synced: the name appears with the whole content. Returns size and hash."""
    import hashlib

    data = json.dumps(value).encode()
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def sync_folder(folder: Path) -> None:
    """Makes renames inside a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
