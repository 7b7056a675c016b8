"""Saving and resuming one's own run.

    DIR/latest.json                     the checkpoint saved last (see :mod:`megatron_vl.weights.run_folder`)
    DIR/step_00000120/run.json          step, layout, data-parallel size, loader topology, files with their
    hashes, lineage DIR/step_00000120/lineage.json      what it was trained from, small enough to be read of
    every checkpoint DIR/step_00000120/weights/          safetensors shards, read by merge, export and every
    later run DIR/step_00000120/optimizer/        one safetensors file a rank and an index of them
                                        (see :mod:`megatron_vl.training.optimizer_state`)
    DIR/step_00000120/loader/           one state a data-parallel replica

A save copies the state to host memory and returns; a thread writes it while training goes on. Ranks agree
through marker files, not collectives, so that the thread never meets the training's communication: each rank
leaves a marker when its files are on disk, and rank 0 gives the folder its name when all are there. A
checkpoint therefore exists under its name only when all of it does, and a crash at any moment leaves the last
good one. A step that another branch has saved is set aside, not replaced.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from megatron_vl import durable
from megatron_vl.data.bad_samples import BadSampleMeter, add_pending
from megatron_vl.json_files import manifest_digest, write_json
from megatron_vl.models.build import chunk_tensors
from megatron_vl.models.names import LiveTensor
from megatron_vl.parallel.grid import Grid
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout, read_layout
from megatron_vl.spec.tensors import tensor_table
from megatron_vl.training.optimizer_state import (
    INDEX,
    OptimizerReader,
    check_hash,
    host_copy,
    index_of_headers,
    restore,
    slices_of,
    snapshot,
    write_hashed,
    write_index,
)
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
    new_branch,
    parse_lineage,
    read_lineage,
    read_signed,
    saved_checkpoints,
    step_folder,
    write_lineage,
)

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
    pending: dict[str, int] = field(default_factory=dict)
    """Samples that this rank alone has counted since the last printed step (see :func:`add_pending`)."""


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
    pending: dict[str, int] | None = None,
) -> Snapshot:
    """Copies this rank's state to the host; collective where parameters are still being gathered.

    Args:
        run: facts for ``run.json``; rank 0's are written.
        pending: what this rank has counted and ``run["bad_samples"]`` does not have yet.
    """
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
    return Snapshot(
        step, weights, experts, snapshot(optimizer, parameters), loader_state, facts, pending or {}
    )


@torch.no_grad()
def stack_experts(tensors: list[LiveTensor]) -> dict[str, Tensor]:
    """Host copies of a rank's experts by canonical name, stacked [E / ep, ...] in the order of their
    numbers."""
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
        keep: latest checkpoints kept; 0 keeps all. Only those that the present weights were trained from are
            counted and deleted: what a roll-back left behind is its owner's to delete. The one that the
            present branch's roll-back went back to is kept too, so that it can be done once more.
        keep_every: checkpoints of multiples of this step are kept for good; 0: none.
        lineage: of what is saved (see :func:`megatron_vl.weights.run_folder.choose`); None: a branch that
            begins here.
    """

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        layout: Layout,
        grid: Grid,
        keep: int,
        keep_every: int = 0,
        lineage: Lineage | None = None,
    ) -> None:
        self.folder, self.spec, self.layout, self.grid = folder, spec, layout, grid
        self.keep, self.keep_every = keep, keep_every
        self._lineage = lineage or Lineage(branch=new_branch())
        self._thread: threading.Thread | None = None
        self._error: str | None = None
        self._lock: Any = None
        if grid.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(folder)
            for left in folder.glob("step_*.partial"):  # of a run that was killed while it saved
                shutil.rmtree(left, ignore_errors=True)
            saved = saved_checkpoints(folder)
            self._lineage = dataclasses.replace(
                self._lineage, serial=saved[-1].lineage.serial if saved else 0
            )

    def start(self, take: Callable[[], Snapshot], step: int) -> None:
        """Takes a snapshot and begins to write it; collective. Waits for an earlier save that is not done
        yet."""
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
        """Until this rank's part (on rank 0: the whole checkpoint) is on disk. Raises CheckpointError when it
        failed."""
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
            grid = self.grid
            marker = {
                "weights": self._write_weights(partial, snapshot),
                "files": self._write_state(partial, snapshot),
                "slices": {state_file(rank): slices_of(snapshot.optimizer, grid.tp_rank, grid.etp_rank)},
                "pending": snapshot.pending,
            }
            write_json(partial / "done" / f"rank_{rank:05d}.json", marker)
            if rank == 0:
                self._commit(partial, snapshot)
        except BaseException as error:  # a thread's exception would vanish: the loop asks for it
            self._error = (
                f"checkpoint of step {snapshot.step} could not be written: {type(error).__name__}: {error}"
            )
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
            entries.append(
                write_expert_file(folder, grid.ep_rank, grid.etp_rank, grid.pp_rank, snapshot.experts)
            )
        return entries

    def _write_state(self, partial: Path, snapshot: Snapshot) -> dict[str, Any]:
        """Optimizer and loader state of this rank. Returns path in the checkpoint -> size and hash."""
        place = {axis: str(getattr(self.grid, f"{axis}_rank")) for axis in ("tp", "pp", "dp", "ep", "etp")}
        name = f"optimizer/{state_file(self.grid.rank)}"
        files = {name: write_hashed(partial / name, snapshot.optimizer, place)}
        if snapshot.loader is not None:
            name = f"loader/dp_{self.grid.dp_rank:05d}.json"
            files[name] = write_json(partial / name, snapshot.loader)
        return files

    def _commit(self, partial: Path, snapshot: Snapshot) -> None:
        """Waits for all ranks' markers, completes the checkpoint and gives it its name. On rank 0."""
        markers = self._wait_for_markers(partial / "done")
        entries = [entry for marker in markers for entry in marker["weights"]]
        weights = write_manifest(
            partial / "weights", self.spec, self.layout, entries, {"step": snapshot.step}
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
        self._prune(snapshot.step)

    def _name(self, partial: Path, step: int) -> None:
        """Gives a whole checkpoint its name. One that has it already keeps its content, under another
        name."""
        final = step_folder(self.folder, step)
        if final.exists():
            # It stays the latest, if it was, until the new one has the name: a kill in between loses the new
            # one alone.
            os.replace(final, aside(Saved(final, step, lineage_or_none(final, step))))
        os.replace(partial, final)
        durable.sync(self.folder)

    def _wait_for_markers(self, done: Path) -> list[dict[str, Any]]:
        while True:
            failed = sorted(done.glob("*.failed"))
            if failed:
                rank, said = int(failed[0].stem.split("_")[1]), failed[0].read_text()
                raise CheckpointError(
                    f"rank {rank}: {json.loads(said) if said else 'its part could not be written'}"
                )
            if len(list(done.glob("rank_*.json"))) == self.grid.world_size:
                return [json.loads(path.read_text()) for path in sorted(done.glob("rank_*.json"))]
            time.sleep(0.05)

    def _prune(self, newest: int) -> None:
        """Deletes what is not kept among the checkpoints that led to the newest one."""
        try:
            saved = saved_checkpoints(self.folder)
        except CheckpointError:
            return  # what led where is not known, so nothing is deleted; the next start says so
        line = sorted(
            (s for s in saved if self._lineage.holds(newest, s.point)), key=lambda saved: saved.step
        )
        kept = line[-self.keep :] if self.keep else line
        if back := self._lineage.rollback:
            kept = [*kept, *(one for one in line if one.point == Point(back.branch, back.step))]
        for one in line:
            if one not in kept and not (self.keep_every and one.step % self.keep_every == 0):
                going = one.path.with_name(
                    f"{one.path.name}.old.partial"
                )  # a half deleted one must not look whole
                os.replace(one.path, going)
                shutil.rmtree(going, ignore_errors=True)


def lineage_or_none(path: Path, step: int) -> Lineage:
    """A checkpoint's lineage, for its name alone: an unknown one is that of an older version."""
    try:
        return read_lineage(path, step)
    except CheckpointError:
        return Lineage()


def state_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def lock_folder(folder: Path) -> Any:
    """Keeps other runs from writing to ``folder`` for the life of this process; the lock dies with it,
    however it dies.

    Raises:
        CheckpointError: another run holds it.
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
            raise CheckpointError(
                f"{path} was changed after it was written (its digest differs); resume from another step"
            )
        if not all(isinstance(saved[key], dict) for key in ("layout", "files")) or not isinstance(
            saved["step"], int
        ):
            raise CheckpointError(f"{path} is damaged: layout, files or step has another type")
        for name in saved["files"]:
            # A checkpoint may come from anybody: its names stay inside its folder.
            if not re.fullmatch(
                r"(optimizer/[\w.-]+\.safetensors)|(optimizer/index\.json)|(loader/[\w.-]+\.json)", name
            ):
                raise CheckpointError(f"{path}: {name!r} is not a file name of optimizer or loader state")
        if saved.get("bad_samples") is not None:
            BadSampleMeter(1.0).load_state_dict(saved["bad_samples"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    return saved


@dataclass
class Restored:
    """What a checkpoint gives back beside weights, optimizer and random numbers."""

    loader: dict[str, Any] | None
    """The loader state of this replica, on the rank that owns its loader."""
    bad_samples: dict[str, Any] | None
    """Counts over all ranks (see :class:`megatron_vl.data.bad_samples.BadSampleMeter`); None: saved by an
    older version."""


def load(
    source: Path,
    *,
    chunks: list[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    spec: ModelSpec,
    grid: Grid,
    layout: Layout,
    run: dict[str, Any],
    restart_data: bool = False,
) -> Restored:
    """Restores weights, optimizer and random numbers of a step folder in this run's layout, whatever layout
    wrote it. Collective.

    Args:
        run: facts that decide which samples are read (see :func:`megatron_vl.training.preflight.run_facts`);
            they must be equal.
        restart_data: the data set starts anew instead; the facts may then differ.

    Raises:
        CheckpointError: files are missing or damaged, or the order of samples could not be kept.
    """
    saved = check_resumable(source, run, restart_data)
    parameters = run_parameters(chunks, layout, grid)
    load_weights(open_weights(source, saved), parameters, grid)
    written = read_layout(spec, saved["layout"])
    state = open_optimizer(source, saved, written, grid)
    restore(state, optimizer, parameters, tensor_table(spec), grid)
    if written == layout and saved["dp"] == grid.dp:
        for name, value in state.rng(state_file(grid.rank)).items():
            if name == "rng/cpu":
                torch.set_rng_state(value)
            elif torch.cuda.is_available():
                torch.cuda.set_rng_state(value)
    state.close()
    loader = None if restart_data or not grid.owns_loader else _loader_state(source, saved, grid)
    return Restored(loader, saved.get("bad_samples"))


def open_weights(source: Path, saved: dict[str, Any]) -> WeightReader:
    """The weights of a step folder. Raises CheckpointError or WeightsError when they are not those of its
    ``run.json``."""
    reader = WeightReader(source / "weights")
    if reader.manifest["digest"] != saved.get("weights"):
        raise CheckpointError(
            f"{reader.path / 'manifest.json'} is not the one that {source / 'run.json'} was written with"
        )
    return reader


def open_optimizer(source: Path, saved: dict[str, Any], written: Layout, grid: Grid) -> OptimizerReader:
    """The optimizer state of a step folder; collective. Without an index, rank 0 reads all headers and tells
    the others."""
    states = {
        name.removeprefix("optimizer/"): f
        for name, f in saved["files"].items()
        if name.startswith("optimizer/")
    }
    index = None
    if INDEX not in states and grid.world_size > 1:
        index = _told_by_first(grid, lambda: index_of_headers(source / "optimizer", sorted(states)))
    return OptimizerReader(source / "optimizer", states, written.cut, index, state_file(grid.rank))


def _told_by_first(grid: Grid, work: Callable[[], Any]) -> Any:
    """What ``work`` gives on rank 0, or its CheckpointError, on all ranks."""
    told: list[Any] = [None, ""]
    if grid.rank == 0:
        try:
            told[0] = work()
        except CheckpointError as error:
            told[1] = str(error)
    dist.broadcast_object_list(told)
    if told[1]:
        raise CheckpointError(told[1])
    return told[0]


def _loader_state(source: Path, saved: dict[str, Any], grid: Grid) -> dict[str, Any] | None:
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
                f"{source} was saved with {name} {saved.get(name)}, this run has {value}: the order of"
                f" samples would change. Resume with the same {name}, or give --checkpoint.restart_data true"
                " to keep weights and optimizer and read the data set from its start"
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
    """What is wrong with the optimizer, loader and lineage files of a step folder; empty when nothing is."""
    problems, saved = [], read_run(source)
    for name, facts in sorted(saved["files"].items()):
        try:
            check_hash(source / name, facts)
        except CheckpointError as error:
            problems.append(str(error))
    if "lineage" in saved and not _says_the_same(source, saved):
        problems.append(
            f"{source / LINEAGE} is missing or damaged; run.json says the same, so nothing is lost"
        )
    return problems


def _says_the_same(source: Path, saved: dict[str, Any]) -> bool:
    """Whether ``lineage.json`` is there and is the lineage of ``run.json``."""
    try:
        return parse_lineage(read_signed(source / LINEAGE, saved["step"])) == parse_lineage(saved["lineage"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
