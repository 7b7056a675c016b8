"""Small errors are reported before anything heavy is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from megatron_vl.config.removed import REMOVED_COMMANDS
from megatron_vl.json_files import manifest_digest
from megatron_vl.weights.manifest import MANIFEST_FILE, MANIFEST_VERSION, WEIGHTS_FORMAT
from tests.support.run_json import write_run_json
from toolkit.cli import main

ROOT = Path(__file__).resolve().parents[2]
WRONG = [
    "data convert --input nowhere.json --media-root . --out out",
    "data convert --input pyproject.toml --media-root nowhere --out out",
    "data verify nowhere",
    "data index --data nowhere --processor .",
    "data show --data . --processor nowhere",
    "convert --hf nowhere --out out",
    "split --checkpoint nowhere --tp 2 --out out",
    "merge --checkpoint nowhere --out out",
    "export --checkpoint . --hf nowhere --out out",
    "verify . nowhere",
    "checkpoint show nowhere",
    "checkpoint verify nowhere",
    "bench --hf nowhere --gpus 8",
    "generate --checkpoint nowhere --prompt Hello",
    "generate --checkpoint . --prompt Hello --image nowhere.jpg",
    "bench --hf . --processes 1 --data nowhere",
    "parity --hf nowhere --layouts 1",
]
CODE = """
import sys
from toolkit.cli import main
assert main(["--version"]) == 0
for words in sys.argv[1:]:
    assert main(words.split()) == 1, words
assert "torch" not in sys.modules
folders = ["--original", ".", "--converted", ".", "--out", "out"]
for words in ("x --lmu-data nowhere", "x.tsv --lmu-data docs", "docs/x --lmu-data docs"):
    assert main(["evaluate", *folders, "--data", *words.split()]) == 2, words
assert "torch" not in sys.modules
hf = "tests/hf_configs/Qwen2-VL-2B-Instruct.json"
for data in ("docs", "pyproject.toml"):
    options = ["--hf", hf, "--processes", "1", "--data", data, "--global_batch_size", "1"]
    assert main(["bench", *options]) == 1, data
assert "torch" not in sys.modules
assert main(["train", "--parallel.tp", "3", "--nproc-per-node", "4"]) == 1
assert "torch" not in sys.modules
assert main(["data", "verify", "pyproject.toml"]) == 1  # a file where a folder belongs
wrong = ("doctor --config run.yaml", "verify a b --forse", "train", "train --config pyproject.toml", "convrt")
for words in wrong:
    assert main(words.split()) == 2, words
