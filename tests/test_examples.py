"""Every shipped example has a valid YAML, a layout that fits its model, correct numbers,
and working scripts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_vl.config import validate_config
from megatron_vl.estimate.split import run_layout
from megatron_vl.spec.families import FAMILIES
from megatron_vl.spec.families.base import text_config
from megatron_vl.weights.weight_reader import WeightReader
from tests.commands import logical_lines, megatron_vl_command, words_of
from tests.examples import EXAMPLES, HF_CONFIGS, ROOT, Example, read_example
from toolkit.weights.options import SplitOptions

SCRIPTS = sorted((ROOT / "examples").glob("*.sh"))
GIB = 2**30
H200_FLOPS = 989e12
"""From the data sheet, bfloat16, dense."""
H200_GIB = 139.8
"""The memory that CUDA reports."""


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.stem)
def example(request) -> Example:
    return read_example(request.param)


WITHOUT_EXAMPLES = {"Qwen3.6-27B", "Qwen3.6-35B-A3B"}
"""Models that have the sizes of Qwen3.5's, whose YAMLs are theirs too."""


def test_every_family_and_every_released_size_has_an_example():
    examples = [read_example(path) for path in EXAMPLES]
    sizes = {path.stem for path in HF_CONFIGS.glob("*.json")}
    assert {e.hf_config.stem for e in examples} == sizes - WITHOUT_EXAMPLES and sizes > WITHOUT_EXAMPLES
    assert {e.spec.family for e in examples} == set(FAMILIES)


def test_yaml_fits_the_released_model(example):
    config, spec = example.config, example.spec
    assert example.name.startswith(spec.family.removesuffix("_moe"))
    run_layout(config, spec, example.world)
    assert validate_config(config, example.world) >= 1
    assert config.data.seq_len <= text_config(spec.hf_config)["max_position_embeddings"]
    assert config.model.checkpoint and config.data.path and config.checkpoint.dir


def test_split_takes_the_layout_of_the_yaml(example):
    """``convert_then_split.sh`` passes only the YAML to it."""
    path = str(ROOT / "examples" / f"{example.name}.yaml")
    p = example.config.parallel
    _, options = megatron_vl_command(f"megatron-vl split --checkpoint full --config {path} --out shards")
    assert isinstance(options, SplitOptions)
    expected = {"tp": p.tp, "pp": p.pp, "vpp": p.vpp, "layers": p.layers, "ep": p.ep, "etp": p.etp}
    assert options.layout_arguments == expected
    _, other = megatron_vl_command(
        f"megatron-vl split --checkpoint full --config {path} --parallel.tp 16 --out shards"
    )
    assert isinstance(other, SplitOptions) and other.layout_arguments == expected | {"tp": 16}


# --- The numbers in the first lines, from transformers' own modules and by hand -----------------------------


@cache
def counted(hf_config: Path) -> tuple[Counter[str], dict[str, Any]]:
    """Parameters of transformers' model by part, and its config.

    The parts: vision, mergers, embedding, head, and of each layer the experts and the rest.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(str(hf_config))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    parts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        layer = re.search(r"language_model\.layers\.(\d+)\.", name)
        if "visual." in name:
            parts["mergers" if "merger" in name else "vision"] += parameter.numel()
        elif layer:
            parts[f"{'experts' if '.experts.' in name else 'layer'} {layer[1]}"] += parameter.numel()
        else:
            parts["embedding" if "embed_tokens" in name else "head" if "lm_head" in name else "norm"] += (
                parameter.numel()
            )
    return parts, {"text": config.get_text_config().to_dict(), "vision": config.vision_config.to_dict()}


def vision_sizes(vision: dict[str, Any]) -> tuple[int, int, int, int, int]:
    """Width, FFN width, matrices of an MLP, layers, layers with full attention; Qwen2-VL has other names."""
    width = vision.get("embed_dim") or vision["hidden_size"]
    ffn = vision.get("intermediate_size") or int(width * vision["mlp_ratio"])
    layers = vision["depth"]
    full = len(vision["fullatt_block_indexes"]) if "fullatt_block_indexes" in vision else layers
    return width, ffn, 3 if "fullatt_block_indexes" in vision else 2, layers, full


def full_attention(text: dict[str, Any]) -> list[int]:
    """The decoder layers with softmax attention; Qwen3.5's others have linear attention."""
    kinds = text.get("layer_types") or ["full_attention"] * text["num_hidden_layers"]
    return [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]


