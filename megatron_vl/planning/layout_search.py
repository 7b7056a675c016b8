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
from collections.abc import Iterator
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
from megatron_vl.planning.memory import (
    GIB,
    RESERVE_GIB,
    offloaded_fraction,
    parameter_bytes,
    peak_stage_gib,
    stage_memories,
)
from megatron_vl.planning.predict import (
    RunPrediction,
    chunk_times,
    predict_from_costs,
    seconds_outside_pipeline,
    tower_and_step_overhead,
)
from megatron_vl.planning.row_statistics import RowStatistics
from megatron_vl.planning.run_layout import with_split
from megatron_vl.spec.families import ModelSpec
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
    {"language": "full", "vision": "full", "offload_inputs": True},
)
"""Recompute settings, the cheapest first. Where ``offload_inputs`` is left out, it is false."""
SEARCH_MARGIN = 1.1
"""The search ends at the first layout whose quick estimate is this many times the step of the slowest layout
to return."""
LEAST_OFFLOAD_GIB = 4.0
"""Offload that frees fewer GiB of a GPU is not tried. With many replicas, each GPU owns little state."""
MAX_TRIED_LAYOUTS = 320
"""Largest number of layouts whose memory is computed after the first one that fits."""
MAX_TRIED_FOR_ADVICE = 40
"""The same where a layout is advised beside an error, which must not take long."""
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
    result_count: int = 8
    """Number of layouts to return."""
    max_tried_layouts: int = MAX_TRIED_LAYOUTS
    """Number of layouts, after the first one that fits, after which the search ends."""
    host_gib: float = math.inf
    """GiB of host memory for each GPU."""

    def fits(self, prediction: RunPrediction) -> bool:
        """Whether a run fits both the GPUs and the host memory."""
        return prediction.fits_memory and prediction.host_gib <= self.host_gib

    def step_costs(self, config: TrainConfig, layout: Layout) -> StepCosts:
        """The costs of a run on these GPUs with another config and layout."""
        data_parallel_size = self.world_size // layout.replica_ranks
        measured_facts = self.row_statistics, self.calibration, self.network
        return StepCosts(config, self.spec, layout, data_parallel_size, *measured_facts)

    def predict(self, config: TrainConfig, layout: Layout) -> RunPrediction:
        """The prediction of a run on these GPUs with another config, which is valid, and layout."""
        return predict_from_costs(self.step_costs(config, layout))


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
    own_share = search_request.config.optimizer.offload_fraction
    resident_optimizer = dataclasses.replace(search_request.config.optimizer, offload_fraction=0.0)
    resident_request = dataclasses.replace(
        search_request, config=dataclasses.replace(search_request.config, optimizer=resident_optimizer)
    )
    if own_share == "auto":
        return _search_larger_shares(resident_request)

    # The share that a run sets is kept, unless the host lacks the memory.
    search_result = _search_larger_shares(search_request)
    if search_result.fitting_layouts or not own_share or search_request.host_gib == math.inf:
        return search_result
    return _search_larger_shares(resident_request)


def _search_larger_shares(search_request: SearchRequest) -> SearchResult:
    """The search with at least the run's own share of the optimizer state in host memory."""
    size_groups = list(_size_groups(search_request))
    if not size_groups:
        raise RunConfigError(
            f"no layout of {search_request.world_size} GPUs is possible with global_batch_size"
            f" {search_request.config.global_batch_size}: the data-parallel size must divide it"
        )

    tried_layouts = _TriedLayouts(search_request)
    for candidate in _candidates_in_order(search_request, size_groups):
        if tried_layouts.is_enough(candidate.least_seconds):
            break
        if isinstance(candidate, _LayoutCandidate):
            tried_layouts.try_candidate(candidate)

    # Only the layouts to return get the better split, because its search takes seconds.
    result_count = search_request.result_count
    best_predictions = sorted(tried_layouts.useful_predictions, key=_sort_key)[:result_count]
    best_predictions = sorted(
        (_refine_split(search_request, prediction) for prediction in best_predictions), key=_sort_key
    )
    return SearchResult(
        tuple(best_predictions),
        tuple(tried_layouts.rejected_by_size.values())[:result_count],
        sum(group.combination_count for group in size_groups),
    )


