"""Runs cases in a real process group and compares each with the reference.

    torchrun --nproc-per-node 4 -m toolkit.parity.worker CASES.json OUT.json [cpu|cuda]

``CASES.json`` is a list of :class:`~toolkit.parity.case.ParityCase` fields. Every case runs the trainer's own
schedule, DDP and gradient finalisation; no part of the model is rebuilt for the comparison. ``megatron-vl
parity`` and the tests run this program. Rank 0 computes the reference, unless
:mod:`toolkit.parity.reference_job` did so before the group started.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import math
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.data.packing.assemble_row import TokenizedSample
from megatron_vl.models.parameter_names import LiveTensor
from megatron_vl.parallel.process_grid import ProcessGrid, end_distributed, init_distributed
from megatron_vl.platform import Platform, get_platform
from megatron_vl.spec.adapters import trained_table
from megatron_vl.spec.tensors import TensorInfo, model_part
from megatron_vl.training.step import reduce_losses, replicated_modules, run_schedule
from megatron_vl.weights.matrix_blocks import join_shards
from toolkit.parity.case import BuiltCase, ParityCase, build_case, draw_samples

from .activations import MegatronActivationRecorder
from .gather_tensors import LazyTensorFile, gather_to_rank_0
from .locations import tensor_location, worst_errors
from .reference import cached_result, compute_reference, load_hf_for_training, samples_fingerprint
from .tolerances import BF16_GRADIENT_RATIO, BF16_LOSS_TOLERANCE, GRADIENT_TOLERANCE, LOSS_TOLERANCE

type CollectedGradients = dict[str, list[dict[int, Callable[[], Tensor]]]]
"""On rank 0, the copies of each tensor's gradient; empty on the other ranks. A copy maps parts (see
:meth:`megatron_vl.spec.tensors.Sharding.shard_index`) to functions that read them. A tied tensor has a copy
on each of two stages."""
type Reference = tuple[float, Mapping[str, Tensor], dict[str, float]]
"""Loss in the case's data type, fp32 gradients by canonical name, and for each tensor the relative error of
transformers' bf16 gradient; empty in fp32."""


def run_case(case: ParityCase, platform: Platform) -> dict[str, Any]:
    """Runs the steps of a case and compares each with the reference. Collective.

    Returns:
        On rank 0, {"ok", "steps"}, with the output of :func:`compare_with_reference` and of
        :meth:`MegatronActivationRecorder.compare_activations` for each step; on the other ranks, no steps. A
        training returns the output of :func:`toolkit.parity.training.run_training`.
    """
    if case.train:
        from .training import run_training

        return run_training(case, platform)

    built_case = build_case(case, platform)
    if built_case.optimizer is not None:
        # The weights must not change, so that every step matches the reference.
        for parameter_group in built_case.optimizer.param_groups:
            parameter_group["lr"] = parameter_group["weight_decay"] = 0.0

    is_first_rank = built_case.grid.rank == 0
    reference_function = make_reference_function(case, platform) if is_first_rank else None
    step_results = []
    for step_number, row_kinds in enumerate(case.steps):
        samples = draw_samples(row_kinds, built_case.spec, step_number, case.samples)
        mean_loss, gradients, departures = run_case_step(case, built_case, samples, platform)
        if reference_function is not None:
            reference = reference_function([sample for row in samples for sample in row])
            step_result = compare_with_reference(case, built_case, mean_loss, gradients, reference)
            step_result["ok"] &= not departures.get("departs")
            step_results.append(step_result | departures)

    return {"ok": all(step_result["ok"] for step_result in step_results), "steps": step_results}


def run_case_step(
    case: ParityCase, built_case: BuiltCase, samples: list[list[TokenizedSample]], platform: Platform
) -> tuple[float, CollectedGradients, dict[str, Any]]:
    """Runs one step. Collective.

    Args:
        samples: for each row of the global batch, its samples.

    Returns:
        The mean loss, the output of :func:`collect_gradients`, and that of
        :meth:`MegatronActivationRecorder.compare_activations` if the case compares layer outputs.
    """
    ddp_chunks, optimizer, grid = built_case.ddp_chunks, built_case.optimizer, built_case.grid
    step_data = built_case.make_step_data(samples, platform, case.seq_len)
    for ddp_chunk in ddp_chunks:
        ddp_chunk.zero_grad_buffer()
    if optimizer is not None:
        optimizer.zero_grad()

    # The trainer's own schedule runs forward and backward; hooks copy the outputs meanwhile.
    activation_recorder = None
    if case.activations:
        activation_recorder = MegatronActivationRecorder(ddp_chunks, built_case.layout, grid)
    loss_reports = run_schedule(ddp_chunks, step_data.rows, seq_len=case.seq_len)
    loss_sum, loss_token_count, *_ = reduce_losses(loss_reports, grid, platform.device)
    departures = {}
    if activation_recorder is not None:
        departures = activation_recorder.compare_activations(step_data, case.reference, case.dtype)

    # The optimizer steps at learning rate 0, so that its overlap with communication is tested too.
    gradients = collect_gradients(built_case, loss_token_count)
    if optimizer is not None:
        optimizer.prepare_grads()
        optimizer.step_with_ready_grads()
    return loss_sum / loss_token_count, gradients, departures


