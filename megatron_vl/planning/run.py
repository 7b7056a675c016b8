"""A run's own layout, memory and speed: what ``train``, ``doctor``, ``plan`` and ``bench`` all ask here."""

from __future__ import annotations

import dataclasses
from typing import Literal

from megatron_vl.config import TrainConfig, validate
from megatron_vl.planning.calibration import Calibration, shipped
from megatron_vl.planning.cost import Costs, Network
from megatron_vl.planning.memory import StageMemory, stage_memories
from megatron_vl.planning.rows import RowStatistics, stated_rows
from megatron_vl.planning.split import layout_of_sizes, planned_layers
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout, check_experts, make_layout


def run_layout(
    config: TrainConfig,
    spec: ModelSpec,
    world_size: int,
    *,
    calibration: Calibration | None = None,
    rows: RowStatistics | None = None,
    network: Network | None = None,
    saved: Layout | None = None,
) -> Layout:
    """The layout of a run; with a pipeline and without ``parallel.layers``, its planned split, or an even one
    where no rates say how to plan it (:func:`rates_apply`).

    The split depends on the arguments alone, so that every rank and every command finds the same one.

    Args:
        saved: layout of the checkpoint that the run resumes from. Its split stays, as long as it has the same
            stages and chunks, and the vision tower the same place.

    Raises:
        RunConfigError, LayoutError: the layout is impossible.
    """
    dp = validate(config, world_size)
    p = config.parallel
    check_experts(spec, p.tp, p.sequence_parallel)
    layers = p.layers if isinstance(p.layers, list) else None
    decoupled = config.vision.placement == "decoupled"
    if layers is not None or p.pp == 1:
        return make_layout(spec, p.tp, p.pp, p.vpp, layers, p.ep, p.etp, decoupled, p.cp)

    if saved is not None and keeps_split(config, saved):
        return make_layout(spec, p.tp, p.pp, p.vpp, saved.layers, p.ep, p.etp, decoupled, p.cp)

    calibration = calibration or shipped()
    if not rates_apply(config, calibration):
        return make_layout(spec, p.tp, p.pp, p.vpp, None, p.ep, p.etp, decoupled, p.cp)

    layout = layout_of_sizes(config, spec)
    rows = rows or stated_rows(spec, config.data.seq_len, config.data.max_patches)
    costs = Costs(config, spec, layout, dp, rows, calibration, network or Network())
    return dataclasses.replace(layout, layers=planned_layers(costs))


def keeps_split(config: TrainConfig, saved: Layout) -> bool:
    """Whether a run without ``parallel.layers`` keeps the split of a checkpoint's layout."""
    p = config.parallel
    decoupled = config.vision.placement == "decoupled"
    return (saved.pp, saved.vpp, saved.decoupled) == (p.pp, p.vpp, decoupled)


def rates_apply(config: TrainConfig, calibration: Calibration) -> bool:
    """Whether a calibration's rates say how fast a run is. Those of a GPU say nothing about a run on CPU."""
    return config.platform != "cpu" or calibration.gpu == "cpu"


def split_source(
    config: TrainConfig, layout: Layout, saved: Layout | None, calibration: Calibration
) -> Literal["given", "saved", "planned", "even"]:
    """Where a run's split comes from."""
    if layout.pp == 1 or isinstance(config.parallel.layers, list):
        return "given"
    if saved is not None and keeps_split(config, saved):
        return "saved"
    return "planned" if rates_apply(config, calibration) else "even"


def estimate(
    config: TrainConfig,
    spec: ModelSpec,
    world_size: int,
    patches: int | None = None,
    calibration: Calibration | None = None,
) -> list[StageMemory]:
    """Estimates the peak memory of each pipeline stage of a run, first stage first.

    Args:
        patches: vision patches of the fullest row; None: as many as a row can hold.
        calibration: with what a split is planned; None: that of H200.

    Raises:
        RunConfigError, LayoutError: the run is impossible.
    """
    layout = run_layout(config, spec, world_size, calibration=calibration)
    return stage_memories(config, spec, layout, validate(config, world_size), patches)
