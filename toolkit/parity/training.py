"""Compares a short training, including the optimizer, with ``transformers`` and torch's AdamW.

Both sides train on the same samples. Weights and moments are compared after a round trip through the
trainer's checkpoint, which is read back as full tensors. This checks both that the optimizer steps correctly
and that nothing is lost or misplaced on disk.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.config import CheckpointConfig
from megatron_vl.data.packing.assemble_row import TokenizedSample
from megatron_vl.parallel.process_groups import broadcast_from_rank_0
from megatron_vl.platform import Platform
from megatron_vl.spec.layout import read_layout
from megatron_vl.spec.tensors import UNSHARDED, TensorInfo
from megatron_vl.training.checkpoint import read_run_metadata
from megatron_vl.training.optimizer_state import OptimizerStateReader
from megatron_vl.weights.run_folder import step_dir_path
from megatron_vl.weights.weight_reader import WeightReader

from .case import ParityCase, train_on_samples
from .gather_tensors import LazyTensorFile
from .tolerances import LOSS_TOLERANCE, NORM_TOLERANCE, STATE_TOLERANCE

STATE_KINDS = {"weights": "weights", "main": "weights", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Maps what a checkpoint holds to what it must equal in the reference."""


def train_and_save(
    case: ParityCase, step_samples: list[list[list[TokenizedSample]]], platform: Platform
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Tensor]]]:
    """Trains in the layout of a case. Collective.

    Returns:
        {loss, grad_norm, ok} of each step; and on rank 0, the full tensors of its checkpoint by kind (see
        :data:`STATE_KINDS`) and name.
    """
    run_dir = broadcast_from_rank_0(lambda: tempfile.mkdtemp(prefix="parity-checkpoint-"))
    try:
        config = dataclasses.replace(case.config, checkpoint=CheckpointConfig(dir=run_dir))
        step_results = train_on_samples(
            config, step_samples, platform, overlap=case.overlap, bucket_size=case.bucket_size
        )
        step_dir = step_dir_path(Path(run_dir), len(step_samples))
        saved_state = read_saved_state(step_dir) if dist.get_rank() == 0 else {}
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(run_dir)

    step_records = []
    for step_result in step_results:
        step_records.append(
            {"loss": step_result.loss, "grad_norm": step_result.grad_norm, "ok": step_result.is_updated}
        )
    return step_records, saved_state


def compare_training(
    step_records: list[dict[str, Any]],
    saved_state: dict[str, dict[str, Tensor]],
    reference_dir: Path,
) -> dict[str, Any]:
    """Compares losses, gradient norms and the checkpoint of a training with the reference.

    Args:
        step_records, saved_state: the output of :func:`train_and_save`.
        reference_dir: output of :mod:`toolkit.parity.reference_job`.

    Returns:
        {"ok", "steps": [{loss, reference, loss_error, norm_error}], "state": {kind: (worst tensor, its
        error)}}.
    """
    reference_facts = json.loads((reference_dir / "reference.json").read_text())
    for step_record, expected_loss, expected_norm in zip(
        step_records, reference_facts["losses"], reference_facts["norms"], strict=True
    ):
        step_record["reference"] = expected_loss
        step_record["loss_error"] = abs(step_record["loss"] - expected_loss) / expected_loss
        step_record["norm_error"] = abs(step_record["grad_norm"] - expected_norm) / expected_norm
        step_record["ok"] &= step_record["loss_error"] <= LOSS_TOLERANCE
        step_record["ok"] &= step_record["norm_error"] <= NORM_TOLERANCE

    worst_errors = {}
    for kind, reference_kind in STATE_KINDS.items():
        expected_tensors = LazyTensorFile(reference_dir / f"{reference_kind}.safetensors")
        worst_errors[kind] = worst_tensor(saved_state[kind], expected_tensors)
    return {
        "ok": all(step_record["ok"] for step_record in step_records)
        and all(error <= STATE_TOLERANCE for _, error in worst_errors.values()),
        "steps": step_records,
        "state": worst_errors,
    }


def worst_tensor(
    trained_tensors: Mapping[str, Tensor], expected_tensors: Mapping[str, Tensor]
) -> tuple[str, float]:
    """Returns the tensor with the largest relative L2 error, and that error (infinite if it is missing)."""
    if trained_tensors.keys() != expected_tensors.keys():
        return sorted(trained_tensors.keys() ^ expected_tensors.keys())[0], math.inf
    relative_errors = {}
    for name, expected_tensor in expected_tensors.items():
        error_norm = (trained_tensors[name] - expected_tensor).norm()
        relative_errors[name] = (error_norm / expected_tensor.norm().clamp(min=1e-30)).item()
    worst_name = max(relative_errors, key=relative_errors.__getitem__)
    return worst_name, relative_errors[worst_name]


def read_saved_state(step_dir: Path) -> dict[str, dict[str, Tensor]]:
    """The full tensors of a checkpoint, by kind (see :data:`STATE_KINDS`) and name."""
    weight_reader = WeightReader(step_dir / "weights", takes_adapters=True)
    saved_metadata = read_run_metadata(step_dir)
    layout = read_layout(weight_reader.spec, saved_metadata["layout"])
    optimizer_files = {}
    for file_name, file_facts in saved_metadata["files"].items():
        optimizer_files[file_name.removeprefix("optimizer/")] = file_facts
    optimizer_reader = OptimizerStateReader(step_dir / "optimizer", optimizer_files, layout.sharding)

    state_by_kind: dict[str, dict[str, Tensor]] = {kind: {} for kind in STATE_KINDS}
    for name, tensor_info in weight_reader.tensor_infos.items():
        state_by_kind["weights"][name] = weight_reader.read_shard(name).float().clone()
        for kind in ("main", "exp_avg", "exp_avg_sq"):
            state_by_kind[kind][name] = read_full_state(optimizer_reader, tensor_info, kind)
    optimizer_reader.close()
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
