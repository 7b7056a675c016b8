"""The commands in the forms that scripts rely on."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from converters.compare import compare_weights, verify_checkpoint_hashes
from converters.convert import convert_weights
from converters.tensor_folder import SINGLE_FILE
from megatron_vl.config import parse_config
from megatron_vl.estimate.split import run_layout
from megatron_vl.spec.families import read_spec
from tests.tiny import tiny_checkpoint

from .helpers import (
    assert_same_folder,
    flip_a_bit,
    released_folder,
    released_tensors,
    run,
    small_config,
    write_hf,
)

SIZE, TIED = "Qwen2.5-VL-7B-Instruct", "Qwen2.5-VL-3B-Instruct"


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return released_folder(tmp_path_factory.mktemp("cli") / "hf", SIZE, files=3)


def test_convert_split_merge_export_give_the_folder_back(tmp_path: Path, capsys) -> None:
    hf = released_folder(tmp_path / "hf", "Qwen3-VL-30B-A3B-Instruct", files=3)
    full, shards = tmp_path / "full", tmp_path / "shards"
    assert run("convert", "--hf", hf, "--out", full) == 0
    split = ["split", "--checkpoint", full, "--out", shards, "--parallel.tp", 2, "--parallel.pp", 2]
    assert run(*split, *"--parallel.layers 1,3 --parallel.ep 2 --parallel.etp 2".split()) == 0
    assert "layout: tp 2, pp 2, vpp 1, layers 1,3, ep 2, etp 2" in capsys.readouterr().out
    experts = {f"ep0{e}_etp0{t}_pp0{p}.safetensors" for e in (0, 1) for t in (0, 1) for p in (0, 1)}
    dense = {f"tp0{t}_pp0{p}.safetensors" for t in (0, 1) for p in (0, 1)}
    assert {path.name for path in shards.iterdir()} == {"manifest.json", *experts, *dense}
    assert run("verify", shards) == 0
    assert run("merge", "--checkpoint", shards, "--out", tmp_path / "merged") == 0
    assert_same_folder(full, tmp_path / "merged")
    assert run("export", "--checkpoint", shards, "--hf", hf, "--out", tmp_path / "back") == 0
    assert_same_folder(hf, tmp_path / "back")
    assert run("verify", hf, tmp_path / "back") == 0
    assert "identical: " in capsys.readouterr().out

    assert run(*split, "--parallel.ep", 8, "--force") == 0
    assert [len(list(shards.glob(name))) for name in ("*etp01*", "ep*")] == [0, 16]
    assert run("verify", shards, full) == 0
    assert run(*split, "--parallel.ep", 3, "--force") == 1
    assert "ep=3 does not divide 8 experts; valid: [1, 2, 4, 8]" in capsys.readouterr().err


def test_export_of_a_training_run(tmp_path: Path, origin: Path, capsys) -> None:
    """The run's folder means its latest step; a step's folder and the weights in it are accepted as well."""
    for step in (5, 120):
        out = tmp_path / "run" / f"step_{step:08d}" / "weights"
        assert run("convert", "--hf", origin, "--parallel.tp", 2, "--out", out) == 0
    for place in (".", "step_00000005", "step_00000005/weights"):
        words = ["--checkpoint", tmp_path / "run" / place, "--hf", origin, "--out", tmp_path / "back"]
        assert run("export", *words, "--force") == 0
        assert ("note: exported step 120, the latest of" in capsys.readouterr().out) == (place == ".")
        assert_same_folder(origin, tmp_path / "back")


@pytest.mark.parametrize(
    "words",
    ["convert --hf nowhere", "convert --hf .", "merge --checkpoint .", "export --checkpoint . --hf ."],
)
def test_commands_fail_with_a_message(tmp_path: Path, words: str, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*words.split(), "--out", "out") == 1
    error = capsys.readouterr().err
    assert error.startswith(f"megatron-vl {words.split()[0]}: ") and "Traceback" not in error
    assert re.search("nowhere does not exist|holds no config.json|holds no weights", error)


def test_layout_without_a_split_is_the_planned_one(tmp_path: Path, origin: Path, capsys) -> None:
    """``split`` and ``convert`` write what a training begins with, never the even split."""
    given = tmp_path / "run.yaml"
    given.write_text(
        f"model: {{hf: {origin}}}\ndtype: float32\nglobal_batch_size: 4\n"
        "data: {seq_len: 1024}\nparallel: {pp: 2, layers: auto}\n"
    )
    config = parse_config(["--config", str(given)])
    planned = run_layout(config, read_spec(origin), 2).layers_per_chunk
    even = sum(planned) // 2
    assert planned != (even, even)

    words = ["--config", given, "--out", tmp_path / "shards"]
    assert run("convert", "--hf", origin, *words) == 0
    assert f"pp 2, vpp 1, layers {planned[0]},{planned[1]}" in capsys.readouterr().out
    again = ["--checkpoint", tmp_path / "shards", "--config", given, "--out", tmp_path / "again"]
    assert run("split", *again) == 0
    assert f"layers {planned[0]},{planned[1]}\n" in capsys.readouterr().out
    assert run("split", *again, "--force", "--parallel.layers", f"{even},{even}") == 0
    assert f"layers {even},{even}\n" in capsys.readouterr().out


def folder_of(path: Path, **tensors: torch.Tensor) -> Path:
    path.mkdir()
    save_file(tensors, path / SINGLE_FILE)
    return path


def test_verify_names_every_kind_of_difference(tmp_path: Path) -> None:
    nan, zeros = torch.tensor([float("nan")]), torch.zeros
    first = {"kind": zeros(2), "shape": zeros(2), "sign": zeros(3), "scalar": torch.tensor(1)}
    second = {"kind": zeros(2).half(), "shape": zeros(1, 2), "sign": -zeros(3), "scalar": torch.tensor(2)}
    a = folder_of(tmp_path / "a", same=nan, **first, only=torch.ones(1))
    b = folder_of(tmp_path / "b", same=nan, **second, new=torch.ones(1))
    found = {difference.name: difference.how for difference in compare_weights(a, b).differences}
    assert found == {
        "kind": "type F32 against F16",
        "new": "missing in the first folder",
        "only": "missing in the second folder",
        "scalar": "1 of 1 elements differ, the first at 0, by at most 1",
        "shape": "shape [2] against [1, 2]",
        "sign": "3 of 3 elements differ, the first at 0, by at most 0",
    }


def present_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As ``save_pretrained(save_original_format=False)`` names the tensors of a released Qwen2.5-VL."""
    return {
        re.sub("^visual", "model.visual", re.sub("^model", "model.language_model", name)): tensor
        for name, tensor in tensors.items()
    }


