"""Small errors are told before anything heavy is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WRONG = [
    "data convert --input nowhere.json --media-root . --out out",
    "data convert --input pyproject.toml --media-root nowhere --out out",
    "data verify nowhere",
    "convert --hf nowhere --out out",
    "split --checkpoint nowhere --tp 2 --out out",
    "merge --checkpoint nowhere --out out",
    "export --checkpoint . --hf nowhere --out out",
    "verify . nowhere",
    "checkpoint show nowhere",
    "checkpoint verify nowhere",
    "bench --hf nowhere --gpus 8",
    "generate --checkpoint nowhere --hf . --prompt Hello",
    "generate --checkpoint . --hf . --prompt Hello --image nowhere.jpg",
    "bench --hf . --processes 1 --data nowhere",
    "parity --hf nowhere --layouts 1",
]
CODE = """
import sys
from toolkit.cli import main
for words in sys.argv[1:]:
    assert main(words.split()) == 1, words
assert "torch" not in sys.modules
hf = "tests/hf_configs/Qwen2-VL-2B-Instruct.json"
for data in ("docs", "pyproject.toml"):
    assert main(["bench", "--hf", hf, "--processes", "1", "--data", data, "--global_batch_size", "1"]) == 1, data
assert "torch" not in sys.modules
from megatron_vl.train import main as train
for words in ("--parallel.tp 3", "--model.hf nowhere", "--data.path nowhere --model.hf " + "tests"):
    assert train(words.split()) == 1, words
assert "torch" not in sys.modules
assert main(["data", "verify", "pyproject.toml"]) == 1  # a file where a folder belongs
for words in ("doctor --config run.yaml --data.seq_len 64", "verify a b --forse"):
    try:
        main(words.split())
    except SystemExit as end:
        assert end.code == 2, words
"""


def test_missing_paths_and_impossible_fields_are_told_without_importing_torch():
    done = subprocess.run([sys.executable, "-c", CODE, *WRONG], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("does not exist") == len(WRONG)
    assert "unrecognized arguments: --data.seq_len; fields of a run go behind `--`" in done.stderr
    assert "verify: unrecognized arguments: --forse; see megatron-vl verify --help" in done.stderr
    assert "data.path docs is no data set (it holds no .nv-meta)" in done.stderr
    assert "data.path pyproject.toml is neither a data set's folder nor a metadataset" in done.stderr
    trainer = 2  # its model.hf, missing in two of the three lines
    assert done.stderr.count("hf download") == sum("--hf nowhere" in words for words in WRONG) + trainer
    assert done.stderr.count("megatron_vl.train: rank 0: ") == 3
