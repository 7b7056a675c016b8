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
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.config import OptimizerConfig
from megatron_vl.data.packing.assemble_row import TokenizedSample
from megatron_vl.data.sample.pixels import read_pixel_norm
from megatron_vl.platform import Platform
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.tensors import UNSHARDED, TensorInfo, tensor_table
from megatron_vl.training.checkpoint import CheckpointSaver, read_run_metadata, take_snapshot
from megatron_vl.training.optimizer import set_learning_rates
from megatron_vl.training.optimizer_state import OptimizerStateReader
from megatron_vl.training.step import StepResult, train_step
from megatron_vl.weights.run_folder import step_dir_path
from megatron_vl.weights.weight_reader import WeightReader

from .case import ADAM_CONFIG, BuiltCase, ParityCase, build_case, draw_samples
from .gather_tensors import LazyTensorFile
from .reference import (
    backward_mean_loss,
    cached_result,
    load_hf_for_training,
    samples_fingerprint,
    to_canonical,
)
from .tolerances import LOSS_TOLERANCE

STATE_TOLERANCE = 2.5e-4
"""Relative L2 of a tensor's moments after some steps. Adam turns rounding errors of tiny gradients into whole
steps of tiny weights: ``transformers`` in fp32 departs by up to 1.2e-4 from the same training in fp64 (small
Qwen3-VL; 4e-5 for Qwen2.5-VL)."""
WEIGHT_TOLERANCE = 2.5e-4
"""Relative L2 of a weight after some steps."""


def run_training(case: ParityCase, platform: Platform) -> dict[str, Any]:
    """Trains in the layout of a case and compares with the reference. Collective.

    Returns:
        On rank 0, {"ok", "steps": [{loss, reference, loss_error, norm_error}], "state": {kind: (worst tensor,
        its error)}}.
    """
    built_case = build_case(case, platform)
    step_batches = []
    for step_number, rows in enumerate(case.steps):
        step_batches.append(draw_samples(rows, built_case.spec, step_number, case.samples))

    step_results: list[dict[str, Any]] = [
        {"loss": step_result.loss, "grad_norm": step_result.grad_norm, "ok": step_result.is_updated}
        for step_result in train_case(built_case, step_batches, platform)
    ]
    trained_state = save_and_read_state(built_case, len(step_batches))
    if built_case.grid.rank != 0:
        return {"ok": True}

    flat_batches = [[sample for row in batch for sample in row] for batch in step_batches]
    if case.reference:
        expected_losses, expected_norms, expected_state = read_stored_training(Path(case.reference))
    else:
        cache_key = ("training", case.hf, *map(samples_fingerprint, flat_batches))
        expected_losses, expected_norms, expected_state = cached_result(
            cache_key, lambda: reference_training(case.hf, flat_batches)
        )

    for step_record, expected_loss, expected_norm in zip(
        step_results, expected_losses, expected_norms, strict=True
    ):
        step_record["reference"] = expected_loss
        step_record["loss_error"] = abs(step_record["loss"] - expected_loss) / expected_loss
        step_record["norm_error"] = abs(step_record["grad_norm"] - expected_norm) / expected_norm
        step_record["ok"] &= step_record["loss_error"] <= LOSS_TOLERANCE and step_record["norm_error"] <= 1e-4

    worst_errors = {}
    is_within_limits = True
    for kind in expected_state:
        worst_errors[kind] = worst_tensor(trained_state[kind], expected_state[kind])
        error_limit = WEIGHT_TOLERANCE if kind in ("main", "weights") else STATE_TOLERANCE
        is_within_limits = is_within_limits and worst_errors[kind][1] <= error_limit

    return {
        "ok": is_within_limits and all(step_record["ok"] for step_record in step_results),
        "steps": step_results,
        "state": worst_errors,
    }


def train_case(
    built_case: BuiltCase, step_batches: list[list[list[TokenizedSample]]], platform: Platform
) -> list[StepResult]:
    """Trains as the training loop does. Collective.

    Args:
        step_batches: for each step and row of the global batch, its samples.
    """
    seq_len = built_case.config.data.seq_len
    step_results = []
    for step_number, samples in enumerate(step_batches):
        step_data = built_case.make_step_data(samples, platform, seq_len)
        set_learning_rates(built_case.optimizer, built_case.config, step_number)
        step_results.append(
            train_step(built_case.ddp_chunks, built_case.optimizer, step_data.rows, built_case.grid, seq_len)
        )
    return step_results