def test_verify_reads_both_naming_styles(tmp_path: Path, capsys) -> None:
    tensors = released_tensors(TIED)
    a = write_hf(tmp_path / "a", tensors, small_config(TIED))
    b = write_hf(tmp_path / "b", present_names(tensors), small_config(TIED), files=2)
    assert run("verify", a, b) == 0

    said = capsys.readouterr().out
    assert f"identical: {len(tensors)} tensors" in said
    assert f"{len(tensors)} names differ only in naming style" in said
    assert "model.embed_tokens.weight is model.language_model.embed_tokens.weight in the second" in said

    changed = {name: tensor.clone() for name, tensor in present_names(tensors).items()}
    damaged = sorted(name for name in changed if ".attn." in name or ".self_attn." in name)[:11]
    for name in damaged:
        changed[name].view(torch.int16).flatten()[7] ^= 1
    c = write_hf(tmp_path / "c", changed, small_config(TIED))
    assert run("verify", a, c) == 1
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].startswith("different: 11 of ") and "1 of" in lines[1] and "the first at 7" in lines[1]
    assert lines[11] == "  ... and 1 more"
    assert said.err == ""  # no progress and no escape codes off a terminal
    assert [found.name for found in compare_weights(c, a).differences] == damaged


def test_verify_does_not_guess_a_tensor_under_both_names(tmp_path: Path) -> None:
    ones = lambda *names: {name: torch.ones(1) for name in names}  # noqa: E731
    a = folder_of(tmp_path / "a", **ones("visual.x", "model.visual.x", "visual.y", "lm_head.weight"))
    b = folder_of(tmp_path / "b", **ones("visual.x", "model.visual.y", "lm_head.weight"))
    result = compare_weights(a, b)
    assert [found.name for found in result.differences] == ["model.visual.x"] and result.renamed == 1


def test_verify_compares_two_layouts(tmp_path: Path) -> None:
    hf = released_folder(tmp_path / "hf", TIED)
    convert_weights(hf, tmp_path / "a", {"tp": 8, "pp": 2})
    convert_weights(hf, tmp_path / "b")
    assert compare_weights(tmp_path / "a", tmp_path / "b").differences == []
    assert verify_checkpoint_hashes(tmp_path / "a").differences == []
    flip_a_bit(tmp_path / "a" / "tp03_pp01.safetensors")
    (damaged,) = verify_checkpoint_hashes(tmp_path / "a").differences
    (other,) = compare_weights(tmp_path / "a", tmp_path / "b").differences
    assert damaged.name == other.name and "tp03_pp01.safetensors" in damaged.how


def test_verify_compares_a_hugging_face_folder_with_megatron_weights(tmp_path: Path, capsys) -> None:
    hf, other = tiny_checkpoint("qwen3_vl_moe"), tiny_checkpoint("qwen3_vl_moe", seed=5)
    convert_weights(hf, tmp_path / "shards", {"tp": 2, "pp": 2})
    for folders in ((hf, tmp_path / "shards"), (tmp_path / "shards", hf)):
        assert run("verify", *folders) == 0
    capsys.readouterr()
    assert run("verify", other, tmp_path / "shards") == 1
    assert "elements differ" in capsys.readouterr().out
