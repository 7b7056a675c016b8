"""The commands in the forms that scripts rely on."""

import re
from pathlib import Path

import pytest

from megatron_vl.config import parse_config
from megatron_vl.estimate.split import run_layout
from megatron_vl.spec.families import read_spec

from .helpers import assert_same_folder, released_folder, run

SIZE = "Qwen2.5-VL-7B-Instruct"


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return released_folder(tmp_path_factory.mktemp("cli") / "hf", SIZE, files=3)


def test_convert_split_merge_export_give_the_folder_back(tmp_path: Path, capsys) -> None:
    """Experts have files of their own."""
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
