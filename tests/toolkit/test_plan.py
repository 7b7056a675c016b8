"""Memory estimates equal measurements and Megatron-core's schedules; every shipped example can be built."""

import dataclasses
import math
from collections import Counter
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
from megatron.core.transformer.cuda_graphs import convert_schedule_table_to_order

from megatron_vl.config import ParallelConfig, TrainConfig, parse_config
from megatron_vl.estimate.memory import in_flight_states, peak_stage_gib
from megatron_vl.models.attention import choose_backend
from megatron_vl.platform import get_platform
from megatron_vl.spec.families import MoeSpec, read_spec
from megatron_vl.spec.layout import make_layout
from megatron_vl.spec.tensors import tensor_table
from tests.examples import EXAMPLES, HF_CONFIGS, read_example
from tests.support.dry_build import dry_build
from tests.support.planned import estimate_stage_memory, stage_tensors
from tests.support.ranks import call

# benchmarks/log/speed.md, 2026-11-20: Qwen2.5-VL-7B on H200, rows of 8192 tokens, before the tower had
# kernels; patches of the fullest row.
BEFORE = ["--model.attention", "reference"]
PIPELINE = "--parallel.tp 2 --parallel.pp 2 --parallel.layers [8,20] --parallel.sequence_parallel true"


@pytest.mark.parametrize(
    ("measured", "world", "options", "layers", "patches"),
    [
        (55.6, 1, "--global_batch_size 2", 4, 0),
        (25.4, 1, "--global_batch_size 2 --optimizer.offload_fraction 1", 4, 0),
        (89.0, 1, "--global_batch_size 1", 4, 23844),
        (76.0, 4, f"--global_batch_size 8 {PIPELINE}", 28, 23844),
    ],
)
def test_estimate_equals_measurements(measured, world, options, layers, patches):
    spec = read_spec(HF_CONFIGS / "Qwen2.5-VL-7B-Instruct.json").replace_layers(num_language_layers=layers)
    config = parse_config(["--data.seq_len", "8192", *BEFORE, *options.split()])
    estimated = peak_stage_gib(estimate_stage_memory(config, spec, world, patches))
    assert estimated == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("head_dim", [8, 16, 36, 40, 64, 72, 80, 96, 120, 128, 136])
def test_auto_is_estimated_as_the_backend_that_it_is(head_dim):
    spec = read_spec(HF_CONFIGS / "Qwen3-VL-8B-Instruct.json")
    vision = dataclasses.replace(spec.vision, num_heads=4, hidden_size=4 * head_dim)
    spec = dataclasses.replace(spec, vision=vision)
    for dtype in ("bfloat16", "float32"):
        about = {"head_dim": head_dim, "causal": False, "dtype": getattr(torch, dtype)}
        chosen = choose_backend("auto", platform="cuda", **about)
        auto, reference = (
            estimate_stage_memory(parse_config(["--dtype", dtype, "--model.attention", name]), spec, 1)[0]
            for name in ("auto", "reference")
        )
        assert (auto.vision < reference.vision) == (chosen == "triton")
        assert auto.vision <= reference.vision


SCHEDULES = [(2, 1, 6), (4, 1, 3), (4, 1, 9), (2, 2, 4), (4, 2, 8), (4, 3, 12), (2, 4, 2)]


@pytest.mark.ranks
@pytest.mark.parametrize(("pp", "vpp", "micro_batches"), SCHEDULES)
def test_schedule_is_that_of_megatron_core(pp, vpp, micro_batches):
    for stage, order in enumerate(core_says(True)["orders"][SCHEDULES.index((pp, vpp, micro_batches))]):
        held, expected = [0] * vpp, []
        for chunk in order:  # chunks from 1; a backward pass is negative
            held[abs(chunk) - 1] += 1 if chunk > 0 else -1
            if chunk > 0:
                expected.append(tuple(held))
        states = in_flight_states(pp, vpp, stage, micro_batches)
        most = max(map(sum, expected))
        assert most == max(map(sum, states)) and set(states) <= set(expected)
        assert {counts for counts in expected if sum(counts) == most} <= set(states)
        assert held == [0] * vpp


