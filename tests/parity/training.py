"""Compares a short training with ``transformers`` and AdamW, its state as the checkpoint holds it."""

import dataclasses
import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.reference_trainer import ReferenceTrainer
from megatron_vl.config import CheckpointConfig
from megatron_vl.data.packing.assemble_row import TokenizedSample
from megatron_vl.parallel.process_groups import broadcast_from_rank_0
from megatron_vl.platform import Platform
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.layout import read_layout
from megatron_vl.spec.tensors import UNSHARDED, TensorInfo
from megatron_vl.training.state.load import read_run_metadata
from megatron_vl.training.state.optimizer_state import OptimizerStateReader
from megatron_vl.weights.run_folder import step_dir_path
from megatron_vl.weights.weight_reader import WeightReader
from toolkit.parity import reference_job
from toolkit.parity.case import ADAM_CONFIG, ParityCase, draw_samples, train_on_samples
from toolkit.parity.errors import relative_error
from toolkit.parity.reference import write_canonical
from toolkit.parity.tolerances import LOSS_TOLERANCE

NORM_TOLERANCE = 1e-4
"""Relative, of a step's gradient norm in a training in fp32."""
STATE_TOLERANCE = 2.5e-4
"""Relative L2 of a tensor's weights or moments after some steps. Adam turns rounding errors of tiny gradients
into whole steps of tiny weights: ``transformers`` in fp32 departs by up to 1.2e-4 from the same training in
fp64 (small Qwen3-VL; 4e-5 for Qwen2.5-VL)."""


@dataclass
class TableCase(ParityCase):
    train: bool = False
    """Take real optimizer steps and compare losses, weights and Adam's moments with ``transformers``."""


def run_training(case: TableCase, platform: Platform) -> dict[str, Any]:
    """Trains in the layout of a case. Collective. Rank 0 returns {"ok", "steps": [{loss, reference,
    loss_error, norm_error}], "state": {kind: (worst tensor, its error)}}."""
    spec = read_spec(case.hf)
    step_samples = [draw_samples(kinds, spec, number, case) for number, kinds in enumerate(case.steps)]
    run_dir = Path(broadcast_from_rank_0(lambda: tempfile.mkdtemp(prefix="parity-checkpoint-")))
    try:
        config = dataclasses.replace(case.config, checkpoint=CheckpointConfig(dir=str(run_dir)))
        step_results = train_on_samples(
            config, step_samples, platform, overlap=case.overlap, bucket_size=case.bucket_size
        )
        if dist.get_rank():
            return {"ok": True}
        reference_dir = trained_reference(case, step_samples)
        worst_tensors = compare_checkpoint(step_dir_path(run_dir, len(step_samples)), reference_dir)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(run_dir)

    facts = json.loads((reference_dir / "reference.json").read_text())
    records: list[dict[str, Any]] = []
    for result, loss, norm in zip(step_results, facts["losses"], facts["norms"], strict=True):
        loss_error, norm_error = abs(result.loss - loss) / loss, abs(result.grad_norm - norm) / norm
        is_equal = loss_error <= LOSS_TOLERANCE and norm_error <= NORM_TOLERANCE
        record = {"ok": result.is_updated and is_equal, "loss": result.loss, "reference": loss}
        records.append(record | {"loss_error": loss_error, "norm_error": norm_error})
    is_equal = all(error <= STATE_TOLERANCE for _, error in worst_tensors.values())
    is_ok = is_equal and all(record["ok"] for record in records)
    return {"ok": is_ok, "steps": records, "state": worst_tensors}


def trained_reference(case: TableCase, step_samples: list[list[list[TokenizedSample]]]) -> Path:
    """The folder with ``transformers``' losses, norms and final state, computed once for these samples."""
    samples = [sum(rows, []) for rows in step_samples]
    kinds = [sum(rows, []) for rows in case.steps]
    inputs = json.dumps([case.hf, kinds])
    folder = reference_job._references_root() / hashlib.sha256(inputs.encode()).hexdigest()
    if (folder / "reference.json").exists():
        return folder
    folder.mkdir(exist_ok=True)
    trainer, results = ReferenceTrainer(case.hf, ADAM_CONFIG), []
    for number, step in enumerate(samples):
        warm_up = min(1.0, (number + 1) / (ADAM_CONFIG.warmup_steps or 1))
        results.append(trainer.train_step(step, ADAM_CONFIG.lr * warm_up))
    write_canonical(trainer.main_weights, case.hf, folder / "weights")
    for kind in ("exp_avg", "exp_avg_sq"):
        state = trainer.adam_optimizer.state
        moments = {name: state[weight][kind] for name, weight in trainer.main_weights.items()}
        write_canonical(moments, case.hf, folder / kind)
    losses, norms = zip(*results, strict=True)
    (folder / "reference.json").write_text(json.dumps({"losses": losses, "norms": norms}))
    return folder


def compare_checkpoint(step_dir: Path, reference_dir: Path) -> dict[str, tuple[str, float]]:
    """Maps each kind of saved state to the tensor with the largest relative L2 error, and that error."""
    weight_reader = WeightReader(step_dir / "weights")
    metadata = read_run_metadata(step_dir)
    layout = read_layout(weight_reader.spec, metadata["layout"])
    files = {name.removeprefix("optimizer/"): facts for name, facts in metadata["files"].items()}
    optimizer_reader = OptimizerStateReader(step_dir / "optimizer", files, layout.sharding)

    worst_tensors = {}
    for kind in ("weights", "main", "exp_avg", "exp_avg_sq"):
        expected_reader = WeightReader(reference_dir / ("weights" if kind == "main" else kind))
        errors = {}
        for name, info in weight_reader.tensor_infos.items():
            if kind == "weights":
                saved = weight_reader.read_shard(name).float()
            else:
                saved = read_full_state(optimizer_reader, info, kind)
            errors[name] = relative_error(saved, expected_reader.read_shard(name))
        worst_tensors[kind] = max(errors.items(), key=lambda item: item[1])
    optimizer_reader.close()
    return worst_tensors


def read_full_state(
    optimizer_reader: OptimizerStateReader, tensor_info: TensorInfo, state_kind: str
) -> Tensor:
    experts: list[int | None] = [*range(tensor_info.num_experts)] or [None]
    numel = torch.Size(tensor_info.shape[1:] if tensor_info.num_experts else tensor_info.shape).numel()
    read = partial(optimizer_reader.read_range, tensor_info, state_kind, 0, UNSHARDED, 0, numel)
    pieces = (read(expert) for expert in experts)
    return torch.cat([piece for piece in pieces if piece is not None]).view(tensor_info.shape)
