"""Runs cases in a real process group and compares each with the reference.

    torchrun --nproc-per-node 4 -m toolkit.parity.worker CASES.json OUT.json [cpu|cuda]

``CASES.json`` is a list of :class:`~toolkit.parity.case.ParityCase` fields. The trainer builds every case,
and the pass has its schedule, DDP and gradient finalisation. ``megatron-vl parity`` and the tests run this
program. Rank 0 computes a reference that does not exist yet.
"""

import faulthandler
import gc
import json
import math
import sys
import traceback
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_vl.data.packing.assemble_row import TokenizedSample
from megatron_vl.parallel.process_grid import end_distributed, init_distributed
from megatron_vl.parallel.process_groups import broadcast_from_rank_0
from megatron_vl.platform import Platform, get_platform
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.lora import trained_table
from megatron_vl.spec.tensors import model_part
from megatron_vl.training.state.load import read_live_shard
from megatron_vl.training.step import reduce_losses, replicated_modules, run_schedule
from megatron_vl.training.trainer import Trainer
from megatron_vl.weights.weight_reader import WeightReader
from toolkit.parity.case import ParityCase, build_case, draw_samples, pack_step

from .activations import MegatronActivationRecorder
from .errors import ErrorSums
from .reference_job import find_reference
from .tolerances import BF16_LOSS_TOLERANCE, BF16_RATIO, GRADIENT_TOLERANCE, LOSS_TOLERANCE


def run_case(case: ParityCase, platform: Platform) -> dict[str, Any]:
    """Runs the steps of a case and compares each with the reference. Collective.

    Returns:
        {"ok", "steps": outputs of :func:`run_one_pass`}.
    """
    trainer = build_case(case, platform)
    if case.optimizer:
        # The weights must not change, so that every step matches the reference.
        for parameter_group in trainer.optimizer.param_groups:
            parameter_group["lr"] = parameter_group["weight_decay"] = 0.0
    step_results = []
    for step_number, kinds in enumerate(case.steps):
        samples = draw_samples(kinds, read_spec(case.hf), step_number, case)
        reference_dir = broadcast_from_rank_0(
            partial(find_reference, case, step_number, str(platform.device))
        )
        step_results.append(run_one_pass(case, trainer, samples, reference_dir))
    return {"ok": all(result["ok"] for result in step_results), "steps": step_results}


def run_one_pass(
    case: ParityCase, trainer: Trainer, samples: list[list[TokenizedSample]], reference_dir: Path
) -> dict[str, Any]:
    """Runs and compares the forward and backward pass of a step. Collective.

    Args:
        samples: for each row of the global batch, its samples.

    Returns:
        The output of :func:`compare_one_pass`, and that of :meth:`MegatronActivationRecorder.compare`.
    """
    step_batch = pack_step(trainer, samples)
    for chunk in trainer.model_chunks:
        chunk.zero_grad_buffer()
    if case.optimizer:
        trainer.optimizer.zero_grad()

    # The trainer's own schedule runs forward and backward; hooks copy the outputs meanwhile.
    activation_recorder = MegatronActivationRecorder(trainer) if case.activations else None
    loss_reports = run_schedule(trainer.model_chunks, step_batch.rows, seq_len=case.seq_len)
    sums, *_ = reduce_losses(loss_reports, step_batch.rows, trainer.grid).read()
    loss_sum, loss_tokens, *_ = sums.tolist()
    outputs: dict[str, Any] = {}
    if activation_recorder is not None:
        row_lengths = [sum(map(len, row)) for row in samples]
        outputs = activation_recorder.compare(step_batch, row_lengths, reference_dir, case.dtype)
    complete_gradients(trainer, loss_tokens)
    errors = gradient_errors(trainer, reference_dir)

    # The optimizer steps at learning rate 0, so that its overlap with communication is tested too.
    if case.optimizer:
        trainer.optimizer.prepare_grads()
        trainer.optimizer.step_with_ready_grads()
    table = trained_table(trainer.spec, trainer.config.lora)
    result = compare_one_pass(case, table, loss_sum / loss_tokens, errors, reference_dir)
    departs = outputs.get("departs") or result["departs"]
    return result | outputs | {"ok": result["ok"] and not departs, "departs": departs}