"""


def test_version_names_what_decides_the_numbers(capsys, monkeypatch):
    """Every line is a name and a version, whether Transformer Engine is installed or not."""
    assert main(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        f"{name} {metadata.version(name)}" for name in ("megatron-vl", "megatron-core", "torch")
    ]

    stated = {"transformer-engine-torch": "2.20.2"}
    monkeypatch.setattr(metadata, "version", lambda name: stated[name])
    monkeypatch.setattr(metadata, "PackageNotFoundError", KeyError)
    assert main(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["megatron-core not installed", "torch not installed", "transformer-engine 2.20.2"]


@pytest.mark.slow
def test_missing_paths_and_impossible_fields_are_reported_without_importing_torch():
    done = subprocess.run(
        [sys.executable, "-c", CODE, *WRONG], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("does not exist") == len(WRONG)
    assert "--lmu-data nowhere is not a folder" in done.stderr
    assert done.stderr.count(" is not a file; give the path of a table") == 2
    assert "megatron-vl doctor: doctor --config was removed: " in done.stderr
    assert "megatron-vl verify: unrecognized arguments: --forse; see megatron-vl verify --help" in done.stderr
    assert "megatron-vl train: no run is given: megatron-vl train --config RUN.yaml" in done.stderr
    assert "megatron-vl: unknown command: convrt; did you mean convert" in done.stderr
    assert "megatron-vl train: parallel: tp 3 x pp 1 = 3 ranks do not divide the world size 4" in done.stderr
    assert "Traceback" not in done.stderr
    assert "data.path docs is not a data set (it holds no .nv-meta)" in done.stderr
    assert "data.path pyproject.toml is neither a data set's folder nor a metadataset" in done.stderr
    assert done.stderr.count("hf download") == sum("--hf nowhere" in words for words in WRONG)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("abandoned/after_step_00000003.partial/x", "", "to step 3 was interrupted; finish it with"),
        ("step_00000002/run.json", "{", "run.json is damaged"),
        ("step_00000002/run.json", '{"format": 2}', "has version 2 of its format, and this program reads 1"),
        ("manifest.json", "{}", "holds only weights, which `megatron-vl verify"),
    ],
)
@pytest.mark.parametrize("action", ["show", "verify"])
def test_damage_of_a_run_is_one_line(tmp_path, capsys, action, file, text, message):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert main(["checkpoint", action, str(tmp_path)]) == 1
    shown = capsys.readouterr().err
    assert message in shown and len(shown.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
@pytest.mark.parametrize("option", ["--platform cuda", "--reference-device cuda", "--reference-device gpu"])
def test_a_device_that_is_not_there_is_reported_at_once(capsys, option):
    assert main(["parity", "--family", "qwen2_5_vl", "--layouts", "1", *option.split()]) == 1
    assert capsys.readouterr().err.startswith(f"megatron-vl parity: {option.split()[0]} ")


def test_zero_processes_are_refused(capsys):
    assert main(["bench", "--hf", "pyproject.toml", "--processes", "0"]) == 2
    assert "'0' is not a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("steps", ["0", "-1"])
def test_a_comparison_of_no_step_is_refused(capsys, steps):
    assert main(["parity", "--family", "qwen2_5_vl", "--layouts", "1", "--steps", steps]) == 2
    assert "is not a whole number of at least 1" in capsys.readouterr().err


def test_missing_files_of_a_checkpoint_are_shown(tmp_path, capsys):
    """Checks optimizer, loader and weights; the intact checkpoint is shown with exit code 0."""
    files = {"optimizer/rank_00000.safetensors": {}, "loader/dp_00000.json": {}}
    facts = {
        "format": 1,
        "step": 3,
        "layout": {"tp": 1, "pp": 1, "vpp": 1, "layers": [4], "ep": 1, "etp": 1},
        "dp": 1,
        "num_workers": 2,
        "seq_len": 64,
        "files": files,
    }

    names = [*files, "weights/tp00_pp00.safetensors"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")

    write_run_json(tmp_path, facts)
    manifest = {
        "format": WEIGHTS_FORMAT,
        "version": MANIFEST_VERSION,
        "kind": "shards",
        "family": "qwen2_5_vl",
        "layout": {},
        "lora": None,
        "hf_config": {},
    }

    manifest |= {"tensors": {}, "files": {"tp00_pp00.safetensors": {}}}
    (tmp_path / "weights" / MANIFEST_FILE).write_text(
        json.dumps(manifest | {"digest": manifest_digest(manifest)})
    )
    assert main(["checkpoint", "show", str(tmp_path)]) == 0
    assert "missing: " not in capsys.readouterr().out

    for name in names:
        (tmp_path / name).unlink()
    assert main(["checkpoint", "show", str(tmp_path)]) == 1
    assert f"missing: {', '.join(sorted(names))}; go back to an earlier step" in capsys.readouterr().out
    assert main(["checkpoint", "show", "--json", str(tmp_path)]) == 1
    assert json.loads(capsys.readouterr().out)["missing"] == sorted(names)

    (tmp_path / "weights" / MANIFEST_FILE).write_text("{}")
    assert main(["checkpoint", "show", str(tmp_path)]) == 1
    assert "manifest.json is not a manifest of" in capsys.readouterr().err
    (tmp_path / "weights" / MANIFEST_FILE).unlink()
    assert main(["checkpoint", "show", str(tmp_path)]) == 1
    assert "has no weights/manifest.json; go back to an earlier step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown command: trian; did you mean train?"),
        (["data", "shw"], "unknown command: data shw; did you mean data show?"),
        (
            ["checkpoint"],
            "checkpoint needs a command after it; valid: checkpoint show, checkpoint verify, "
            "checkpoint rollback, checkpoint restart-data\n",
        ),
        (
            ["checkpoint", "zzz"],
            "unknown command: checkpoint zzz; valid: checkpoint show, checkpoint verify, "
            "checkpoint rollback, checkpoint restart-data\n",
        ),
        (["zzz"], "unknown command: zzz; valid: train, plan, convert,"),
    ],
)
def test_an_unknown_command_is_answered_with_those_that_were_meant(capsys, words, message):
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", REMOVED_COMMANDS)
def test_a_removed_command_is_refused_with_what_to_do(capsys, name):
    assert main([*name.split(), "--hf", "."]) == 2
    assert f"the command {name} was removed: {REMOVED_COMMANDS[name]}" in capsys.readouterr().err
