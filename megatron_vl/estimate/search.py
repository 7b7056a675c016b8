"""Searches the layouts of a run for the fastest ones that fit.

All sizes of TP, PP, VPP, EP and ETP that the model and the number of GPUs allow, and both placements of the
tower, are taken in the order of their step without recomputation and offload. Both only make a step longer,
so each is tried with the cheapest of them that fits, and the search ends at sizes whose step is longer even
without.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_vl.config import ParallelConfig, RecomputeConfig, RunConfigError, TrainConfig
from megatron_vl.config.checks import check_field_ranges, check_sizes
from megatron_vl.estimate.gpus import Gpu
from megatron_vl.estimate.memory_check import with_offload_fraction
from megatron_vl.estimate.parameters import offloaded_fraction
from megatron_vl.estimate.rows import assumed_rows, executed_flops
from megatron_vl.estimate.split import balanced_layout, planned_layout
from megatron_vl.estimate.step import GPUS_PER_NODE, RunPrediction
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.spec.tensors import LayoutError

LARGEST_TP, LARGEST_PP, LARGEST_VPP, LARGEST_EP = GPUS_PER_NODE, 64, 4, 64
NARROWEST_EXPERT_WIDTH = 768
"""Experts are not cut into narrower matrices, because that costs more time than it saves memory."""
RECOMPUTE_LADDER: tuple[dict[str, Any], ...] = (
    {"language": "none", "vision": "none"},
    {"language": "selective", "language_modules": ["activation"], "vision": "activation"},
    {"language": "selective", "language_modules": ["activation"], "vision": "full"},
    {"language": "full", "vision": "activation", "keep": ["attention", "experts"]},
    {"language": "full", "vision": "activation", "keep": ["attention"]},
    {"language": "full", "vision": "activation"},
    {"language": "full", "vision": "full"},
    {"language": "full", "vision": "full", "offload_inputs": True},
)
"""Recompute settings, the cheapest first. What is left out has its default."""
OFFLOAD_SHARES = 0.0, 0.5, 1.0


@dataclass(frozen=True)
class SearchRequest:
    config: TrainConfig
    spec: ModelSpec
    world_size: int
    gpu: Gpu
    host_gib: float = math.inf
    """GiB of host memory for each GPU."""
    result_count: int = 8

    def fits(self, prediction: RunPrediction) -> bool:
        return prediction.fits_memory and prediction.host_gib <= self.host_gib

    @functools.cached_property
    def offload_shares(self) -> list[float]:
        """The shares of the optimizer's state in host memory to try, the least first."""
        own_share = offloaded_fraction(self.config)
        return sorted({own_share, *(share for share in OFFLOAD_SHARES if share > own_share)})

    @functools.cached_property
    def recomputes(self) -> tuple[list[RecomputeConfig], list[RecomputeConfig]]:
        """The recompute settings that a run can have, the one that needs least memory last: with ``etp`` 1,
        and with more."""
        can_keep = self.config.fp8.recipe == "none" and self.gpu.is_hopper_or_later
        ladders: tuple[list[RecomputeConfig], list[RecomputeConfig]] = [], []
        for ladder, has_no_experts in zip(ladders, (self.spec.language.moe is None, True), strict=True):
            for recompute_fields in RECOMPUTE_LADDER:
                fields: dict[str, Any] = {"offload_inputs": False, "keep": []} | recompute_fields
                if fields["keep"] and (not can_keep or "experts" in fields["keep"] and has_no_experts):
                    continue  # it would keep less than this
                ladder.append(dataclasses.replace(self.config.recompute, **fields))
        return ladders


def search_layouts(request: SearchRequest) -> list[RunPrediction]:
    """The fastest layouts that fit, fastest first; none if none fits.

    Raises:
        RunConfigError: no combination of sizes is possible at all, for instance because
            ``global_batch_size`` has no divisor in common with the number of GPUs.
    """
    found: list[RunPrediction] = []
    for group in sorted(_size_groups(request), key=_sort_key):
        slowest = found[-1] if len(found) == request.result_count else None
        if slowest is not None and _sort_key(group) > _sort_key(slowest):
            break
        if (prediction := _cheapest_fit(request, group, slowest)) is not None:
            found = sorted([*found, prediction], key=_sort_key)[: request.result_count]
    return found


def smallest_layout(request: SearchRequest) -> RunPrediction:
    """The one that needs least memory. It raises the error of :func:`search_layouts`."""
    smallest = (_smallest_variant(request, group) for group in _size_groups(request))
    return min(smallest, key=lambda prediction: prediction.peak_gib)


def _sort_key(time: RunPrediction) -> tuple:
    """The order of layouts: the fastest first, and of equally fast ones the simplest."""
    layout = time.layout
    return round(time.step_seconds, 4), layout.pp * layout.vpp, layout.tp, layout.ep, layout.etp


