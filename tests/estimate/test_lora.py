"""What planning knows of a run with LoRA: parameters, memory, time and the layouts that are found."""

import math
import re
from pathlib import Path

import pytest

from megatron_vl.config import RunConfigError, TrainConfig, parse_config
from megatron_vl.estimate.gpus import find_gpu
from megatron_vl.estimate.memory import StageMemory, stage_memories
from megatron_vl.estimate.parameters import count_parameters, stage_parameters
from megatron_vl.estimate.split import run_layout
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.layout import make_layout
from tests.examples import HF_CONFIGS, ROOT, read_example
from tests.support.dry_build import dry_build
from tests.support.planned import predict_run
from tests.support.ranks import in_ranks

PAGE = ROOT / "docs" / "lora.md"
B7, TIED = "Qwen2.5-VL-7B-Instruct", "Qwen3-VL-4B-Instruct"
BASE = "--global_batch_size 8 --dtype float32 --lora.rank 4"
SEQUENCE = "--parallel.sequence_parallel true"
RUNS = [
    ("qwen2_5_vl", 4, "--parallel.tp 2 --parallel.pp 2 --lora.targets [language,vision,merger]"),
    ("qwen2_5_vl", 4, "--parallel.pp 2 --vision.placement decoupled --lora.targets [vision,q_proj]"),
    ("qwen3_vl", 2, '--parallel.pp 2 --lora.targets [".*layers.[01].*v_proj",merger]'),
    ("qwen3_5_moe", 2, "--parallel.ep 2 --lora.targets all-linear,experts"),
    ("qwen3_vl_moe", 2, f"--parallel.etp 2 --parallel.tp 2 {SEQUENCE} --lora.targets [experts]"),
    ("qwen3_5", 1, "--lora.targets q_proj,in_proj_z"),
    ("qwen3_vl", 2, "--parallel.tp 2 --lora.modules_to_save [merger,input_layernorm,lm_head]"),
]
"""Family, ranks and options."""


def spec_of(name: str) -> ModelSpec:
    return read_spec(HF_CONFIGS / f"{name}.json")


def config_of(options: str) -> TrainConfig:
    return parse_config(options.split())


def memory_of(name: str, options: str) -> StageMemory:
    spec = spec_of(name)
    return next(stage_memories(config_of(options), spec, make_layout(spec), 1))


@pytest.mark.parametrize(("family", "world_size", "options"), RUNS, ids=range(len(RUNS)))
@in_ranks()
def test_parameters_are_those_of_the_modules(family: str, world_size: int, options: str, hf: Path) -> None:
    config, spec = config_of(f"{BASE} {options}"), read_spec(hf)
    layout = run_layout(config, spec, world_size)
    planned = stage_parameters(config, spec, layout, world_size // layout.replica_ranks)
    for stage, tensors in zip(planned, dry_build(config, spec, world_size), strict=True):
        sizes = [(math.prod(tensor.tensor_shape), tensor.is_trained) for tensor in tensors]
        counts = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
        assert (stage.parameter_count, stage.trained_count) == counts


def test_adapters_alone_have_gradients_and_optimizer_state() -> None:
    """With q and v of rank 8 in 28 layers. Their B has the rows of the fused matrix, those of k included."""
    options = "--lora.rank 8 --lora.targets [q_proj,v_proj]"
    everything, trained = count_parameters(config_of(options), spec_of(B7))
    assert trained == 28 * 8 * (2 * 3584 + 4608)
    memory = memory_of(B7, options)
    assert memory.gradients == 4 * trained and memory.optimizer == 12 * trained
    assert memory.weights == 2 * everything
    full = memory_of(B7, "--lora.rank 0")
    assert full.weights == 2 * (everything - trained) and full.gradients == 2 * full.weights


def test_tower_without_adapters_keeps_nothing() -> None:
    """Nor does a part of the language model: only what adapters or other operators read is kept."""
    attention_alone = "--lora.rank 16 --lora.targets [attention]"
    all_parts = "--lora.rank 16 --lora.targets [language,vision,merger]"
    full, language, attention, everything = (
        memory_of(B7, options) for options in ("--lora.rank 0", "--lora.rank 16", attention_alone, all_parts)
    )
    frozen = memory_of(B7, "--model.freeze_vision true --model.freeze_merger true")
    assert language.vision == frozen.vision < 0.05 * full.vision
    # Pixels are kept for the gradient of the patch embedding alone.
    assert 0.95 * full.vision < everything.vision < full.vision
    assert full.activations < language.activations < 1.01 * full.activations

    # Without an adapter of the second matrix, no MLP keeps its activation: 18944 numbers of each token.
    assert language.activations - attention.activations > 28 * 4096 * 18944 * 2
    recomputed = "--recompute.language selective --recompute.language_modules [activation]"
    assert memory_of(B7, f"{attention_alone} {recomputed}") == attention


TABLE_LINE = re.compile(
    r"\| `(\w+)` \| (\d) x (80|141) GB \| (?:`(.*)` )?\| (\d+) GiB \| ([\d,]+) tokens/s \|"
)


@pytest.mark.parametrize("line", [line for line in PAGE.read_text().splitlines() if TABLE_LINE.match(line)])
def test_page_states_what_is_estimated_today(line: str) -> None:
    name, gpus, gigabytes, options, gib, speed = TABLE_LINE.fullmatch(line).groups()
    path = ROOT / "examples" / f"{name}.yaml"
    config = parse_config(["--config", str(path), "--lora.rank", "16", *(options or "").split()])
    gpu = find_gpu("H100" if gigabytes == "80" else "H200")
    prediction = predict_run(config, read_example(path).spec, int(gpus), gpu)
    assert int(gib) == round(prediction.peak_gib) and prediction.fits_memory
    assert prediction.tokens_per_second == pytest.approx(int(speed.replace(",", "")), rel=0.01)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (B7, "--model.freeze_language true", "model.freeze_language is set"),
        (B7, "--lora.modules_to_save [merger] --model.freeze_merger true", "model.freeze_merger is set"),
        (B7, "--lora.modules_to_save [router]", "'router' matches no matrix of this model. .*Kinds: merger$"),
        (B7, "--lora.targets q_proj,router", "lora.targets: 'router' .*, such as '[a-z0-9._]*'. Kinds: lang"),
        (B7, "--lora.targets [.*mlp]", "'.*mlp' matches no matrix of this model"),
        (B7, "--lora.targets [merger] --lora.modules_to_save [merger]", "visual.merger has adapters too"),
        (TIED, "--lora.modules_to_save [lm_head]", "the embedding and lm_head .* are tied"),
        (TIED, "--lora.modules_to_save [embed_tokens]", "the embedding and lm_head .* are tied"),
    ],
)
def test_impossible_lora_fields_are_refused(name: str, options: str, message: str) -> None:
    with pytest.raises(RunConfigError, match=message):
        memory_of(name, f"--lora.rank 16 {options}")
