"""Searches the layouts of a run for the fastest ones that fit.

All sizes of TP, PP, VPP, EP and ETP that the model and the number of GPUs allow are combined with each step
of a ladder of recompute, and with offload. The combinations are tried in the order of a quick estimate of
their time. For each one, memory is computed; if a balanced split of the layers does not fit, a better split
is searched. The search ends when enough layouts fit. Sizes whose shortest possible step is longer than that
of the layouts found so far are not combined with anything.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_vl.config import RunConfigError, TrainConfig, validate_config
from megatron_vl.errors import UserError
from megatron_vl.planning.calibration import Calibration
from megatron_vl.planning.cost import Network, StepCosts
from megatron_vl.planning.layer_split import (
    balanced_layers,
    planned_layers,
    quick_pipeline_seconds,
    unsplit_layout,
)
from megatron_vl.planning.memory import GIB, RESERVE_GIB, offloaded_fraction, parameter_bytes, stage_memories
from megatron_vl.planning.offload_fraction import with_offload_fraction
from megatron_vl.planning.predict import (
    RunPrediction,
    chunk_times,
    predict_layout,
    seconds_outside_pipeline,
    tower_and_step_overhead,
)
from megatron_vl.planning.row_statistics import RowStatistics
from megatron_vl.spec.families import ModelSpec, MoeSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.spec.tensors import LayoutError

LARGEST_TP = 8
LARGEST_PP = 64
LARGEST_VPP = 4
LARGEST_EP = 64
NARROWEST_EXPERT_WIDTH = 768
"""Experts are not cut into narrower matrices, because that costs more time than it saves memory."""
RECOMPUTE_LADDER: tuple[dict[str, Any], ...] = (
    {"language": "none", "vision": "none"},
    {"language": "selective", "language_modules": ["activation"], "vision": "activation"},
    {"language": "selective", "language_modules": ["activation"], "vision": "full"},
    {"language": "full", "vision": "activation"},
    {"language": "full", "vision": "full"},
)
"""Recompute settings, the cheapest first."""
SEARCH_MARGIN = 1.1
"""The search ends at the first layout whose quick estimate is this many times the step of the slowest layout
to return."""
LEAST_OFFLOAD_GIB = 4.0
"""Offload that frees fewer GiB of a GPU is not tried. With many replicas, each GPU owns little state."""
MAX_TRIED_LAYOUTS = 40
"""Largest number of layouts whose memory is computed after the first one that fits, for each layout to
return."""
UNCHANGED_RUN_TEXT = "the run as it is"
"""The text in place of options if none is needed."""


@dataclass(frozen=True)
class SearchRequest:
    """The run whose layout is searched, with the rates and rows that times are predicted from."""

    config: TrainConfig
    spec: ModelSpec
    world_size: int
    calibration: Calibration
    row_statistics: RowStatistics
    network: Network = Network()
    max_row_patches: int | None = None
    """Patches of the fullest row, for memory; None: as many as a row can hold."""
    result_count: int = 8
    """Number of layouts to return."""
    keep_parallel_sizes: bool = False
    """Whether to keep TP, PP, VPP, EP and ETP of the run."""

    def step_costs(self, config: TrainConfig, layout: Layout) -> StepCosts:
        """The cost model of a combination."""
        return StepCosts(
            config,
            self.spec,
            layout,
            self.world_size // layout.replica_ranks,
            self.row_statistics,
            self.calibration,
            self.network,
        )


@dataclass(frozen=True)
class RejectedLayout:
    """A layout that does not fit, and the reason in words."""

    text: str
    why: str


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    fitting_layouts: tuple[RunPrediction, ...]
    """Layouts that fit, fastest first."""
    slowdown_reasons: tuple[str, ...]
    """For each of them but the first, why it is slower than the first."""
    rejected_layouts: tuple[RejectedLayout, ...]
    """Layouts that would be faster and do not fit, fastest first."""
    combination_count: int
    """Number of combinations of sizes, recompute and offload."""


@dataclass(frozen=True)
class _SizeGroup:
    """Combinations of equal parallel sizes and tower placement. They differ in recompute and offload."""

    least_seconds: float
    """Lower bound of the quick estimates of all combinations."""
    group_number: int
    combination_count: int
    """Number of combinations."""
    config: TrainConfig


@dataclass(frozen=True)
class _LayoutCandidate:
    """A combination with its quick estimate."""

    least_seconds: float
    candidate_number: int
    config: TrainConfig
    layout: Layout
    step_costs: StepCosts


def search_layouts(search_request: SearchRequest) -> SearchResult:
    """Finds the fastest layouts that fit.

    Raises:
        RunConfigError: no combination of sizes is possible at all, for instance because
            ``global_batch_size`` has no divisor in common with the number of GPUs.
    """
    # Without offload at first: the search itself adds larger shares where they help.
    config = search_request.config
    if config.optimizer.offload_fraction == "auto":
        config = with_offload_fraction(config, 0.0)
        search_request = dataclasses.replace(search_request, config=config)

    size_groups = list(_size_groups(search_request))
    if not size_groups:
        raise RunConfigError(
            f"no layout of {search_request.world_size} GPUs is possible with global_batch_size"
            f" {config.global_batch_size}: the data-parallel size must divide it"
        )
    layout_search = _LayoutSearch(search_request)
    layout_search.try_groups(size_groups)

    # Only the layouts to return get the better split, because its search takes seconds.
    predictions = sorted(layout_search.predictions_by_size.values(), key=_sort_key)
    refined_predictions = [
        _refine_split(search_request, prediction) for prediction in predictions[: search_request.result_count]
    ]
    refined_predictions.sort(key=_sort_key)
    return SearchResult(
        tuple(refined_predictions),
        tuple(explain_slowdown(refined_predictions[0], other) for other in refined_predictions[1:]),
        tuple(layout_search.rejected_by_size.values())[: search_request.result_count],
        sum(group.combination_count for group in size_groups),
    )


@dataclass
class _LayoutSearch:
    """Tries combinations in the order of their quick estimates until enough layouts fit."""

    search_request: SearchRequest
    predictions_by_size: dict[tuple, RunPrediction] = dataclasses.field(default_factory=dict)
    rejected_by_size: dict[tuple, RejectedLayout] = dataclasses.field(default_factory=dict)
    tried_count: int = 0
    """Number of layouts that were tried after the first one that fits."""

    def try_groups(self, size_groups: list[_SizeGroup]) -> None:
        # The queue is ordered by the lower bound of the time. The numbers break ties, always the same way.
        priority_queue: list[tuple[float, int, _SizeGroup | _LayoutCandidate]] = [
            (group.least_seconds, group.group_number, group) for group in size_groups
        ]
        heapq.heapify(priority_queue)
        while priority_queue:
            _, _, candidate = heapq.heappop(priority_queue)
            if self._is_done(candidate.least_seconds):
                break
            if isinstance(candidate, _LayoutCandidate):
                self._try_candidate(candidate)
                continue
            # None of a group's combinations is faster than the group, so they are still taken in order.
            for member in _group_candidates(self.search_request, candidate):
                heapq.heappush(priority_queue, (member.least_seconds, member.candidate_number, member))

    def _is_done(self, least_seconds: float) -> bool:
        """Whether no later combination is worth trying. ``least_seconds``: the quick estimate of the next."""
        if not self.predictions_by_size:
            return False
        result_count = self.search_request.result_count
        steps = sorted(prediction.step_seconds for prediction in self.predictions_by_size.values())
        # While there are too few layouts, the limit is twice the fastest step.
        slowest_step = steps[result_count - 1] if len(steps) >= result_count else 2 * steps[0]
        return least_seconds > SEARCH_MARGIN * slowest_step or (
            self.tried_count > MAX_TRIED_LAYOUTS * result_count
        )

    def _try_candidate(self, candidate: _LayoutCandidate) -> None:
        # More recompute under the same sizes is slower, so one combination that fits is enough.
        size_key = _size_key(candidate)
        if size_key in self.predictions_by_size:
            return
        self.tried_count += bool(self.predictions_by_size)
        prediction, required_gib = _predict_if_fits(self.search_request, candidate)
        if prediction is not None:
            self.predictions_by_size[size_key] = prediction
        elif size_key not in self.rejected_by_size:
            self.rejected_by_size[size_key] = RejectedLayout(
                describe_layout(candidate.config, candidate.layout, candidate.step_costs.data_parallel_size),
                f"{required_gib:.0f} GiB on the fullest GPU",
            )


def _sort_key(prediction: RunPrediction) -> tuple:
    """The order of predictions: the fastest first, and of equally fast ones the simplest."""
    layout = prediction.layout
    return round(prediction.step_seconds, 4), layout.pp * layout.vpp, layout.tp, layout.ep, layout.etp


def _size_key(candidate: _LayoutCandidate) -> tuple:
    layout = candidate.layout
    return (
        layout.tp,
        layout.pp,
        layout.vpp,
        layout.ep,
        layout.etp,
        offloaded_fraction(candidate.config),
        layout.decoupled,
    )


# --- Combinations -------------------------------------------------------------------------------------------


def _size_groups(search_request: SearchRequest) -> Iterator[_SizeGroup]:
    """All parallel sizes that the fields of a run allow, with each placement of the tower."""
    combination_count = len(RECOMPUTE_LADDER) * (1 + len(offload_variants(search_request.config)))
    group_number = 0
    for parallel_config in _parallel_configs(search_request):
        base_config = dataclasses.replace(search_request.config, parallel=parallel_config)
        try:
            validate_config(base_config, search_request.world_size)
        except RunConfigError:
            continue
        for placed_config in _tower_placements(base_config):
            group_number += combination_count + 1
            yield _SizeGroup(
                step_lower_bound(search_request, placed_config),
                group_number,
                combination_count,
                placed_config,
            )


def step_lower_bound(search_request: SearchRequest, config: TrainConfig) -> float:
    """A lower bound in seconds of the quick estimates under parallel sizes; infinite if they are impossible.

    It assumes that stages share all work evenly, that nothing is computed twice, and that passes hide all
    communication at the end of the step.
    """
    bare_recompute = dataclasses.replace(search_request.config.recompute, **RECOMPUTE_LADDER[0])
    config = dataclasses.replace(config, recompute=bare_recompute)
    try:
        layout = unsplit_layout(config, search_request.spec)
    except LayoutError:
        return math.inf

    step_costs = search_request.step_costs(config, layout)
    micro_batches = config.global_batch_size // step_costs.data_parallel_size
    end_times = [step_costs.embedding_time(), step_costs.output_layer_time()] + (
        [] if layout.decoupled else [step_costs.vision_tower_time]
    )
    end_seconds = [end_time.total_seconds for end_time in end_times]
    layers_seconds = step_costs.decoder_layers_time(
        range(search_request.spec.language.num_layers)
    ).total_seconds
    # One stage holds the longest end.
    row_seconds = max((layers_seconds + sum(end_seconds)) / layout.pp, max(end_seconds))
    wait_seconds = 2 * search_request.calibration.pass_s * layout.vpp * (layout.pp > 1)
    return micro_batches * (row_seconds + wait_seconds) + tower_and_step_overhead(step_costs, micro_batches)


def _group_candidates(search_request: SearchRequest, group: _SizeGroup) -> Iterator[_LayoutCandidate]:
    """The combinations of a group that the model allows and whose parameters and optimizer state fit."""
    combined_configs = []
    for recompute_fields in RECOMPUTE_LADDER:
        recompute_config = dataclasses.replace(search_request.config.recompute, **recompute_fields)
        config = dataclasses.replace(group.config, recompute=recompute_config)
        combined_configs += [config, *offload_variants(config)]
    for number, config in enumerate(combined_configs, group.group_number + 1):
        candidate = _make_candidate(search_request, number, config)
        if candidate is not None:
            yield candidate


def _parallel_configs(search_request: SearchRequest) -> Iterator[Any]:
    """The ``parallel`` sections to try. Some of them are impossible for other fields of the run."""
    parallel_config, language_spec = search_request.config.parallel, search_request.spec.language
    world_size = search_request.world_size
    if search_request.keep_parallel_sizes:
        yield dataclasses.replace(parallel_config, layers=None)
        return

    largest_tp = min(LARGEST_TP, search_request.network.gpus_per_node)
    largest_pp = min(LARGEST_PP, language_spec.num_layers)
    for tensor_size, pipeline_size, expert_size in itertools.product(
        _divisors(_powers_of_two(largest_tp), world_size),
        _divisors(range(1, largest_pp + 1), world_size),
        _powers_of_two(min(LARGEST_EP, world_size)) if language_spec.moe else [1],
    ):
        largest_vpp = min(LARGEST_VPP, language_spec.num_layers // pipeline_size) if pipeline_size > 1 else 1
        for virtual_size, expert_tensor_size in itertools.product(
            range(1, max(1, largest_vpp) + 1), _expert_tensor_sizes(language_spec.moe, tensor_size)
        ):
            yield dataclasses.replace(
                parallel_config,
                tp=tensor_size,
                pp=pipeline_size,
                vpp=virtual_size,
                ep=expert_size,
                etp=expert_tensor_size,
                layers=None,
                sequence_parallel=tensor_size > 1,
                tp_comm_overlap=parallel_config.tp_comm_overlap and tensor_size > 1,
            )


def _expert_tensor_sizes(moe_spec: MoeSpec | None, tensor_size: int) -> list[int]:
    has_wide_experts = moe_spec and moe_spec.ffn_hidden_size >= NARROWEST_EXPERT_WIDTH * tensor_size
    return [1, tensor_size] if has_wide_experts and tensor_size > 1 else [1]


def _divisors(sizes: Iterable[int], world_size: int) -> list[int]:
    """Those of ``sizes`` that divide the number of GPUs."""
    return [size for size in sizes if world_size % size == 0]


def _powers_of_two(largest: int) -> list[int]:
    """The powers of two up to ``largest``."""
    return [2**i for i in range(largest.bit_length()) if 2**i <= largest]


def _tower_placements(config: TrainConfig) -> list[TrainConfig]:
    """The run with each placement of the vision tower that makes a difference and that FP8 allows."""
    placements: list[Any] = ["first_stage"]
    if config.parallel.replica_ranks > 1 and not config.fp8.vision:
        placements.append("decoupled")
    return [
        dataclasses.replace(config, vision=dataclasses.replace(config.vision, placement=placement))
        for placement in placements
    ]


def offload_variants(config: TrainConfig) -> list[TrainConfig]:
    """The run with more of its optimizer state in host memory."""
    return [
        with_offload_fraction(config, share) for share in (0.5, 1.0) if share > offloaded_fraction(config)
    ]


def _make_candidate(
    search_request: SearchRequest, candidate_number: int, config: TrainConfig
) -> _LayoutCandidate | None:
    """A combination with its quick estimate; None if it is impossible or its parameters alone do not fit."""
    try:
        layout = unsplit_layout(config, search_request.spec)
    except LayoutError:
        return None

    # Every split needs at least an even share of the parameters, their gradients and their optimizer state.
    state_gib = _mean_state_gib(search_request, config, layout)
    if state_gib + RESERVE_GIB > search_request.calibration.memory_gib:
        return None
    if offloaded_fraction(config) > offloaded_fraction(search_request.config):
        resident_config = dataclasses.replace(config, optimizer=search_request.config.optimizer)
        if _mean_state_gib(search_request, resident_config, layout) - state_gib < LEAST_OFFLOAD_GIB:
            return None

    step_costs = search_request.step_costs(config, layout)
    layout = dataclasses.replace(layout, layers_per_chunk=balanced_layers(step_costs))
    times_by_stage = [chunk_times(step_costs, layout, stage) for stage in range(layout.pp)]
    micro_batches = config.global_batch_size // step_costs.data_parallel_size
    quick_step_seconds = quick_pipeline_seconds(
        times_by_stage, micro_batches, step_costs.stage_message_seconds()
    )
    quick_step_seconds += seconds_outside_pipeline(step_costs, layout, times_by_stage)
    return _LayoutCandidate(quick_step_seconds, candidate_number, config, layout, step_costs)


def _mean_state_gib(search_request: SearchRequest, config: TrainConfig, layout: Layout) -> float:
    """GiB of parameters, gradients and optimizer state on a GPU, as a mean over the stages."""
    data_parallel_size = search_request.world_size // layout.replica_ranks
    return parameter_bytes(config, search_request.spec, layout, data_parallel_size) / layout.pp / GIB


def _predict_if_fits(
    search_request: SearchRequest, candidate: _LayoutCandidate
) -> tuple[RunPrediction | None, float]:
    """(prediction, 0) of a combination that fits; otherwise (None, GiB that it would take)."""
    config, spec = candidate.config, search_request.spec
    layout, step_costs = candidate.layout, candidate.step_costs
    stage_memory_list = stage_memories(
        config, spec, layout, step_costs.data_parallel_size, search_request.max_row_patches
    )
    limit_gib = search_request.calibration.memory_gib - RESERVE_GIB
    mean_stage_gib = sum(memory.total_bytes for memory in stage_memory_list) / len(stage_memory_list) / GIB
    fullest_stage_gib = max(memory.total_bytes for memory in stage_memory_list) / GIB
    if fullest_stage_gib > limit_gib and (layout.pp == 1 or mean_stage_gib > limit_gib):
        return None, fullest_stage_gib
    if fullest_stage_gib > limit_gib:
        layout = dataclasses.replace(
            layout,
            layers_per_chunk=planned_layers(
                step_costs, max_row_patches=search_request.max_row_patches, skip_timelines=True
            ),
        )
    prediction = _predict_candidate(search_request, config, layout)
    return (prediction, 0.0) if prediction.fits_memory else (None, prediction.peak_gib)


def _predict_candidate(search_request: SearchRequest, config: TrainConfig, layout: Layout) -> RunPrediction:
    return predict_layout(
        config,
        search_request.spec,
        search_request.world_size,
        layout,
        row_statistics=search_request.row_statistics,
        calibration=search_request.calibration,
        network=search_request.network,
        patch_count=search_request.max_row_patches,
    )


def _refine_split(search_request: SearchRequest, original_prediction: RunPrediction) -> RunPrediction:
    """The same sizes with the split that a run without ``parallel.layers`` gets."""
    config, layout = original_prediction.config, original_prediction.layout
    if layout.pp == 1:
        return original_prediction
    step_costs = original_prediction.step_costs(config, original_prediction.calibration)
    layers = planned_layers(step_costs, max_row_patches=search_request.max_row_patches)
    if layers == layout.layers_per_chunk:
        return original_prediction
    refined_layout = dataclasses.replace(layout, layers_per_chunk=layers)
    refined_prediction = _predict_candidate(search_request, config, refined_layout)
    return refined_prediction if refined_prediction.fits_memory else original_prediction


# --- Texts --------------------------------------------------------------------------------------------------


def describe_layout(config: TrainConfig, layout: Layout, data_parallel_size: int) -> str:
    """A layout in a few words: ``tp2 pp4 vpp2 dp8, ep8, recompute full/activation``."""
    dense_text = _describe_sizes(
        tp=layout.tp, cp=layout.cp, pp=layout.pp, vpp=layout.vpp, dp=data_parallel_size
    )
    recompute_config = config.recompute
    language_mode: str = recompute_config.language
    if language_mode == "selective" and recompute_config.language_modules == ["activation"]:
        language_mode = "activation"
    recompute_text = f"{language_mode}/{recompute_config.vision}"
    offload_share = offloaded_fraction(config)
    layout_parts = [
        dense_text or "one GPU",
        _describe_sizes(ep=layout.ep, etp=layout.etp),
        "" if recompute_text == "none/none" else f"recompute {recompute_text}",
        f"offload {offload_share:g}" if offload_share else "",
        "tower on every rank" if layout.decoupled else "",
    ]
    return ", ".join(filter(None, layout_parts))


def _describe_sizes(**sizes: int) -> str:
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)


def explain_slowdown(best_prediction: RunPrediction, slower_prediction: RunPrediction) -> str:
    """A text with the two largest causes that make a layout slower than the best one."""
    total_seconds = slower_prediction.step_seconds - best_prediction.step_seconds
    best_seconds = _seconds_by_cause(best_prediction)
    relevant_causes = []
    for cause, slower_seconds in _seconds_by_cause(slower_prediction).items():
        extra_seconds = slower_seconds - best_seconds[cause]
        if extra_seconds > 0.1 * max(total_seconds, 1e-9):
            relevant_causes.append((extra_seconds, f"{cause} {1e3 * extra_seconds:+,.0f} ms"))

    cause_texts = [cause_text for _, cause_text in sorted(relevant_causes, reverse=True)[:2]]
    slowdown_text = f"{100 * total_seconds / best_prediction.step_seconds:+.1f} %"
    return f"{slowdown_text}: {', '.join(cause_texts)}" if cause_texts else slowdown_text


def _seconds_by_cause(prediction: RunPrediction) -> dict[str, float]:
    """Seconds of a step by cause, as a mean over the stages.

    A cause's share is the difference between two estimates, one without recompute or without communication.
    """
    config, calibration = prediction.config, prediction.calibration
    bare_recompute = dataclasses.replace(config.recompute, language="none", vision="none")
    bare_config = dataclasses.replace(config, recompute=bare_recompute)
    instant_network = dataclasses.replace(calibration, nvlink_gb_s=1e6, network_gb_s=1e6, collective_s=0.0)

    all_seconds = _compute_seconds(prediction, config, calibration)
    seconds_without_recompute = _compute_seconds(prediction, bare_config, calibration)
    compute_seconds = _compute_seconds(prediction, bare_config, instant_network)
    return {
        "pipeline waits": prediction.timeline_seconds - all_seconds,
        "recompute": all_seconds - seconds_without_recompute,
        "collectives": seconds_without_recompute - compute_seconds,
        "computing": compute_seconds,
        "gradients and update": prediction.stage_end_seconds,
        "tower on every rank": prediction.decoupled_tower_seconds,
    }


def _compute_seconds(prediction: RunPrediction, config: TrainConfig, calibration: Calibration) -> float:
    """Seconds of the mean stage's passes in a step."""
    step_costs, layout = prediction.step_costs(config, calibration), prediction.layout
    times_by_stage = [chunk_times(step_costs, layout, stage) for stage in range(layout.pp)]
    row_seconds = sum(chunk.total_seconds for stage in times_by_stage for chunk in stage)
    return prediction.micro_batches * row_seconds / layout.pp


