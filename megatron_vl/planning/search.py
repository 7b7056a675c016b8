"""Searches the layouts of a run for the fastest that fits.

All sizes of TP, PP, VPP, EP and ETP that the model and the number of GPUs allow are combined with a ladder of
recompute (and offload). They are taken in the order of a quick estimate of their time; for each, memory is
computed, and the split improved where a balanced one does not fit, until enough have been found. Sizes whose
shortest possible step is longer than what has been found are not combined with anything.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_vl.config import RunConfigError, TrainConfig, validate
from megatron_vl.errors import UserError
from megatron_vl.planning.calibration import Calibration
from megatron_vl.planning.cost import Costs, Network
from megatron_vl.planning.memory import GIB, RESERVE_GIB, offloaded, parameter_bytes, stage_memories
from megatron_vl.planning.predict import Prediction, besides, chunk_times, predict, step_ends
from megatron_vl.planning.rows import RowStatistics
from megatron_vl.planning.split import balanced_layers, layout_of_sizes, planned_layers, quick_seconds
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.spec.tensors import LayoutError

LARGEST_TP = 8
LARGEST_PP = 64
LARGEST_VPP = 4
LARGEST_EP = 64
NARROWEST_EXPERT = 768
"""Experts are not cut into narrower matrices, which costs more than it saves."""
LADDER: tuple[dict[str, Any], ...] = (
    {"language": "none", "vision": "none"},
    {"language": "selective", "language_modules": ["activation"], "vision": "activation"},
    {"language": "selective", "language_modules": ["activation"], "vision": "full"},
    {"language": "full", "vision": "activation"},
    {"language": "full", "vision": "full"},
)
"""Recompute in the order of what it costs."""
MARGIN = 1.1
"""Layouts whose quick estimate is so many times the best found are not looked at any more."""
LEAST_OFFLOAD_GIB = 4.0
"""Offload that frees less of a GPU is not looked at: with many replicas, each owns little state."""
TRIED = 40
"""Most layouts whose memory is computed after the first that fits, for each layout to return."""
AS_IT_IS = "the run as it is"
"""What stands for the options if none is needed."""


@dataclass(frozen=True)
class Wanted:
    """What the search may choose, and with what it reckons."""

    config: TrainConfig
    spec: ModelSpec
    world: int
    calibration: Calibration
    rows: RowStatistics
    network: Network = Network()
    patches: int | None = None
    """Patches of the fullest row, for memory; None: as many as a row can hold."""
    keep: int = 8
    """Number of layouts to return."""
    same_sizes: bool = False
    """Keep TP, PP, VPP, EP and ETP of the run."""


@dataclass(frozen=True)
class Lost:
    """A layout that was not chosen."""

    text: str
    why: str


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    best: tuple[Prediction, ...]
    """Layouts that fit, fastest first."""
    reasons: tuple[str, ...]
    """Of each of them but the first, why it is slower."""
    lost: tuple[Lost, ...]
    """Layouts that would be faster and do not fit, fastest first."""
    combinations: int
    """Number of combinations of sizes, recompute and offload."""


@dataclass(frozen=True)
class _Group:
    """Parallel sizes and the tower's place: the combinations that differ in recompute and offload alone."""

    seconds: float
    """No combination has a shorter step by the quick estimate."""
    number: int
    size: int
    """Number of combinations."""
    config: TrainConfig


@dataclass(frozen=True)
class _Candidate:
    """A combination with its quick estimate."""

    seconds: float
    number: int
    config: TrainConfig
    layout: Layout
    costs: Costs


def search(wanted: Wanted) -> Found:
    """Finds the fastest layouts that fit.

    Raises:
        RunConfigError: no combination of sizes is possible at all, for instance because
            ``global_batch_size`` has no divisor in common with the number of GPUs.
    """
    if wanted.config.optimizer.offload_fraction == "auto":
        optimizer = dataclasses.replace(wanted.config.optimizer, offload_fraction=0.0)
        wanted = dataclasses.replace(wanted, config=dataclasses.replace(wanted.config, optimizer=optimizer))

    groups = list(_groups(wanted))
    queue: list[tuple[float, int, _Group | _Candidate]] = [(g.seconds, g.number, g) for g in groups]

    if not groups:
        raise RunConfigError(
            f"no layout of {wanted.world} GPUs is possible with global_batch_size"
            f" {wanted.config.global_batch_size}: the data-parallel size must divide it"
        )

    heapq.heapify(queue)
    found: dict[tuple, Prediction] = {}
    lost: dict[tuple, Lost] = {}
    tried = 0

    while queue:
        _, _, candidate = heapq.heappop(queue)
        enough = MARGIN * _slowest(found, wanted.keep) if found else math.inf
        if candidate.seconds > enough or tried > TRIED * wanted.keep:
            break

        if isinstance(candidate, _Group):
            # None of a group's combinations is faster than the group, so they are still taken in order.
            for one in _combinations(wanted, candidate):
                heapq.heappush(queue, (one.seconds, one.number, one))
            continue

        key = _sizes(candidate)
        # More recompute under the same sizes is slower: one that fits is enough.
        if key in found:
            continue
        tried += bool(found)
        prediction, lacking = _judge(wanted, candidate)

        if prediction is not None:
            found[key] = prediction
        elif key not in lost:
            text = describe(candidate.config, candidate.layout, candidate.costs.dp)
            lost[key] = Lost(text, f"{lacking:.0f} GiB on the fullest GPU")

    best = sorted(found.values(), key=_rank)[: wanted.keep]
    best = sorted((_refined(wanted, prediction) for prediction in best), key=_rank)
    reasons = tuple(why_slower(best[0], other) for other in best[1:])
    combinations = sum(group.size for group in groups)

    return Found(tuple(best), reasons, tuple(lost.values())[: wanted.keep], combinations)