def _candidates_in_order(
    search_request: SearchRequest, size_groups: list[_SizeGroup]
) -> Iterator[_SizeGroup | _LayoutCandidate]:
    """Groups and combinations by rising lower bound of the time, each group before its combinations.

    The numbers only break ties, always the same way.
    """
    priority_queue: list[tuple[float, int, _SizeGroup | _LayoutCandidate]] = [
        (group.least_seconds, group.group_number, group) for group in size_groups
    ]
    heapq.heapify(priority_queue)
    while priority_queue:
        _, _, candidate = heapq.heappop(priority_queue)
        yield candidate
        if isinstance(candidate, _SizeGroup):
            # None of a group's combinations is faster than the group, so they are still taken in order.
            for member in _group_candidates(search_request, candidate):
                heapq.heappush(priority_queue, (member.least_seconds, member.candidate_number, member))


@dataclass
class _TriedLayouts:
    """The combinations whose memory was computed, by :func:`_size_key`."""

    search_request: SearchRequest
    fitting_by_size: dict[tuple, RunPrediction] = dataclasses.field(default_factory=dict)
    rejected_by_size: dict[tuple, RejectedLayout] = dataclasses.field(default_factory=dict)
    useful_predictions: list[RunPrediction] = dataclasses.field(default_factory=list)
    """:func:`_without_idle_offload` of those that fit."""
    tried_count: int = 0
    """Number of combinations that were tried after the first one that fits."""

    def is_enough(self, least_seconds: float) -> bool:
        """Whether the search ends before combinations that take at least ``least_seconds``."""
        result_count = self.search_request.result_count
        if self.tried_count > self.search_request.max_tried_layouts:
            return True
        if not self.useful_predictions:
            return False
        return least_seconds > SEARCH_MARGIN * _slowest_kept_step(self.useful_predictions, result_count)

    def try_candidate(self, candidate: _LayoutCandidate) -> None:
        # More recompute under the same sizes is slower, so one combination that fits is enough.
        size_key = _size_key(candidate)
        if size_key in self.fitting_by_size:
            return

        self.tried_count += bool(self.fitting_by_size)
        prediction, required_text = _predict_if_fits(self.search_request, candidate)
        if prediction is not None:
            self.fitting_by_size[size_key] = prediction
            self.useful_predictions = _without_idle_offload(self.fitting_by_size)
        elif size_key not in self.rejected_by_size:
            layout_text = describe_layout(
                candidate.config, candidate.layout, candidate.step_costs.data_parallel_size
            )
            self.rejected_by_size[size_key] = RejectedLayout(layout_text, required_text)


def _without_idle_offload(predictions_by_size: dict[tuple, RunPrediction]) -> list[RunPrediction]:
    """The predictions but those that are no faster than the same sizes with less of the state offloaded."""
    useful_predictions = []
    least_seconds: dict[tuple, float] = {}
    for (*sizes, _), prediction in sorted(predictions_by_size.items(), key=lambda item: item[0][-1]):
        step_seconds = round(prediction.step_seconds, 4)
        if step_seconds < least_seconds.get(tuple(sizes), math.inf):
            least_seconds[tuple(sizes)] = step_seconds
            useful_predictions.append(prediction)
    return useful_predictions


def _slowest_kept_step(predictions: list[RunPrediction], result_count: int) -> float:
    """Seconds of the slowest step to return. While there are too few, it is twice the fastest step."""
    steps = sorted(prediction.step_seconds for prediction in predictions)
    return steps[result_count - 1] if len(steps) >= result_count else 2 * steps[0]


def _sort_key(prediction: RunPrediction) -> tuple:
    """The order of predictions: the fastest first, and of equally fast ones the simplest."""
    layout = prediction.layout
    return round(prediction.step_seconds, 4), layout.pp * layout.vpp, layout.tp, layout.ep, layout.etp


def _size_key(candidate: _LayoutCandidate) -> tuple:
    """What differs between the layouts of a search but recompute. The offloaded share is the last part."""
    layout = candidate.layout
    offload_share = offloaded_fraction(candidate.config)
    return layout.tp, layout.pp, layout.vpp, layout.ep, layout.etp, layout.decoupled, offload_share


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
            least_seconds = step_lower_bound(search_request, placed_config)
            yield _SizeGroup(least_seconds, group_number, combination_count, placed_config)


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
    end_times = [step_costs.embedding_time(), step_costs.output_layer_time()] + (
        [] if layout.decoupled else [step_costs.vision_tower_time]
    )
    wait_seconds = 2 * search_request.calibration.pass_s * layout.vpp * (layout.pp > 1)
    all_layers_seconds = step_costs.decoder_layers_time(
        range(search_request.spec.language.num_layers)
    ).total_seconds
    mean_stage_seconds = (all_layers_seconds + sum(end.total_seconds for end in end_times)) / layout.pp
    longest_end_seconds = max(end.total_seconds for end in end_times)  # one stage holds it
    row_seconds = max(mean_stage_seconds, longest_end_seconds) + wait_seconds
    return step_costs.micro_batches * row_seconds + tower_and_step_overhead(step_costs)


