"""Runs cases in a real process group and compares each with the reference.

    torchrun --nproc-per-node 4 -m toolkit.parity.worker CASES.json OUT.json [cpu|cuda]

``CASES.json`` is a list of :class:`~toolkit.parity.case.ParityCase` fields. The trainer builds every case and
runs its training; a single pass has the trainer's own schedule, DDP and gradient finalisation. ``megatron-vl
parity`` and the tests run this program. Rank 0 computes a reference that does not exist yet.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import hashlib
import itertools
import json
import math
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.data.packing.assemble_row import TokenizedSample
from megatron_vl.parallel.process_grid import end_distributed, init_distributed
from megatron_vl.platform import Platform, get_platform
from megatron_vl.spec.adapters import trained_table
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.tensors import Sharding, TensorInfo, model_part
from megatron_vl.training.step import reduce_losses, replicated_modules, run_schedule
from megatron_vl.training.trainer import Trainer
from megatron_vl.weights.matrix_blocks import join_shards
from toolkit.parity.case import ParityCase, build_case, draw_samples, pack_step

from .activations import MegatronActivationRecorder
from .gather_tensors import LazyTensorFile, gather_to_rank_0
from .reference_job import ReferenceJob, write_reference
from .tolerances import BF16_GRADIENT_RATIO, BF16_LOSS_TOLERANCE, GRADIENT_TOLERANCE, LOSS_TOLERANCE
from .training import compare_training, train_and_save


def run_case(case: ParityCase, platform: Platform) -> dict[str, Any]:
    """Runs the steps of a case and compares each with the reference. Collective.

    Returns:
        On rank 0, {"ok", "steps"}, with the output of :func:`compare_one_pass` for each step; of a training,
        the output of :func:`~toolkit.parity.training.compare_training`. On the other ranks, {"ok": True}.
    """
    spec = read_spec(case.hf)
    step_samples = []
    for step_number, row_kinds in enumerate(case.steps):
        step_samples.append(draw_samples(row_kinds, spec, step_number, case.samples))
    if case.train:
        step_records, saved_state = train_and_save(case, step_samples, platform)
        if dist.get_rank():
            return {"ok": True}
        reference_dir = find_reference(case, range(len(case.steps)), step_samples, platform)
        return compare_training(step_records, saved_state, reference_dir)

    trainer = build_case(case, platform)
    if case.optimizer:
        # The weights must not change, so that every step matches the reference.
        for parameter_group in trainer.optimizer.param_groups:
            parameter_group["lr"] = parameter_group["weight_decay"] = 0.0
    step_results = []
    for step_number, samples in enumerate(step_samples):
        reference_dir = None
        if trainer.grid.rank == 0:
            reference_dir = find_reference(case, [step_number], [samples], platform)
        step_results.append(run_one_pass(case, trainer, samples, reference_dir))
    return {"ok": all(result["ok"] for result in step_results), "steps": step_results}


def run_one_pass(
    case: ParityCase, trainer: Trainer, samples: list[list[TokenizedSample]], reference_dir: Path | None
) -> dict[str, Any]:
    """Runs and compares the forward and backward pass of a step. Collective.

    Args:
        samples: for each row of the global batch, its samples.
        reference_dir: output of :mod:`toolkit.parity.reference_job`; None on all ranks but rank 0.

    Returns:
        On rank 0, the output of :func:`compare_one_pass`, and of
        :meth:`MegatronActivationRecorder.compare_activations` if the case compares layer outputs.
    """
    step_batch = pack_step(trainer, samples)
    for chunk in trainer.model_chunks:
        chunk.zero_grad_buffer()
    if case.optimizer:
        trainer.optimizer.zero_grad()

    # The trainer's own schedule runs forward and backward; hooks copy the outputs meanwhile.
    activation_recorder = MegatronActivationRecorder(trainer) if case.activations else None
    loss_reports = run_schedule(trainer.model_chunks, step_batch.rows, seq_len=case.seq_len)
    loss_sum, loss_tokens, *_ = reduce_losses(loss_reports, trainer.grid, trainer.platform.device)
    outputs: dict[str, Any] = {}
    if activation_recorder is not None:
        outputs = activation_recorder.compare_activations(step_batch, reference_dir, case.dtype)

    # The optimizer steps at learning rate 0, so that its overlap with communication is tested too.
    gradients = gather_gradients(trainer, loss_tokens)
    if case.optimizer:
        trainer.optimizer.prepare_grads()
        trainer.optimizer.step_with_ready_grads()
    if reference_dir is None:
        return {"ok": True}
    result = compare_one_pass(case, trainer, loss_sum / loss_tokens, gradients, reference_dir)
    departure = outputs.get("departs") or result["departs"]
    return result | outputs | {"ok": result["ok"] and not departure, "departs": departure}


# --- Gradients ----------------------------------------------------------------------------------------------


def gather_gradients(trainer: Trainer, loss_tokens: int) -> Iterator[tuple[str, Tensor]]:
    """Gathers the gradients of the mean loss. Collective.

    The ranks of a data-parallel group hold equal gradients after the reduction; the first one contributes.
    The trainer divides gradients only as it clips them, so they are divided here.

    Args:
        loss_tokens: number of loss tokens of the step.

    Returns:
        On rank 0, the name and the full fp32 gradient of every copy of every tensor. A tied tensor has a copy
        on each of two stages, and each tensor-parallel rank has one of a replicated tensor.
    """
    for replicated_module in replicated_modules(trainer.model_chunks):
        replicated_module.scale_gradients(1.0 / loss_tokens)
    _gather_slices(trainer)
    tensor_infos = trained_table(trainer.spec, trainer.config.lora)
    local_gradients = _local_gradients(trainer, tensor_infos)
    contribution = {(trainer.grid.rank,): local_gradients} if local_gradients else {}
    gathered_gradients = gather_to_rank_0(contribution, trainer.grid)
    return _full_gradients(list(gathered_gradients.values()), tensor_infos, trainer.layout.sharding)


def _gather_slices(trainer: Trainer) -> None:
    """Completes the gradient buffers on every rank. Collective.

    With the distributed optimizer, each rank holds only its own slice of every bucket after the reduction.
    """
    for chunk in replicated_modules(trainer.model_chunks):
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for gradient_buffer in chunk.buffers + chunk.expert_parallel_buffers:
            group = gradient_buffer.data_parallel_group
            for gradient_bucket in gradient_buffer.buckets:
                shards = gradient_bucket.grad_data.chunk(group.size())
                dist.all_gather(list(shards), shards[group.rank()].clone(), group=group)


def _local_gradients(trainer: Trainer, tensor_infos: Mapping[str, TensorInfo]) -> dict[str, Tensor]:
    """The gradients that this rank contributes, under ``stage.copy/part/name``."""
    grid = trainer.grid
    stacks: dict[str, list[Tensor]] = {}
    copy_counts: dict[str, int] = {}
    for tensor_name, parameter, expert_number in trainer.live_tensors:
        if not parameter.requires_grad or not grid.is_first_copy(tensor_infos[tensor_name]):
            continue
        tensor_info = tensor_infos[tensor_name]
        copy_index = 0  # experts come in their order, and are stacked
        if expert_number is None:
            copy_index = copy_counts[tensor_name] = copy_counts.get(tensor_name, -1) + 1
        key = f"{grid.pp_rank}.{copy_index}/{grid.shard_index(tensor_info)}/{tensor_name}"
        # The gradient that Megatron-core's DDP accumulates.
        stacks.setdefault(key, []).append(parameter.main_grad.detach().float().cpu().clone())
    is_stack = {key: tensor_infos[key.split("/")[2]].num_experts for key in stacks}
    return {key: torch.stack(stack) if is_stack[key] else stack[0] for key, stack in stacks.items()}


def _full_gradients(
    gradients_by_rank: list[LazyTensorFile], tensor_infos: Mapping[str, TensorInfo], sharding: Sharding
) -> Iterator[tuple[str, Tensor]]:
    parts_by_copy: dict[tuple[str, str], dict[int, Callable[[], Tensor]]] = {}
    for rank_gradients in gradients_by_rank:
        for key in rank_gradients:
            copy, part, tensor_name = key.split("/")
            read_part = partial(rank_gradients.__getitem__, key)
            parts_by_copy.setdefault((tensor_name, copy), {})[int(part)] = read_part
    for (tensor_name, _), parts in parts_by_copy.items():
        tensor_info = tensor_infos[tensor_name]
        gradients = [parts[part]() for part in range(sharding.num_shards(tensor_info))]
        # Each rank has a replicated gradient as a whole, so each of these must be right.
        if tensor_info.parallel_style != "replicated" or tensor_info.num_experts:
            gradients = [join_shards(gradients, tensor_info, sharding)]
        for gradient in gradients:
            yield tensor_name, gradient


def compare_one_pass(
    case: ParityCase,
    trainer: Trainer,
    mean_loss: float,
    gradients: Iterator[tuple[str, Tensor]],
    reference_dir: Path,
) -> dict[str, Any]:
    """Compares loss and gradients with the reference, including every copy of a replicated or tied tensor.

    ``departs`` names the tensor whose gradient is computed first among those that depart; "" if none does.

    Args:
        mean_loss: mean loss over all loss tokens.
    """
    reference_facts = json.loads((reference_dir / "reference.json").read_text())
    expected_loss, bf16_noise = reference_facts["loss"], reference_facts["gradients_noise"]
    expected_gradients = LazyTensorFile(reference_dir / "gradients.safetensors")
    errors: dict[str, float] = {}
    for tensor_name, gradient in gradients:
        error = _gradient_error(gradient, expected_gradients[tensor_name])
        errors[tensor_name] = max(errors.get(tensor_name, 0.0), error)

    # In bf16, transformers' own error against fp32 is the measure.
    is_bf16 = case.dtype == "bfloat16"
    gradient_limit = max(bf16_noise.values()) * BF16_GRADIENT_RATIO if is_bf16 else GRADIENT_TOLERANCE
    loss_limit = BF16_LOSS_TOLERANCE if is_bf16 else LOSS_TOLERANCE

    # Frozen parts must have no gradient, and all others must have one.
    table = trained_table(trainer.spec, case.config.lora)
    unexpected_names = sorted({name for name in table if model_part(name) not in case.freeze} ^ errors.keys())
    departing_names = [name for name in table if name in errors and not errors[name] <= gradient_limit]
    worst_names = sorted(errors, key=errors.__getitem__, reverse=True)[:3]
    loss_error = abs(mean_loss - expected_loss) / abs(expected_loss)
    departures = [*unexpected_names[:1], *departing_names[-1:]]
    return {
        "ok": not departures and loss_error <= loss_limit,
        "loss": mean_loss,
        "reference": expected_loss,
        "loss_error": loss_error,
        "gradient_error": max(errors.values()),
        "worst": {tensor_name: errors[tensor_name] for tensor_name in worst_names},
        "departs": f"the gradient of {departures[0]}" if departures else "",
        "transformers_bf16_gradient_error": max(bf16_noise.values()) if bf16_noise else None,
        "unexpected": unexpected_names,
        "compared": len(errors),
    }


def _gradient_error(gradient: Tensor, expected_gradient: Tensor) -> float:
    """Relative L2 error; absolute if the expected gradient is zero, and infinite if it is not finite."""
    expected_norm = expected_gradient.norm().item()
    error = (gradient - expected_gradient).norm().item() / (expected_norm or 1.0)
    return error if math.isfinite(error) else math.inf


# --- The reference ------------------------------------------------------------------------------------------


def find_reference(
    case: ParityCase,
    step_numbers: Iterable[int],
    step_samples: list[list[list[TokenizedSample]]],
    platform: Platform,
) -> Path:
    """The folder of the reference of these steps. Computes it unless an earlier case of this group did.

    Args:
        step_samples: for each of the steps and row, its samples.
    """
    if case.reference:
        return Path(case.reference)
    # The samples follow from their kinds and the number of the step, however they are spread over rows.
    kinds = [[number, *itertools.chain(*case.steps[number])] for number in step_numbers]
    inputs = json.dumps([case.hf, case.dtype, case.train, case.samples, kinds])
    folder = _references_root() / hashlib.sha256(inputs.encode()).hexdigest()
    if not (folder / "reference.json").exists():
        folder.mkdir(exist_ok=True)
        steps = len(step_samples) if case.train else 0
        job = ReferenceJob(case.hf, str(folder), case.dtype, str(platform.device), steps)
        write_reference(job, [list(itertools.chain(*samples)) for samples in step_samples])
    return folder


@cache
def _references_root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="parity-references-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def main(argv: list[str]) -> int:
    """Runs all cases of a file. If a case raises, the error is reported and the next case runs."""
    platform = get_platform(argv[2] if len(argv) > 2 else "cpu")
    torch.set_num_threads(1)
    faulthandler.enable()
    init_distributed(platform)
    parity_cases = [ParityCase(**fields) for fields in json.loads(Path(argv[0]).read_text())]
    results_by_case: dict[str, Any] = {}

    for case in parity_cases:
        try:
            results_by_case[case.name] = run_case(case, platform)
        except Exception:
            results_by_case[case.name] = {"ok": False, "error": traceback.format_exc()}
            print(f"{case.name}: {results_by_case[case.name]['error']}", file=sys.stderr, flush=True)
        gc.collect()
        if dist.get_rank() == 0:
            Path(argv[1]).write_text(json.dumps(results_by_case, indent=1))
            print(case.name, "ok" if results_by_case[case.name]["ok"] else "FAILED", flush=True)

    end_distributed()
    return 0 if all(result["ok"] for result in results_by_case.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