def changed_options_text(config: TrainConfig, found_prediction: RunPrediction) -> str:
    """The options that turn a run into the found one: ``--parallel.pp 2 --parallel.layers [8,20]``."""
    return " ".join(changed_sections(config, found_prediction)) or UNCHANGED_RUN_TEXT


def changed_sections(config: TrainConfig, found_prediction: RunPrediction) -> list[str]:
    """The options of each section in which a found run differs from a run."""
    found_config = with_split(found_prediction.config, found_prediction.layout)
    section_texts = []
    for section_name in ("parallel", "recompute", "optimizer", "vision"):
        section_before, section_after = getattr(config, section_name), getattr(found_config, section_name)
        if section_before != section_after:
            section_texts.append(section_option_text(section_name, section_before, section_after))
    return section_texts


def section_option_text(section_name: str, section_before: Any, section_after: Any) -> str:
    """``--section.field value`` for the fields of a section that differ."""
    option_texts = []
    for name, new_value in vars(section_after).items():
        if new_value != getattr(section_before, name):
            option_texts.append(f"--{section_name}.{name} {_command_line_value(new_value)}")
    return " ".join(option_texts)


def _command_line_value(option_value: Any) -> str:
    """A value as it is written on a command line."""
    if option_value is None or isinstance(option_value, bool):
        return {None: "null", True: "true", False: "false"}[option_value]
    return str(option_value).replace(" ", "").replace("'", "")


def with_split(config: TrainConfig, layout: Layout) -> TrainConfig:
    """The run with the layout's split in ``parallel.layers``."""
    layers = list(layout.layers_per_chunk) if layout.pp > 1 else None
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, layers=layers))


def search_fastest_fit(
    search_request: SearchRequest, *, keep_parallel_sizes: bool = False
) -> RunPrediction | None:
    """The fastest layout that fits; None if no layout fits or the search is impossible."""
    try:
        search_result = search_layouts(
            dataclasses.replace(search_request, result_count=1, keep_parallel_sizes=keep_parallel_sizes)
        )
    except (UserError, ValueError):
        return None
    return search_result.fitting_layouts[0] if search_result.fitting_layouts else None
