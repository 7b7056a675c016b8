"""LoRA trains alike in every layout, the base is untouched, and checkpoints hold LoRA alone."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from converters.compare import verify_checkpoint_hashes
from converters.convert import convert_adapter, convert_weights, export_adapter, export_weights
from converters.peft_folder import ADAPTER_FILE
from megatron_vl.config import RunConfigError, parse_config
from megatron_vl.models.lora import add_to_output
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.lora import fused_lora, trained_table
from megatron_vl.training.resolve import resolve_run
from megatron_vl.training.trainer import Trainer
from megatron_vl.weights.run_folder import export_dir_path, step_dir_path
from megatron_vl.weights.weight_reader import WeightReader
from tests.support.mixed_lora import mixed_lora
from tests.support.ranks import in_ranks, run_module
from tests.support.tiny_run import metrics, options_of, trained, trainings
from tests.support.tiny_trainer import differences, gather, load, save, trainer_of
from tests.support.tiny_trainer import train as train_steps
from tests.tiny import SHORT_TOWER, TWO_LAYERS, tiny_checkpoint
from tests.training.test_context_parallel import ROWS
from toolkit.bench.options import parse_bench_options
from toolkit.common.options import parse_command_line
from toolkit.parity.case import draw_samples, pack_step
from toolkit.plan.command import make_plan
from toolkit.plan.options import PlanOptions

SP = {"sequence_parallel": True}
RECOMPUTE = {"language": "selective", "language_modules": ["mlp", "core_attn"]}
WHOLE = ["norm", "input_layernorm", "norm2", "patch_embed", "lm_head", "embed_tokens"]
"""Modules that are trained whole, in all families."""
LANGUAGE_AND_VISION = {"rank": 4, "targets": ["language", "vision"]}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "qwen2_5_vl": (
        {**LANGUAGE_AND_VISION, "ranks": {"q_proj": 2}, "modules_to_save": ["merger", *WHOLE]},
        {
            "DP4, overlap": {"overlap": True},
            "TP4 + SP, more ranks than key heads, recompute": {"tp": 4, "recompute": RECOMPUTE, **SP},
            "TP2 + SP x PP2 x VPP2": {"tp": 2, "pp": 2, "vpp": 2, **SP},
        },
    ),
    "qwen3_5": (
        {
            "rank": 4,
            "targets": ["language", "vision", "merger"],
            "alphas": {"in_proj_z": 8.0},
            "modules_to_save": [*WHOLE, "pos_embed"],
        },
        {"DP4": {}, "TP2 + SP": {"tp": 2, **SP}, "CP4, decoupled": {"cp": 4, "decoupled": True}},
    ),
    "qwen3_5_moe": (
        {"rank": 4, "targets": ["shared_experts", "experts", "k_proj"], "use_rslora": True},
        {"DP4": {}, "EP4 x TP2 + SP": {"ep": 4, "tp": 2, **SP}, "EP2 x ETP2": {"ep": 2, "etp": 2}},
    ),
}
"""Fields of LoRA of each family, and layouts that together have each way to divide the work."""


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("qwen2_5_vl", {}), ("qwen3_5", TWO_LAYERS), ("qwen3_5_moe", TWO_LAYERS)],
    ids=list(LAYOUTS),
)
@in_ranks(4)
def test_lora_trains_alike_in_every_layout(hf, family: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    """Losses within 1e-5, moments within 1e-4 of those of data parallelism; the base keeps every bit.

    Merged weights give the same logits, in the second layout. Each layout then resumes bit for bit what the
    one before has saved.
    """
    lora = dataclasses.asdict(mixed_lora(read_spec(hf), alpha=32.0, **LAYOUTS[family][0]))
    first_losses: list[float] = []
    first: dict[str, Tensor] = {}
    for number, (name, layout) in enumerate(LAYOUTS[family][1].items()):
        trainer = trainer_of(hf, lora=lora, **layout)
        before = [live.parameter.detach().clone() for live in trainer.live_tensors]
        base_logits = local_logits(trainer) if number == 1 else None
        # The second step sees matrices that are not zero.
        losses = [result.loss for result in train_steps(trainer, ROWS, range(2))]
        run = tmp_path / str(number)
        saved = save(trainer, run)
        first_losses, first = first_losses or losses, first or saved
        assert losses == pytest.approx(first_losses, rel=1e-5), name
        assert saved.keys() == first.keys() and (len(saved) > 50 or dist.get_rank()), name
        for key, tensor in saved.items():
            if key.endswith(("/exp_avg", "/exp_avg_sq")):
                expected = first[key].double()
                error = (tensor.double() - expected).norm()
                assert error < 1e-4 * expected.norm().clamp(min=1e-12), (name, key)

        assert changed_base(trainer, before) == [], name
        if base_logits is not None:
            trained_logits, merged_logits = local_logits(trainer), logits_when_merged(run, hf, **layout)
            assert distance(merged_logits, trained_logits) < 1e-5, name
            assert distance(base_logits, trained_logits) > 1e-3, name
        if number:
            load(trainer, tmp_path / str(number - 1), step=2 if number == 1 else 3)
            assert differences(save(trainer, run, step=3), first) == [], name


def changed_base(trainer: Trainer, before: list[Tensor]) -> list[str]:
    """Names of this rank's tensors of the base that are not frozen, or have changed by a bit."""
    table = trained_table(trainer.spec, trainer.config.lora)
    return [
        live.tensor_name
        for live, tensor in zip(trainer.live_tensors, before, strict=True)
        if live.tensor_name not in table
        and (live.parameter.requires_grad or not torch.equal(live.parameter, tensor))
    ]