def _group_candidates(search_request: SearchRequest, group: _SizeGroup) -> Iterator[_LayoutCandidate]:
    """The combinations of a group that the model allows and whose parameters and optimizer state fit."""
    combined_configs = []
    for recompute_fields in RECOMPUTE_LADDER:
        all_fields = {"offload_inputs": False} | recompute_fields
        recompute_config = dataclasses.replace(search_request.config.recompute, **all_fields)
        config = dataclasses.replace(group.config, recompute=recompute_config)
        combined_configs.append(config)
        combined_configs += [
            dataclasses.replace(config, optimizer=optimizer) for optimizer in offload_variants(config)
        ]
    for number, config in enumerate(combined_configs, group.group_number + 1):
        candidate = _make_candidate(search_request, number, config)
        if candidate is not None:
            yield candidate


def _parallel_configs(search_request: SearchRequest) -> Iterator[Any]:
    """The ``parallel`` sections to try. Some of them are impossible for other fields of the run."""
    parallel_config = search_request.config.parallel
    language_spec = search_request.spec.language
    for tensor_size, pipeline_size, expert_size in _size_combinations(search_request):
        has_wide_experts = (
            language_spec.moe is not None
            and language_spec.moe.ffn_hidden_size >= NARROWEST_EXPERT_WIDTH * tensor_size
        )
        expert_tensor_sizes = [1, tensor_size] if has_wide_experts and tensor_size > 1 else [1]
        virtual_sizes = [
            size
            for size in range(1, LARGEST_VPP + 1)
            if size == 1 or pipeline_size > 1 and pipeline_size * size <= language_spec.num_layers
        ]
        for virtual_size, expert_tensor_size in itertools.product(virtual_sizes, expert_tensor_sizes):
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


def _size_combinations(search_request: SearchRequest) -> Iterator[tuple[int, int, int]]:
    """The tensor-, pipeline- and expert-parallel sizes to try."""
    language_spec = search_request.spec.language
    world_size = search_request.world_size
    largest_tp = min(LARGEST_TP, search_request.network.gpus_per_node, world_size)
    largest_pp = min(LARGEST_PP, language_spec.num_layers, world_size)
    expert_sizes = _powers_of_two(min(LARGEST_EP, world_size)) if language_spec.moe else [1]

    for tensor_size, pipeline_size, expert_size in itertools.product(
        _powers_of_two(largest_tp), range(1, largest_pp + 1), expert_sizes
    ):
        if world_size % tensor_size == 0 and world_size % pipeline_size == 0:
            yield tensor_size, pipeline_size, expert_size


def _powers_of_two(largest: int) -> list[int]:
    """The powers of two up to ``largest``."""
    return [2**i for i in range(largest.bit_length()) if 2**i <= largest]


def _tower_placements(config: TrainConfig) -> list[TrainConfig]:
    """The run with each placement of the vision tower that makes a difference and that FP8 allows."""
    is_single_rank = config.parallel.replica_ranks == 1
    names: list[Any] = (
        ["first_stage"] if is_single_rank or config.fp8.vision else ["first_stage", "decoupled"]
    )
    return [
        dataclasses.replace(config, vision=dataclasses.replace(config.vision, placement=name))
        for name in names
    ]


def offload_variants(config: TrainConfig) -> list[Any]:
    """The optimizer's section with more of its state in host memory."""
    larger_fractions = [share for share in (0.5, 1.0) if share > offloaded_fraction(config)]
    return [dataclasses.replace(config.optimizer, offload_fraction=share) for share in larger_fractions]


def _make_candidate(
    search_request: SearchRequest, candidate_number: int, config: TrainConfig
) -> _LayoutCandidate | None:
    """A combination with its quick estimate; None if it is impossible or its parameters alone do not fit."""
    spec, parallel_config = search_request.spec, config.parallel
    data_parallel_size = search_request.world_size // parallel_config.replica_ranks
    try:
        layout = unsplit_layout(config, spec)
    except LayoutError:
        return None

    if not _is_state_worth_trying(search_request, config, layout, data_parallel_size):
        return None

    step_costs = search_request.step_costs(config, layout)
    layout = dataclasses.replace(layout, layers_per_chunk=balanced_layers(step_costs))
    times_by_stage = [chunk_times(step_costs, layout, stage) for stage in range(parallel_config.pp)]
    quick_step_seconds = quick_pipeline_seconds(
        times_by_stage, step_costs.micro_batches, step_costs.stage_message_seconds()
    ) + seconds_outside_pipeline(step_costs, layout, times_by_stage)

    return _LayoutCandidate(quick_step_seconds, candidate_number, config, layout, step_costs)


