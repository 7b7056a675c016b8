"""``megatron-vl plan``: lists the layouts of a run that fit."""

import contextlib
import dataclasses
import json
import math
from typing import Any

from megatron_vl.config import ParallelConfig, RunConfigError, TrainConfig, parse_config
from megatron_vl.estimate.flops import RowSizes
from megatron_vl.estimate.gpus import find_gpu, known_gpus, local_gpu
from megatron_vl.estimate.memory import GPU_MEMORY_PARTS
from megatron_vl.estimate.memory_check import with_offload_fraction
from megatron_vl.estimate.search import SearchRequest, describe_layout, search_layouts, smallest_layout
from megatron_vl.estimate.split import run_layout
from megatron_vl.estimate.step import GPUS_PER_NODE, RunPrediction, predict_layout
from megatron_vl.spec.families import run_spec
from megatron_vl.system import host_memory
from megatron_vl.system.errors import UsageError, UserError
from megatron_vl.training.lora import with_start_lora
from megatron_vl.training.resolve import find_source_checkpoint

from .options import PlanOptions
from .print_plan import Plan, print_plan


def plan(options: PlanOptions) -> int:
    """Returns 0, or 1 if the run's own layout, or every layout, does not fit."""
    found = make_plan(options)
    if options.json:
        print(json.dumps(plan_as_json(found), indent=2))
    else:
        print_plan(found)
    return 0 if found.request.fits(found.chosen) else 1


def make_plan(options: PlanOptions) -> Plan:
    """Predicts the layout that the run sets, and finds those that fit.

    Raises:
        UsageError: no model is given.
        UserError: no layout fits, the given one is impossible, or a run could not start from the adapters in
            ``lora.adapter``. The message says why.
    """
    config = _read_config(options)
    spec = run_spec(config)
    # Adapters that are there already decide their own rank and targets, as at the start of a run.
    if config.lora.adapter:
        config = with_start_lora(config, spec, find_source_checkpoint(config))
    gpu = find_gpu(options.gpu) if options.gpu else local_gpu() or find_gpu()
    # Of a GPU that only this machine knows (an H20, an RTX 5090), the generation is not known.
    if config.fp8.recipe != "none" and gpu.name in known_gpus() and not gpu.is_hopper_or_later:
        raise UserError(
            f"fp8.recipe {config.fp8.recipe} needs Hopper or later, which {gpu.name} is not; set it to none"
        )
    request = SearchRequest(config, spec, options.gpus, gpu, _host_gib(options))
    own = None
    if _sets_layout(config.parallel, options.fields):
        own = predict_layout(config, spec, options.gpus, run_layout(config, spec, options.gpus), gpu)
        if not request.fits(own):  # the share that it offloads may be the reason
            request = dataclasses.replace(request, config=with_offload_fraction(config, 0.0))
    with contextlib.suppress(RunConfigError) if own else contextlib.nullcontext():
        if not (fitting := search_layouts(request)) and own is None:
            raise UserError(_nothing_fits_message(smallest_layout(request), request))
        return Plan(dataclasses.replace(request, config=config), own, fitting)
    return Plan(request, own, [])


def _read_config(options: PlanOptions) -> TrainConfig:
    try:
        config = parse_config([*options.fields, *(["--model.hf", options.hf] if options.hf else [])])
    except RunConfigError as error:
        raise UsageError(f"{error}; megatron-vl plan --help explains every field") from error
    if not config.model.hf:
        raise UsageError("no model is given: megatron-vl plan --hf HF_DIR, or model.hf of a run")
    sets_batch = any("global_batch_size" in word or word == "--config" for word in options.fields)
    # The field's default is for one GPU.
    is_small = not sets_batch and config.global_batch_size < options.gpus
    return dataclasses.replace(config, global_batch_size=8 * options.gpus) if is_small else config


def _host_gib(options: PlanOptions) -> float:
    """GiB of host memory for each GPU of a node; infinite if it is not known."""
    node_gib: float | None = options.host_memory
    if node_gib is None and not options.gpu and local_gpu() is not None:
        node_gib = host_memory.available_bytes() / host_memory.GIB
    return math.inf if node_gib is None else node_gib / min(options.gpus, GPUS_PER_NODE)


def _sets_layout(parallel_config: ParallelConfig, given_words: list[str]) -> bool:
    """Whether a run sets a layout. A default value counts if it stands on the command line."""
    given = {word.partition("=")[0] for word in given_words}
    return any(
        value != "auto" and (f"--parallel.{name}" in given or value != getattr(ParallelConfig(), name))
        for name, value in vars(parallel_config).items()
        if name not in ("sequence_parallel", "distributed_optimizer")
    )


def _nothing_fits_message(smallest: RunPrediction, request: SearchRequest) -> str:
    fullest = max(smallest.stages, key=lambda stage: stage.total_bytes)
    part = max(GPU_MEMORY_PARTS, key=lambda part: getattr(fullest, part))
    adapters_help = part in ("weights", "gradients", "optimizer") and not request.config.lora.rank
    remedy = "train adapters (--lora.rank 16)" if adapters_help else "lower data.seq_len or data.max_patches"
    return (
        f"no layout of {request.world_size} {request.gpu.name} fits {request.spec.family} with rows of"
        f" {request.config.data.seq_len} tokens: the smallest,"
        f" {describe_layout(smallest.config, smallest.layout, smallest.dp)}, takes"
        f" {smallest.peak_gib:.0f} of {request.gpu.memory_gib:.0f} GiB, of which {part}"
        f" {fullest.as_json()[part]:.0f}: take more GPUs, or {remedy}"
    )


def plan_as_json(found: Plan) -> dict[str, Any]:
    request = found.request
    return {
        "family": request.spec.family,
        "gpus": request.world_size,
        "gpu": request.gpu.name,
        "measured": request.gpu.is_measured,
        "seq_len": request.config.data.seq_len,
        "global_batch_size": request.config.global_batch_size,
        "rows": {name: getattr(found.chosen.rows, name) for name in RowSizes.__annotations__},
        "own": None if found.own is None else _prediction_facts(found.own, request),
        "layouts": [_prediction_facts(prediction, request) for prediction in found.fitting],
    }


def _prediction_facts(prediction: RunPrediction, request: SearchRequest) -> dict[str, Any]:
    return {
        "text": describe_layout(prediction.config, prediction.layout, prediction.dp),
        **prediction.as_json(),
        "fits": request.fits(prediction),
        "recompute": dataclasses.asdict(prediction.config.recompute),
    }