def _local_gradients(
    live_tensors: list[LiveTensor], grid: ProcessGrid, tensor_infos: Mapping[str, TensorInfo]
) -> dict[str, Tensor]:
    """The gradients that this rank contributes, under ``stage/copy/part/name``."""
    local_gradients: dict[str, Tensor] = {}
    expert_gradients: dict[str, list[Tensor]] = {}
    copy_counts: dict[str, int] = {}
    for tensor_name, parameter, expert_number in live_tensors:
        if not parameter.requires_grad or not grid.is_first_copy(tensor_infos[tensor_name]):
            continue
        if expert_number is not None:  # experts come in their order
            expert_gradients.setdefault(tensor_name, []).append(_main_grad(parameter))
            continue
        copy_index = copy_counts[tensor_name] = copy_counts.get(tensor_name, -1) + 1
        shard_index = grid.shard_index(tensor_infos[tensor_name])
        local_gradients[f"{grid.pp_rank}/{copy_index}/{shard_index}/{tensor_name}"] = _main_grad(parameter)

    for tensor_name, gradient_stack in expert_gradients.items():
        shard_index = grid.shard_index(tensor_infos[tensor_name])
        local_gradients[f"{grid.pp_rank}/0/{shard_index}/{tensor_name}"] = torch.stack(gradient_stack)
    return local_gradients


def collect_gradients(built_case: BuiltCase, loss_tokens: int) -> CollectedGradients:
    """Collects the gradients of the mean loss from all ranks on rank 0. Collective.

    The ranks of a data-parallel group hold equal gradients after the reduction; the first one contributes.
    The trainer divides gradients only as it clips them, so they are divided here.

    Args:
        loss_tokens: number of loss tokens of the step.
    """
    grid = built_case.grid
    for replicated_module in replicated_modules(built_case.ddp_chunks):
        replicated_module.scale_gradients(1.0 / loss_tokens)
    _gather_slices(built_case.ddp_chunks)
    tensor_infos = trained_table(built_case.spec, built_case.config.lora)
    local_gradients = _local_gradients(built_case.live_tensors, grid, tensor_infos)
    local_contribution: dict[tuple[int, ...], dict[str, Tensor]] = {}
    if local_gradients:
        local_contribution[grid.rank,] = local_gradients

    gathered_gradients: dict[str, dict[str, dict[int, Callable[[], Tensor]]]] = {}
    for rank_gradients in gather_to_rank_0(local_contribution, grid).values():
        for gradient_key in rank_gradients:
            pipeline_stage, copy_number, part_number, tensor_name = gradient_key.split("/")
            tensor_copies = gathered_gradients.setdefault(tensor_name, {})
            copy_parts = tensor_copies.setdefault(f"{pipeline_stage}/{copy_number}", {})
            copy_parts[int(part_number)] = partial(rank_gradients.__getitem__, gradient_key)

    gradient_copies: CollectedGradients = {}
    for tensor_name, tensor_copies in gathered_gradients.items():
        gradient_copies[tensor_name] = list(tensor_copies.values())
    return gradient_copies


def _gather_slices(ddp_chunks: list[Any]) -> None:
    """Completes the gradient buffers on every rank. Collective.

    With the distributed optimizer, each rank holds only its own slice of every bucket after the reduction.
    """
    for chunk in replicated_modules(ddp_chunks):
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for gradient_buffer in chunk.buffers + chunk.expert_parallel_buffers:
            group = gradient_buffer.data_parallel_group
            for gradient_bucket in gradient_buffer.buckets:
                shards = gradient_bucket.grad_data.chunk(group.size())
                dist.all_gather(list(shards), shards[group.rank()].clone(), group=group)


def _main_grad(parameter: Any) -> Tensor:
    """The fp32 gradient that Megatron-core's DDP accumulates, on the host."""
    return parameter.main_grad.detach().float().cpu().clone()