def complete_gradients(trainer: Trainer, loss_tokens: int) -> None:
    """Makes ``main_grad`` of every parameter the gradient of the mean loss, on every rank. Collective.

    The trainer divides gradients by ``loss_tokens`` only as it clips them. With the distributed optimizer,
    each rank holds only its own slice of every bucket after the reduction.
    """
    for chunk in replicated_modules(trainer.model_chunks):
        chunk.scale_gradients(1.0 / loss_tokens)
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for gradient_buffer in chunk.buffers + chunk.expert_parallel_buffers:
            group = gradient_buffer.data_parallel_group
            for gradient_bucket in gradient_buffer.buckets:
                shards = gradient_bucket.grad_data.chunk(group.size())
                dist.all_gather(list(shards), shards[group.rank()].clone(), group=group)


def gradient_errors(trainer: Trainer, reference_dir: Path) -> dict[str, float]:
    """The relative L2 error of each tensor's gradient: the largest of all copies. Collective.

    A tied tensor has a copy on each of two stages, and each tensor-parallel rank has one of a replicated
    tensor. The ranks of a data-parallel group have equal gradients, and the first one compares its own.
    """
    grid = trainer.grid
    expected_reader = WeightReader(reference_dir / "gradients", takes_lora=True)
    sums = ErrorSums[tuple[str, tuple[int, ...]]]()
    copy_counts: Counter[tuple[str, int | None]] = Counter()
    for live_tensor in trainer.live_tensors:
        name, parameter, expert = live_tensor
        if not parameter.requires_grad:
            continue
        tensor_info = expected_reader.tensor_infos[name]
        if not grid.is_first_copy(tensor_info):
            continue
        tensor_rank = grid.etp_rank if tensor_info.num_experts else grid.tp_rank
        twin = tensor_rank if tensor_info.parallel_style == "replicated" else 0
        key = name, (grid.pp_rank, copy_counts[name, expert], twin)
        copy_counts[name, expert] += 1
        # The gradient that Megatron-core's DDP accumulates, in fp32.
        gradient = parameter.main_grad.detach().cpu()  # type: ignore[attr-defined]
        sums.add(key, gradient, read_live_shard(expected_reader, live_tensor, grid))
    sums.gather()

    errors: dict[str, float] = {}
    for name, copy in sums.sums:
        error = sums.error((name, copy), math.prod(expected_reader.tensor_infos[name].shape))
        errors[name] = max(errors.get(name, 0.0), error)
    return errors


def compare_one_pass(
    case: ParityCase, table: Iterable[str], mean_loss: float, errors: dict[str, float], reference_dir: Path
) -> dict[str, Any]:
    """Compares loss and gradients with the reference. Of the gradients that depart, ``departs`` names the one
    that is computed first; it is empty if there is none.

    Args:
        table: names of the tensors that can be trained, in the order of the forward pass.
    """
    reference_facts = json.loads((reference_dir / "reference.json").read_text())
    expected_loss, bf16_noise = reference_facts["loss"], reference_facts["gradient_noise"]

    # In bf16, transformers' own error against fp32 is the measure.
    is_bf16 = case.dtype == "bfloat16"
    gradient_limit = max(bf16_noise.values()) * BF16_RATIO if is_bf16 else GRADIENT_TOLERANCE

    # Frozen parts must have no gradient, and all others must have one.
    unexpected_names = sorted({name for name in table if model_part(name) not in case.freeze} ^ errors.keys())
    departing_names = [name for name in table if name in errors and not errors[name] <= gradient_limit]
    loss_error = abs(mean_loss - expected_loss) / abs(expected_loss)
    departures = [*unexpected_names[:1], *departing_names[-1:]]
    return {
        "ok": not departures and loss_error <= (BF16_LOSS_TOLERANCE if is_bf16 else LOSS_TOLERANCE),
        "loss": mean_loss,
        "reference": expected_loss,
        "loss_error": loss_error,
        "gradient_error": max(errors.values()),
        "worst": {name: errors[name] for name in sorted(errors, key=errors.__getitem__, reverse=True)[:3]},
        "departs": f"the gradient of {departures[0]}" if departures else "",
        "transformers_bf16_gradient_error": max(bf16_noise.values()) if bf16_noise else None,
        "unexpected": unexpected_names,
        "compared": len(errors),
    }


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
