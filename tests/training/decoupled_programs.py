"""What the ranks of :mod:`tests.training.test_decoupled` run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.parallel.process_grid import init_distributed
from megatron_vl.platform import get_platform
from megatron_vl.training.optimizer import set_learning_rates
from megatron_vl.training.state.checkpoint import (
    CheckpointSaver,
    load_checkpoint,
    read_run_metadata,
    take_snapshot,
)
from megatron_vl.training.state.optimizer_state import STATE_KINDS, OptimizerStateReader
from megatron_vl.training.step import replicated_modules
from megatron_vl.training.trainer import Trainer
from megatron_vl.weights.run_folder import step_dir_path
from megatron_vl.weights.weight_reader import WeightReader
from toolkit.parity.case import ParityCase, build_case, draw_samples, pack_step
from toolkit.parity.training import read_full_state

ROWS = [["mixed", "text"], ["image"]]


def moved(hf: str, weights: str, folder: str, layout: dict[str, Any]) -> list[dict[str, Any]]:
    """Trains with the tower in one place, saves, loads it in the other and saves again, both ways."""
    platform = get_platform("cpu")
    torch.set_num_threads(1)
    init_distributed(platform)
    return [_move(hf, weights, Path(folder) / str(first), layout, first, platform) for first in (False, True)]


def _move(
    hf: str, weights: str, folder: Path, layout: dict[str, Any], first: bool, platform: Any
) -> dict[str, Any]:
    saved, results = [], []
    for number, decoupled in enumerate((first, not first)):
        case = ParityCase("case", hf, weights, [], seq_len=512, decoupled=decoupled, **layout)
        live = build_case(case, platform)
        if number == 0:
            for step in range(2):
                _step(live, step)
        else:
            parts = {"model_chunks": live.model_chunks, "optimizer": live.optimizer}
            place = {"spec": live.spec, "grid": live.grid, "layout": live.layout}
            load_checkpoint(step_dir_path(folder / "0", 2), **parts, **place)
        saved.append(saved_tensors(live, folder / str(number)))
        results.append(_step(live, 2))
    if dist.get_rank():
        return {}
    before, after = saved
    different = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    return {
        "different": different + sorted(before.keys() ^ after.keys()),
        "compared": len(before),
        "loss": results[1].loss,
        "loss_of_another_step": results[0].loss,
        "norm": results[1].grad_norm,
        "norm_of_another_step": results[0].grad_norm,
    }


def not_finite_in_one_share(hf: str, weights: str, layout: dict[str, Any]) -> list[list[list[Any]]]:
    """For each rank and three steps: [why skipped, whether its weights changed, whether all are finite].

    In the second step, the pictures of the last rank alone have a gradient with one NaN.
    """
    platform = get_platform("cpu")
    torch.set_num_threads(1)
    init_distributed(platform)
    live = build_case(ParityCase("case", hf, weights, [], seq_len=512, decoupled=True, **layout), platform)
    tower = live.model_chunks[0].module.decoupled
    last = dist.get_rank() == dist.get_world_size() - 1
    own, calls = tower.backward_call, []

    def with_nan(features: list[Tensor], patches: slice, gradient: Tensor) -> None:
        calls.append(patches)
        gradient = gradient.clone()
        gradient[patches.start // tower.vision.merge_unit, 0, 0] = float("nan")
        own(features, patches, gradient)

    def held() -> list[Tensor]:
        parts = replicated_modules(live.model_chunks)
        return [parameter.detach().clone() for part in parts for parameter in part.parameters()]

    results = []
    for number in range(3):
        before = held()
        tower.backward_call = with_nan if last and number == 1 else own
        skipped = _step(live, number).skip_reason
        after = held()
        changed = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        results.append([skipped, changed, all(bool(p.isfinite().all()) for p in after)])
    assert bool(calls) == last  # that rank has pictures of its own
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, results)
    return by_rank


def _step(live: Trainer, number: int) -> Any:
    data = pack_step(live, draw_samples(ROWS, live.spec, number))
    set_learning_rates(live.optimizer, live.config, number)
    return live.train_step(data)


def saved_tensors(live: Any, folder: Path) -> dict[str, Tensor]:
    """Saves; on rank 0, returns every weight, master weight and moment in the files, and Adam's counts."""
    saver = CheckpointSaver(folder, live.spec, live.layout, live.grid, num_latest_kept=0)
    place = {"spec": live.spec, "layout": live.layout, "grid": live.grid}
    parts = {"model_chunks": live.model_chunks, "optimizer": live.optimizer}
    saver.start_save(
        lambda: take_snapshot(2, **parts, **place, loader_state=None, run_metadata={"dp": live.grid.dp}), 2
    )
    saver.wait_until_saved()
    dist.barrier()
    if dist.get_rank():
        return {}
    source = step_dir_path(folder, 2)
    files = {
        name.removeprefix("optimizer/"): facts for name, facts in read_run_metadata(source)["files"].items()
    }
    state = OptimizerStateReader(source / "optimizer", files, live.layout.sharding)
    reader, found = WeightReader(source / "weights", takes_adapters=True), {}
    for name, info in reader.tensor_infos.items():
        found[name] = reader.read_shard(name).clone()
        found |= {f"{name}/{kind}": read_full_state(state, info, kind) for kind in STATE_KINDS}
        found[f"{name}/step"] = torch.tensor(state.adam_step_count(name))
    state.close()
    return found
