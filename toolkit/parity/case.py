"""Defines a case of the comparison (one layout of one model) and builds its model."""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_vl.config import (
    DataConfig,
    Fp8Config,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RecomputeConfig,
    TrainConfig,
    VisionConfig,
)
from megatron_vl.data.packing.assemble_row import TokenizedSample, pack_row
from megatron_vl.models.parameter_names import LiveTensor
from megatron_vl.parallel.process_grid import ProcessGrid, make_grid
from megatron_vl.platform import Platform
from megatron_vl.spec.adapters import MixedLora
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.layout import Layout, make_layout
from megatron_vl.training.batch_broadcast import BatchBroadcast, StepBatch
from megatron_vl.training.model import build_model
from megatron_vl.training.optimizer import build_optimizer
from megatron_vl.training.step import wrap_in_ddp
from megatron_vl.weights.weight_reader import WeightReader
from toolkit.sample_encoder import read_samples

from .random_samples import make_sample

ADAM_CONFIG = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=1.0, schedule="constant", warmup_steps=2)


@dataclass
class ParityCase:
    """One layout of one model, and the global batch of each step."""

    name: str
    hf: str
    """Hugging Face folder of the small model."""
    weights: str
    """Megatron weights of the model (in any layout)."""
    steps: list[list[list[str]]]
    """[step][row][sample kind]; each data-parallel rank gets an equal number of rows, in order."""
    tp: int = 1
    pp: int = 1
    cp: int = 1
    vpp: int = 1
    layers: list[int] | None = None
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    tp_comm_overlap: bool = False
    decoupled: bool = False
    """Whether every rank holds the vision tower."""
    patches: int = 0
    """With ``decoupled``, the approximate number of patches in a call of the tower; 0: the default."""
    distributed_optimizer: bool = True
    overlap: bool = False
    seq_len: int = 256
    bucket_size: int | None = None
    freeze: list[str] = field(default_factory=list)
    """Parts to freeze: vision, merger, language."""
    recompute: dict[str, Any] = field(default_factory=dict)
    fp8: dict[str, Any] = field(default_factory=dict)
    """Fields of :class:`~megatron_vl.config.Fp8Config`; without any, nothing is computed in FP8."""
    dtype: str = "float32"
    """float32 or bfloat16."""
    aux_loss: float = 0.0
    """Coefficient of the experts' load-balancing loss, which ``transformers`` computes only on request."""
    train: bool = False
    """Take real optimizer steps and compare losses, weights and Adam's moments with ``transformers``."""
    samples: str = ""
    """File of :func:`toolkit.sample_encoder.write_samples`; kind ``sample:2`` in ``steps`` is its third
    sample."""
    reference: str = ""
    """Folder written by :mod:`toolkit.parity.reference_job`; empty: rank 0 computes the reference."""
    activations: bool = False
    """Also compare layer outputs and logits. Needs ``reference``, samples without videos, and one forward
    pass per step."""
    lora: dict[str, Any] = field(default_factory=dict)
    """Fields of :class:`~megatron_vl.config.LoraConfig`; without any, the model itself is trained."""
    adapter: str = ""
    """Megatron weights of the adapters that ``lora`` describes; empty: new adapters."""
    optimizer: bool = True
    """If false, no optimizer state is allocated and overlap with optimizer steps is not tested."""
    attention: str = "auto"
    """``model.attention``; the fused GPU kernels do not support float32."""

    @property
    def _vision_config(self) -> VisionConfig:
        if not self.decoupled:
            return VisionConfig()
        limit = {"patches_a_call": self.patches} if self.patches else {}
        return VisionConfig(placement="decoupled", **limit)

    @property
    def config(self) -> TrainConfig:
        """The settings of a training in this layout."""
        model_config = ModelConfig(
            checkpoint=self.weights,
            hf=self.hf,
            freeze_vision="vision" in self.freeze,
            freeze_merger="merger" in self.freeze,
            freeze_language="language" in self.freeze,
            moe_aux_loss=self.aux_loss,
            attention=self.attention,  # type: ignore[arg-type]
        )
        return TrainConfig(
            optimizer=ADAM_CONFIG,
            dtype=self.dtype,  # type: ignore[arg-type]
            data=DataConfig(seq_len=self.seq_len),
            model=model_config,
            lora=(MixedLora if "matrices" in self.lora else LoraConfig)(**self.lora),
            vision=self._vision_config,
            recompute=RecomputeConfig(**self.recompute),
            fp8=Fp8Config(**self.fp8),
            parallel=self._parallel_config,
        )

    @property
    def _parallel_config(self) -> ParallelConfig:
        return ParallelConfig(
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            vpp=self.vpp,
            layers=self.layers,
            ep=self.ep,
            etp=self.etp,
            sequence_parallel=self.sequence_parallel,
            tp_comm_overlap=self.tp_comm_overlap,
            distributed_optimizer=self.distributed_optimizer,
        )


