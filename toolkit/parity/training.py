"""Compares a short training, including the optimizer, with ``transformers`` and torch's AdamW.

Both sides train on the same samples. Weights and moments are compared after a round trip through a
checkpoint: the trainer's own saver writes them in the case's layout, and they are read back as full tensors.
This checks both that the optimizer steps correctly and that nothing is lost or misplaced on disk.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.data.packing.assemble import Sample
from megatron_vl.data.sample.pixels import read_pixel_norm
from megatron_vl.platform import Platform
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.tensors import WHOLE, TensorInfo, tensor_table
from megatron_vl.training.checkpoint import CheckpointSaver, read_run, take_snapshot
from megatron_vl.training.optimizer import set_learning_rates
from megatron_vl.training.optimizer_state import OptimizerReader
from megatron_vl.training.step import train_step
from megatron_vl.weights.reader import WeightReader
from megatron_vl.weights.run_folder import step_folder

from .case import ADAM, BuiltCase, Case, build, draw
from .gather import StoredTensors
from .reference import backward, canonical, fingerprint, load_hf, remembered
from .tolerances import LOSS_TOLERANCE

STATE_TOLERANCE = 2.5e-4
"""Relative L2 of a tensor's moments after some steps. Adam turns rounding errors of tiny gradients into whole
steps of tiny weights: ``transformers`` in fp32 departs by up to 1.2e-4 from the same training in fp64 (small
Qwen3-VL; 4e-5 for Qwen2.5-VL)."""
WEIGHT_TOLERANCE = 2.5e-4
"""Relative L2 of a weight after some steps."""


def run_training(case: Case, platform: Platform) -> dict[str, Any]:
    """Trains in the layout of a case and compares with the reference. Collective.

    Returns:
        On rank 0, {"ok", "steps": [{loss, reference, loss_error, norm_error}], "state": {kind: (worst tensor,
        its error)}}.
    """
    live = build(case, platform)
    results: list[dict[str, Any]] = []
    batches = [draw(rows, live.spec, number, case.samples) for number, rows in enumerate(case.steps)]
    for number, samples in enumerate(batches):
        data = live.feed(samples, platform, case.seq_len)
        set_learning_rates(live.optimizer, live.config, number)
        result = train_step(live.wrapped, live.optimizer, data.rows, live.grid, case.seq_len)
        results.append({"loss": result.loss, "grad_norm": result.grad_norm, "ok": result.updated})

    state = saved_state(live, len(batches))
    if live.grid.rank != 0:
        return {"ok": True}

    flat = [[s for row in batch for s in row] for batch in batches]
    if case.reference:
        want_losses, want_norms, want = stored_training(Path(case.reference))
    else:
        key = ("training", case.hf, *map(fingerprint, flat))
        want_losses, want_norms, want = remembered(key, lambda: reference_training(case.hf, flat))

    for line, loss, norm in zip(results, want_losses, want_norms, strict=True):
        line |= {"reference": loss, "loss_error": abs(line["loss"] - loss) / loss}
        line |= {"norm_error": abs(line["grad_norm"] - norm) / norm}
        line["ok"] &= line["loss_error"] <= LOSS_TOLERANCE and line["norm_error"] <= 1e-4

    errors = {kind: worst(state[kind], want[kind]) for kind in want}
    limits = {kind: WEIGHT_TOLERANCE if kind in ("main", "weights") else STATE_TOLERANCE for kind in want}
    near = all(error <= limits[kind] for kind, (_, error) in errors.items())
    return {"ok": near and all(r["ok"] for r in results), "steps": results, "state": errors}


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[str, float]:
    """Returns the tensor with the largest relative L2 error, and that error (infinite if it is missing)."""
    if ours.keys() != theirs.keys():
        return sorted(ours.keys() ^ theirs.keys())[0], math.inf
    errors = {
        name: ((ours[name] - want).norm() / want.norm().clamp(min=1e-30)).item()
        for name, want in theirs.items()
    }
    name = max(errors, key=errors.__getitem__)
    return name, errors[name]


def saved_state(live: BuiltCase, step: int) -> dict[str, dict[str, Tensor]]:
    """Writes a checkpoint in this layout and reads it back on rank 0. Collective.

    Returns:
        Maps kind ("weights", "main", "exp_avg", "exp_avg_sq") and name to the full tensor; empty on the other
        ranks.
    """
    made: list[Any] = [tempfile.mkdtemp(prefix="parity-checkpoint-") if live.grid.rank == 0 else None]
    dist.broadcast_object_list(made)
    folder = Path(made[0])
    saver = CheckpointSaver(folder, live.spec, live.layout, live.grid, keep=0)

    def take() -> Any:
        return take_snapshot(
            step,
            chunks=live.wrapped,
            optimizer=live.optimizer,
            spec=live.spec,
            layout=live.layout,
            grid=live.grid,
            loader_state=None,
            run={},
        )

    saver.start(take, step)
    saver.wait()
    dist.barrier()

    state: dict[str, dict[str, Tensor]] = {}
    if live.grid.rank == 0:
        source = step_folder(folder, step)
        files = {name.removeprefix("optimizer/"): facts for name, facts in read_run(source)["files"].items()}
        reader = OptimizerReader(source / "optimizer", files, live.layout.cut)
        weights = WeightReader(source / "weights")
        table = tensor_table(live.spec)

        state["weights"] = {name: weights.get(name).float().clone() for name in table}
        for kind in ("main", "exp_avg", "exp_avg_sq"):
            state[kind] = {name: full_state(reader, info, kind) for name, info in table.items()}

        reader.close()
        shutil.rmtree(folder)

    return state


def full_state(reader: OptimizerReader, info: TensorInfo, kind: str) -> Tensor:
    """Reads the optimizer state of a whole tensor."""
    one = info.shape[1:] if info.experts else info.shape
    pieces = [
        reader.get(info, kind, 0, WHOLE, 0, torch.Size(one).numel(), expert)
        for expert in (range(info.experts) if info.experts else [None])
    ]
    return torch.cat([piece for piece in pieces if piece is not None]).view(info.shape)


def stored_training(folder: Path) -> tuple[list[float], list[float], dict[str, dict[str, Tensor]]]:
    """Reads the result of :func:`reference_training` that :mod:`toolkit.parity.stored` wrote."""
    facts = json.loads((folder / "reference.json").read_text())
    tensors = StoredTensors(folder / "training.safetensors")
    state: dict[str, dict[str, Tensor]] = {}
    for name in tensors:
        kind, _, tensor = name.partition("/")
        state.setdefault(kind, {})[tensor] = tensors[name]
    return facts["losses"], facts["norms"], state | {"main": state["weights"]}


def reference_training(
    hf: str, batches: list[list[Sample]], device: str = "cpu"
) -> tuple[list[float], list[float], dict[str, dict[str, Tensor]]]:
    """Trains with ``transformers``, torch's AdamW and gradient clipping.

    Returns:
        (losses, gradient norms, canonical tensors by kind and name), as :func:`saved_state` names the kinds.
    """
    spec = read_spec(hf)
    norm = read_pixel_norm(hf)
    model = load_hf(hf, device=device)
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": ADAM.weight_decay},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=ADAM.lr, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps)

    losses, norms = [], []
    for number, samples in enumerate(batches):
        losses.append(backward(model, samples, spec, norm))
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                # In a step without pictures, torch skips the vision tower, while Megatron-core's optimizer
                # continues with its moments.
                parameter.grad = torch.zeros_like(parameter)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM.clip_grad)))
        for group in adam.param_groups:
            group["lr"] = ADAM.lr * min(1.0, (number + 1) / ADAM.warmup_steps)
        adam.step()

    state = {"weights": canonical({name: p.detach() for name, p in named.items()}, hf)}
    state["main"] = state["weights"]
    for kind in ("exp_avg", "exp_avg_sq"):
        state[kind] = canonical({name: adam.state[p][kind] for name, p in named.items()}, hf)
    return losses, norms, state