def _is_state_worth_trying(
    search_request: SearchRequest, config: TrainConfig, layout: Layout, data_parallel_size: int
) -> bool:
    """Whether the parameters and their state fit, and whether a larger offloaded share frees enough of it."""
    spec = search_request.spec
    # Every split needs at least an even share of the parameters, their gradients and their optimizer state.
    state_gib = parameter_bytes(config, spec, layout, data_parallel_size) / layout.pp / GIB
    if state_gib + RESERVE_GIB > search_request.calibration.memory_gib:
        return False
    if offloaded_fraction(config) <= offloaded_fraction(search_request.config):
        return True

    resident_config = dataclasses.replace(config, optimizer=search_request.config.optimizer)
    resident_gib = parameter_bytes(resident_config, spec, layout, data_parallel_size) / layout.pp / GIB
    return resident_gib - state_gib >= LEAST_OFFLOAD_GIB


def _predict_if_fits(
    search_request: SearchRequest, candidate: _LayoutCandidate
) -> tuple[RunPrediction | None, str]:
    """(prediction, "") of a combination that fits; otherwise (None, the memory that it would take)."""
    layout, step_costs = candidate.layout, candidate.step_costs
    stage_memory_list = stage_memories(
        candidate.config, search_request.spec, layout, step_costs.data_parallel_size
    )
    limit_gib = search_request.calibration.memory_gib - RESERVE_GIB
    mean_stage_gib = sum(memory.total_bytes for memory in stage_memory_list) / len(stage_memory_list) / GIB
    fullest_stage_gib = peak_stage_gib(stage_memory_list)
    if fullest_stage_gib > limit_gib and (layout.pp == 1 or mean_stage_gib > limit_gib):
        return None, f"{fullest_stage_gib:.0f} GiB on the fullest GPU"
    if fullest_stage_gib > limit_gib:
        layers = planned_layers(step_costs, skip_timelines=True)
        layout = dataclasses.replace(layout, layers_per_chunk=layers)
    prediction = search_request.predict(candidate.config, layout)
    if search_request.fits(prediction):
        return prediction, ""
    if prediction.fits_memory:
        return None, f"{prediction.host_gib:.0f} GiB of host memory for each GPU"
    return None, f"{prediction.peak_gib:.0f} GiB on the fullest GPU"


def _refine_split(search_request: SearchRequest, original_prediction: RunPrediction) -> RunPrediction:
    """The same sizes with the split that a run without ``parallel.layers`` gets."""
    if original_prediction.layout.pp == 1:
        return original_prediction
    config, layout = original_prediction.config, original_prediction.layout
    layers = planned_layers(search_request.step_costs(config, layout))
    if layers == layout.layers_per_chunk:
        return original_prediction
    refined_layout = dataclasses.replace(layout, layers_per_chunk=layers)
    refined_prediction = search_request.predict(config, refined_layout)
    return refined_prediction if search_request.fits(refined_prediction) else original_prediction


# --- Texts --------------------------------------------------------------------------------------------------


def describe_layout(config: TrainConfig, layout: Layout, data_parallel_size: int) -> str:
    """A layout in a few words: ``tp2 pp4 vpp2 dp8, ep8, recompute full/activation``."""

    def sizes_text(*names: str) -> str:
        sizes = {name: getattr(layout, name, data_parallel_size) for name in names}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)

    dense_text = sizes_text("tp", "cp", "pp", "vpp", "dp") or "one GPU"
    if layout.key_ranks > 1:
        dense_text += f", {layout.key_ranks} ranks gather keys"
    further_parts = [sizes_text("ep", "etp")]
    recompute_config = config.recompute
    language_mode = (
        "activation"
        if recompute_config.language == "selective" and recompute_config.language_modules == ["activation"]
        else recompute_config.language
    )
    if (language_mode, recompute_config.vision) != ("none", "none"):
        inputs_text = " with inputs in host memory" if recompute_config.offload_inputs else ""
        further_parts.append(f"recompute {language_mode}/{recompute_config.vision}{inputs_text}")
    if offload_share := offloaded_fraction(config):
        further_parts.append(f"offload {offload_share:g}")
    if layout.decoupled:
        further_parts.append("tower on every rank")
    return ", ".join([dense_text, *[word for word in further_parts if word]])


