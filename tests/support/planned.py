"""What a run will do under its own layout, and what a stage of it holds."""

from __future__ import annotations

from megatron_vl.config import TrainConfig
from megatron_vl.planning.calibration import Calibration
from megatron_vl.planning.cost import Network
from megatron_vl.planning.predict import Prediction, predict
from megatron_vl.planning.rows import RowStatistics
from megatron_vl.planning.run import run_layout
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.spec.tensors import EMBEDDING, TensorInfo, tensor_table


def predict_run(
    config: TrainConfig,
    spec: ModelSpec,
    world_size: int,
    *,
    rows: RowStatistics | None = None,
    calibration: Calibration | None = None,
    network: Network | None = None,
    patches: int | None = None,
) -> Prediction:
    """Predicts a run under its own layout.

    Raises:
        RunConfigError, LayoutError: the run is impossible.
    """
    layout = run_layout(config, spec, world_size, calibration=calibration, rows=rows, network=network)
    return predict(
        config,
        spec,
        world_size,
        layout,
        rows=rows,
        calibration=calibration,
        network=network,
        patches=patches,
    )


def stage_tensors(spec: ModelSpec, layout: Layout, stage: int) -> list[TensorInfo]:
    """The tensors on a pipeline stage; a tied embedding is also on the last one."""
    table = tensor_table(spec)
    own = [
        info for info in table.values() if layout.stage_of(info) == stage or layout.cut.on_every_rank(info)
    ]
    if spec.language.tied_embeddings and layout.pp > 1 and stage == layout.pp - 1:
        own.append(table[EMBEDDING])
    return own