def _slowest(found: dict[tuple, Prediction], keep: int) -> float:
    """The step of the last layout that would be returned; infinite while there are too few."""
    steps = sorted(prediction.step for prediction in found.values())
    return steps[keep - 1] if len(steps) >= keep else 2 * steps[0]


def _rank(prediction: Prediction) -> tuple:
    """Fastest first; of equally fast ones, the simplest."""
    layout = prediction.layout
    return round(prediction.step, 4), layout.pp * layout.vpp, layout.tp, layout.ep, layout.etp


def _sizes(candidate: _Candidate) -> tuple:
    layout = candidate.layout
    share = offloaded(candidate.config)
    return layout.tp, layout.pp, layout.vpp, layout.ep, layout.etp, share, layout.decoupled


# --- Combinations -------------------------------------------------------------------------------------------


def _groups(wanted: Wanted) -> Iterator[_Group]:
    """All parallel sizes that the fields of a run allow, with each place of the tower."""
    size = len(LADDER) * (1 + len(offloads(wanted.config)))
    number = 0
    for parallel in _parallels(wanted):
        base = dataclasses.replace(wanted.config, parallel=parallel)
        try:
            validate(base, wanted.world)
        except RunConfigError:
            continue
        for placed in _placements(base):
            number += size + 1
            yield _Group(shortest_step(wanted, placed), number, size, placed)


def shortest_step(wanted: Wanted, config: TrainConfig) -> float:
    """Less than any quick estimate of these parallel sizes: the stages share all work without a rest, nothing
    is computed twice, and all communication at the end of the step hides. Infinite if they are impossible."""
    bare = dataclasses.replace(wanted.config.recompute, **LADDER[0])
    config = dataclasses.replace(config, recompute=bare)
    try:
        layout = layout_of_sizes(config, wanted.spec)
    except LayoutError:
        return math.inf
    dp = wanted.world // layout.replica_ranks
    costs = Costs(config, wanted.spec, layout, dp, wanted.rows, wanted.calibration, wanted.network)
    micro_batches = config.global_batch_size // dp
    ends = [costs.embedding(), costs.head()] + ([] if layout.decoupled else [costs.tower()])
    waits = 2 * wanted.calibration.pass_s * layout.vpp * (layout.pp > 1)
    layers = costs.decoder_layers(range(wanted.spec.language.num_layers)).both
    mean = (layers + sum(end.both for end in ends)) / layout.pp
    alone = max(end.both for end in ends)  # one stage holds it
    return micro_batches * (max(mean, alone) + waits) + besides(costs, micro_batches)


def _combinations(wanted: Wanted, group: _Group) -> Iterator[_Candidate]:
    """The combinations of a group that the model allows and whose states fit."""
    configs = []
    for recompute in LADDER:
        r = dataclasses.replace(wanted.config.recompute, **recompute)
        config = dataclasses.replace(group.config, recompute=r)
        configs.append(config)
        configs += [dataclasses.replace(config, optimizer=optimizer) for optimizer in offloads(config)]
    for number, config in enumerate(configs, group.number + 1):
        candidate = _candidate(wanted, number, config)
        if candidate is not None:
            yield candidate