def test_optimizer_state_is_spread_without_loss():
    """All ranks together hold 12 bytes per parameter, experts in some layers included."""
    spec = read_spec(HF_CONFIGS / "Qwen3-VL-8B-Instruct.json")
    moe = MoeSpec(128, 8, 768, aux_loss_coef=0.0, dense_layers=(0, 5))
    spec = dataclasses.replace(spec, language=dataclasses.replace(spec.language, moe=moe))
    parameters = sum(math.prod(info.shape) for info in tensor_table(spec).values())
    for sizes in ({"ep": 4}, {"ep": 8, "pp": 2}, {"ep": 2, "etp": 4, "pp": 2}):
        config = TrainConfig(global_batch_size=16, parallel=ParallelConfig(**sizes))
        state = sum(stage.optimizer for stage in estimate_stage_memory(config, spec, 16))
        assert state * 16 / config.parallel.pp == pytest.approx(12 * parameters)


QUICK = "qwen2_vl_2b qwen2_5_vl_32b qwen3_vl_2b qwen3_vl_235b_a22b qwen3_5_0_8b qwen3_5_35b_a3b".split()
"""One of each family; together they have TP, PP, VPP, EP, an uneven split and both places of the tower."""


@cache
def core_says(is_quick: bool) -> dict[str, Any]:
    """Of a process: the modules of each (quick) example as [name, shape, trained], and core's schedules."""
    return call(built_examples, is_quick=is_quick)


def built_examples(is_quick: bool) -> dict[str, Any]:
    get_platform("cpu")
    return {
        "orders": [[order_of_chunks(pp, vpp, n, stage) for stage in range(pp)] for pp, vpp, n in SCHEDULES],
        "built": {
            example.name: [
                [[tensor.tensor_name, tensor.tensor_shape, tensor.is_trained] for tensor in stage]
                for stage in dry_build(example.config, example.spec, example.world)
            ]
            for example in map(read_example, EXAMPLES)
            if (example.name in QUICK) == is_quick
        },
    }


def order_of_chunks(pp: int, vpp: int, micro_batches: int, stage: int) -> list[int]:
    """Core's order of forward (positive) and backward (negative) passes of a stage's chunks, from 1."""
    group = SimpleNamespace(size=lambda: pp, rank=lambda: stage)
    place = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None)
    warm_up = get_pp_rank_microbatches(micro_batches, vpp, pp, p2p_communicator=place)[2]
    return convert_schedule_table_to_order(warm_up, vpp, get_schedule_table(micro_batches, vpp, pp))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "path",
    [pytest.param(each, marks=[pytest.mark.full] * (each.stem not in QUICK)) for each in EXAMPLES],
    ids=lambda path: path.stem,
)
def test_example_builds_under_its_layout(path):
    """Each stage has exactly the table's tensors in the shape of their shards, and the estimated weights."""
    example = read_example(path)
    config, spec, world = example.config, example.spec, example.world
    if config.lora.rank:
        return  # tests/estimate/test_lora.py compares adapters with what is built
    p = config.parallel
    decoupled = config.vision.placement == "decoupled"
    layout = make_layout(spec, p.tp, p.pp, p.vpp, p.layers, p.ep, p.etp, decoupled)
    stages = core_says(path.stem in QUICK)["built"][path.stem]
    assert len(stages) == p.pp
    for memory, built in zip(estimate_stage_memory(config, spec, world), stages, strict=True):
        expected: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for info in stage_tensors(spec, layout, memory.pipeline_stage):
            shape = info.shard_shape(layout.sharding)
            # A stack of experts is built as so many parameters.
            count, shape = (shape[0], shape[1:]) if info.num_experts else (1, shape)
            expected[info.name, shape] += count
        assert Counter((name, tuple(shape)) for name, shape, _ in built) == expected
        assert memory.weights == 2 * sum(math.prod(shape) for _, shape, _ in built)
        assert memory.gradients == 4 * sum(math.prod(shape) for _, shape, trained in built if trained)
