"""Shows a run without a GPU: its layout, its schedule, the predicted memory and speed, and how long a pass
over its data is, if they are there. Without them, torch is not imported."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from megatron_vl.config import TrainConfig
from megatron_vl.errors import UserError
from megatron_vl.planning.gpus import calibration_for
from megatron_vl.planning.memory import GPU_GIB, RESERVE_GIB, peak_gib, warm_up_passes
from megatron_vl.planning.offload import least_share
from megatron_vl.planning.predict import Prediction, predict
from megatron_vl.planning.run import rates_apply
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.training.resolve import resolve
from megatron_vl.words import counted
from toolkit.doctor.machine import list_gpus
from toolkit.memory_table import WIDTH, memory_table


def show(config: TrainConfig, per_node: int | None, nnodes: int, as_json: bool) -> None:
    """Prints the plan. Raises like :func:`plan`."""
    world = nnodes * (per_node or len(list_gpus()) or _least_ranks(config, nnodes))
    facts = plan(config, world)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)


def plan(config: TrainConfig, world: int) -> dict[str, Any]:
    """Layout, schedule and memory (GiB) of a run of ``world`` ranks.

    Raises:
        RunConfigError, LayoutError, ConfigError: the run is impossible; the message names the field.
    """
    run = resolve(config, world, show_only=True)
    config, spec, layout, dp = run.config, run.spec, run.layout, run.dp
    micro_batches = config.global_batch_size // dp
    rates = calibration_for(config.platform)
    gpus = {} if config.platform == "cpu" else GPU_GIB
    shares = {name: least_share(config, spec, layout, dp, gib) for name, gib in gpus.items()}
    prediction = predict(config, spec, world, layout, calibration=rates)
    stages = [stage.memory for stage in prediction.stages]
    fit = [name for name, gib in gpus.items() if peak_gib(stages) + RESERVE_GIB <= gib]

    return {
        "family": spec.family,
        "platform": config.platform,
        "ranks": world,
        "layout": {**layout.as_dict(), "dp": dp, "sequence_parallel": config.parallel.sequence_parallel},
        "stages": [_contents(spec, layout, stage) for stage in range(layout.pp)],
        "rows_per_step": config.global_batch_size,
        "tokens_per_step": config.global_batch_size * config.data.seq_len,
        "pass": _pass(config, spec),
        "schedule": _schedule(layout, micro_batches),
        "memory_gib": [stage.as_json() for stage in stages],
        "peak_gib": round(peak_gib(stages), 1),
        "fits": fit,
        "moments_dtype": config.optimizer.moments_dtype,
        "offload_fraction": config.optimizer.offload_fraction,
        "least_offload_fraction": shares,
        "host_gib_per_rank": round(max(stage.host for stage in stages) / 2**30, 1),
        "split": run.split,
        "speed": _speed(prediction) if rates_apply(config, rates) else None,
    }


def _pass(config: TrainConfig, spec: ModelSpec) -> dict[str, Any] | None:
    """Rows and steps of a pass over the data, from the stored sizes of its samples; None if the data set or
    the tokenizer is not here. This imports torch."""
    if not config.data.path or not Path(config.data.path).exists() or not Path(config.model.hf).is_dir():
        return None
    from data_tools.sources import open_encoder
    from data_tools.statistics import statistics

    try:
        found = statistics(open_encoder(config.data, spec, config.model.hf), config.model.hf)
    except (UserError, OSError, ValueError) as error:
        return {"unknown": str(error)}
    return found.one_pass(config.global_batch_size)


def _print_pass(facts: dict[str, Any]) -> None:
    """Prints how long a pass over the data is, or why that is not known."""
    if facts["pass"] is None:
        return
    if "unknown" in facts["pass"]:
        print(f"the steps of a pass over the data are not known: {facts['pass']['unknown']}")
        return
    from data_tools.statistics import pass_in_words

    print(pass_in_words(facts["pass"]))


def _least_ranks(config: TrainConfig, nnodes: int) -> int:
    """Number of ranks per node if none is given: as few as the layout needs."""
    p = config.parallel
    return max(1, -(-p.pp * math.lcm(p.tp * p.cp, p.ep * p.etp) // nnodes))


def _contents(spec: ModelSpec, layout: Layout, stage: int) -> list[str]:
    """The contents of a stage, in the order of the model."""
    found = ["vision tower"] if stage == 0 or layout.decoupled else []
    found += ["embedding"] if stage == 0 else []
    for v in range(layout.vpp):
        layers = list(layout.chunk_layers(stage, v))
        chunk = f" (chunk {v})" if layout.vpp > 1 else ""
        if layers:
            found.append(f"decoder layers {layers[0]} to {layers[-1]}{chunk}")
    if stage == layout.pp - 1:
        found.append("output layer and loss")
    return found


def _schedule(layout: Layout, micro_batches: int) -> dict[str, Any]:
    """The passes of each stage, in micro-batches (with virtual chunks: chunk-micro-batches)."""
    passes = micro_batches * layout.vpp
    warm_up = [warm_up_passes(layout.pp, layout.vpp, stage, micro_batches) for stage in range(layout.pp)]
    return {
        "kind": "interleaved 1F1B" if layout.vpp > 1 else "1F1B" if layout.pp > 1 else "no pipeline",
        "micro_batches": micro_batches,
        "warm_up": warm_up,
        "steady": [passes - first for first in warm_up],
        "idle_share": round((layout.pp - 1) / (passes + layout.pp - 1), 4),
    }


def _speed(prediction: Prediction) -> dict[str, float | str]:
    """The predicted speed with image rows."""
    return {
        "gpu": prediction.calibration.gpu,
        "rates": prediction.calibration.source,
        "step_s": round(prediction.step, 3),
        "bubble": round(prediction.bubble, 3),
        "mfu": round(prediction.mfu, 3),
        "tokens_per_second": round(prediction.tokens_per_second),
        "hours_per_billion_tokens": round(prediction.hours_per_billion_tokens, 1),
    }


SPLITS = {
    "planned": "planned, as parallel.layers is left out",
    "even": "even, as parallel.layers is left out and no rates of a CPU are known",
    "saved": "that of the checkpoint that the run resumes from",
}


def _print_offload(facts: dict[str, Any]) -> None:
    """Prints what of the optimizer is in host memory, and what would have to be for GPUs too small."""
    if facts["moments_dtype"] != "float32":
        print(f"Adam's moments: {facts['moments_dtype']}")
    if share := facts["offload_fraction"]:
        print(
            f"optimizer state in host memory: {share:.0%}, {facts['host_gib_per_rank']} GiB for each rank of"
            " the fullest stage"
        )
    for name, least in facts["least_offload_fraction"].items():
        if name not in facts["fits"] and least is not None:
            print(f"would fit {name}: --optimizer.offload_fraction {least:g}")


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console

    sizes, schedule = facts["layout"], facts["schedule"]
    experts = f", experts ep {sizes['ep']} x etp {sizes['etp']}" if sizes["ep"] * sizes["etp"] > 1 else ""
    context = f" x cp {sizes['cp']}" if "cp" in sizes else ""
    sequence = ", sequence parallel" if sizes["sequence_parallel"] else ""
    print(f"{facts['family']} on {counted(facts['ranks'], 'rank')}")
    print(
        f"layout: tp {sizes['tp']}{context} x pp {sizes['pp']} x vpp {sizes['vpp']} x dp {sizes['dp']}"
        f"{experts}{sequence}"
    )

    for stage, contents in enumerate(facts["stages"]):
        print(f"  stage {stage}: {', '.join(contents)}")

    if facts["split"] in SPLITS:
        print(f"  split {sizes['layers']}: {SPLITS[facts['split']]}")
    print(f"step: {counted(facts['rows_per_step'], 'row')}, {facts['tokens_per_step']:,} tokens")
    _print_pass(facts)
    each = f"{counted(schedule['micro_batches'], 'micro-batch')} on each data-parallel rank"
    print(f"schedule: {schedule['kind']}, {each}")
    if sizes["pp"] > 1:
        for stage, (first, steady) in enumerate(zip(schedule["warm_up"], schedule["steady"], strict=True)):
            print(f"  stage {stage}: {first} forward, {steady} x (forward, backward), {first} backward")
        speed = facts["speed"]
        estimated = f"{speed['bubble']:.1%} of the pipeline's time (estimate); " if speed else ""
        print(f"  idle: {estimated}{schedule['idle_share']:.1%} if all stages took equally long")

    table = memory_table(facts["memory_gib"], "Memory per GPU of each pipeline stage in GiB (estimate)")
    console = Console(highlight=False, file=sys.stdout)
    Console(width=max(console.width, WIDTH), highlight=False, file=sys.stdout).print(table)
    _print_fits(facts)
    if speed := facts["speed"]:
        print(
            f"estimated speed on {speed['gpu']} with image rows: {speed['step_s']:.2f} s a step,"
            f" {speed['tokens_per_second']:,} tokens/s at {speed['mfu']:.0%} MFU,"
            f" {speed['hours_per_billion_tokens']} hours per billion tokens ({speed['rates']})"
        )


def _print_fits(facts: dict[str, Any]) -> None:
    """Prints the memory of the fullest rank, and on which kinds of GPU it fits."""
    fullest = f"{facts['peak_gib']} GiB, with a row full of pictures"
    if facts["platform"] == "cpu":
        print(f"fullest rank: {fullest}; the estimate is made for GPUs")
        return
    print(f"fullest GPU: {fullest}; {RESERVE_GIB:.0f} GiB more should stay free")
    print(f"fits: {', '.join(facts['fits']) or 'none of ' + ', '.join(GPU_GIB)}")
    _print_offload(facts)