def linear_attention(text: dict[str, Any]) -> float:
    """Elements of a token that linear attention keeps.

    These are the projection's output, queries, keys and values after the convolution, outputs before and
    after the norm, a row of a chunk of 64, and gates.
    """
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    count = text["linear_num_value_heads"]
    values = count * text["linear_value_head_dim"]
    return (2 * keys + 2 * values) + (2 * keys + values) + 2 * values + count * (64 + 5)


def flops_per_token(example: Example) -> float:
    """Forward and backward: 6 operations per weight that multiplies a token, and attention; pictures of 640 x
    480 with 152 tokens of text."""
    parts, config = counted(example.hf_config)
    text, vision = config["text"], config["vision"]
    unit = vision["patch_size"] * vision["spatial_merge_size"]
    pictured = round(640 / unit) * round(480 / unit)
    document = pictured + 152
    patches = 4 * pictured

    active = text.get("num_experts_per_tok", 1) / (
        text.get("num_local_experts") or text.get("num_experts", 1)
    )
    layers = sum(n for part, n in parts.items() if part.startswith("layer"))
    experts = sum(n for part, n in parts.items() if part.startswith("experts"))
    heads = text["num_attention_heads"] * (
        text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    )
    language = (
        6 * (layers + experts * active) * document + 6 * len(full_attention(text)) * heads * document**2
    )
    head = 6 * text["hidden_size"] * text["vocab_size"] * 75  # tokens that bear loss

    width, _, _, _, full = vision_sizes(vision)
    tower = 6 * (parts["vision"] + parts["mergers"] / 4) * patches + 12 * width * full * patches**2
    return (language + head + tower) / document


def base_mfu(example: Example) -> float:
    """Measured MFU (benchmarks/log/speed.md 2026-11-21): 7B and 3B data parallel, 7B under TP2, 30B-A3B in short
    and long rows. Since then, the 7B with 10 layers takes 3,137 instead of 3,337 ms a step (2026-11-26).
    """
    tensor = 3337 / 3137 * (39.0 / 50.1 if example.config.parallel.tp > 1 else 1.0)
    if example.config.vision.placement == "decoupled":
        return text_mfu(example)
    if example.spec.language.moe:
        return tensor * (0.342 if example.config.data.seq_len >= 32768 else 0.188)
    return tensor * (0.461 if counted(example.hf_config)[1]["text"]["hidden_size"] < 3072 else 0.501)


def text_mfu(example: Example) -> float:
    """Measured MFU of text rows (benchmarks/log/speed.md 2026-11-21), carried over to another width: where every
    rank has the tower, that is not cut, and what is left is the decoder's.

    The time for an operation has a part that shrinks with the width (all but the large products; with TP2,
    its collectives). Measured: 3B, 2048 wide, 49.6 %; 7B, 3584 wide, 54.2 %, and 48.2 % under TP2. Since
    then, the 7B has 57.6 % (2026-11-26).
    """
    gain_since = 57.6 / 54.2
    narrow, wide, cut = 1 / 0.496, 1 / 0.542, 1 / 0.482
    width = counted(example.hf_config)[1]["text"]["hidden_size"]
    shrinking = (narrow - wide) / (1 / 2048 - 1 / 3584)
    collectives = (cut - wide) * 3584
    assert example.config.parallel.tp <= 2, "not measured"
    if example.config.parallel.tp == 1:
        collectives = 0.0
    return gain_since / (wide - shrinking / 3584 + (shrinking + collectives) / width)


def test_stated_speed_is_that_of_the_stated_mfu(example):
    assert example.hours == pytest.approx(1e9 / example.tokens_per_second / 3600, abs=0.06)
    if example.measured_per_gpu:
        assert example.tokens_per_second == pytest.approx(example.measured_per_gpu * example.world, rel=0.001)
        assert f"| image rows | {example.measured_per_gpu:,} |" in (ROOT / "docs" / "speed.md").read_text()
        return
    by_hand = example.mfu * H200_FLOPS * example.world / flops_per_token(example)
    assert example.tokens_per_second == pytest.approx(by_hand, rel=0.08)