def worst_tensor(
    trained_tensors: dict[str, Tensor], reference_tensors: dict[str, Tensor]
) -> tuple[str, float]:
    """Returns the tensor with the largest relative L2 error, and that error (infinite if it is missing)."""
    if trained_tensors.keys() != reference_tensors.keys():
        return sorted(trained_tensors.keys() ^ reference_tensors.keys())[0], math.inf
    relative_errors = {}
    for name, reference_tensor in reference_tensors.items():
        error_norm = (trained_tensors[name] - reference_tensor).norm()
        relative_errors[name] = (error_norm / reference_tensor.norm().clamp(min=1e-30)).item()
    worst_name = max(relative_errors, key=relative_errors.__getitem__)
    return worst_name, relative_errors[worst_name]


def save_and_read_state(built_case: BuiltCase, step_number: int) -> dict[str, dict[str, Tensor]]:
    """Writes a checkpoint in this layout and reads it back on rank 0. Collective.

    Returns:
        Maps kind ("weights", "main", "exp_avg", "exp_avg_sq") and name to the full tensor; empty on the other
        ranks.
    """
    broadcast_dir: list[Any] = [
        tempfile.mkdtemp(prefix="parity-checkpoint-") if built_case.grid.rank == 0 else None
    ]
    dist.broadcast_object_list(broadcast_dir)
    checkpoint_dir = Path(broadcast_dir[0])
    checkpoint_saver = CheckpointSaver(
        checkpoint_dir, built_case.spec, built_case.layout, built_case.grid, num_latest_kept=0
    )

    def take_case_snapshot() -> Any:
        return take_snapshot(
            step_number,
            model_chunks=built_case.ddp_chunks,
            optimizer=built_case.optimizer,
            spec=built_case.spec,
            layout=built_case.layout,
            grid=built_case.grid,
            loader_state=None,
            run_metadata={},
        )

    checkpoint_saver.start_save(take_case_snapshot, step_number)
    checkpoint_saver.wait_until_saved()
    dist.barrier()

    state_by_kind: dict[str, dict[str, Tensor]] = {}
    if built_case.grid.rank == 0:
        step_dir = step_dir_path(checkpoint_dir, step_number)

        optimizer_files = {}
        for file_name, file_facts in read_run_metadata(step_dir)["files"].items():
            optimizer_files[file_name.removeprefix("optimizer/")] = file_facts

        optimizer_reader = OptimizerStateReader(
            step_dir / "optimizer", optimizer_files, built_case.layout.sharding
        )
        weight_reader = WeightReader(step_dir / "weights")
        tensor_infos = tensor_table(built_case.spec)

        for kind in ("weights", "main", "exp_avg", "exp_avg_sq"):
            state_by_kind[kind] = {}
            for name, info in tensor_infos.items():
                if kind == "weights":
                    state_by_kind[kind][name] = weight_reader.read_shard(name).float().clone()
                else:
                    state_by_kind[kind][name] = read_full_state(optimizer_reader, info, kind)

        optimizer_reader.close()
        shutil.rmtree(checkpoint_dir)

    return state_by_kind


def read_full_state(
    optimizer_reader: OptimizerStateReader, tensor_info: TensorInfo, state_kind: str
) -> Tensor:
    """Reads the optimizer state of a whole tensor."""
    single_shape = tensor_info.shape[1:] if tensor_info.num_experts else tensor_info.shape

    state_pieces = []
    for expert in range(tensor_info.num_experts) if tensor_info.num_experts else [None]:
        state_pieces.append(
            optimizer_reader.read_range(
                tensor_info, state_kind, 0, UNSHARDED, 0, torch.Size(single_shape).numel(), expert
            )
        )

    return torch.cat([piece for piece in state_pieces if piece is not None]).view(tensor_info.shape)


def read_stored_training(
    reference_dir: Path,
) -> tuple[list[float], list[float], dict[str, dict[str, Tensor]]]:
    """Reads the result of :func:`reference_training` that :mod:`toolkit.parity.reference_job` wrote."""
    reference_facts = json.loads((reference_dir / "reference.json").read_text())
    tensors = LazyTensorFile(reference_dir / "training.safetensors")
    state: dict[str, dict[str, Tensor]] = {}
    for name in tensors:
        kind, _, tensor = name.partition("/")
        state.setdefault(kind, {})[tensor] = tensors[name]
    return reference_facts["losses"], reference_facts["norms"], state | {"main": state["weights"]}


