"""The commands in the forms that scripts rely on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from toolkit.cli import main

from .helpers import assert_same_folder, released_folder, released_tensors, small_config, write_hf

SIZE = "Qwen2.5-VL-7B-Instruct"


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return released_folder(tmp_path_factory.mktemp("cli") / "hf", SIZE, files=3)


def run(*words: object) -> int:
    return main([str(word) for word in words])


def test_convert_split_merge_export_give_the_folder_back(tmp_path, origin, capsys) -> None:
    assert run("convert", "--hf", origin, "--out", tmp_path / "full") == 0
    split = ["split", "--checkpoint", tmp_path / "full", "--out", tmp_path / "shards"]
    assert run(*split, *"--parallel.tp 2 --parallel.pp 2 --parallel.layers 1,3".split()) == 0
    assert "layout: tp 2, pp 2, vpp 1, layers 1,3" in capsys.readouterr().out
    assert run("merge", "--checkpoint", tmp_path / "shards", "--out", tmp_path / "merged") == 0
    assert_same_folder(tmp_path / "full", tmp_path / "merged")
    assert run("export", "--checkpoint", tmp_path / "shards", "--hf", origin, "--out", tmp_path / "back") == 0

    assert_same_folder(origin, tmp_path / "back")
    assert run("verify", origin, tmp_path / "back") == 0
    assert "identical: " in capsys.readouterr().out


def test_experts_have_files_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    origin = released_folder(tmp_path / "hf", "Qwen3-VL-30B-A3B-Instruct", files=3)
    assert run("convert", "--hf", origin, "--out", tmp_path / "full") == 0
    split = ["split", "--checkpoint", tmp_path / "full", "--out", tmp_path / "shards"]
    split += ["--parallel.tp", 2, "--parallel.pp", 2]
    assert run(*split, "--parallel.ep", 2, "--parallel.etp", 2) == 0
    assert "layout: tp 2, pp 2, vpp 1, layers 2,2, ep 2, etp 2" in capsys.readouterr().out

    experts = {f"ep0{e}_etp0{t}_pp0{p}.safetensors" for e in (0, 1) for t in (0, 1) for p in (0, 1)}
    dense = {f"tp0{t}_pp0{p}.safetensors" for t in (0, 1) for p in (0, 1)}
    assert {path.name for path in (tmp_path / "shards").iterdir()} == {"manifest.json", *experts, *dense}
    assert run("verify", tmp_path / "shards") == 0
    assert run(*split, "--parallel.ep", 8, "--force") == 0
    counts = [len(list((tmp_path / "shards").glob(name))) for name in ("*etp01*", "ep*")]
    assert counts == [0, 16]
    assert run("verify", tmp_path / "shards", tmp_path / "full") == 0
    assert run(*split, "--parallel.ep", 3, "--force") == 1
    assert "ep=3 does not divide 8 experts; valid: [1, 2, 4, 8]" in capsys.readouterr().err
    assert run(*split, "--parallel.ep", 0, "--force") == 1
    assert "ep=0 must be at least 1" in capsys.readouterr().err


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


def test_verify_names_the_first_tensors_and_fails(tmp_path: Path, origin: Path, capsys) -> None:
    tensors = {name: tensor.clone() for name, tensor in released_tensors(SIZE).items()}
    damaged = [name for name in tensors if name.startswith("model.")][:10]
    for name in ("lm_head.weight", *damaged):
        tensors[name].view(torch.int16).flatten()[7] ^= 1
    other = write_hf(tmp_path / "other", tensors, small_config(SIZE))
    assert run("verify", origin, other) == 1
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].startswith("different: 11 of ")
    assert lines[1].startswith("  lm_head.weight: 1 of") and "the first at 7" in lines[1]
    assert lines[11] == "  ... and 1 more"
    assert said.err == ""  # no progress and no escape codes off a terminal


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
    from megatron_vl.config import parse_config
    from megatron_vl.estimate.split import run_layout
    from megatron_vl.spec.families import read_spec

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
