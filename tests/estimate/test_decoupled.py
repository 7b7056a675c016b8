"""What a run with the tower on every rank is expected to need."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from megatron_vl.config import (
    DataConfig,
    Fp8Config,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    RecomputeConfig,
    RunConfigError,
    TrainConfig,
    VisionConfig,
    validate_config,
)
from megatron_vl.estimate.flops import repeated_flops, row_sizes, tower_forward_flops
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.tensors import model_part, tensor_table
from tests.support.planned import estimate_stage_memory

SPEC = read_spec(Path(__file__).parents[1] / "hf_configs" / "Qwen2.5-VL-7B-Instruct.json")
DECOUPLED = VisionConfig(placement="decoupled")
RUN = TrainConfig(
    parallel=ParallelConfig(tp=2, pp=2, layers=[14, 14], sequence_parallel=True),
    data=DataConfig(seq_len=8192),
    global_batch_size=16,
)


def test_every_stage_holds_the_whole_tower() -> None:
    tower = sum(math.prod(i.shape) for i in tensor_table(SPEC).values() if model_part(i.name) != "language")
    before = estimate_stage_memory(RUN, SPEC, 8)
    after = estimate_stage_memory(dataclasses.replace(RUN, vision=DECOUPLED), SPEC, 8)
    assert after[1].weights - before[1].weights == pytest.approx(2 * tower)
    assert after[1].gradients - before[1].gradients == pytest.approx(4 * tower)
    # float32 weights and two moments, spread over all eight ranks; before, over the two of a place
    assert after[1].optimizer - before[1].optimizer == pytest.approx(12 * tower / 8)
    assert after[0].weights > before[0].weights


def test_flops_count_the_second_forward_pass_of_a_decoupled_tower() -> None:
    sizes, plain = row_sizes([300], [64, 128], [64, 64, 64], 0), RecomputeConfig()
    again = repeated_flops(SPEC, ModelConfig(), LoraConfig(), plain, sizes, is_decoupled=True)
    assert again.tower == sum(tower_forward_flops(SPEC.vision, sizes)) and again.language == 0
    frozen = ModelConfig(freeze_vision=True)  # all activations of the merger are kept
    assert repeated_flops(SPEC, frozen, LoraConfig(), plain, sizes, is_decoupled=True).total == 0


def test_fp8_of_the_tower_is_refused_by_name() -> None:
    fp8 = Fp8Config(recipe="tensorwise", vision=True)
    with pytest.raises(RunConfigError, match=r"fp8\.vision needs vision\.placement first_stage"):
        validate_config(dataclasses.replace(RUN, vision=DECOUPLED, fp8=fp8), 8)
    validate_config(dataclasses.replace(RUN, vision=DECOUPLED, fp8=Fp8Config(recipe="tensorwise")), 8)