@dataclass
class BuiltCase:
    """A case built in this process group, with its weights loaded."""

    config: TrainConfig
    spec: ModelSpec
    layout: Layout
    grid: ProcessGrid
    ddp_chunks: list[Any]
    optimizer: Any
    """None if the case has no optimizer."""
    live_tensors: list[LiveTensor]

    def make_step_data(
        self, samples: list[list[TokenizedSample]], platform: Platform, seq_len: int
    ) -> StepBatch:
        """Packs the samples and returns this rank's rows of one step. Collective.

        Args:
            samples: for each row of the global batch, its samples.
        """
        rows_per_replica = len(samples) // self.grid.dp
        first_row = self.grid.dp_rank * rows_per_replica
        replica_rows = samples[first_row : first_row + rows_per_replica]
        packed_rows = None
        if self.grid.owns_loader:
            packed_rows = iter([pack_row(row, self.spec, seq_len) for row in replica_rows])
        batch_broadcast = BatchBroadcast(
            self.grid,
            platform,
            packed_rows,
            rows_per_replica,
            vision_spec=self.spec.vision,
        )
        return batch_broadcast.next_batch()


def build_case(case: ParityCase, platform: Platform, config: TrainConfig | None = None) -> BuiltCase:
    """Builds the model of a case and loads its weights. Collective.

    Args:
        config: settings of the training in place of the case's own; their layout must be the case's.
    """
    config = config or case.config
    spec = read_spec(case.hf)
    layout = make_layout(
        spec, case.tp, case.pp, case.vpp, case.layers, case.ep, case.etp, case.decoupled, case.cp
    )
    grid = make_grid(layout)

    weight_reader = WeightReader(case.weights)
    adapter_reader = WeightReader(case.adapter, takes_adapters=True) if case.adapter else None
    built_model = build_model(
        config, spec, layout, platform, grid, weight_reader=weight_reader, adapter_reader=adapter_reader
    )
    ddp_chunks = wrap_in_ddp(
        config, built_model.model_chunks, overlap=case.overlap, bucket_size=case.bucket_size
    )
    optimizer = build_optimizer(config, platform, ddp_chunks) if case.optimizer else None
    return BuiltCase(config, spec, layout, grid, ddp_chunks, optimizer, built_model.live_tensors)


def draw_samples(
    sample_kinds: list[list[str]], spec: ModelSpec, step_number: int, samples_file: str = ""
) -> list[list[TokenizedSample]]:
    """Draws the samples of one step.

    The samples depend on the order of their kinds, but not on how the kinds are distributed over rows.

    Args:
        sample_kinds: for each row, the kinds of its samples.
        samples_file: file of the samples that kinds such as ``sample:2`` name.
    """
    stored_samples = read_samples(Path(samples_file)) if samples_file else []
    sample_seeds = itertools.count(100 * step_number)

    def draw_one_sample(sample_kind: str) -> TokenizedSample:
        sample_seed = next(sample_seeds)
        if sample_kind.startswith("sample:"):
            return stored_samples[int(sample_kind.removeprefix("sample:"))]
        return make_sample(sample_kind, spec, seed=sample_seed)

    return [[draw_one_sample(kind) for kind in row] for row in sample_kinds]


def write_cases(cases: list[ParityCase], cases_path: Path) -> None:
    """Writes the input file of :mod:`toolkit.parity.worker`."""
    cases_path.write_text(json.dumps([dataclasses.asdict(case) for case in cases]))
