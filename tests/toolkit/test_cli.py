"""Small errors are reported before anything heavy is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from megatron_vl.system.json_files import manifest_digest
from megatron_vl.weights.manifest import MANIFEST_FILE, MANIFEST_VERSION, WEIGHTS_FORMAT
from tests.data.media import write
from tests.support.run_json import write_run_json
from toolkit.cli import main

ROOT = Path(__file__).resolve().parents[2]
HF = str(ROOT / "tests" / "hf_configs" / "Qwen2-VL-2B-Instruct.json")
WRONG = [
    "data convert --input nowhere.json --media-root . --out out",
    "data convert --input pyproject.toml --media-root nowhere --out out",
    "data index --data.path nowhere --model.hf .",
    "data show --data.path nowhere --model.hf .",
    "convert --hf nowhere --out out",
    "split --checkpoint nowhere --parallel.tp 2 --out out",
    "merge --checkpoint nowhere --out out",
    "export --checkpoint . --hf nowhere --out out",
    "verify . nowhere",
    "checkpoint show nowhere",
    "checkpoint verify nowhere",
    "generate --checkpoint nowhere --prompt Hello",
    "generate --checkpoint . --prompt Hello --image nowhere.jpg",
    f"bench --model.hf {HF} --nproc-per-node 1 --data.path nowhere",
    "parity --hf nowhere --layouts 1",
]
CODE = """
import sys
from toolkit.cli import main
assert main(["--version"]) == 0
for words in ("--help", "train --help", "bench --help", "data --help", "parity --help"):
    try:
        main(words.split())
    except SystemExit as end:
        assert end.code == 0
assert "torch" not in sys.modules and "numpy" not in sys.modules
for words in (*sys.argv[1:], "generate --checkpoint . --prompt Hello --image docs"):
    assert main(words.split()) == 1, words
assert "torch" not in sys.modules
folders = ["--original", ".", "--converted", ".", "--out", "out"]
import os
os.environ["LMUData"] = "nowhere"
for words in ("x", "x.tsv", "docs/x"):
    assert main(["evaluate", *folders, "--data", *words.split()]) == 2, words
assert "torch" not in sys.modules
hf = "tests/hf_configs/Qwen2-VL-2B-Instruct.json"
for data in ("docs", "pyproject.toml"):
    options = ["--model.hf", hf, "--nproc-per-node", "1", "--data.path", data, "--global_batch_size", "1"]
    assert main(["bench", *options]) == 1, data
assert "torch" not in sys.modules
run = ["--model.hf", hf, "--model.checkpoint", "random", "--data.path", "synthetic:images", "--steps", "1"]
assert main(["train", *run, "--parallel.tp", "3", "--nproc-per-node", "4"]) == 1
assert "torch" not in sys.modules
wrong = ("doctor --config run.yaml", "verify a b --forse", "train", "train --config pyproject.toml", "convrt")
for words in wrong:
    assert main(words.split()) == 2, words
"""


def test_version_names_what_decides_the_numbers(capsys, monkeypatch):
    """Every line is a name and a version, whether Transformer Engine is installed or not."""
    assert main(["--version"]) == 0
    names = ("megatron-vl", "megatron-core", "torch")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [f"{name} {metadata.version(name)}" for name in names]
    monkeypatch.setattr(metadata, "version", {"transformer-engine-torch": "2.20.2"}.__getitem__)
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
    assert "--data.seq_len" in done.stdout and "--even-routing" in done.stdout
    assert done.stderr.count("does not exist") == len(WRONG)
    assert "$LMUData nowhere is not a folder" in done.stderr
    assert done.stderr.count(" is not a file; give the path of a table") == 2
    assert "megatron-vl doctor: --config is unknown; " in done.stderr
    assert (
        "megatron-vl verify: --forse is unknown; valid: --help; see megatron-vl verify --help" in done.stderr
    )
    assert "megatron-vl train: no run is given: --model.hf DIR --data.path FILE, or --conf" in done.stderr
    assert "megatron-vl: convrt is unknown; did you mean convert" in done.stderr
    assert "megatron-vl train: parallel: tp 3 x pp 1 = 3 ranks do not divide the world size 4" in done.stderr
    assert "Traceback" not in done.stderr
    assert "megatron-vl generate: docs is a folder; --image takes a file" in done.stderr
    assert "data.path docs is not a data set (it holds no .nv-meta)" in done.stderr
    assert "data.path pyproject.toml is neither a data set's folder nor a metadataset" in done.stderr
    missing_models = sum("--hf nowhere" in words for words in WRONG)
    assert done.stderr.count("the folder of a downloaded checkpoint") == missing_models


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
@pytest.mark.parametrize("words", [["bench"], ["train", *"--steps 1 --data.path synthetic:text".split()]])
def test_one_rank_is_started_where_there_is_no_gpu(words, capsys):
    """Two of its ranks cannot share a layer; the message says how many to start, and with which option."""
    assert main([*words, "--model.hf", HF, "--parallel.tp", "2"]) == 1
    refused = "2 ranks do not divide the world size 1; start a multiple of 2 processes"
    assert f"{refused} (on one node: --nproc-per-node 2), or" in capsys.readouterr().err


def test_missing_files_of_a_checkpoint_are_shown(tmp_path, capsys):
    """Checks optimizer, loader and weights; the intact checkpoint is shown with exit code 0."""
    files = {"optimizer/rank_00000.safetensors": {}, "loader/dp_00000.json": {}}
    layout = {"tp": 1, "pp": 1, "vpp": 1, "layers": [4], "ep": 1, "etp": 1}
    facts = {"format": 1, "step": 3, "layout": layout, "dp": 1, "num_workers": 2, "seq_len": 64}
    names = [*files, "weights/tp00_pp00.safetensors"]
    for name in names:
        write(tmp_path / name, b"x")
    write_run_json(tmp_path, facts | {"files": files})
    manifest = {"format": WEIGHTS_FORMAT, "version": MANIFEST_VERSION, "kind": "shards"}
    manifest |= {"family": "qwen2_5_vl", "layout": {}, "lora": None, "hf_config": {}}
    manifest |= {"tensors": {}, "files": {"tp00_pp00.safetensors": {}}}
    manifest_path = tmp_path / "weights" / MANIFEST_FILE
    manifest_path.write_text(json.dumps(manifest | {"digest": manifest_digest(manifest)}))
    assert main(["checkpoint", "show", str(tmp_path)]) == 0
    for name in names:
        (tmp_path / name).unlink()
    assert main(["checkpoint", "show", str(tmp_path)]) == 1
    assert f"missing: {', '.join(sorted(names))}; go back to an earlier step" in capsys.readouterr().out
    manifest_path.unlink()
    assert main(["checkpoint", "show", str(tmp_path)]) == 1
    assert "has no weights/manifest.json; go back to an earlier step" in capsys.readouterr().err
