"""A run with multi-token prediction: its log, its checkpoints, exports, and switching it on and off."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from converters import convert
from converters.compare import compare_weights
from converters.hf_checkpoint import HfCheckpoint
from megatron_vl.config import RunConfigError, parse_config
from megatron_vl.spec.families import ConfigError, read_spec
from megatron_vl.training.input_files import check_same_files
from megatron_vl.training.resolve import resolve_run
from megatron_vl.weights.run_folder import step_dir_path
from megatron_vl.weights.tensor_files import WeightsError
from megatron_vl.weights.weight_reader import WeightReader
from tests.converters.helpers import stack_mtp_experts
from tests.support.ranks import in_ranks
from tests.support.tiny_run import metrics, options_of, prepare, trained, trainings
from tests.support.tiny_trainer import differences, save, state_of, train, trainer_of
from tests.tiny import TWO_LAYERS, tiny_checkpoint
from tests.training.test_context_parallel import check_moves

MTP = {"mtp": {"loss": 0.5, "trains": "all"}}
SP = {"tp": 2, "sequence_parallel": True}
ROWS = [["image", "short_text"], ["text"], ["text", "words"], ["video"]]


def mtp_of(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {n: t for file in files for n, t in load_file(file).items() if n.startswith("mtp.")}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    hf = tiny_checkpoint("qwen3_5", dtype=torch.float32, **TWO_LAYERS | {"layers": 4})
    return prepare(tmp_path_factory.mktemp("mtp"), hf, val_fraction=0.3)


@pytest.mark.ranks
def test_run_logs_evaluates_saves_and_exports_it_and_may_switch_it(prepared, tmp_path: Path) -> None:
    run, hf = tmp_path / "run", prepared["hf"]
    # Gradients are clipped in all steps.
    words = "--steps 8 --optimizer.clip_grad 0.01 --log.interval 1 --eval.interval 2 --eval.rows 4".split()
    words += "--optimizer.lr 1e-2 --checkpoint.interval 2 --checkpoint.keep 9".split()
    on = [*words, "--mtp.loss", "0.3", "--model.checkpoint", ""]
    off = [*words, "--model.checkpoint", ""]
    said = trainings(
        prepared,
        (run, [*on, "--stop_after", "2"]),
        (run, [*on, "--stop_after", "4"]),
        (run, [*off, "--stop_after", "6"]),
        (run, on),
        (tmp_path / "plain", [*off, "--stop_after", "2"]),
    )
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 9)), said
    has_mtp = ["mtp_loss" in line for line in lines]
    assert has_mtp == [True] * 4 + [False] * 2 + [True] * 2
    assert re.search(r"mtp loss \d+\.\d+, top-1 \d+\.\d% of \d+", said[0])
    assert re.search(r"validation loss .* \| mtp loss \d+\.\d+, top-1", said[0])
    assert lines[3]["mtp_loss"] < lines[0]["mtp_loss"]
    assert 0 < lines[0]["mtp_tokens"] <= lines[0]["loss_tokens"]
    # Head alone: the model trains as without it, bit for bit.
    plain = [line["loss"] for line in metrics(tmp_path / "plain")]
    assert plain == [line["loss"] for line in lines[:2]]
    evaluations = metrics(run, "eval.jsonl")
    assert [("mtp_top1" in each) for each in evaluations] == [True, True, True, False, True]

    assert "is left out, as mtp.loss is 0" in said[2] and "multi-token prediction begins" in said[3]
    assert "mtp.loss was 0.3, is 0.0" in said[2] and "mtp.loss was 0.0, is 0.3" in said[3]
    held = [WeightReader(step_dir_path(run, step)).spec.language.has_mtp for step in (4, 6, 8)]
    assert held == [True, False, True]

    # Exports: the trained layer, the original one, and back to the same bits.
    for step, is_trained in ((4, True), (6, False)):
        report = convert.export_weights(step_dir_path(run, step), hf, tmp_path / f"hf_{step}")
        exported, original = mtp_of(tmp_path / f"hf_{step}"), mtp_of(hf)
        assert exported.keys() == original.keys() and bool(report.carried) != is_trained
        assert all(torch.equal(exported[name], original[name]) != is_trained for name in exported)
    assert compare_weights(step_dir_path(run, 4), tmp_path / "hf_4").differences == []

    # Other ranks evaluate the last weights to the same numbers.
    others = [*on[2:], "--eval.interval", "9", "--parallel.pp", "2", "--parallel.cp", "2"]
    trained(prepared, tmp_path / "pp_cp", *others, "--model.checkpoint", str(run), ranks=4, steps=3)
    [again, _], known = metrics(tmp_path / "pp_cp", "eval.jsonl"), evaluations[-1]
    assert 0 < again["mtp_top1"] == known["mtp_top1"] and again["mtp_tokens"] == known["mtp_tokens"]
    assert again["mtp_loss"] == pytest.approx(known["mtp_loss"], rel=1e-5)


@pytest.mark.ranks
def test_layer_is_trained_beside_adapters_and_merged_with_them(prepared, tmp_path: Path) -> None:
    run, hf = tmp_path / "run", prepared["hf"]
    # The base is weights that were converted without the layer.
    words = "--steps 4 --optimizer.clip_grad 0.01 --lora.rank 4 --log.interval 1".split()
    on = [*words, "--mtp.loss", "0.3"]
    said = trainings(
        prepared,
        (tmp_path / "alone", [*words, "--stop_after", "2"]),
        (run, [*on, "--stop_after", "2"]),
        (run, on),
        (tmp_path / "alone", on),  # begins with it at a resume
    )
    assert "resumed at step 2" in said[2] and "begins with the weights in model.hf" in said[3], said
    losses = [[line["loss"] for line in metrics(folder)] for folder in (run, tmp_path / "alone")]
    assert losses[0] == losses[1] and len(losses[0]) == 4  # the adapters do not see it
    held = WeightReader(run, takes_lora=True)
    whole_names = {name for name in held.tensor_names() if "lora" not in name}
    assert whole_names == {name for name in HfCheckpoint(hf, has_mtp=True).tensor_infos if name[:4] == "mtp."}

    convert.export_weights(run, hf, tmp_path / "merged", merges_adapter=True)
    exported, original = mtp_of(tmp_path / "merged"), mtp_of(hf)
    assert not any(torch.equal(exported[name], original[name]) for name in original)
    assert convert.export_adapter(run, hf, tmp_path / "adapter").notes == [
        "PEFT has no place for the multi-token prediction (mtp.*) that was trained beside the adapters;"
        " an export with --merge writes it"
    ]
    [more] = trainings(
        prepared, (tmp_path / "more", [*words[:4], *on[6:], "--lora.adapter", str(run), "--steps", "5"])
    )
    assert "step 5/5" in more, more


@pytest.mark.parametrize("size", ["qwen3_5", "qwen3_5_moe apart", "qwen3_5_moe stacked"])
def test_folder_comes_back_bit_for_bit_from_any_layout(size: str, tmp_path: Path) -> None:
    family, _, style = size.partition(" ")
    hf = shutil.copytree(tiny_checkpoint(family), tmp_path / "hf")
    if style == "stacked":
        stack_mtp_experts(hf)
    source = HfCheckpoint(hf, has_mtp=True)
    assert source.carried_names == []
    layout = {"tp": 2, "pp": 2, **({"ep": 2} if style else {})}
    convert._write_weights(source, [Path(hf)], tmp_path / "cut", layout, "convert", 1, False, {})
    convert.reshard_weights(tmp_path / "cut", tmp_path / "whole", workers=1)
    convert.export_weights(tmp_path / "whole", hf, tmp_path / "out", workers=1)
    for file in sorted(Path(hf).glob("*.safetensors")):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    # Without it, the weights are those of before.
    convert.convert_weights(hf, tmp_path / "plain", workers=1)
    assert "mtp" not in json.loads((tmp_path / "plain" / "manifest.json").read_text())


@in_ranks(2)
def test_checkpoint_moves_between_layouts_bit_for_bit(tmp_path: Path) -> None:
    layouts = {"TP2 + SP": SP, "PP2": {"pp": 2}, "EP2": {"ep": 2}, "CP2": {"cp": 2}}
    hf = tiny_checkpoint("qwen3_5_moe", dtype=torch.float32, **TWO_LAYERS)
    saved = check_moves(hf, tmp_path, layouts, **MTP)
    assert dist.get_rank() or sum(name.startswith("mtp.") for name in saved) > 60


@pytest.mark.parametrize(("family", "layout"), [("qwen3_5", {"pp": 2}), ("qwen3_5_moe", {"ep": 2})])
@in_ranks(2)
def test_head_leaves_updates_of_the_model_as_they_are(family: str, layout: dict[str, Any], tmp_path: Path):
    """Although gradients are clipped: each by its own norm. Ranks that share state sum it in other parts."""
    states = []
    for number, loss in enumerate((0.0, 2.0)):
        hf = tiny_checkpoint(family, dtype=torch.float32, **TWO_LAYERS)
        trainer = trainer_of(hf, 128, mtp={"loss": loss}, **layout)
        train(trainer, ROWS, range(2))
        states.append(save(trainer, tmp_path / str(number)))
    if dist.get_rank() == 0:  # it has read them
        assert len(states[0]) > 30 and states[1].keys() > states[0].keys()
    tolerance = 0.0 if layout == {"pp": 2} else 1e-5
    for name, state in states[0].items():
        assert (state - states[1][name]).abs().max() <= tolerance * state.abs().max(), name


@in_ranks()
def test_step_without_a_gradient_of_the_model_leaves_it_as_it_is() -> None:
    """The tower alone is trained, and the row has no images. Without the layer, the step is skipped."""
    hf = tiny_checkpoint("qwen3_5", dtype=torch.float32)
    for freeze, reason in ((["language"], "no_gradient"), (["language", "vision", "merger"], "")):
        trainer = trainer_of(hf, 128, freeze=freeze, mtp={"loss": 0.3})
        before = state_of(trainer)
        [result] = train(trainer, [["text"]], range(1))
        after = state_of(trainer)
        changed = {name.split("/")[1][:4] for name in differences(before, after) if name[:7] == "weight/"}
        assert (result.skip_reason, changed) == (reason, set() if reason else {"mtp."})


def test_models_and_folders_without_it_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"qwen3_vl has no layer of multi-token prediction: set mtp\.loss"):
        read_spec(tiny_checkpoint("qwen3_vl")).with_mtp()
    hf = tiny_checkpoint("qwen3_5")
    config = json.loads((hf / "config.json").read_text())
    config["text_config"]["mtp_use_dedicated_embeddings"] = True
    with pytest.raises(ConfigError, match="mtp_use_dedicated_embeddings false"):
        read_spec(config).with_mtp()

    # As transformers saves it.
    kept = {
        n: t for f in sorted(hf.glob("*.safetensors")) for n, t in load_file(f).items() if n[:4] != "mtp."
    }
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((hf / "config.json").read_text())
    HfCheckpoint(tmp_path)
    with pytest.raises(WeightsError, match=r"'mtp\..* is missing.* transformers drops .* set mtp\.loss to 0"):
        HfCheckpoint(tmp_path, has_mtp=True)


@pytest.mark.parametrize("checkpoint", ["", "weights"])
def test_other_layer_under_the_path_of_a_node_is_refused(prepared, tmp_path, monkeypatch, checkpoint) -> None:
    """Whether a run begins with the whole folder, or with its layer beside weights that have none."""
    for node in ("first", "second"):
        shutil.copytree(prepared["hf"], tmp_path / node / "hf")
    paths = ["--model.hf", "hf", "--model.checkpoint", checkpoint and str(prepared["weights"])]
    config = parse_config(options_of(prepared, tmp_path / "run", *paths, "--mtp.loss", "0.3"))
    monkeypatch.chdir(tmp_path / "first")
    resolved_run = resolve_run(config, 1)
    monkeypatch.chdir(tmp_path / "second")
    check_same_files(resolved_run, owns_loader=False)
    for file in Path("hf").glob("*.safetensors"):
        changed = {name: tensor + name.startswith("mtp.") for name, tensor in load_file(file).items()}
        save_file(changed, file, {"format": "pt"})
    with pytest.raises(RunConfigError, match=r"hf \(multi-token prediction\) is not as rank 0 reads it"):
        check_same_files(resolved_run, owns_loader=False)