def compare_with_reference(
    case: ParityCase,
    built_case: BuiltCase,
    mean_loss: float,
    gradients: CollectedGradients,
    reference: Reference,
) -> dict[str, Any]:
    """Compares loss and gradients with the reference, including every copy of a replicated or tied tensor.

    Args:
        mean_loss: mean loss over all loss tokens.
    """
    expected_loss, expected_gradients, bf16_noise = reference
    sharding = built_case.layout.sharding
    tensor_infos = trained_table(built_case.spec, case.config.lora)
    gradient_errors: dict[str, float] = {}

    for tensor_name, tensor_copies in gradients.items():
        tensor_info = tensor_infos[tensor_name]
        for copy_parts in tensor_copies:
            full_gradients = [copy_parts[part]() for part in range(sharding.num_shards(tensor_info))]
            # Each rank has a replicated gradient as a whole, so each of these must be right.
            if tensor_info.parallel_style != "replicated" or tensor_info.num_experts:
                full_gradients = [join_shards(full_gradients, tensor_info, sharding)]
            for full_gradient in full_gradients:
                relative_error = _gradient_error(full_gradient, expected_gradients[tensor_name])
                gradient_errors[tensor_name] = max(gradient_errors.get(tensor_name, 0.0), relative_error)

    # Frozen parts must have no gradient, and all others must have one.
    trained_names = {name for name in tensor_infos if model_part(name) not in case.freeze}
    unexpected_names = sorted(trained_names - gradient_errors.keys())
    unexpected_names += sorted(gradient_errors.keys() - trained_names)
    worst_names = sorted(gradient_errors, key=gradient_errors.__getitem__, reverse=True)[:3]

    loss_error = abs(mean_loss - expected_loss) / abs(expected_loss)
    gradient_error = max(gradient_errors.values())
    is_bf16 = case.dtype == "bfloat16"
    # In bf16, transformers' own error against fp32 is the measure.
    gradient_limit = max(bf16_noise.values()) * BF16_GRADIENT_RATIO if is_bf16 else GRADIENT_TOLERANCE
    loss_limit = BF16_LOSS_TOLERANCE if is_bf16 else LOSS_TOLERANCE

    return {
        "ok": not unexpected_names and loss_error <= loss_limit and gradient_error <= gradient_limit,
        "loss": mean_loss,
        "reference": expected_loss,
        "loss_error": loss_error,
        "gradient_error": gradient_error,
        "worst": {tensor_name: gradient_errors[tensor_name] for tensor_name in worst_names},
        "transformers_bf16_gradient_error": max(bf16_noise.values()) if bf16_noise else None,
        "unexpected": unexpected_names,
        "compared": len(gradient_errors),
        "gradients": worst_errors(gradient_errors, tensor_location),
    }


def _gradient_error(gradient: Tensor, expected_gradient: Tensor) -> float:
    """Relative L2 error; absolute if the expected gradient is zero, and infinite if it is not finite."""
    expected_norm = expected_gradient.norm().item()
    if expected_norm:
        error = (gradient - expected_gradient).norm().item() / expected_norm
    else:
        error = gradient.norm().item()
    return error if math.isfinite(error) else math.inf


def make_reference_function(
    case: ParityCase, platform: Platform
) -> Callable[[list[TokenizedSample]], Reference]:
    """Returns a function of the samples that computes their reference, or reads what
    :mod:`toolkit.parity.reference_job` computed for them."""
    if case.reference:
        reference_dir = Path(case.reference)
        reference_facts = json.loads((reference_dir / "reference.json").read_text())
        stored_gradients = LazyTensorFile(reference_dir / "gradients.safetensors")
        return lambda _: (reference_facts["loss"], stored_gradients, reference_facts["gradient_noise"])

    device = str(platform.device)
    load_model = cache(lambda dtype: load_hf_for_training(case.hf, dtype, device))

    def compute(samples: list[TokenizedSample]) -> Reference:
        loss, float32_gradients = compute_reference(case.hf, samples, load_model(torch.float32))
        if case.dtype != "bfloat16":
            return loss, float32_gradients, {}
        loss, bf16_gradients = compute_reference(case.hf, samples, load_model(torch.bfloat16))
        bf16_noise = {}
        for name, exact in float32_gradients.items():
            bf16_noise[name] = ((bf16_gradients[name] - exact).norm() / exact.norm().clamp(min=1e-30)).item()
        return loss, float32_gradients, bf16_noise

    def reference_of(samples: list[TokenizedSample]) -> Reference:
        key = (case.hf, case.dtype, device, samples_fingerprint(samples))
        return cached_result(key, lambda: compute(samples))

    return reference_of


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
