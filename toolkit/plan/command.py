"""``megatron-vl plan``: searches the layouts of a run, or predicts the one that it sets."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from typing import Any

from megatron_vl import host_memory
from megatron_vl.config import ParallelConfig, RunConfigError, TrainConfig, parse_config
from megatron_vl.errors import UsageError, UserError
from megatron_vl.planning.calibration import Calibration, find_calibration
from megatron_vl.planning.cost import Network
from megatron_vl.planning.gpus import calibration_for_platform, read_local_calibration
from megatron_vl.planning.layout_search import (
    SearchRequest,
    SearchResult,
    describe_layout,
    explain_slowdown,
    search_fastest_fit,
    search_layouts,
)
from megatron_vl.planning.predict import RunPrediction, predict_layout
from megatron_vl.planning.row_statistics import RowStatistics, make_assumed_rows
from megatron_vl.planning.run_layout import run_layout
from megatron_vl.spec.families import ModelSpec, read_spec
from toolkit.run_adapters import with_adapter_settings

from .options import PlanOptions
from .print_plan import PlanResult, print_plan

LAYOUT_FIELDS = ("tp", "cp", "pp", "vpp", "layers", "ep", "etp")


def plan(options: PlanOptions) -> int:
    """Returns 0, or 1 if the given layout, or every layout, does not fit."""
    plan_result = make_plan(options)

    if options.picture is not None:
        from .timeline_picture import draw_timeline

        draw_timeline(plan_result.best_prediction, options.picture)
    if options.yaml is not None:
        from .run_file import write_run_yaml

        given_fields = {"model.hf": options.hf} if options.hf else {}
        write_run_yaml(options.yaml, plan_result.best_prediction, given_fields)

    if options.json:
        print(json.dumps(plan_as_json(plan_result), indent=2))
    else:
        print_plan(plan_result)
    return 0 if plan_result.search_request.fits(plan_result.best_prediction) else 1


def make_plan(options: PlanOptions) -> PlanResult:
    """Predicts the layout that the run sets, or searches the fastest one.

    Raises:
        UsageError: no model is given, or a search is requested although nothing is left to choose.
        UserError: no layout fits, the given one is impossible, or a run could not start from the adapters in
            ``lora.adapter``. The message says why.
    """
    config = _read_config(options)
    spec = read_spec(config.model.hf)
    # Adapters that are there already decide their own rank and targets, as at the start of a run.
    config = with_adapter_settings(config, spec)
    row_statistics = _row_statistics(options, config, spec)
    search_request = SearchRequest(
        config,
        spec,
        options.gpus,
        _chosen_calibration(options),
        row_statistics,
        Network(options.gpus_per_node),
        result_count=options.keep,
        host_gib=_host_gib(options),
    )
    sets_layout = _sets_layout(config.parallel, options.fields)

    if sets_layout and not options.search:
        run_prediction = _predict_run_layout(search_request)
        # If the run's layout does not fit, the user needs to know one that does.
        alternative = None if search_request.fits(run_prediction) else search_fastest_fit(search_request)
        return PlanResult(search_request, run_prediction, None, alternative)

    # The search chooses the split itself. The run's own layout is shown beside the results.
    own_prediction = None
    if sets_layout:
        with contextlib.suppress(UserError):  # it needs another number of GPUs
            own_prediction = _predict_run_layout(search_request)
    unsplit_config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, layers=None))
    search_result = search_layouts(dataclasses.replace(search_request, config=unsplit_config))
    if not search_result.fitting_layouts:
        raise UserError(_nothing_fits_message(search_result, search_request))

    return PlanResult(
        search_request, search_result.fitting_layouts[0], search_result, own_prediction=own_prediction
    )


def _read_config(options: PlanOptions) -> TrainConfig:
    run_words = [*options.fields]
    run_words += ["--model.hf", options.hf] if options.hf else []
    run_words += ["--data.path", str(options.data)] if options.data is not None else []
    try:
        config = parse_config(run_words)
    except RunConfigError as error:
        raise UsageError(f"{error}; megatron-vl plan --help explains every field") from error
    if not config.model.hf:
        raise UsageError("no model is given: megatron-vl plan --hf HF_DIR, or model.hf of a run")
    sets_batch = any("global_batch_size" in word or word == "--config" for word in options.fields)
    if not sets_batch and config.global_batch_size < options.gpus:
        # The field's default is for one GPU.
        return dataclasses.replace(config, global_batch_size=8 * options.gpus)
    return config


def _chosen_calibration(options: PlanOptions) -> Calibration:
    return find_calibration(options.gpu) if options.gpu else calibration_for_platform("auto")


def _host_gib(options: PlanOptions) -> float:
    """GiB of host memory for each GPU of a node; infinite if it is not known."""
    node_gib: float | None = options.host_memory
    if node_gib is None and not options.gpu and read_local_calibration() is not None:
        node_gib = host_memory.available_bytes() / host_memory.GIB
    return math.inf if node_gib is None else node_gib / min(options.gpus, options.gpus_per_node)


def _row_statistics(options: PlanOptions, config: TrainConfig, spec: ModelSpec) -> RowStatistics:
    if options.data is None:
        return make_assumed_rows(spec, config.data.seq_len, config.data.max_patches)
    from .data_rows import measure_rows

    return measure_rows(config, spec, options.rows)


def _sets_layout(parallel_config: ParallelConfig, given_words: list[str]) -> bool:
    """Whether a run sets a layout. A default value counts if it stands on the command line."""
    default_config = ParallelConfig()
    given_options = {word.partition("=")[0] for word in given_words}
    for field_name in LAYOUT_FIELDS:
        value = getattr(parallel_config, field_name)
        is_given = f"--parallel.{field_name}" in given_options
        if value != "auto" and (is_given or value != getattr(default_config, field_name)):
            return True
    return False


def _predict_run_layout(search_request: SearchRequest) -> RunPrediction:
    """The prediction of the layout that the run sets."""
    config, spec, world_size = search_request.config, search_request.spec, search_request.world_size
    prediction_arguments: dict[str, Any] = {
        "calibration": search_request.calibration,
        "row_statistics": search_request.row_statistics,
        "network": search_request.network,
    }
    layout = run_layout(config, spec, world_size, **prediction_arguments)
    return predict_layout(config, spec, world_size, layout, **prediction_arguments)


def _nothing_fits_message(search_result: SearchResult, search_request: SearchRequest) -> str:
    nearest_note = ""
    if search_result.rejected_layouts:
        nearest_layout = search_result.rejected_layouts[0]
        nearest_note = f"; the nearest, {nearest_layout.text}, takes {nearest_layout.why}"
    return (
        f"no layout of {search_request.world_size} {search_request.calibration.gpu} fits "
        f"{search_request.spec.family} with rows of {search_request.config.data.seq_len} "
        f"tokens{nearest_note}: take more GPUs, or lower data.seq_len"
    )


def plan_as_json(plan_result: PlanResult) -> dict[str, Any]:
    """What ``--json`` prints."""
    search_request, calibration = plan_result.search_request, plan_result.search_request.calibration
    plan_facts: dict[str, Any] = {
        "family": search_request.spec.family,
        "gpus": search_request.world_size,
        "gpu": calibration.gpu,
        "measured_rates": calibration.measured,
        "rates": calibration.source,
        "seq_len": search_request.config.data.seq_len,
        "global_batch_size": search_request.config.global_batch_size,
        "rows": search_request.row_statistics.as_json(),
        "best": _prediction_facts(plan_result.best_prediction, search_request),
    }

    if plan_result.search_result is not None:
        plan_facts["others"] = []
        for other_prediction in plan_result.search_result.fitting_layouts[1:]:
            plan_facts["others"].append(_compared_facts(other_prediction, plan_result))
        plan_facts["lost"] = list(map(dataclasses.asdict, plan_result.search_result.rejected_layouts))
        plan_facts["combinations"] = plan_result.search_result.combination_count

    if plan_result.own_prediction is not None:
        plan_facts["own"] = _compared_facts(plan_result.own_prediction, plan_result)
    if plan_result.fitting_alternative is not None:
        plan_facts["instead"] = _prediction_facts(plan_result.fitting_alternative, search_request)
    return plan_facts


def _compared_facts(prediction: RunPrediction, plan_result: PlanResult) -> dict[str, Any]:
    slowdown_reason = explain_slowdown(plan_result.best_prediction, prediction)
    return {**_prediction_facts(prediction, plan_result.search_request), "why": slowdown_reason}


def _prediction_facts(prediction: RunPrediction, search_request: SearchRequest) -> dict[str, Any]:
    return {
        "text": describe_layout(prediction.config, prediction.layout, prediction.data_parallel_size),
        **prediction.as_json(),
        "fits": search_request.fits(prediction),
        "recompute": dataclasses.asdict(prediction.config.recompute),
    }