def _parallels(wanted: Wanted) -> Iterator[Any]:
    p, m, world = wanted.config.parallel, wanted.spec.language, wanted.world
    if wanted.same_sizes:
        yield dataclasses.replace(p, layers=None)
        return

    tps = [n for n in _powers(min(LARGEST_TP, wanted.network.gpus_per_node, world)) if world % n == 0]
    pps = [n for n in range(1, min(LARGEST_PP, m.num_layers, world) + 1) if world % n == 0]
    eps = _powers(min(LARGEST_EP, world)) if m.moe else [1]

    for tp, pp, ep in itertools.product(tps, pps, eps):
        wide = m.moe is not None and m.moe.ffn_hidden_size >= NARROWEST_EXPERT * tp
        etps = [1, tp] if wide and tp > 1 else [1]
        vpps = [n for n in range(1, LARGEST_VPP + 1) if n == 1 or pp > 1 and pp * n <= m.num_layers]
        for vpp, etp in itertools.product(vpps, etps):
            sizes: dict[str, Any] = {"tp": tp, "pp": pp, "vpp": vpp, "ep": ep, "etp": etp}
            overlap = p.tp_comm_overlap and tp > 1
            yield dataclasses.replace(
                p, **sizes, layers=None, sequence_parallel=tp > 1, tp_comm_overlap=overlap
            )


def _powers(largest: int) -> list[int]:
    return [2**i for i in range(largest.bit_length()) if 2**i <= largest]


def _placements(config: TrainConfig) -> list[TrainConfig]:
    """The run with the vision tower on the first stage and on every rank, where both make a difference."""
    alone = config.parallel.replica_ranks == 1
    names: list[Any] = ["first_stage"] if alone or config.fp8.vision else ["first_stage", "decoupled"]
    return [
        dataclasses.replace(config, vision=dataclasses.replace(config.vision, placement=name))
        for name in names
    ]


def offloads(config: TrainConfig) -> list[Any]:
    """The optimizer's section with more of its state in host memory."""
    optimizer = config.optimizer
    shares = [share for share in (0.5, 1.0) if share > offloaded(config)]
    return [dataclasses.replace(optimizer, offload_fraction=share) for share in shares]


def _candidate(wanted: Wanted, number: int, config: TrainConfig) -> _Candidate | None:
    """A combination with its quick estimate; None if the model does not allow it or its states do not fit."""
    spec, p = wanted.spec, config.parallel
    dp = wanted.world // p.replica_ranks
    try:
        layout = layout_of_sizes(config, spec)
    except LayoutError:
        return None

    # The parameters alone, evenly spread, are the least that any split needs.
    states = parameter_bytes(config, spec, layout, dp) / p.pp / GIB
    if states + RESERVE_GIB > wanted.calibration.memory_gib:
        return None
    if offloaded(config) > offloaded(wanted.config):
        there = parameter_bytes(wanted_offload(wanted, config), spec, layout, dp) / p.pp / GIB
        if there - states < LEAST_OFFLOAD_GIB:
            return None

    costs = Costs(config, spec, layout, dp, wanted.rows, wanted.calibration, wanted.network)
    layout = dataclasses.replace(layout, layers=balanced_layers(costs))
    times = [chunk_times(costs, layout, stage) for stage in range(p.pp)]
    micro_batches = config.global_batch_size // dp
    seconds = quick_seconds(times, micro_batches, costs.message()) + step_ends(costs, layout, times)

    return _Candidate(seconds, number, config, layout, costs)


def wanted_offload(wanted: Wanted, config: TrainConfig) -> TrainConfig:
    """A combination with no more state in host memory than the run asks for."""
    return dataclasses.replace(config, optimizer=wanted.config.optimizer)


def _judge(wanted: Wanted, candidate: _Candidate) -> tuple[Prediction | None, float]:
    """The prediction of a combination that fits; otherwise None and the GiB that it would take."""
    config, spec, layout, costs = candidate.config, wanted.spec, candidate.layout, candidate.costs
    memories = stage_memories(config, spec, layout, costs.dp, wanted.patches)
    limit = wanted.calibration.memory_gib - RESERVE_GIB
    mean = sum(memory.total for memory in memories) / len(memories) / GIB
    most = max(memory.total for memory in memories) / GIB
    if most > limit and (layout.pp == 1 or mean > limit):
        return None, most
    if most > limit:
        layout = dataclasses.replace(layout, layers=planned_layers(costs, patches=wanted.patches, quick=True))
    prediction = _predict(wanted, config, layout)
    return (prediction, 0.0) if prediction.fits else (None, prediction.peak_gib)


def _predict(wanted: Wanted, config: TrainConfig, layout: Layout) -> Prediction:
    return predict(
        config,
        wanted.spec,
        wanted.world,
        layout,
        rows=wanted.rows,
        calibration=wanted.calibration,
        network=wanted.network,
        patches=wanted.patches,
    )


def _refined(wanted: Wanted, found: Prediction) -> Prediction:
    """The same sizes with the split that a run without ``parallel.layers`` gets."""
    if found.layout.pp == 1:
        return found
    costs = Costs(
        found.config, found.spec, found.layout, found.dp, found.rows, found.calibration, found.network
    )
    layers = planned_layers(costs, patches=wanted.patches)
    if layers == found.layout.layers:
        return found
    other = _predict(wanted, found.config, dataclasses.replace(found.layout, layers=layers))
    return other if other.fits else found


