"""The share of the optimizer state that has to be in host memory, by the estimate."""

import dataclasses

import pytest

from megatron_vl.config import RunConfigError, TrainConfig, parse_config
from megatron_vl.estimate.gpus import find_gpu
from megatron_vl.estimate.memory import GIB, StageMemory
from megatron_vl.estimate.memory_check import (
    check_host_memory,
    check_memory,
    largest_offload_fraction,
    least_offload_fraction,
    resolve_offload_fraction,
    with_offload_fraction,
)
from megatron_vl.kernels.sizes import STATE_CHUNK_BYTES, STATE_CHUNKS_ON_GPU
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.layout import make_layout
from tests.examples import HF_CONFIGS
from tests.support.planned import estimate_stage_memory

SHAPE = "--data.seq_len 8192 --global_batch_size 16 --recompute.vision full --recompute.language full"
SPEC = read_spec(HF_CONFIGS / "Qwen2.5-VL-7B-Instruct.json").replace_layers(num_language_layers=10)
"""4.1 billion parameters."""
LAYOUT = make_layout(SPEC)
GPU = 139.8


def gpu_of(free_gib: float) -> float:
    """GiB of a GPU on which a run may take ``free_gib``."""
    return min(free_gib + 8, free_gib * 9 / 8)


def run(options: str = "") -> TrainConfig:
    return parse_config(f"{SHAPE} {options}".split())


def stage(config: TrainConfig, share: float) -> StageMemory:
    return estimate_stage_memory(with_offload_fraction(config, share), SPEC, 2)[0]


@pytest.fixture(scope="module")
def full() -> float:
    return stage(run(), 0.0).total_bytes / GIB


def check_host(config: TrainConfig, gpu_gib: float | None, host_gib: float) -> None:
    check_host_memory(config, SPEC, LAYOUT, 2, gpu_gib, host_gib)


def test_offloaded_state_is_in_host_memory_but_for_half_of_the_master_weights() -> None:
    none, half, whole = (stage(run(), share) for share in (0.0, 0.5, 1.0))
    assert none.host_bytes == 0 and whole.optimizer == 0
    assert half.optimizer == none.optimizer / 2
    assert whole.host_bytes == 2 * half.host_bytes == none.optimizer * 10 / 12
    assert none.optimizer / GIB == pytest.approx(23.0, rel=0.03)  # 23.5 were measured on 2 H200
    assert whole.total_bytes == none.total_bytes - none.optimizer


def test_moments_in_bf16_halve_the_state_of_a_bf16_model() -> None:
    short = "--optimizer.moments_dtype bfloat16"
    none, whole = stage(run(short), 0.0), stage(run(short), 1.0)
    assert none.optimizer == stage(run(), 0.0).optimizer / 2 == whole.host_bytes
    assert none.host_bytes == whole.optimizer == 0
    config = run(f"{short} --dtype float32")
    assert stage(config, 1.0).host_bytes == stage(config, 0.0).optimizer == none.optimizer * 4 / 6


def test_moments_in_bf16_need_no_more_than_their_state() -> None:
    """They are updated where they are: only pieces on their way from host memory come on top."""
    config = run("--data.seq_len 256 --data.max_patches 64 --optimizer.moments_dtype bfloat16")
    here, away = stage(config, 0.0), stage(config, 1.0)
    free = here.activations + here.vision + here.logits
    assert here.optimizer == away.host_bytes
    assert away.optimizer == STATE_CHUNKS_ON_GPU * STATE_CHUNK_BYTES - free