def _size_groups(request: SearchRequest) -> list[RunPrediction]:
    """The step of all possible sizes and placements, without recomputation and with the least offload."""
    groups, spec, rows = [], request.spec, assumed_rows(request.config, request.spec)
    refusal: Exception | None = None
    run = with_offload_fraction(request.config, request.offload_shares[0])
    run = dataclasses.replace(run, recompute=request.recomputes[0][0])
    check_field_ranges(run)
    visions = [dataclasses.replace(run.vision, placement=place) for place in ("first_stage", "decoupled")]
    for parallel in _parallel_configs(request):
        config = dataclasses.replace(run, parallel=parallel)
        try:
            dp = check_sizes(config, request.world_size)
            # On one rank, there is nothing to share.
            for vision in visions if parallel.replica_ranks > 1 else visions[:1]:
                placed = dataclasses.replace(config, vision=vision)
                flops = executed_flops(placed, spec, rows)
                layout = planned_layout(placed, spec)
                groups.append(RunPrediction(placed, spec, layout, dp, request.gpu, rows, flops))
        except (RunConfigError, LayoutError) as error:
            refusal = refusal or error
    if not groups:
        raise RunConfigError(f"no layout of {request.world_size} GPUs is possible: {refusal}")
    return groups


def _cheapest_fit(
    request: SearchRequest, group: RunPrediction, slowest: RunPrediction | None
) -> RunPrediction | None:
    """The fastest run with these sizes that fits and is no slower than ``slowest``."""
    if not _smallest_variant(request, group).first_stages_fit(1):
        return None
    best: RunPrediction | None = None
    best_key = math.inf, math.inf
    for recompute in request.recomputes[group.layout.etp > 1]:
        without = _with_recompute(group, recompute)
        for share in request.offload_shares:  # each makes a step longer
            run = _with_share(without, share)
            # Of equally fast ones, that with less offload comes first.
            key = round(run.step_seconds, 4), share
            if key >= best_key or slowest is not None and run.step_seconds > slowest.step_seconds:
                break
            if run is without and not _with_share(run, request.offload_shares[-1]).fits_memory:
                break
            if request.fits(run):
                best, best_key = run, key
                break
    return best


def _with_share(run: RunPrediction, offload_share: float) -> RunPrediction:
    if offload_share == offloaded_fraction(run.config):
        return run
    return dataclasses.replace(run, config=with_offload_fraction(run.config, offload_share))


def _smallest_variant(request: SearchRequest, group: RunPrediction) -> RunPrediction:
    run = _with_recompute(group, request.recomputes[group.layout.etp > 1][-1])
    return _with_share(run, request.offload_shares[-1])


def _with_recompute(group: RunPrediction, recompute: RecomputeConfig) -> RunPrediction:
    if recompute == group.config.recompute:
        return group
    config = dataclasses.replace(group.config, recompute=recompute)
    flops = executed_flops(config, group.spec, group.rows)
    return dataclasses.replace(group, config=config, layout=balanced_layout(group.layout, flops), flops=flops)


def _parallel_configs(request: SearchRequest) -> Iterator[ParallelConfig]:
    """The ``parallel`` sections to try. Some of them are impossible for other fields of the run."""
    parallel, language, world_size = request.config.parallel, request.spec.language, request.world_size
    moe, largest_pp = language.moe, min(LARGEST_PP, language.num_layers, world_size)
    for tp, pp, ep in itertools.product(
        _powers_of_two(min(LARGEST_TP, world_size)),
        range(1, largest_pp + 1),
        _powers_of_two(min(LARGEST_EP, world_size)) if moe else [1],
    ):
        if world_size % (tp * pp) or world_size // pp % ep:
            continue
        has_wide_experts = moe is not None and moe.ffn_hidden_size >= NARROWEST_EXPERT_WIDTH * tp
        expert_tensor_sizes = [1, tp] if has_wide_experts and tp > 1 else [1]
        largest_vpp = min(LARGEST_VPP, language.num_layers // pp) if pp > 1 else 1
        for vpp, etp in itertools.product(_powers_of_two(largest_vpp), expert_tensor_sizes):
            sizes: dict[str, Any] = {"tp": tp, "pp": pp, "vpp": vpp, "ep": ep, "etp": etp, "layers": None}
            yield dataclasses.replace(parallel, **sizes, sequence_parallel=tp > 1)


def _powers_of_two(largest: int) -> list[int]:
    return [2**i for i in range(largest.bit_length()) if 2**i <= largest]


def describe_layout(config: TrainConfig, layout: Layout, dp: int) -> str:
    """A layout in a few words: ``tp2 pp4 vpp2 dp8, ep8, recompute full/activation``."""

    def sizes_text(*names: str) -> str:
        sizes = {name: getattr(layout, name, dp) for name in names}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)

    dense_text = sizes_text("tp", "cp", "pp", "vpp", "dp") or "one GPU"
    further_parts = [sizes_text("ep", "etp")]
    recompute, language_mode = config.recompute, config.recompute.language
    if language_mode == "selective" and recompute.language_modules == ["activation"]:
        language_mode = "activation"  # type: ignore[assignment]
    if (language_mode, recompute.vision) != ("none", "none"):
        inputs_text = f" but {' and '.join(recompute.keep)}" if recompute.keep else ""
        inputs_text += " with inputs in host memory" if recompute.offload_inputs else ""
        further_parts.append(f"recompute {language_mode}/{recompute.vision}{inputs_text}")
    if offload_share := offloaded_fraction(config):
        further_parts.append(f"offload {offload_share:g}")
    if layout.decoupled:
        further_parts.append("tower on every rank")
    return ", ".join([dense_text, *[word for word in further_parts if word]])