def test_stated_mfu_is_a_measured_one_less_what_a_layout_costs(example):
    """Above what was measured without idle stages and recomputation by no more than the estimate's error; and
    idle stages, uneven ones and the collectives of wide tensor parallelism together cost less than half."""
    if example.measured_per_gpu:
        return
    p = example.config.parallel
    config = example.config
    passes = p.vpp * config.global_batch_size * p.tp * p.pp // example.world
    busy = passes / (passes + p.pp - 1)
    # A whole forward pass again makes 4/3 of the work.
    again = 3 / 4 if "full" in (config.recompute.language, config.recompute.vision) else 1
    # tests/estimate/test_measured_runs.py: within 12 %, but up to 42 % of a step too short with experts.
    error = 0.42 if example.spec.language.moe else 0.12
    assert 0.5 * again * base_mfu(example) * busy <= example.mfu <= base_mfu(example) * busy / (1 - error)


def states_gib(example: Example, stage: int) -> float:
    """bfloat16 weights, float32 gradients, and 12 bytes of optimizer state, shared by ranks that
    hold the same."""
    p = example.config.parallel
    dp = example.world // (p.tp * p.pp)
    on_gpu = 1 - float(example.config.optimizer.offload_fraction)
    total = 0.0
    for part, n in stage_parts(example, stage).items():
        sharded, copies = (
            (p.ep * p.etp, p.tp * dp // (p.ep * p.etp)) if part.startswith("experts") else (p.tp, dp)
        )
        if part in ("vision", "mergers") and on_every_rank(example):
            sharded, copies = 1, example.world
        total += n / sharded * (2 + 4 + 12 * on_gpu / copies)
    return total / GIB


def on_every_rank(example: Example) -> bool:
    """Whether each rank has the whole tower."""
    return example.config.vision.placement == "decoupled"


def stage_layers(example: Example, stage: int) -> list[int]:
    p = example.config.parallel
    count = counted(example.hf_config)[1]["text"]["num_hidden_layers"]
    split = p.layers or [count // (p.pp * p.vpp)] * (p.pp * p.vpp)
    first = [sum(split[:i]) for i in range(len(split))]
    layers: list[int] = []
    for chunk in range(stage, p.pp * p.vpp, p.pp):
        layers += range(first[chunk], first[chunk] + split[chunk])
    return layers


def stage_parts(example: Example, stage: int) -> dict[str, int]:
    parts, _ = counted(example.hf_config)
    last = stage == example.config.parallel.pp - 1
    wanted = {f"{kind} {layer}" for kind in ("layer", "experts") for layer in stage_layers(example, stage)}
    wanted |= {"vision", "mergers"} if stage == 0 or on_every_rank(example) else set()
    wanted |= {"embedding"} if stage == 0 else set()
    wanted |= {"head"} if last else set()
    if last and "head" not in parts and stage:  # tied, and far from the embedding
        return {part: parts[part] for part in wanted & set(parts)} | {"copy": parts["embedding"]}
    return {part: parts[part] for part in wanted & set(parts)}


def activations_gib(example: Example, stage: int, logits: float) -> float:
    """What a decoder layer or vision layer keeps for its backward pass, in bfloat16, and the logits.

    These are inputs and outputs of both norms, q, k, v, the output of attention, and the products of the MLP.
    The ``logits`` (bytes) are gone before a layer is recomputed.
    """
    _, sizes = counted(example.hf_config)
    config = example.config
    p = example.config.parallel
    text = sizes["text"]
    tokens = config.data.seq_len
    h = text["hidden_size"]
    split = p.tp if p.sequence_parallel else 1
    head_dim = text.get("head_dim") or h // text["num_attention_heads"]
    heads, kv = text["num_attention_heads"] * head_dim / p.tp, text["num_key_value_heads"] * head_dim / p.tp
    modules = config.recompute.language_modules if config.recompute.language == "selective" else []
    products = 2 if "activation" in modules else 3
    mlp = products * text.get("intermediate_size", 0) / p.tp
    if "num_experts_per_tok" in text:
        mlp = text["num_experts_per_tok"] * (h + products * text["moe_intermediate_size"]) / split
    if shared := text.get("shared_expert_intermediate_size"):
        mlp += (products * shared + h) / split
    attention = 2 * heads + 2 * kv
    mine = stage_layers(example, stage)
    softmax = len(set(full_attention(text)) & set(mine))
    layer = 4 * h / split + attention + mlp
    mixers = softmax * attention
    if softmax < len(
        mine
    ):  # with linear attention; the others have a gate, kept in both types, and its product
        linear = linear_attention(text) / p.tp
        layer += max(linear, attention + 4 * heads) - attention
        mixers = softmax * (attention + 4 * heads) + (len(mine) - softmax) * linear
    full = config.recompute.language == "full"
    all_layers = len(mine) * (4 * h / split + mlp) + mixers
    kept = (len(mine) * h / split if full else all_layers) / p.vpp * 2 * tokens
    again = max(layer * 2 * tokens if full else 0.0, logits)

    passes = p.vpp * config.global_batch_size * p.tp * p.pp // example.world
    ahead = (p.pp - stage - 1) * 2 + (p.vpp - 1) * p.pp if p.vpp > 1 else p.pp - stage - 1
    language = kept * min(ahead + 1, passes) + again
    if stage:
        return language / GIB

    if on_every_rank(example):
        # The tower runs when there are no other activations. Its features and their gradients stay.
        levels = 1 + len(sizes["vision"].get("deepstack_visual_indexes") or ())
        return (language + 2 * 2 * passes / p.vpp * tokens * h * levels) / GIB

    width, ffn, matrices, depth, _ = vision_sizes(sizes["vision"])
    patches = 4 * tokens
    inner = 4 * width + (4 * width + (matrices - (config.recompute.vision == "activation")) * ffn) / p.tp
    tower = depth * (width if config.recompute.vision == "full" else inner) * 2 * patches
    # Interleaved, the first chunk takes two rounds of micro-batches before its first backward pass.
    held = min(ahead + 1 if p.vpp == 1 else 2 * p.pp, passes)

    return (language + tower * held) / GIB


def test_stated_memory_is_what_is_counted_by_hand(example):
    """States are exact, activations are as above, logits count twice; the rest (rows, mergers, embeddings)
    takes a few GiB."""
    text = counted(example.hf_config)[1]["text"]
    p = example.config.parallel
    stages = []
    for stage in range(p.pp):
        last = stage == p.pp - 1
        # At most 8,192 tokens have logits at a time.
        logits = 4 * min(example.config.data.seq_len, 8192) * text["vocab_size"] / p.tp if last else 0.0
        stages.append(states_gib(example, stage) + activations_gib(example, stage, logits))
    assert example.gpu == "H200 (141 GB)"
    assert max(stages) * 0.95 <= example.gib <= max(stages) * 1.12 + 2
    assert example.gib <= H200_GIB - 8


# --- The scripts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_can_be_started(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK), f"{script} is not executable"
    assert "set -euo pipefail" in script.read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_their_commands_are_valid(script):
    """Variables stand for themselves; what follows ``"$@"`` comes from the user."""
    for line in logical_lines(script.read_text()):
        start = re.search(r"megatron-vl (train|convert|split|export|evaluate)\b", line)
        if start is None or line.startswith("echo"):
            continue
        command = re.sub(
            r'"\$\{?\w*\[?@\]?\}?"',
            "",
            line[start.start() :],
        )
        if start[1] == "train":
            assert words_of(command)[2:4] == ["--config", "config"]
            continue
        megatron_vl_command(re.sub(r'--config "\$config"', "", command))


def environment(**variables: str | Path) -> dict[str, str]:
    """This environment with the programs of this Python first on the path."""
    own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return os.environ | own | {key: str(value) for key, value in variables.items()}


def run(script: str, *words: str, folder: Path, **variables: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "examples" / script), *words]
    return subprocess.run(
        command, env=environment(**variables), cwd=folder, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_convert_then_split_runs(tiny_checkpoint, tmp_path):
    hf = tiny_checkpoint("qwen2_vl", layers=28)
    text = (ROOT / "examples" / "qwen2_vl_7b.yaml").read_text()
    cut = text.replace("tp: 1\n  pp: 1", "tp: 2\n  pp: 2\n  layers: [10, 18]\n  sequence_parallel: true")
    (tmp_path / "cut.yaml").write_text(cut)
    done = run(
        "convert_then_split.sh",
        str(tmp_path / "cut.yaml"),
        folder=tmp_path,
        HF=hf,
        FULL=tmp_path / "full",
        SHARDS=tmp_path / "shards",
    )
    assert done.returncode == 0, done.stderr
    assert WeightReader(tmp_path / "shards").layout.layers_per_chunk == (10, 18)

    # FULL exists now, and must be that of HF.
    other = tiny_checkpoint("qwen2_vl", layers=28, seed=5)
    for source, exit_code in ((hf, 0), (other, 1)):
        done = run(
            "convert_then_split.sh",
            str(tmp_path / "cut.yaml"),
            folder=tmp_path,
            HF=source,
            FULL=tmp_path / "full",
            SHARDS=tmp_path / f"shards of {source.name}",
        )
        assert done.returncode == exit_code, done.stderr
    assert f"{tmp_path / 'full'} does not hold the weights of {other}" in done.stderr
    assert not (tmp_path / f"shards of {other.name}").exists()


def test_pretrain_passes_options_to_the_trainer_and_returns_its_exit_code(tmp_path):
    words = ["--parallel.tp", "3", "--parallel.pp", "2"]
    done = run("pretrain.sh", "qwen2_vl_7b", *words, folder=tmp_path, GPUS="2")
    assert done.returncode == 1 and "tp 3 x pp 2 = 6 ranks do not divide the world size 2" in done.stderr
    # The name as it was once a folder, and more nodes without a meeting point.
    missing = run("pretrain.sh", "examples/qwen2_vl_7b", folder=tmp_path, GPUS="4", NNODES="2")
    assert missing.returncode == 2 and "--master-addr" in missing.stderr


@pytest.mark.parametrize("script", ["convert_then_split.sh", "pretrain.sh", "evaluate.sh", "slurm.sh"])
def test_without_arguments_only_the_usage_is_printed(script, tmp_path):
    done = run(script, folder=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"usage: .*\n", done.stderr), done.stderr


def test_an_unknown_name_is_answered_with_those_that_there_are(tmp_path):
    done = run("pretrain.sh", "qwen9", folder=tmp_path)
    assert done.returncode == 2 and "qwen9 is neither a YAML nor one of: qwen2_5_vl_32b " in done.stderr


@pytest.mark.parametrize("script", ["convert_then_split.sh", "pretrain.sh", "evaluate.sh"])
def test_without_the_environment_one_line_says_what_to_do(script, tmp_path):
    for program in ("bash", "env", "dirname"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    command = [str(ROOT / "examples" / script), "qwen2_vl_7b"]
    done = subprocess.run(command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 127
    assert re.fullmatch(rf"{script}: .*source \.venv/bin/activate.*\n", done.stderr), done.stderr


def test_slurm_starts_one_task_a_node_with_the_yaml(tmp_path):
    """``srun`` records its arguments; megatron-vl's part is tested where it reads Slurm's environment."""
    (tmp_path / "srun").write_text(f'#!{shutil.which("bash")}\nprintf "%s\\n" "$@" > {tmp_path}/given\n')
    (tmp_path / "srun").chmod(0o755)
    shutil.copy(ROOT / "examples" / "slurm.sh", tmp_path / "spooled.sh")  # Slurm runs a copy
    variables = environment(SLURM_JOB_NUM_NODES="4", SLURM_GPUS_ON_NODE="8")
    variables["PATH"] = f"{tmp_path}:{variables['PATH']}"
    command = [str(tmp_path / "spooled.sh"), "qwen2_5_vl_72b", "--steps", "3"]
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    given = (tmp_path / "given").read_text().split()
    start = ["megatron-vl", "train", "--config", "examples/qwen2_5_vl_72b.yaml", "--nproc-per-node", "8"]
    assert given == ["--kill-on-bad-exit=1", *start, "--steps", "3"]