def test_auto_is_the_least_share_that_fits_gpu_and_host(full: float) -> None:
    config = run("--optimizer.offload_fraction auto")
    state, whole = stage(config, 0.0).optimizer / GIB, stage(config, 1.0).host_bytes / GIB

    def share(run_config: TrainConfig, *memory: float | None) -> float:
        return resolve_offload_fraction(run_config, SPEC, LAYOUT, 2, *memory).optimizer.offload_fraction

    assert share(config, gpu_of(full + 1)) == share(config, gpu_of(full), whole) == 0.0
    assert share(config, gpu_of(full - 0.32 * state)) == 0.35
    assert share(config, 1.0) == 1.0  # as much as there is
    assert share(config, None) == 0.0
    assert share(with_offload_fraction(config, 0.7), gpu_of(full + 1)) == 0.7
    for host_gib, expected in ((whole, 1.0), (0.52 * whole, 0.5), (0.04 * whole, 0.0)):
        assert largest_offload_fraction(config, SPEC, LAYOUT, 2, host_gib) == expected
        assert share(config, 1.0, host_gib) == expected


def test_message_names_the_share_that_would_fit(full: float) -> None:
    config = run("--failures.check_memory false")

    def remark(gib: float) -> str:
        return check_memory(config, SPEC, LAYOUT, 2, dataclasses.replace(find_gpu(), memory_gib=gib))

    assert remark(gpu_of(full + 1)) == ""
    assert "--optimizer.offload_fraction 0.5 would fit" in remark(gpu_of(full - 11.2))
    assert "not even --optimizer.offload_fraction 1 would change that" in remark(30.0)
    assert least_offload_fraction(config, SPEC, LAYOUT, 2, 30.0) is None


def test_offload_beyond_host_memory_is_refused_before_it_is_allocated(monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_host(run(), GPU, 10)
    check_host(with_offload_fraction(run(), 0.5), GPU, 10)
    check_host(with_offload_fraction(run(), 1.0), None, 10)  # on CPU nothing is offloaded
    expected = "1.0 needs 38.* GiB of host memory for 2 ranks of .*, which has 20.0 GiB left; lower it to 0.5"
    with pytest.raises(RunConfigError, match=expected):
        check_host(with_offload_fraction(run(), 1.0), GPU, 10)


def test_auto_is_refused_where_host_memory_lacks_the_share_that_fits(full: float) -> None:
    config = run("--optimizer.offload_fraction auto")
    small = gpu_of(full - 0.47 * stage(config, 0.0).optimizer / GIB)
    check_host(config, gpu_of(full), 2)
    check_host(config, small, 10)
    expected = r"auto \(0.5\) needs 9.5 GiB of host memory for 1 rank of a node, which has 2.0 GiB left;.*GPU"
    with pytest.raises(RunConfigError, match=expected):
        check_host(config, small, 2)
    check_host(run("--optimizer.offload_fraction auto --failures.check_memory false"), small, 2)


def test_inputs_of_layers_come_before_optimizer_state_in_host_memory() -> None:
    """10 layers of width 3584, and 32 of the tower of width 1280 for four patches a token."""
    config = run("--recompute.offload_inputs true")
    decoder_input, tower_input = 2 * 8192 * 3584 / GIB, 2 * 4 * 8192 * 1280 / GIB
    inputs = 10 * decoder_input + 32 * tower_input
    here, away = stage(run(), 0.0), stage(config, 0.0)
    assert (here.host_input_bytes, away.host_input_bytes / GIB) == (0, inputs)
    # Two inputs are on the GPU while a layer is recomputed; the tower's take the memory of the decoder's.
    assert (here.activations - away.activations) / GIB == pytest.approx(8 * decoder_input)
    assert (here.vision - away.vision) / GIB == pytest.approx(32 * tower_input)

    with pytest.raises(RunConfigError, match=r"offload_inputs needs 3.0 GiB .* set it to false"):
        check_host(config, GPU, inputs - 0.1)
    check_host(config, GPU, inputs + 0.1)
    host_gib = inputs + 0.52 * stage(config, 1.0).host_bytes / GIB
    assert largest_offload_fraction(config, SPEC, LAYOUT, 2, host_gib) == 0.5
    with pytest.raises(RunConfigError, match=r"lower it to 0.5"):
        check_host(with_offload_fraction(config, 1.0), GPU, host_gib)
