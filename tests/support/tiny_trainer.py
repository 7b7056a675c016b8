"""A trainer of a small model in any layout, for tests whose bodies run in ranks (:mod:`tests.support.ranks`).

This selects the CPU platform, which changes torch for the rest of the process.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from megatron_vl.data.given_rows import GivenRows
from megatron_vl.data.packing.assemble_row import pack_row
from megatron_vl.data.packing.training_row import TrainingRow
from megatron_vl.parallel.process_grid import init_distributed
from megatron_vl.platform import Platform, get_platform
from megatron_vl.training.optimizer import set_learning_rates
from megatron_vl.training.rows.batch_broadcast import BatchBroadcast
from megatron_vl.training.state.host_copies import HostBlocks, HostCopies
from megatron_vl.training.state.load import load_checkpoint, read_run_metadata
from megatron_vl.training.state.optimizer_state import (
    STATE_KINDS,
    OptimizerStateReader,
    SavedTensor,
    snapshot_optimizer,
)
from megatron_vl.training.state.save import CheckpointSaver, take_snapshot
from megatron_vl.training.step import StepResult, reduce_losses, run_schedule
from megatron_vl.training.trainer import Trainer
from megatron_vl.weights.run_folder import step_dir_path
from megatron_vl.weights.weight_reader import WeightReader
from tests.parity.training import read_full_state
from toolkit.parity.case import ParityCase, build_case, draw_samples, pack_step, resolve_on_given_rows
from toolkit.parity.random_samples import make_sample
from toolkit.parity.worker import complete_gradients

SEQ_LEN = 256
ROWS = 2
"""Rows of each data-parallel rank per step."""


def join(platform_name: str = "cpu") -> Platform:
    platform = get_platform(platform_name)
    torch.set_num_threads(1)
    init_distributed(platform)
    return platform


def trainer_of(hf: str | Path, seq_len: int = 192, platform_name: str = "cpu", **fields: Any) -> Trainer:
    """A trainer with the weights of ``hf`` and the fields of a :class:`~toolkit.parity.case.ParityCase`."""
    platform = join(platform_name)
    return build_case(ParityCase("case", str(hf), "", [], seq_len=seq_len, **fields), platform)


def train(trainer: Trainer, kinds: list[list[str]], steps: Iterable[int]) -> list[StepResult]:
    """Trains on samples of the given kinds by row; each step has others."""
    results = []
    for step in steps:
        set_learning_rates(trainer.optimizer, trainer.config, step)
        results.append(trainer.train_step(pack_step(trainer, draw_samples(kinds, trainer.spec, step))))
    return results


def run_passes(trainer: Trainer, kinds: list[list[str]]) -> list[float]:
    """Runs forward and backward passes of the first step's samples and completes the gradients. Collective.

    Returns [mean loss] and, with multi-token prediction, its mean loss, its targets and those ranked first.
    """
    batch = pack_step(trainer, draw_samples(kinds, trainer.spec, 0))
    for chunk in trainer.model_chunks:
        chunk.zero_grad_buffer()
    reports = run_schedule(trainer.model_chunks, batch.rows, seq_len=trainer.config.data.seq_len)
    sums, *_ = reduce_losses(reports, batch.rows, trainer.grid).read()
    loss, tokens, *mtp = sums.tolist()
    complete_gradients(trainer, int(tokens))
    return [loss / tokens, *([mtp[0] / mtp[1], *map(int, mtp[1:])] if mtp else [])]


def save(trainer: Trainer, run: Path, step: int = 2) -> dict[str, Tensor]:
    """Saves a step. On rank 0, returns every weight, master weight, moment and step count in the files."""
    saver = CheckpointSaver(run, trainer.spec, trainer.layout, trainer.grid, num_latest_kept=0)
    trainer.step = step
    saver.start_save(lambda: take_snapshot(trainer, None, {"dp": trainer.grid.dp}), step)
    saver.wait_until_saved()
    dist.barrier()
    if dist.get_rank():
        return {}

    folder = step_dir_path(run, step)
    listed = read_run_metadata(folder)["files"].items()
    files = {name.removeprefix("optimizer/"): facts for name, facts in listed}
    state = OptimizerStateReader(folder / "optimizer", files, trainer.layout.sharding)
    reader, found = WeightReader(folder / "weights", takes_lora=True), {}
    for name, info in reader.tensor_infos.items():
        found[name] = reader.read_shard(name).clone()
        found |= {f"{name}/{kind}": read_full_state(state, info, kind) for kind in STATE_KINDS}
        found[f"{name}/step"] = torch.tensor(state.adam_step_count(name))
    state.close()
    return found


def optimizer_state(trainer: Trainer) -> dict[str, Tensor]:
    """The optimizer state of this rank, as a checkpoint would hold it."""
    copies = HostCopies()
    tensors = snapshot_optimizer(trainer.optimizer, trainer.live_tensors, copies)
    copies.copy(HostBlocks())
    return {key: tensor.read().clone() for key, tensor in tensors.items()}


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    weights = {f"weight/{live.tensor_name}": live.parameter.detach().clone() for live in trainer.live_tensors}
    return weights | optimizer_state(trainer)


def as_saved(tensors: dict[str, Tensor]) -> dict[str, SavedTensor]:
    return {key: SavedTensor(each.dtype, each.numel(), each.view(-1).clone) for key, each in tensors.items()}


def load(trainer: Trainer, run: Path, step: int = 2) -> None:
    """Restores a saved step. Collective."""
    parts = {"live_tensors": trainer.saved_tensors, "optimizer": trainer.optimizer}
    load_checkpoint(step_dir_path(run, step), **parts, spec=trainer.spec, grid=trainer.grid)


def differences(tensors: dict[str, Tensor], others: dict[str, Tensor]) -> list[str]:
    """Names of tensors that differ by a bit, or that only one of the two has."""
    common = tensors.keys() & others.keys()
    changed = {name for name in common if not torch.equal(tensors[name], others[name])}
    return sorted(changed | (tensors.keys() ^ others.keys()))


def gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class TinyTrainer(Trainer):
    """A trainer of a model with random weights, whose rows alternate between image and text."""

    def __init__(self, config: TrainConfig, **model_options: Any) -> None:
        run = resolve_on_given_rows(config)
        super().__init__(run, get_platform("cpu"), make_loader=lambda grid: GivenRows(self._rows()))
        self.build(**model_options)

    def _rows(self) -> Iterator[TrainingRow]:
        return itertools.cycle([self.row_of("image"), self.row_of("text")])

    def row_of(self, *kinds: str) -> TrainingRow:
        return pack_row([make_sample(kind, self.spec, 0) for kind in kinds], self.spec, SEQ_LEN)

    def device_row(self, *kinds: str, seq_len: int = SEQ_LEN) -> Any:
        """One row of a sample of each kind, as the model gets it."""
        samples = [make_sample(kind, self.spec, 0) for kind in kinds]
        return self.feed_of([pack_row(samples, self.spec, seq_len)], 1).next_batch().rows[0]

    @property
    def chunks(self) -> list[Any]:
        return [chunk.module for chunk in self.model_chunks]

    def run_step(self, number: int = 0) -> StepResult:
        """Sets the learning rates of a step and runs it on the loader's next rows."""
        set_learning_rates(self.optimizer, self.config, number)
        return self.train_step(self.batches.next_batch())

    def feed_of(self, rows: Iterable[Any], count: int) -> BatchBroadcast:
        return BatchBroadcast(self.grid, self.platform, iter(rows), count, spec=self.spec)

    def again(self, **sections: Any) -> TinyTrainer:
        """Builds the same model with the same random weights again, with other sections of the config."""
        return TinyTrainer(dataclasses.replace(self.config, **sections))


def tiny_trainer(
    hf: str | Path, dtype: str = "float32", pp: int = 1, freeze_language: bool = False, **optimizer: Any
) -> TinyTrainer:
    """A trainer whose rows alternate between image and text; ``optimizer`` are fields of its config."""
    join()
    rates = {"lr": 1e-3, "vision_lr": 5e-4, "merger_lr": 2e-4, "weight_decay": 0.1, "schedule": "constant"}
    config = TrainConfig(
        dtype=dtype,  # type: ignore[arg-type]
        steps=10,
        global_batch_size=ROWS * dist.get_world_size() // pp,
        parallel=ParallelConfig(pp=pp),
        data=DataConfig(seq_len=SEQ_LEN),
        model=ModelConfig(hf=str(hf), freeze_language=freeze_language),
        optimizer=OptimizerConfig(**(rates | optimizer)),
    )
    return TinyTrainer(config)