def reference_training(
    hf_dir: str, step_batches: list[list[TokenizedSample]], device: str = "cpu"
) -> tuple[list[float], list[float], dict[str, dict[str, Tensor]]]:
    """Trains with ``transformers``, torch's AdamW and gradient clipping.

    Returns:
        (losses, gradient norms, canonical tensors by kind and name), as :func:`save_and_read_state` names the
        kinds.
    """
    reference_trainer = ReferenceTrainer(hf_dir, ADAM_CONFIG, device=device)
    losses, gradient_norms = [], []
    for step_number, samples in enumerate(step_batches):
        learning_rate = ADAM_CONFIG.lr * min(1.0, (step_number + 1) / ADAM_CONFIG.warmup_steps)
        loss, gradient_norm = reference_trainer.train_step(samples, learning_rate)
        losses.append(loss)
        gradient_norms.append(gradient_norm)

    main_weights = reference_trainer.main_weights
    trained_weights = {name: weight.detach() for name, weight in main_weights.items()}
    state_by_kind = {"weights": to_canonical(trained_weights, hf_dir)}
    state_by_kind["main"] = state_by_kind["weights"]
    for kind in ("exp_avg", "exp_avg_sq"):
        moments = {}
        for name, weight in main_weights.items():
            moments[name] = reference_trainer.adam_optimizer.state[weight][kind]
        state_by_kind[kind] = to_canonical(moments, hf_dir)
    return losses, gradient_norms, state_by_kind


class ReferenceTrainer:
    """Trains a checkpoint in ``transformers`` with torch's AdamW and gradient clipping.

    AdamW works on float32 weights and gradients, as in the trainer. A model of another type has float32
    copies of its weights, and its own weights are rounded from them after each step.

    Args:
        optimizer_config: clipping and AdamW's settings, without the schedule.
        dtype: type of the model.
        batch_size: number of samples in a forward pass.
        attention: attention implementation of transformers.
    """

    def __init__(
        self,
        hf_dir: str | Path,
        optimizer_config: OptimizerConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        batch_size: int = 1,
        attention: str = "sdpa",
    ) -> None:
        self.spec = read_spec(hf_dir)
        self.pixel_norm = read_pixel_norm(hf_dir)
        self.batch_size = batch_size
        self.max_gradient_norm = optimizer_config.clip_grad or math.inf
        self.model = load_hf_for_training(hf_dir, dtype, device)
        self.model.set_attn_implementation(attention)

        self.main_weights: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            self.main_weights[name] = parameter
            if parameter.dtype != torch.float32:
                self.main_weights[name] = parameter.detach().float()
                parameter.register_post_accumulate_grad_hook(partial(_move_gradient, self.main_weights[name]))
        self.adam_optimizer = self._build_optimizer(optimizer_config)

    def _build_optimizer(self, optimizer_config: OptimizerConfig) -> torch.optim.AdamW:
        # As in the trainer, biases and norms do not decay.
        matrices = [weight for weight in self.main_weights.values() if weight.dim() > 1]
        vectors = [weight for weight in self.main_weights.values() if weight.dim() == 1]
        weight_groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": optimizer_config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            weight_groups,
            lr=optimizer_config.lr,
            betas=(optimizer_config.beta1, optimizer_config.beta2),
            eps=optimizer_config.eps,
            # One kernel, where float32 copies take much memory.
            fused=self.model.dtype != torch.float32 or None,
        )

    def train_step(self, samples: list[TokenizedSample], learning_rate: float) -> tuple[float, float]:
        """Trains on one global batch. Returns (its mean loss over loss tokens, the gradient norm)."""
        self.adam_optimizer.zero_grad(set_to_none=True)
        loss = backward_mean_loss(self.model, samples, self.spec, self.pixel_norm, batch_size=self.batch_size)
        for weight in self.main_weights.values():
            if weight.grad is None:
                # In a step without pictures, torch skips the vision tower, while Megatron-core's optimizer
                # continues with its moments.
                weight.grad = torch.zeros_like(weight)

        gradient_norm = torch.nn.utils.clip_grad_norm_(self.main_weights.values(), self.max_gradient_norm)
        for weight_group in self.adam_optimizer.param_groups:
            weight_group["lr"] = learning_rate
        self.adam_optimizer.step()

        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter is not self.main_weights[name]:
                    parameter.copy_(self.main_weights[name])
        return loss, float(gradient_norm)


def _move_gradient(main_weight: Tensor, parameter: Tensor) -> None:
    """Adds a parameter's gradient to the one of its float32 copy, and frees it."""
    assert parameter.grad is not None
    if main_weight.grad is None:
        main_weight.grad = parameter.grad.float()
    else:
        main_weight.grad += parameter.grad
    parameter.grad = None
