"""The layout of a run, for ``train``, ``plan`` and ``bench``."""

from __future__ import annotations

import dataclasses
from typing import Literal

from megatron_vl.config import TrainConfig, validate_config
from megatron_vl.planning.calibration import Calibration, find_calibration
from megatron_vl.planning.cost import Network, run_costs
from megatron_vl.planning.layer_split import planned_layers, unsplit_layout
from megatron_vl.planning.row_statistics import RowStatistics
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout, check_experts_use_sequence_parallel, configured_layout


def run_layout(
    config: TrainConfig,
    spec: ModelSpec,
    world_size: int,
    *,
    calibration: Calibration | None = None,
    row_statistics: RowStatistics | None = None,
    network: Network | None = None,
    saved_layout: Layout | None = None,
) -> Layout:
    """The layout of a run.

    With a pipeline and without ``parallel.layers``, the split of the layers is planned. It is an even split
    on CPU (:func:`rates_apply`). The split depends on the arguments alone, so
    every rank and every command finds the same one.

    Args:
        saved_layout: layout of the checkpoint that the run resumes from. Its split stays, as long as it has
            the same stages and chunks, and the vision tower the same placement.

    Raises:
        RunConfigError, LayoutError: the layout is impossible.
    """
    data_parallel_size = validate_config(config, world_size)
    parallel_config = config.parallel
    check_experts_use_sequence_parallel(spec, parallel_config.tp, parallel_config.sequence_parallel)
    calibration = calibration or find_calibration()
    layers_origin = split_source(config, saved_layout)
    if layers_origin == "planned":
        layout = unsplit_layout(config, spec)
        step_costs = run_costs(config, spec, layout, data_parallel_size, row_statistics, calibration, network)
        return dataclasses.replace(layout, layers_per_chunk=planned_layers(step_costs))

    # Without layers, make_layout divides them evenly.
    layers: list[int] | tuple[int, ...] | None = None
    if isinstance(parallel_config.layers, list):
        layers = parallel_config.layers
    elif layers_origin == "saved" and saved_layout is not None:
        layers = saved_layout.layers_per_chunk
    return configured_layout(config, spec, layers)


def with_split(config: TrainConfig, layout: Layout) -> TrainConfig:
    """The run with the layout's split in ``parallel.layers``."""
    layers = list(layout.layers_per_chunk) if layout.pp > 1 else None
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, layers=layers))


def rates_apply(config: TrainConfig) -> bool:
    """Whether rates hold for a run. Those of a GPU do not hold for a run on CPU."""
    return config.platform != "cpu"


def split_source(
    config: TrainConfig, saved_layout: Layout | None
) -> Literal["given", "saved", "planned", "even"]:
    """The origin of a run's split: its fields, its checkpoint, the planner, or an even division."""
    if config.parallel.pp == 1 or isinstance(config.parallel.layers, list):
        return "given"
    if saved_layout is not None:
        saved_split = saved_layout.pp, saved_layout.vpp, saved_layout.decoupled
        if saved_split == (config.parallel.pp, config.parallel.vpp, config.vision.placement == "decoupled"):
            return "saved"
    return "planned" if rates_apply(config) else "even"
