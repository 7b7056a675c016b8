"""Saving and resuming one's own run.

    DIR/latest.json                     {"step": 120}
    DIR/step_00000120/run.json          step, layout, data-parallel size, loader workers
    DIR/step_00000120/weights/          safetensors shards, read by merge, export and every later run
    DIR/step_00000120/optimizer/        one safetensors file a rank: the slices of master weights and moments it owns
    DIR/step_00000120/loader/           one state a data-parallel replica

Optimizer state is written as live tensors under canonical names with their ranges, not through Megatron-core's
``dist_checkpointing``: core 0.19.2 writes padded buckets' moments at wrong offsets without a word, and it pickles.
A checkpoint appears under its name only when all of it is on disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from megatron_vl.models.build import chunk_tensors
from megatron_vl.models.families import ModelSpec
from megatron_vl.models.tensors import tensor_table
from megatron_vl.parallel.grid import Grid
from megatron_vl.parallel.layout import Layout
from megatron_vl.weights import WeightReader, write_manifest, write_rank_file

MOMENTS = ("exp_avg", "exp_avg_sq")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be resumed from; the message says what differs and what to do."""


@dataclass(frozen=True)
class OptimizerSlice:
    """A contiguous range of one parameter's flattened shard and the optimizer's fp32 tensors for it on this rank."""

    name: str
    parameter: nn.Parameter
    start: int
    end: int
    main: Tensor
    state: dict[str, Any]
    group: dict[str, Any]


def run_parameters(chunks: list[DistributedDataParallel], layout: Layout, grid: Grid) -> list[tuple[str, nn.Parameter]]:
    """(canonical name, parameter) of this rank. A tied output layer is a second parameter of the embedding's name."""
    return chunk_tensors([chunk.module for chunk in chunks], layout, grid.pp_rank)


def optimizer_slices(optimizer: ChainedOptimizer, parameters: list[tuple[str, nn.Parameter]]) -> Iterator[OptimizerSlice]:
    """What this rank's optimizer holds, parameter by parameter."""
    names = {id(parameter): name for name, parameter in parameters}
    for part in optimizer.chained_optimizers:
        if getattr(part, "is_stub_optimizer", False):
            continue
        if isinstance(part, DistributedOptimizer):
            for parameter in part.model_param_gbuf_map:
                if parameter not in part.model_param_group_index_map:
                    continue  # its range on this data-parallel rank is empty
                group_index, order = part.model_param_group_index_map[parameter]
                group = part.optimizer.param_groups[group_index]
                main = group["params"][order]
                span = part._get_model_param_range_map(parameter)["param"]
                yield OptimizerSlice(
                    names[id(parameter)], parameter, span.start, span.end, main, part.optimizer.state[main], group
                )
            continue
        for name, parameter in parameters:
            if parameter.requires_grad:
                main = getattr(parameter, "main_param", parameter)
                group = next(g for g in part.optimizer.param_groups if any(p is main for p in g["params"]))
                yield OptimizerSlice(name, parameter, 0, parameter.numel(), main, part.optimizer.state[main], group)