def logits_when_merged(run: Path, hf: Path, **layout: Any) -> Tensor:
    """This rank's logits of the model that has a run's LoRA in its weights. Collective."""
    if dist.get_rank() == 0:
        export_weights(step_dir_path(run, 2) / "weights", hf, run / "merged", merges_adapter=True)
    dist.barrier()
    return local_logits(trainer_of(run / "merged", **layout))


def distance(logits: Tensor, expected: Tensor) -> float:
    """The largest relative distance on any rank. Collective."""
    error = (logits - expected).norm() / expected.norm()
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    return float(error)


def local_logits(trainer: Trainer) -> Tensor:
    """This rank's logits of real tokens, for rows that no step has seen. Needs one pipeline stage."""
    step_batch = pack_step(trainer, draw_samples(ROWS[:2], trainer.spec, 2))
    chunk = trainer.model_chunks[0].module.eval()
    with torch.no_grad():
        logits = [chunk(row, labels=False).flatten(0, 1).float() for row in step_batch.rows]
    chunk.train()
    return torch.cat(logits)


def test_lora_reads_what_comes_out_of_the_norm_of_its_layer() -> None:
    """In the forms in which layers of Transformer Engine return it, with and without their bias."""

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, *, output: Any) -> Any:
            return output

        def adapter(self, layer_input: torch.Tensor, layer_output: torch.Tensor) -> torch.Tensor:
            return layer_output + 10 * layer_input

    layer = Layer()
    layer.register_forward_hook(add_to_output)
    x, output, bias, normalized = (torch.tensor(float(value)) for value in (1, 2, 3, 4))
    assert layer(x, output=(output, bias, normalized)) == (42, 3)
    assert layer(x, output=((output, normalized), None)) == (42, None)
    assert layer(x, output=(output, bias)) == (12, 3)


@pytest.mark.parametrize("layout", [{}, {"tp": 2}], ids=["DP2", "TP2"])
@in_ranks(2)
def test_dropout_differs_where_the_inputs_do(hf, layout: dict[str, int]) -> None:
    """Replicas and ranks with a part of an input draw their own masks; ranks with one input draw one."""
    trainer = trainer_of(hf, lora={"rank": 4, "dropout": 0.5}, **layout)
    attention = trainer.model_chunks[0].module.language_model.decoder.layers[0].self_attention
    ones = torch.ones(64)
    whole = gather(attention.linear_qkv.adapter._drop(ones).tolist())
    cut = gather(attention.linear_proj.adapter._drop(ones).tolist())
    assert set(whole[0]) == {0.0, 2.0}
    assert (whole[0] == whole[1]) == bool(layout) and cut[0] != cut[1]