def explain_slowdown(best_prediction: RunPrediction, slower_prediction: RunPrediction) -> str:
    """A text with the two largest causes that make a layout slower than the best one."""
    total_seconds = slower_prediction.step_seconds - best_prediction.step_seconds
    best_seconds = _seconds_by_cause(best_prediction)
    relevant_causes = []
    for cause, slower_seconds in _seconds_by_cause(slower_prediction).items():
        extra_seconds = slower_seconds - best_seconds[cause]
        if extra_seconds > 0.1 * max(total_seconds, 1e-9):
            relevant_causes.append((extra_seconds, cause))

    cause_texts = []
    for extra_seconds, cause in sorted(relevant_causes, reverse=True)[:2]:
        cause_texts.append(f"{cause} {1e3 * extra_seconds:+,.0f} ms")
    slowdown_text = f"{100 * total_seconds / best_prediction.step_seconds:+.1f} %"
    return f"{slowdown_text}: {', '.join(cause_texts)}" if cause_texts else slowdown_text


def _mean_stage_seconds(
    prediction: RunPrediction, run_config: TrainConfig, calibration: Calibration
) -> float:
    """Seconds of the mean stage's passes in a step."""
    layout = prediction.layout
    facts = prediction.spec, layout, prediction.data_parallel_size, prediction.row_statistics
    step_costs = StepCosts(run_config, *facts, calibration, prediction.network)
    times_by_stage = [chunk_times(step_costs, layout, stage) for stage in range(layout.pp)]
    row_seconds = sum(chunk.total_seconds for stage in times_by_stage for chunk in stage)
    return prediction.micro_batches * row_seconds / layout.pp


def _seconds_by_cause(prediction: RunPrediction) -> dict[str, float]:
    """Seconds of a step by cause, as a mean over the stages.

    A cause's share is the difference between two estimates, one without recompute or without communication.
    """
    config = prediction.config
    bare_config = dataclasses.replace(
        config, recompute=dataclasses.replace(config.recompute, language="none", vision="none")
    )
    instant_network = dataclasses.replace(
        prediction.calibration, nvlink_gb_s=1e6, network_gb_s=1e6, collective_s=0.0
    )

    all_seconds = _mean_stage_seconds(prediction, config, prediction.calibration)
    seconds_without_recompute = _mean_stage_seconds(prediction, bare_config, prediction.calibration)
    compute_seconds = _mean_stage_seconds(prediction, bare_config, instant_network)
    stage_end_seconds = max(
        stage.exposed_collective_seconds + stage.optimizer_seconds for stage in prediction.stage_plans
    )
    return {
        "pipeline waits": prediction.timeline_seconds - all_seconds,
        "recompute": all_seconds - seconds_without_recompute,
        "collectives": seconds_without_recompute - compute_seconds,
        "computing": compute_seconds,
        "gradients and update": stage_end_seconds,
        "tower on every rank": prediction.decoupled_tower_seconds,
    }


def changed_options_text(config: TrainConfig, found_prediction: RunPrediction) -> str:
    """The options that turn a run into the found one: ``--parallel.pp 2 --parallel.layers [8,20]``."""
    return " ".join(changed_sections(config, found_prediction)) or UNCHANGED_RUN_TEXT


def changed_sections(config: TrainConfig, found_prediction: RunPrediction) -> list[str]:
    """The options of each section in which a found run differs from a run."""
    section_texts = []
    found_config = with_split(found_prediction.config, found_prediction.layout)
    for section_name in ("parallel", "recompute", "optimizer", "vision"):
        section_before = getattr(config, section_name, None)
        section_after = getattr(found_config, section_name, None)
        if section_before is not None and section_after is not None and section_before != section_after:
            section_texts.append(section_option_text(section_name, section_before, section_after))
    return section_texts


def section_option_text(section_name: str, section_before: Any, section_after: Any) -> str:
    """``--section.field value`` for the fields of a section that differ."""
    names = [field.name for field in dataclasses.fields(section_after)]
    changed_names = [name for name in names if getattr(section_after, name) != getattr(section_before, name)]
    return " ".join(
        f"--{section_name}.{name} {_command_line_value(getattr(section_after, name))}"
        for name in changed_names
    )


def _command_line_value(option_value: Any) -> str:
    """A value as it is written on a command line."""
    if option_value is None or isinstance(option_value, bool):
        return {None: "null", True: "true", False: "false"}[option_value]
    return str(option_value).replace(" ", "").replace("'", "")


def search_fastest_fit(search_request: SearchRequest) -> RunPrediction | None:
    """The fastest layout that a short search finds; None if no layout fits or none is possible."""
    try:
        search_result = search_layouts(
            dataclasses.replace(search_request, result_count=1, max_tried_layouts=MAX_TRIED_FOR_ADVICE)
        )
    except (UserError, ValueError):
        return None
    return search_result.fitting_layouts[0] if search_result.fitting_layouts else None
