"""Defines a case of the comparison (one layout of one model), and has the trainer build it."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_vl.config import (
    DataConfig,
    Fp8Config,
    LoraConfig,
    ModelConfig,
    MtpConfig,
    OptimizerConfig,
    ParallelConfig,
    RecomputeConfig,
    TrainConfig,
    VisionConfig,
)
from megatron_vl.data.given_rows import GivenRows, replica_rows
from megatron_vl.data.packing.assemble_row import TokenizedSample, pack_row
from megatron_vl.data.source.dataset_description import SplitFacts
from megatron_vl.parallel.process_grid import ProcessGrid
from megatron_vl.platform import Platform
from megatron_vl.spec.families import ModelSpec, run_spec
from megatron_vl.spec.layout import configured_layout
from megatron_vl.spec.lora import MixedLora
from megatron_vl.training.hooks import Hook
from megatron_vl.training.input_files import read_model_digests
from megatron_vl.training.resolved_run import ResolvedRun
from megatron_vl.training.rows.batch_broadcast import BatchBroadcast, StepBatch
from megatron_vl.training.step import StepResult
from megatron_vl.training.trainer import Trainer
from toolkit.common.sample_encoder import SampleEncoder

from .random_samples import make_sample

ADAM_CONFIG = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=1.0, schedule="constant", warmup_steps=2)


@dataclass
class ParityCase:
    """One layout of one model, and the global batch of each step."""

    name: str
    hf: str
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
    decoupled: bool = False
    """Whether every rank holds the vision tower."""
    patches: int = 0
    """The approximate number of patches in a call of the decoupled tower; 0: the default."""
    distributed_optimizer: bool = True
    overlap: bool = False
    seq_len: int = 256
    bucket_size: int | None = None
    freeze: list[str] = field(default_factory=list)
    """Parts to freeze: vision, merger, language."""
    recompute: dict[str, Any] = field(default_factory=dict)
    fp8: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    aux_loss: float = 0.0
    """Coefficient of the experts' load-balancing loss, which ``transformers`` computes only on request."""
    samples: str = ""
    """File of :func:`encode_conversations`; kind ``sample:2`` in ``steps`` is its third conversation."""
    reference: str = ""
    """Folder written by :mod:`toolkit.parity.reference_job`; empty: rank 0 computes the reference."""
    activations: bool = False
    """Also compare layer outputs and logits. Needs ``reference``, samples without videos, and one forward
    pass per step."""
    lora: dict[str, Any] = field(default_factory=dict)
    """Fields of :class:`~megatron_vl.config.LoraConfig`; without any, the model itself is trained."""
    mtp: dict[str, Any] = field(default_factory=dict)
    """Fields of :class:`~megatron_vl.config.MtpConfig`; ``transformers`` has no multi-token prediction."""
    optimizer: bool = True
    """If false, no optimizer state is allocated and overlap with optimizer steps is not tested."""
    attention: str = "auto"

    @property
    def config(self) -> TrainConfig:
        return TrainConfig(
            optimizer=ADAM_CONFIG,
            dtype=self.dtype,  # type: ignore[arg-type]
            steps=max(len(self.steps), 1),
            global_batch_size=len(self.steps[0]) if self.steps else 1,
            data=DataConfig(seq_len=self.seq_len),
            model=ModelConfig(
                checkpoint=self.weights,
                hf=self.hf,
                freeze_vision="vision" in self.freeze,
                freeze_merger="merger" in self.freeze,
                freeze_language="language" in self.freeze,
                moe_aux_loss=self.aux_loss,
                attention=self.attention,  # type: ignore[arg-type]
            ),
            lora=(MixedLora if "matrices" in self.lora else LoraConfig)(**self.lora),
            mtp=MtpConfig(**self.mtp),
            vision=VisionConfig(
                placement="decoupled" if self.decoupled else VisionConfig.placement,
                patches_a_call=self.patches or VisionConfig.patches_a_call,
            ),
            recompute=RecomputeConfig(**self.recompute),
            fp8=Fp8Config(**self.fp8),
            parallel=ParallelConfig(**{name: getattr(self, name) for name in ParallelConfig.__annotations__}),
        )


class StepResults(Hook):
    def __init__(self) -> None:
        self.results: list[StepResult] = []

    def after_step(self, trainer: Trainer, step_batch: StepBatch, step_result: StepResult) -> None:
        self.results.append(step_result)


