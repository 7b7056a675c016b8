"""What a run will do under its own layout, and what a stage of it holds."""

from __future__ import annotations

from megatron_vl.config import TrainConfig, validate_config
from megatron_vl.planning.calibration import Calibration
from megatron_vl.planning.cost import Network
from megatron_vl.planning.gpus import calibration_for_platform
from megatron_vl.planning.memory import StageMemory, stage_memories
from megatron_vl.planning.predict import RunPrediction, predict_layout
from megatron_vl.planning.row_statistics import RowStatistics
from megatron_vl.planning.run_layout import run_layout, split_source
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.spec.tensors import EMBEDDING_TENSOR, TensorInfo, tensor_table
from megatron_vl.training.resolve import find_source_checkpoint
from megatron_vl.training.resolved_run import ResolvedRun


def predict_run(
    config: TrainConfig,
    spec: ModelSpec,
    world_size: int,
    *,
    rows: RowStatistics | None = None,
    calibration: Calibration | None = None,
    network: Network | None = None,
    patches: int | None = None,
) -> RunPrediction:
    """Predicts a run under its own layout.

    Raises:
        RunConfigError, LayoutError: the run is impossible.
    """
    layout = run_layout(
        config, spec, world_size, calibration=calibration, row_statistics=rows, network=network
    )
    return predict_layout(
        config,
        spec,
        world_size,
        layout,
        row_statistics=rows,
        calibration=calibration,
        network=network,
        patch_count=patches,
    )


def planned_run(config: TrainConfig, spec: ModelSpec, world_size: int) -> ResolvedRun:
    """A run as ``resolve_run`` decides it; its weights and data need not exist."""
    calibration = calibration_for_platform(config.platform)
    layout = run_layout(config, spec, world_size, calibration=calibration)
    origin = split_source(config, None)
    dp = validate_config(config, world_size)
    return ResolvedRun(config, spec, layout, dp, origin, find_source_checkpoint(config), {}, ())


def estimate_stage_memory(
    config: TrainConfig, spec: ModelSpec, world_size: int, patches: int | None = None
) -> list[StageMemory]:
    """The peak memory of each pipeline stage of a run under its own layout, first stage first."""
    layout = run_layout(config, spec, world_size)
    return stage_memories(config, spec, layout, validate_config(config, world_size), patches)


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


def cut(language: int, vision: int | None = None) -> dict[str, int]:
    """What :meth:`ModelSpec.replace_layers` takes; without ``vision``, the tower keeps its layers."""
    return {"num_language_layers": language} | ({"num_vision_layers": vision} if vision else {})
