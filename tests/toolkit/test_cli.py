"""Small errors are reported before anything heavy is imported."""

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
from tests.support.tiny_run import environment
from toolkit.cli import main

ROOT = Path(__file__).resolve().parents[2]
HF = str(ROOT / "tests" / "hf_configs" / "Qwen2-VL-2B-Instruct.json")
RUN = f"--model.hf {HF} --model.checkpoint random --data.path synthetic:images --steps 1"
BENCH = f"bench --model.hf {HF} --nproc-per-node 1 --global_batch_size 1 --data.path"
SET = "evaluate --original . --converted . --out out --data"
MISSING = "nowhere does not exist"
NO_MODEL = f"{MISSING}; give the folder of a downloaded checkpoint"
REFUSED = {
    # before a start: importing torch takes four seconds, and converting the data may take hours
    "train {model} --data.path none.json": "none.json does not exist",
    "train {model} --data.path a.json,b.csv": "a.json,b.csv does not exist; `megatron-vl data",
    "train {inputs} --optimizer.lr abc": "expected a number, got abc",
    "train --model.hf nowhere --data.path {records}": f"model.hf {MISSING}",
    "train --model.hf {weightless} --data.path {records}": "weightless holds no weights",
    "train {inputs} --model.checkpoint nowhere": f"model.checkpoint {MISSING}",
    "train {inputs} --lora.adapter nowhere": f"lora.adapter {MISSING}; give a run",
    "train {model} --data.path {records} --checkpoint.dir {records}/run": "records.json is a file",
    "train {inputs} --nproc-per-node 4 --parallel.tp 3": "3 ranks do not divide the world size 4",
    f"train {RUN} --parallel.tp 3 --nproc-per-node 4": "3 ranks do not divide the world size 4",
    "train {model} --data.path {records} --platform cpu --fp8.recipe delayed": "delayed needs a GPU",
    "train {model} --data.path {records} --eval.interval 5": "give --val-fraction, such as 0.1",
    "train {inputs} --columns a=user --val-fraction 0.1": "records, so leave out --columns, --val-fraction",
    "train {inputs} --steps 5 --epochs 2": "exclude each other",
    "train {model} --data.path synthetic:text": "has no end: give steps",
    "train {model} --dry-run --data.path nowhere": f"{MISSING}; give a folder",
    "data convert --input nowhere.json --media-root . --out out": "nowhere.json does not exist",
    "data convert --input pyproject.toml --media-root nowhere --out out": MISSING,
    "data index --data.path nowhere --model.hf .": MISSING,
    "data show --data.path nowhere --model.hf .": MISSING,
    "convert --hf nowhere --out out": NO_MODEL,
    "split --checkpoint nowhere --parallel.tp 2 --out out": MISSING,
    "export --checkpoint . --hf nowhere --out out": NO_MODEL,
    "verify . nowhere": MISSING,
    "checkpoint show nowhere": MISSING,
    "generate --checkpoint nowhere --prompt Hello": MISSING,
    "generate --checkpoint . --prompt Hello --image nowhere.jpg": "nowhere.jpg does not exist",
    "generate --checkpoint . --prompt Hello --image docs": "docs is a folder; --image takes a file",
    "parity --hf nowhere --layouts 1": NO_MODEL,
    f"{SET} x": "$LMUData nowhere is not a folder",
    f"{SET} docs/x": " is not a file; give the path of a table",
    f"{BENCH} nowhere": MISSING,
    f"{BENCH} docs": "data.path docs is not a data set (it holds no .nv-meta)",
    f"{BENCH} pyproject.toml": "data.path pyproject.toml is neither a data set's folder nor a metadataset",
}
PROGRAM = """
import contextlib, io, json, sys
from toolkit.cli import main
results = []
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words.split())
        except SystemExit as end:
            code = end.code
    results.append([code, out.getvalue(), err.getvalue(), sorted({"torch", "pyarrow"} & {*sys.modules})])
print(json.dumps(results))
"""


def test_version_names_what_decides_the_numbers(capsys, monkeypatch):
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
def test_help_and_refusals_do_not_import_torch(tmp_path):
    (tmp_path / "data" / ".nv-meta").mkdir(parents=True)
    paths = {"records": tmp_path / "records.json", "weightless": tmp_path / "weightless"}
    write(paths["records"], b"[]")
    write(paths["weightless"] / "config.json", b"{}")
    (tmp_path / "config.json").write_bytes(Path(HF).read_bytes())
    (tmp_path / "model.safetensors").touch()
    model = f"--model.hf {tmp_path}"
    shown = ["--version", "--help", "train --help", "bench --help", "data --help", "parity --help"]
    refused = [
        words.format(model=model, inputs=f"{model} --data.path {tmp_path}/data", **paths) for words in REFUSED
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([*refused, *shown])],
        env=environment() | {"LMUData": "nowhere"}, cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = dict(zip([*REFUSED, *shown], json.loads(done.stdout), strict=True))
    for words, message in REFUSED.items():
        code, _, said, imported = results[words]
        assert code in (1, 2) and message in said and said.count("\n") == 1, f"{words}: {said}"
        assert "torch" not in imported and (imported == [] or not words.startswith("train")), words
    assert all(results[words][0] == 0 and "torch" not in results[words][3] for words in shown), results
    assert "--data.seq_len" in results["train --help"][1] and "--even-routing" in results["bench --help"][1]


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
    write(tmp_path / file, text.encode())
    assert main(["checkpoint", action, str(tmp_path)]) == 1
    shown = capsys.readouterr().err
    assert message in shown and len(shown.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
@pytest.mark.parametrize("words", [["bench"], ["train", *"--steps 1 --data.path synthetic:text".split()]])
def test_one_rank_is_started_where_there_is_no_gpu(words, capsys):
    assert main([*words, "--model.hf", HF, "--parallel.tp", "2"]) == 1
    refused = "2 ranks do not divide the world size 1; start a multiple of 2 processes"
    assert f"{refused} (on one node: --nproc-per-node 2), or" in capsys.readouterr().err


def test_missing_files_of_a_checkpoint_are_shown(tmp_path, capsys):
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