def save(
    folder: Path,
    step: int,
    *,
    chunks: list[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    spec: ModelSpec,
    layout: Layout,
    grid: Grid,
    loader_state: dict[str, Any] | None,
    run: dict[str, Any],
    keep: int,
) -> Path:
    """Writes the checkpoint of ``step``; collective. Returns its folder."""
    final, partial = folder / f"step_{step:08d}", folder / f"step_{step:08d}.partial"
    if grid.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        for name in ("weights", "optimizer", "loader"):
            (partial / name).mkdir(parents=True)
    dist.barrier()
    for chunk in chunks:
        # With the overlapped gather the weights of the last update arrive only with the next forward pass.
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
    parameters = run_parameters(chunks, layout, grid)
    entry = _save_weights(partial / "weights", parameters, spec, layout, grid)
    _save_optimizer(partial / "optimizer" / f"rank_{grid.rank:05d}.safetensors", optimizer, parameters)
    if grid.owns_loader and loader_state is not None:
        _write_json(partial / "loader" / f"dp_{grid.dp_rank:05d}.json", loader_state)
    entries: list[Any] = [None] * grid.world_size
    dist.all_gather_object(entries, entry)
    if grid.rank == 0:
        write_manifest(partial / "weights", spec, layout, [e for e in entries if e is not None])
        _write_json(partial / "run.json", {"step": step, "layout": layout.as_dict(), "dp": grid.dp, **run})
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        _write_json(folder / "latest.json", {"step": step})
        _prune(folder, keep)
    dist.barrier()
    return final


def _save_weights(
    folder: Path, parameters: list[tuple[str, nn.Parameter]], spec: ModelSpec, layout: Layout, grid: Grid
) -> dict[str, Any] | None:
    """This rank's weights file, written by the first data-parallel replica."""
    if grid.dp_rank != 0:
        return None
    table = tensor_table(spec)
    mine = {name: p.detach() for name, p in parameters if layout.stage_of(table[name]) == grid.pp_rank}
    return write_rank_file(folder, grid.tp_rank, grid.pp_rank, mine)


def _save_optimizer(path: Path, optimizer: ChainedOptimizer, parameters: list[tuple[str, nn.Parameter]]) -> None:
    tensors: dict[str, Tensor] = {"rng/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["rng/cuda"] = torch.cuda.get_rng_state()
    for piece in optimizer_slices(optimizer, parameters):
        where = f"{piece.name}[{piece.start}:{piece.end}]"
        tensors[f"{where}/main"] = _host(piece.main)
        tensors[f"{where}/step"] = torch.tensor(_step_of(piece), dtype=torch.int64)
        for moment in MOMENTS:
            if moment in piece.state:
                tensors[f"{where}/{moment}"] = _host(piece.state[moment])
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    os.replace(partial, path)


def _host(tensor: Tensor) -> Tensor:
    """A host copy of a tensor, alone in its storage (shards are views of one buffer)."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _step_of(piece: OptimizerSlice) -> int:
    """Adam's step count: torch keeps it per parameter, Transformer Engine's FusedAdam per group."""
    step = piece.state.get("step", piece.group.get("step", 0))
    return int(step.item() if isinstance(step, Tensor) else step)


def latest_step(folder: Path) -> int | None:
    """The step of the last complete checkpoint of a run, None when there is none."""
    path = folder / "latest.json"
    return int(json.loads(path.read_text())["step"]) if path.is_file() else None


def load(
    folder: Path,
    step: int,
    *,
    chunks: list[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    layout: Layout,
    grid: Grid,
    run: dict[str, Any],
) -> dict[str, Any] | None:
    """Restores weights, optimizer and RNG of ``step``; collective. Returns the loader state of this replica's owner.

    Raises:
        CheckpointError: the run was saved in another layout or with another loader topology.
    """
    source = folder / f"step_{step:08d}"
    saved = json.loads((source / "run.json").read_text())
    now = {"layout": layout.as_dict(), "dp": grid.dp, **run}
    for name, value in now.items():
        if saved.get(name) != value:
            raise CheckpointError(
                f"{source} was saved with {name} {saved.get(name)}, this run has {value}; resume with the same {name}, or start "
                f"a new run from its weights (model.checkpoint: {source / 'weights'}) with another checkpoint.dir"
            )
    parameters = run_parameters(chunks, layout, grid)
    load_weights(WeightReader(source / "weights"), parameters, grid)
    _load_optimizer(source / "optimizer" / f"rank_{grid.rank:05d}.safetensors", optimizer, parameters)
    state = source / "loader" / f"dp_{grid.dp_rank:05d}.json"
    return json.loads(state.read_text()) if grid.owns_loader and state.is_file() else None


@torch.no_grad()
def load_weights(reader: WeightReader, parameters: list[tuple[str, nn.Parameter]], grid: Grid) -> None:
    """Fills this rank's parameters from weights of any layout, each rank reading only its own slices."""
    for name, parameter in parameters:
        parameter.copy_(reader.get(name, grid.tp_rank, grid.tp))


@torch.no_grad()
def _load_optimizer(path: Path, optimizer: ChainedOptimizer, parameters: list[tuple[str, nn.Parameter]]) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; the checkpoint is not whole")
    with safe_open(path, framework="pt") as file:
        stored = set(file.keys())
        for piece in optimizer_slices(optimizer, parameters):
            where = f"{piece.name}[{piece.start}:{piece.end}]"
            if f"{where}/main" not in stored:
                raise CheckpointError(f"{path} has no optimizer state for {where}; were other parts frozen when it was saved?")
            piece.main.copy_(file.get_tensor(f"{where}/main").view_as(piece.main))
            step = int(file.get_tensor(f"{where}/step"))
            for moment in MOMENTS:
                if f"{where}/{moment}" in stored:
                    piece.state[moment] = file.get_tensor(f"{where}/{moment}").view_as(piece.main).to(piece.main.device)
            if "step" in piece.group or _is_fused(optimizer):
                piece.group["step"] = step
            elif step:
                # One tensor a parameter: torch's Adam counts in place, and a shared one would count once per parameter.
                piece.state["step"] = torch.tensor(float(step))
        torch.set_rng_state(file.get_tensor("rng/cpu"))
        if "rng/cuda" in stored and torch.cuda.is_available():
            torch.cuda.set_rng_state(file.get_tensor("rng/cuda"))


def _is_fused(optimizer: ChainedOptimizer) -> bool:
    """Whether Adam is Transformer Engine's, which counts steps per parameter group."""
    return any(
        type(part.optimizer).__name__ == "FusedAdam" for part in optimizer.chained_optimizers if hasattr(part, "optimizer")
    )


def _prune(folder: Path, keep: int) -> None:
    """Removes all but the ``keep`` latest checkpoints (0 keeps all)."""
    steps = sorted(p for p in folder.glob("step_*") if p.is_dir() and not p.name.endswith(".partial"))
    for old in steps[:-keep] if keep else []:
        shutil.rmtree(old, ignore_errors=True)


def _write_json(path: Path, value: Any) -> None:
    """Atomic: the name appears with the whole content."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