# --- Words --------------------------------------------------------------------------------------------------


def describe(config: TrainConfig, layout: Layout, dp: int) -> str:
    """A layout in a few words: ``tp2 pp4 vpp2 dp8, ep8, recompute full/activation``."""
    sizes = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "vpp": layout.vpp, "dp": dp}
    words = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one GPU"
    experts = {"ep": layout.ep, "etp": layout.etp}
    more = [" ".join(f"{name}{size}" for name, size in experts.items() if size > 1)]
    r = config.recompute
    language = (
        "activation" if r.language == "selective" and r.language_modules == ["activation"] else r.language
    )
    if (language, r.vision) != ("none", "none"):
        more.append(f"recompute {language}/{r.vision}")
    if share := offloaded(config):
        more.append(f"offload {share:g}")
    if layout.decoupled:
        more.append("tower on every rank")
    return ", ".join([words, *[word for word in more if word]])


def why_slower(best: Prediction, other: Prediction) -> str:
    """The causes that make a layout slower than the best, the largest first."""
    parts = {
        name: theirs - ours
        for (name, theirs), ours in zip(_parts(other).items(), _parts(best).values(), strict=True)
    }
    total = other.step - best.step
    named = [(seconds, name) for name, seconds in parts.items() if seconds > 0.1 * max(total, 1e-9)]
    causes = [f"{name} {1e3 * seconds:+,.0f} ms" for seconds, name in sorted(named, reverse=True)[:2]]
    return f"{100 * total / best.step:+.1f} %" + (f": {', '.join(causes)}" if causes else "")


def _parts(prediction: Prediction) -> dict[str, float]:
    """Seconds of a step by cause, of the mean stage."""
    config = prediction.config
    stages = prediction.stages
    bare_config = dataclasses.replace(
        config, recompute=dataclasses.replace(config.recompute, language="none", vision="none")
    )
    fast = dataclasses.replace(prediction.calibration, nvlink_gb_s=1e6, network_gb_s=1e6, collective_s=0.0)

    def computing(run: TrainConfig, calibration: Calibration) -> float:
        layout = prediction.layout
        costs = Costs(
            run, prediction.spec, layout, prediction.dp, prediction.rows, calibration, prediction.network
        )
        times = [chunk_times(costs, layout, stage) for stage in range(layout.pp)]
        row = sum(chunk.both for stage in times for chunk in stage)
        return prediction.micro_batches * row / layout.pp

    whole = computing(config, prediction.calibration)
    bare = computing(bare_config, prediction.calibration)
    silent = computing(bare_config, fast)
    ends = max(stage.exposed + stage.update for stage in stages)
    return {
        "pipeline waits": prediction.pipeline - whole,
        "recompute": whole - bare,
        "collectives": bare - silent,
        "computing": silent,
        "gradients and update": ends,
        "tower on every rank": prediction.ahead,
    }


def options_of(config: TrainConfig, found: Prediction) -> str:
    """The options that turn a run into a found one: ``--parallel.pp 2 --parallel.layers [8,20]``."""
    return " ".join(changed_sections(config, found)) or AS_IT_IS


def changed_sections(config: TrainConfig, found: Prediction) -> list[str]:
    """The options of each section in which a found run differs from a run."""
    words = []
    after = with_split(found.config, found.layout)
    for section in ("parallel", "recompute", "optimizer", "vision"):
        ours, theirs = getattr(config, section, None), getattr(after, section, None)
        if ours is not None and theirs is not None and ours != theirs:
            words.append(changed_options(section, ours, theirs))
    return words


def changed_options(section: str, before: Any, after: Any) -> str:
    """``--section.field value`` for the fields of a section that differ."""
    names = [field.name for field in dataclasses.fields(after)]
    changed = [name for name in names if getattr(after, name) != getattr(before, name)]
    return " ".join(f"--{section}.{name} {_word(getattr(after, name))}" for name in changed)


def _word(value: Any) -> str:
    """A value as it is written on a command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value).replace(" ", "").replace("'", "")


def with_split(config: TrainConfig, layout: Layout) -> TrainConfig:
    """The run with its split written out."""
    layers = list(layout.layers) if layout.pp > 1 else None
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, layers=layers))


def what_fits(wanted: Wanted, *, same_sizes: bool = False) -> Prediction | None:
    """The fastest layout that fits; None if there is none."""
    try:
        found = search(dataclasses.replace(wanted, keep=1, same_sizes=same_sizes))
    except (UserError, ValueError):
        return None
    return found.best[0] if found.best else None