QUICK = ["--data.num_workers", "0"]
LORA = ["--lora.rank", "4", "--lora.targets", "[language,merger]", "--optimizer.lr", "1e-2", *QUICK]


@pytest.mark.ranks
def test_run_resumes_in_another_layout_and_learns(prepared: dict[str, Path], tmp_path: Path) -> None:
    """Its checkpoints hold the adapters alone. What would not fit them is refused by name."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    trained(prepared, whole, *LORA, ranks=2, steps=6)
    printed = trained(prepared, run, *LORA, "--stop_after", "3", "--parallel.tp", "2", ranks=2, steps=6)
    assert "resumed at step 3" in trained(prepared, run, *LORA, "--parallel.pp", "2", ranks=2, steps=6)

    losses = {line["step"]: line["loss"] for line in metrics(whole)}
    assert losses[6] < losses[1]
    for line in metrics(run):
        assert line["loss"] == pytest.approx(losses[line["step"]], rel=1e-4)

    weights = WeightReader(step_dir_path(run, 6), takes_lora=True)
    assert weights.lora.rank == 4 and all(".adapter.lora_" in name for name in weights.tensor_names())
    count = sum(math.prod(weights.tensor_infos[name].shape) for name in weights.tensor_names())
    assert f"\ntrained: {count:,} of " in printed
    stored = sum(file.stat().st_size for file in step_dir_path(run, 6).rglob("*.safetensors"))
    assert stored < 0.2 * sum(file.stat().st_size for file in prepared["weights"].glob("*.safetensors"))

    refusals = {
        "--lora.rank 8": r"other shapes or scales than this run's \(lora.rank was 4, is 8\)",
        "--lora.targets [mlp] --lora.dropout 0.1": "lora.targets was .*, is .*mlp.*; give the settings",
        "--lora.modules_to_save [patch_embed]": "lora.modules_to_save was .*, is .*; give the settings",
        "--lora.rank 0": "holds LoRA of rank 4, but this run has lora.rank 0",
        "--model.freeze_merger true": "model.freeze_merger is set, but lora.targets names",
        "--lora.dropout 0.1 --vision.placement decoupled": "lora.dropout: with vision.placement",
        "--model.checkpoint random": "lora.rank 4 needs trained weights",
        f"--model.checkpoint {run}": "holds LoRA adapters and no whole model",
    }
    said = trainings(prepared, *((run, [*LORA, *options.split(), "--steps", "8"]) for options in refusals))
    for text, message in zip(said, refusals.values(), strict=True):
        assert re.search(message, text), (message, text)


def check_equal_weights(folder: Path, other: Path) -> None:
    ours, theirs = (WeightReader(each, takes_lora=True) for each in (folder, other))
    assert ours.tensor_names() == theirs.tensor_names()
    for name in ours.tensor_names():
        assert torch.equal(ours.read_shard(name), theirs.read_shard(name)), name


@pytest.mark.ranks
def test_dropout_goes_on_bit_for_bit(prepared: dict[str, Path], tmp_path: Path) -> None:
    """Masks of whole inputs and of parts of them; a whole module beside the adapters goes on too."""
    lora = (*LORA, "--lora.targets", "[language]", "--lora.modules_to_save", "[merger,patch_embed]")
    options = (*lora, "--lora.dropout", "0.1", "--parallel.tp", "2")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for run, stop in ((whole, "2"), (parts, "1"), (parts, "2")):
        trained(prepared, run, *options, "--stop_after", stop, ranks=2, steps=3)

    assert [line["loss"] for line in metrics(whole)] == [line["loss"] for line in metrics(parts)]
    assert "vision_model.patch_embed.proj.weight" in WeightReader(whole, takes_lora=True).tensor_names()
    check_equal_weights(whole, parts)


@pytest.mark.ranks
def test_run_rejects_lora_of_another_base(prepared: dict[str, Path], tmp_path: Path) -> None:
    """Of the same model with other numbers; the same numbers in another layout are accepted."""
    run, options = tmp_path / "run", [*LORA, "--steps", "3", "--model.checkpoint"]
    other = tiny_checkpoint("qwen2_5_vl", tied=True, dtype=torch.float32, seed=99, **SHORT_TOWER)
    convert_weights(other, tmp_path / "other")
    convert_weights(prepared["hf"], tmp_path / "tp2", {"tp": 2})
    on_other = [*options, str(tmp_path / "other")]
    _, resumed, begun, accepted = trainings(
        prepared,
        (run, [*LORA, "--steps", "3", "--stop_after", "1"]),
        (run, on_other),
        (tmp_path / "b", ["--lora.adapter", str(run), *on_other[-2:]]),
        (run, [*options, str(tmp_path / "tp2")]),
    )
    assert "were trained on another model" in resumed
    assert f"the adapters in {run} were trained on other weights ({prepared['weights']})" in begun
    assert f"than those in {tmp_path / 'other'}" in begun and "trained 2 steps" in accepted


@pytest.mark.ranks
def test_lora_leaves_as_a_peft_folder_and_begins_another_run(prepared, tmp_path) -> None:
    """The run's own export is the command's. A run that begins with the adapters has their settings."""
    run, hf = tmp_path / "run", prepared["hf"]
    at_once = ("--optimizer.warmup_steps", "0")
    export = ("--checkpoint.export_hf", "last", "--parallel.tp", "2", *at_once)
    trained(prepared, run, *LORA, *export, ranks=2, steps=2)
    folder = export_dir_path(run, 2)
    export_adapter(run, hf, tmp_path / "adapter")
    exported = load_file(folder / ADAPTER_FILE)
    assert differences(exported, load_file(tmp_path / "adapter" / ADAPTER_FILE)) == []
    assert any(tensor.count_nonzero() for key, tensor in exported.items() if ".lora_B." in key)

    convert_adapter(folder, hf, tmp_path / "weights")
    assert not verify_checkpoint_hashes(run).differences
    stored = WeightReader(run, takes_lora=True)
    converted = WeightReader(tmp_path / "weights", takes_lora=True)
    assert fused_lora(stored.spec, stored.lora) == fused_lora(stored.spec, converted.lora)
    check_equal_weights(run, tmp_path / "weights")

    # Main weights in float32 are those of the adapters, although the parameters are rounded.
    start = ("--lora.adapter", str(tmp_path / "weights"), "--optimizer.lr", "0", *at_once, *QUICK)
    narrow = tmp_path / "narrow"
    trained(prepared, narrow, *start, "--dtype", "bfloat16", "--parallel.tp", "2", ranks=2, steps=1)
    main_weights: dict[str, list[float]] = {}
    for file in (step_dir_path(narrow, 1) / "optimizer").glob("*.safetensors"):
        for key, tensor in load_file(file).items():
            if key.endswith("/main"):
                main_weights.setdefault(key.partition("[")[0], []).extend(tensor.flatten().tolist())
    for name, values in main_weights.items():
        assert set(values) == set(stored.read_shard(name).flatten().tolist()), name
    assert main_weights.keys() == set(stored.tensor_names())

    # A run takes PEFT's folder as it is. One that goes on no longer needs it, and nor does its plan.
    moved, direct = tmp_path / "peft", tmp_path / "direct"
    folder.rename(moved)
    words = options_of(prepared, direct, "--lora.adapter", str(moved), *start[2:], steps=2)
    done = run_module("toolkit", ["train", *words, "--stop_after", "1"], 1, cwd=prepared["folder"])
    assert done.returncode == 0, done.stderr[-3000:]
    check_equal_weights(run, direct)
    moved.rename(folder)
    planned = make_plan(parse_command_line(PlanOptions, [*words, "--gpus", "2"], "plan"))
    for config in (planned.request.config, parse_bench_options(words).config):
        assert trained_table(stored.spec, config.lora) == trained_table(stored.spec, stored.lora)
        assert fused_lora(stored.spec, config.lora) == fused_lora(stored.spec, stored.lora)
    done = run_module("toolkit", ["train", *words], 1, cwd=prepared["folder"])
    assert done.returncode == 0 and "resumed at step 1" in done.stdout, done.stderr[-3000:]

    refused = [*start, "--lora.adapter", str(prepared["weights"])]
    with pytest.raises(RunConfigError, match="lora.adapter: .* holds a whole model"):
        resolve_run(parse_config(options_of(prepared, tmp_path / "refused", *refused)), 1)
