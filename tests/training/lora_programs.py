"""What the ranks of :mod:`tests.training.test_lora` run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from converters.convert import convert_weights, export_weights
from megatron_vl.parallel.process_grid import init_distributed
from megatron_vl.platform import Platform, get_platform
from megatron_vl.spec.lora import trained_table
from megatron_vl.training.optimizer import set_learning_rates
from megatron_vl.training.trainer import Trainer
from megatron_vl.weights.run_folder import step_dir_path
from toolkit.parity.case import ParityCase, build_case, draw_samples, pack_step

from .context_programs import ROWS, SEQ_LEN
from .decoupled_programs import saved_tensors

STEPS = 2
UNCOMPARED_LOGITS = {"pp", "decoupled", "fp8"}
"""Layouts with these have no logits of a row in one call, or rounded ones."""


def train_layouts(
    hf: str,
    weights: str,
    folder: str,
    lora: dict[str, Any],
    layouts: dict[str, dict[str, Any]],
    platform_name: str = "cpu",
) -> dict[str, Any]:
    """Trains adapters in each layout: in float32 on a CPU, in bfloat16 on GPUs.

    Returns, on rank 0, by layout: losses, base tensors that changed, errors of the saved tensors beside
    those of the first layout, and distances of logits (:func:`logit_distances`).
    """
    platform = start(platform_name)
    results: dict[str, Any] = {}
    reference: dict[str, Tensor] = {}
    for name, layout in layouts.items():
        live = build(name, hf, weights, lora, layout, platform)
        losses = train(live, platform)
        run = Path(folder) / name.replace(" ", "_")
        saved = saved_tensors(live, run)
        reference = reference or saved
        changed = changed_base(live, hf, weights, layout, lora, platform)
        results[name] = {"losses": losses, "base_changed": changed}
        results[name] |= {"errors": largest_errors(saved, reference), "tensors": len(saved)}
        if not UNCOMPARED_LOGITS & layout.keys():
            results[name] |= logit_distances(live, run, hf, weights, layout, platform)
    return results


def logit_distances(
    live: Trainer, run: Path, hf: str, weights: str, layout: dict[str, Any], platform: Platform
) -> dict[str, float]:
    """How far the logits of two models are from those of base and adapters. Collective.

    Returns:
        ``merged``: of a model that has the adapters in its weights; ``base``: of the model without adapters.
        Each is relative to the norm of the logits, and the largest of all ranks.
    """
    merged_hf, merged_weights = run / "merged_hf", run / "merged"
    if dist.get_rank() == 0:
        export_weights(step_dir_path(run, STEPS) / "weights", hf, merged_hf, merges_adapter=True)
        convert_weights(merged_hf, merged_weights)
    dist.barrier()

    expected = local_logits(live, platform)
    distances = {}
    for name, model_hf, model_weights in (
        ("merged", str(merged_hf), str(merged_weights)),
        ("base", hf, weights),
    ):
        logits = local_logits(build(name, model_hf, model_weights, {}, layout, platform), platform)
        distance = (logits - expected).norm() / expected.norm()
        dist.all_reduce(distance, op=dist.ReduceOp.MAX)
        distances[name] = float(distance)
    return distances


def local_logits(live: Trainer, platform: Platform) -> Tensor:
    """This rank's logits of real tokens, for rows that no step has seen. Needs one pipeline stage."""
    step_data = pack_step(live, draw_samples(ROWS, live.spec, STEPS))
    model_chunk = live.model_chunks[0].module.eval()
    with torch.no_grad():
        return torch.cat([model_chunk(row, labels=False).flatten(0, 1).float() for row in step_data.rows])


def dropout_masks(hf: str, weights: str, layout: dict[str, Any]) -> dict[str, list[list[float]]]:
    """What dropout makes of ones on each rank: where all ranks have the whole input, and where it is cut."""
    platform = start("cpu")
    live = build("dropout", hf, weights, {"rank": 4, "dropout": 0.5}, layout, platform)
    masks: dict[str, list[list[float]]] = {}
    layer = live.model_chunks[0].module.language_model.decoder.layers[0].self_attention
    for name, linear in (("whole", layer.linear_qkv), ("cut", layer.linear_proj)):
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, linear.adapter._drop(torch.ones(64)).tolist())
        masks[name] = by_rank
    return masks


def start(platform_name: str) -> Platform:
    platform = get_platform(platform_name)
    torch.set_num_threads(1)
    init_distributed(platform)
    return platform


def build(
    name: str, hf: str, weights: str, lora: dict[str, Any], layout: dict[str, Any], platform: Platform
) -> Trainer:
    dtype = "bfloat16" if platform.name == "cuda" else "float32"
    case = ParityCase(name, hf, weights, [], seq_len=SEQ_LEN, lora=lora, dtype=dtype, **layout)
    return build_case(case, platform)


def train(live: Trainer, platform: Platform) -> list[float]:
    """The losses of two steps, the second of which sees adapters that are not zero."""
    losses = []
    for step in range(STEPS):
        data = pack_step(live, draw_samples(ROWS, live.spec, step))
        set_learning_rates(live.optimizer, live.config, step)
        losses.append(live.train_step(data).loss)
    return losses


def changed_base(
    live: Trainer, hf: str, weights: str, layout: dict[str, Any], lora: dict[str, Any], platform: Platform
) -> list[str]:
    """Names of the base's frozen tensors on any rank that differ from a newly built model by a bit."""
    fresh = build("fresh", hf, weights, lora, layout, platform)
    before = {
        (tensor.tensor_name, tensor.expert_index, number): tensor.parameter
        for number, tensor in enumerate(fresh.live_tensors)
    }
    changed = []
    trained = trained_table(live.spec, live.config.lora)
    for number, tensor in enumerate(live.live_tensors):
        if tensor.tensor_name not in trained:
            same = torch.equal(tensor.parameter, before[tensor.tensor_name, tensor.expert_index, number])
            changed += [] if same and not tensor.parameter.requires_grad else [tensor.tensor_name]
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, changed)
    return sorted({name for names in by_rank for name in names})


def largest_errors(saved: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """Kind of tensor -> the largest distance from a reference, relative to the reference's norm."""
    errors: dict[str, float] = {}
    for key, tensor in saved.items():
        kind = key.rpartition("/")[2] if "/" in key else "weight"
        expected = reference[key].double()
        error = float((tensor.double() - expected).norm() / expected.norm().clamp(min=1e-12))
        errors[kind] = max(errors.get(kind, 0.0), error)
    return errors
