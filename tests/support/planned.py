"""What a run will do under its own layout, and what a stage of it holds."""

import dataclasses

import yaml

from megatron_vl.config import TrainConfig, validate_config
from megatron_vl.estimate.flops import RowSizes
from megatron_vl.estimate.gpus import Gpu
from megatron_vl.estimate.memory import StageMemory, stage_memories
from megatron_vl.estimate.split import run_layout, split_source
from megatron_vl.estimate.step import RunPrediction, predict_layout
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.spec.tensors import EMBEDDING_TENSOR, TensorInfo, tensor_table
from megatron_vl.training.resolve import find_source_checkpoint
from megatron_vl.training.resolved_run import ResolvedRun


def config_of(options: str) -> TrainConfig:
    """The run of valid options, names and values in turn, for which ``parse_config`` takes 0.1 s."""
    config, words = TrainConfig(), options.split()
    for name, value in zip(words[::2], map(yaml.safe_load, words[1::2]), strict=True):
        section, _, field = name.removeprefix("--").rpartition(".")
        if section:
            field, value = section, dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{field: value})
    return config


def predict_run(
    config: TrainConfig, spec: ModelSpec, world_size: int, gpu: Gpu | None = None
) -> RunPrediction:
    return predict_layout(config, spec, world_size, run_layout(config, spec, world_size), gpu)


def planned_run(config: TrainConfig, spec: ModelSpec, world_size: int) -> ResolvedRun:
    """A run as ``resolve_run`` decides it; its weights and data need not exist."""
    if config.dtype == "auto":
        config = dataclasses.replace(config, dtype="bfloat16")
    layout = run_layout(config, spec, world_size)
    origin = split_source(config, None)
    dp = validate_config(config, world_size)
    return ResolvedRun(config, spec, layout, dp, origin, find_source_checkpoint(config), {}, ())


def estimate_stage_memory(
    config: TrainConfig, spec: ModelSpec, world_size: int, patches: int | None = None
) -> list[StageMemory]:
    """The peak memory of each pipeline stage of a run under its own layout. The fullest row has ``patches``
    (None: as many as it can hold), and all of its tokens have a loss."""
    layout, seq_len = run_layout(config, spec, world_size), config.data.seq_len
    row = None if patches is None else RowSizes(seq_len, 0, seq_len, patches)
    return [*stage_memories(config, spec, layout, validate_config(config, world_size), row)]


def stage_tensors(spec: ModelSpec, layout: Layout, stage: int) -> list[TensorInfo]:
    """The tensors on a pipeline stage; a tied embedding is also on the last one."""
    table = tensor_table(spec)
    own = [
        info
        for info in table.values()
        if layout.owning_pipeline_rank(info) == stage or layout.sharding.is_on_every_rank(info)
    ]
    if spec.language.tied_embeddings and layout.pp > 1 and stage == layout.pp - 1:
        own.append(table[EMBEDDING_TENSOR])
    return own
