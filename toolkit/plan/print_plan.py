"""Prints a plan: the layout, its stages, its memory, and how the others compare."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from megatron_vl.planning.layout_search import (
    UNCHANGED_RUN_TEXT,
    SearchRequest,
    SearchResult,
    changed_options_text,
    changed_sections,
    describe_layout,
    explain_slowdown,
)
from megatron_vl.planning.memory import GIB, RESERVE_GIB, count_parameters, trained_text
from megatron_vl.planning.predict import RunPrediction
from megatron_vl.plurals import pluralize
from toolkit.memory_table import memory_table, wide_console


@dataclass(frozen=True)
class PlanResult:
    """The request, the best layout, and the layouts that it is compared with."""

    search_request: SearchRequest
    best_prediction: RunPrediction
    search_result: SearchResult | None
    """None if the layout was given."""
    fitting_alternative: RunPrediction | None = None
    """A layout that fits, if the given one does not."""
    own_prediction: RunPrediction | None = None
    """The prediction of the layout that the run sets, if other layouts were searched."""


def print_plan(plan_result: PlanResult) -> None:
    """Prints the rows, the best layout with its stages, memory and speed, and the other layouts."""
    table_console = wide_console()
    search_request, best_prediction = plan_result.search_request, plan_result.best_prediction
    calibration = search_request.calibration
    print(
        f"{search_request.spec.family} on {search_request.world_size} x "
        f"{calibration.gpu}, rows of {search_request.config.data.seq_len} tokens, "
        f"{pluralize(search_request.config.global_batch_size, 'row')} a step"
    )
    if trained := trained_text(*count_parameters(search_request.config, search_request.spec)):
        print(trained)
    for text_line in (*_row_lines(plan_result), *_layout_lines(best_prediction)):
        print(text_line)
    table_console.print(_stage_table(best_prediction))
    stage_memories = [stage.stage_memory.as_json() for stage in best_prediction.stage_plans]
    table_console.print(memory_table(stage_memories, "Memory of a GPU in GiB"))
    for text_line in _speed_lines(plan_result):
        print(text_line)
    if plan_result.search_result is not None:
        table_console.print(_comparison_table(plan_result))
        for rejected_layout in plan_result.search_result.rejected_layouts[:3]:
            print(f"does not fit: {rejected_layout.text} ({rejected_layout.why})")
    if not search_request.fits(best_prediction):
        print(_too_large_message(plan_result))
    print(f"{'' if calibration.measured else 'note: '}{calibration.source}")


def _row_lines(plan_result: PlanResult) -> list[str]:
    rows = plan_result.search_request.row_statistics
    error = f", mean good to {rows.patches_error:.1%}" if rows.is_sample else ""
    return [
        f"rows: {rows.source_text}",
        f"  {rows.mean_tokens:,.0f} tokens, {rows.loss_tokens:,.0f} with loss, {rows.pictures:.1f} pictures,"
        f" {rows.mean_patches:,.0f} patches (spread {rows.patch_spread:.0%}{error}) a row",
    ]


def _layout_lines(best_prediction: RunPrediction) -> list[str]:
    layout_text = describe_layout(
        best_prediction.config, best_prediction.layout, best_prediction.data_parallel_size
    )
    return [f"layout: {layout_text}", f"  {layout_options(best_prediction)}"]


def layout_options(best_prediction: RunPrediction) -> str:
    """The layout as options of ``train``."""
    from megatron_vl.config import OptimizerConfig, TrainConfig

    # Of the optimizer, only what memory depends on belongs to a layout; the rest is the run's own.
    default_optimizer = OptimizerConfig()
    optimizer = dataclasses.replace(
        best_prediction.config.optimizer,
        offload_fraction=default_optimizer.offload_fraction,
        moments_dtype=default_optimizer.moments_dtype,
    )
    base_config = TrainConfig(optimizer=optimizer)
    option_words = changed_sections(base_config, best_prediction)
    batch_size = best_prediction.config.global_batch_size
    if batch_size != base_config.global_batch_size:
        option_words.append(f"--global_batch_size {batch_size}")
    return " ".join(option_words) or UNCHANGED_RUN_TEXT


def _stage_table(best_prediction: RunPrediction) -> Any:
    from rich.table import Table

    stage_table = Table(
        "stage",
        "decoder layers",
        "parameters",
        "forward ms",
        "backward ms",
        "GiB",
        "reduce ms",
        "update ms",
        title="Each stage: layers of its chunks, parameters and memory of a GPU, time of a row",
    )
    for i, stage in enumerate(best_prediction.stage_plans):
        layers_text = " + ".join(str(layer_count) for layer_count in stage.layers_per_chunk)
        stage_ends = ["tower"] if i == 0 else []
        if i == best_prediction.layout.pp - 1:
            stage_ends.append("head")
        stage_table.add_row(
            str(i),
            f"{layers_text} ({', '.join(stage_ends)})" if stage_ends else layers_text,
            f"{stage.parameter_count / 1e9:.2f} B",
            f"{1e3 * sum(chunk.forward for chunk in stage.times_by_chunk):.1f}",
            f"{1e3 * sum(chunk.backward for chunk in stage.times_by_chunk):.1f}",
            f"{stage.stage_memory.total_bytes / GIB:.1f}",
            f"{1e3 * stage.exposed_collective_seconds:.0f}",
            f"{1e3 * stage.optimizer_seconds:.0f}",
        )
    return stage_table


def _speed_lines(plan_result: PlanResult) -> list[str]:
    best_prediction, host_limit_gib = plan_result.best_prediction, plan_result.search_request.host_gib
    bubble_note = ""
    if best_prediction.layout.pp > 1:
        bubble_note = f", stages wait {best_prediction.bubble_share:.1%} of the pipeline's time"
    host_lines = []
    if host_gib := best_prediction.host_gib:
        limit_text = f"of {host_limit_gib:.1f} " * (host_limit_gib < math.inf)
        host_lines = [f"host memory: {host_gib:.1f} {limit_text}GiB for each GPU of the fullest stage"]
    return [
        f"step: {best_prediction.step_seconds:.2f} s, {best_prediction.tokens_per_second:,.0f} tokens/s, "
        f"{best_prediction.mfu:.1%} MFU{bubble_note}; "
        f"{best_prediction.hours_per_billion_tokens:.1f} hours per billion tokens",
        f"fullest GPU: {best_prediction.peak_gib:.1f} of {best_prediction.calibration.memory_gib:.1f} GiB,"
        f" of which {RESERVE_GIB:.0f} should stay free",
        *host_lines,
    ]


def _comparison_table(plan_result: PlanResult) -> Any:
    from rich.table import Table

    assert plan_result.search_result is not None
    comparison_table = Table(
        "layout",
        "s a step",
        "MFU",
        "GiB",
        "why slower",
        title=f"Of {plan_result.search_result.combination_count} combinations",
    )
    best_prediction, *others = plan_result.search_result.fitting_layouts
    compared_layouts = [(best_prediction, "")]
    compared_layouts += [(other, explain_slowdown(best_prediction, other)) for other in others]
    if (own_prediction := plan_result.own_prediction) is not None:
        slower_reason = "does not fit"
        if plan_result.search_request.fits(own_prediction):
            slower_reason = explain_slowdown(best_prediction, own_prediction)
        compared_layouts.append((own_prediction, f"the run's own, {slower_reason}"))
    for prediction, slower_reason in compared_layouts:
        comparison_table.add_row(
            describe_layout(prediction.config, prediction.layout, prediction.data_parallel_size),
            f"{prediction.step_seconds:.2f}",
            f"{prediction.mfu:.1%}",
            f"{prediction.peak_gib:.0f}",
            slower_reason,
        )
    return comparison_table


def _too_large_message(plan_result: PlanResult) -> str:
    best_prediction = plan_result.best_prediction
    problem_text = f"does not fit: {best_prediction.peak_gib:.0f} GiB and {RESERVE_GIB:.0f} to stay free"
    if best_prediction.fits_memory:
        problem_text = f"does not fit: {best_prediction.host_gib:.1f} GiB of host memory for each GPU"
    if plan_result.fitting_alternative is None:
        return f"{problem_text}; nothing else fits either: take more GPUs, or lower data.seq_len"
    return (
        f"{problem_text}; what would: "
        f"{changed_options_text(plan_result.search_request.config, plan_result.fitting_alternative)}"
    )