def resolve_on_given_rows(config: TrainConfig) -> ResolvedRun:
    """The run of a config without a data set, from the weights in ``model.checkpoint``. Collective."""
    spec = run_spec(config)
    layers = config.parallel.layers
    layout = configured_layout(config, spec, layers if isinstance(layers, list) else None)
    return ResolvedRun(
        config,
        spec,
        layout,
        dp=dist.get_world_size() // layout.replica_ranks,
        layer_split_origin="given",
        source_checkpoint=None,
        facts_by_split={"train": SplitFacts(GivenRows.dataset_identity)},
        run_notes=(),
        model_digests=read_model_digests(config, None),
    )


def build_case(case: ParityCase, platform: Platform) -> Trainer:
    """Builds the model of a case with its weights. Rows come from :func:`pack_step`. Collective."""
    trainer = Trainer(resolve_on_given_rows(case.config), platform)
    trainer.build_model(overlap=case.overlap, bucket_size=case.bucket_size, with_optimizer=case.optimizer)
    return trainer


def pack_step(trainer: Trainer, samples: list[list[TokenizedSample]]) -> StepBatch:
    """Packs samples and returns this rank's rows of one step. Collective.

    Args:
        samples: for each row of the global batch, its samples.
    """
    grid, spec = trainer.grid, trainer.spec
    rows = list(replica_rows([samples], grid.dp_rank, grid.dp))
    packed = GivenRows(pack_row(row, spec, trainer.config.data.seq_len) for row in rows)
    loader = packed if grid.owns_loader else None
    return BatchBroadcast(grid, trainer.platform, loader, len(rows), spec=spec).next_batch()


def train_on_samples(
    config: TrainConfig, step_samples: list[list[list[TokenizedSample]]], platform: Platform, **options: Any
) -> list[StepResult]:
    """Runs the trainer on given samples, and returns the results of its steps. Collective.

    Args:
        step_samples: for each step and row of the global batch, its samples.
        options: those of :meth:`Trainer.build_model`.
    """
    resolved_run, hook = resolve_on_given_rows(config), StepResults()

    def make_loader(grid: ProcessGrid) -> GivenRows:
        own_samples = replica_rows(step_samples, grid.dp_rank, grid.dp)
        return GivenRows(pack_row(row, resolved_run.spec, config.data.seq_len) for row in own_samples)

    with Trainer(resolved_run, platform, [hook], make_loader=make_loader) as trainer:
        trainer.build(**options)
        trainer.restore()
        trainer.run()
    return hook.results


@cache
def encode_conversations(conversations_path: Path, hf_dir: str | Path) -> list[TokenizedSample]:
    """Encodes the samples of a JSON file: a list of {"messages": HF messages, "images": files}, or the same
    with the parts of a "document"."""
    encoder = SampleEncoder(hf_dir)
    samples = []
    for conversation in json.loads(conversations_path.read_text()):
        images = [
            encoder.encode_medium("image", path.name, path.read_bytes())
            for path in map(Path, conversation["images"])
        ]
        if "document" in conversation:
            samples.append(encoder.encode_document(conversation["document"], images))
        else:
            samples.append(encoder.encode_sample(conversation["messages"], images))
    return samples


def draw_samples(
    sample_kinds: list[list[str]], spec: ModelSpec, step_number: int, case: ParityCase | None = None
) -> list[list[TokenizedSample]]:
    """Draws the samples of one step, which do not depend on how their kinds are distributed over rows.

    Args:
        sample_kinds: for each row, the kinds of its samples.
        case: the case whose conversations kinds such as ``sample:2`` name.
    """
    stored = encode_conversations(Path(case.samples), case.hf) if case and case.samples else []
    seeds = itertools.count(100 * step_number)

    def draw(kind: str) -> TokenizedSample:
        seed = next(seeds)
        name, _, number = kind.partition(":")
        return stored[int(number)] if name == "sample" else make_sample(kind, spec, seed=seed)

    return [[draw(kind) for kind in row] for row in sample_kinds]


def write_cases(cases: Sequence[ParityCase], cases_path: Path) -> None:
    cases_path.write_text(json.dumps([asdict(case) for case in cases]))
