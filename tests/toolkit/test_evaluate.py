"""`megatron-vl evaluate` with the real VLMEvalKit: an example's script from shards to scores,
damage, refused tables."""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from converters.convert import convert, export, reshard
from megatron_vl.errors import UsageError
from tests.tiny import tiny_checkpoint
from tests.toolkit.evaluation import (
    answers_letters,
    answers_of,
    damage,
    needs_vlmevalkit,
    photograph_table,
    write_table,
)
from toolkit.cli import main
from toolkit.evaluate.comparison import _gpus
from toolkit.evaluate.early import check_data, find_data
from toolkit.hf import load_model, load_processor

pytestmark = needs_vlmevalkit

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["--dtype", "float32", "--max-new-tokens", "1"]


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    return photograph_table(tmp_path_factory.mktemp("LMUData") / "photographs.tsv")


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "hf"
    shutil.copytree(tiny_checkpoint("qwen2_5_vl", layers=28), folder)
    return answers_letters(folder, 0)


@pytest.fixture(scope="module")
def converted(original, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    convert(original, folder / "shards", {"tp": 2, "pp": 2, "layers": [10, 18]})
    export(folder / "shards", original, folder / "hf")
    return folder / "hf"


def first_answers(folder: Path, lines: list[dict], table: Path) -> list[str]:
    """The first words of transformers' answer to VLMEvalKit's prompt about the table's own pictures."""
    with table.open(newline="") as file:
        pictures = {row["index"]: row["image"] for row in csv.DictReader(file, delimiter="\t")}
    processor = load_processor(folder)
    model = load_model(folder, torch.float32)
    answers = []
    for line in lines:
        content = [{"type": "image"}, {"type": "text", "text": line["question"]}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        picture = Image.open(io.BytesIO(base64.b64decode(pictures[line["index"]]))).convert("RGB")
        batch = processor(text=[text], images=[picture], return_tensors="pt")
        with torch.no_grad():
            answers.append(processor.decode(model(**batch).logits[0, -1].argmax()))
    return answers


@pytest.mark.ranks
def test_an_examples_script_scores_original_round_trip_and_training(original, table, tmp_path):
    """Two processes share the questions; answers and scores are those of transformers and of counting."""
    full, shards, run = tmp_path / "full", tmp_path / "shards", tmp_path / "run"
    convert(original, shards, {"tp": 2, "pp": 2, "layers": [10, 18]})
    other = shutil.copytree(tiny_checkpoint("qwen2_5_vl", layers=28), tmp_path / "other")
    convert(answers_letters(other, 1), full)
    reshard(full, run / "step_00000003" / "weights", {"tp": 2, "pp": 1})
    (run / "latest.json").write_text('{"step": 3, "serial": 0}')

    environment = {"HF": original, "SHARDS": shards, "RUN": run, "DATA": table.stem, "OUT": tmp_path / "out"}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    script = [ROOT / "examples" / "evaluate.sh", "qwen2_5_vl_7b"]
    command = [*script, "--lmu-data", table.parent, "--processes", "2", *QUICK]
    done = subprocess.run(
        list(map(str, command)),
        env=os.environ | {k: str(v) for k, v in environment.items()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    report = json.loads((tmp_path / "out" / "report" / "report.json").read_text())
    assert [gate["name"] for gate in report["gates"]] == ["tensors", "logits", "text", "scores"] and report[
        "passed"
    ]
    assert report["questions"] == 8 and report["settings"]["processes"] == 2
    for role, folder in (("original", original), ("trained", other)):
        lines = answers_of(tmp_path / "out" / "report", role)
        assert len({(line["index"]) for line in lines}) == 8
        assert [line["answer"] for line in lines] == first_answers(folder, lines, table)
        right = sum(line["answer"] == line["expected"] for line in lines)
        assert report["checkpoints"][role]["metrics"]["split=none|Overall"] == pytest.approx(right / 8)
    assert report["checkpoints"]["original"]["metrics"] == report["checkpoints"]["converted"]["metrics"]
    page = (tmp_path / "out" / "report" / "report.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 8 and "http" not in page and "<script" not in page


@pytest.fixture(scope="module")
def damaged(converted, tmp_path_factory) -> Path:
    return damage(converted, tmp_path_factory.mktemp("damaged") / "hf")


def run(original: Path, converted: Path, table: Path, out: Path, *options: str) -> tuple[int, dict]:
    folders = ["--original", str(original), "--converted", str(converted), "--out", str(out)]
    code = main(
        ["evaluate", *folders, "--data", table.stem, "--lmu-data", str(table.parent), *QUICK, *options]
    )
    report = out / "report.json"
    return code, json.loads(report.read_text()) if report.is_file() else {}


def test_one_permuted_projection_fails_before_a_question_is_asked(original, damaged, table, tmp_path, capsys):
    code, report = run(original, damaged, table, tmp_path / "out")
    assert code == 1 and not report["passed"]
    assert [gate["passed"] for gate in report["gates"]] == [False, None, None, None]
    assert "k_proj" in report["gates"][0]["details"][0] and "k_proj" in capsys.readouterr().out
    assert not list((tmp_path / "out" / "work").glob("*/answers*"))
    assert "no question asked" in (tmp_path / "out" / "report.html").read_text()


def test_what_cannot_be_used_ends_with_2(original, converted, table, tmp_path, capsys):
    def refused(*options: str, hf: Path = original, out: Path = tmp_path / "out") -> str:
        assert run(hf, converted, table, out, *options)[0] == 2
        return capsys.readouterr().err

    assert "other.tsv does not exist" in refused("--data", "other")
    assert "gone.tsv is not a file; give the path of a table" in refused("--data", str(tmp_path / "gone.tsv"))
    assert f"--data {table} is a table whose own folder is used" in refused("--data", str(table))
    assert "config.json is missing" in refused(hf=tmp_path)
    assert "--limit 0 must be at least 1" in refused("--limit", "0")
    assert "must be on this machine" in refused(
        "--judge", "gpt", "--judge-base-url", "https://example.com/v1"
    )
    assert "must be given together" in refused("--judge", "gpt")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    assert "is not empty" in refused(out=tmp_path / "full")
    assert main(["evaluate", "--original", str(original)]) == 2


def test_an_existing_table_is_taken_as_a_path(tmp_path, monkeypatch):
    """Also a table in the working folder or with a name that VLMEvalKit knows, but never a folder
    or another file."""
    usual = tmp_path / "LMUData"
    write_table(tmp_path / "mine" / "photos.tsv", [[1, "Who?"]], ("index", "question"))
    write_table(usual / "photos.tsv", [[1, "Where?"]], ("index", "question"))
    mine = ("photos", tmp_path / "mine")
    assert find_data(str(tmp_path / "mine" / "photos.tsv"), None, usual) == mine

    monkeypatch.chdir(tmp_path / "mine")
    assert find_data("photos.tsv", None, usual) == find_data("../mine/photos.tsv", None, usual) == mine
    assert find_data("photos", None, usual) == ("photos", usual)
    assert find_data("photos", tmp_path, usual) == ("photos", tmp_path)

    (tmp_path / "mine" / "MMBench").touch()
    (tmp_path / "mine" / "folder.tsv").mkdir()
    assert find_data("MMBench", None, usual) == ("MMBench", usual)
    for wrong in ("folder.tsv", "gone.tsv", "../mine/photos", "..", ""):
        with pytest.raises(UsageError, match="is not a file; give the path of a table"):
            find_data(wrong, None, usual)

    with pytest.raises(UsageError, match="leave it out"):
        find_data("photos.tsv", tmp_path, usual)


EARLY = """
import sys
from toolkit.cli import main
for data in sys.argv[2:]:
    where = ["--lmu-data", sys.argv[1], "--out", sys.argv[1] + "/out"]
    assert main(["evaluate", "--original", ".", "--converted", ".", "--data", data, *where]) == 2, data
assert not {"torch", "vlmeval", "pandas"} & set(sys.modules)
"""


def test_wrong_data_is_reported_before_anything_is_imported(table, tmp_path):
    """Tries unknown names, a published table, one of several tables, and an own table's columns."""
    write_table(tmp_path / "MMMB_ar.tsv", [[1, "Who?"]], ("index", "question"))
    write_table(tmp_path / "photos.tsv", [[1, "Who?", "a", "b"]], ("index", "question", "A", "B"))
    names = ("nobody", "MMBench_DEV_EN_V11", "MMMB", "photos")
    command = [sys.executable, "-c", EARLY, str(tmp_path), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    for line, file in zip(said[:3], ("nobody", "MMBench_DEV_EN_V11", "MMMB_cn"), strict=True):
        assert f"{tmp_path.resolve() / file}.tsv does not exist" in line
    assert said[3] == "megatron-vl evaluate: photos.tsv: no column answer; it has index, question, A, B"
    check_data("photos", tmp_path, False)
    check_data(table.stem, table.parent, True)


@pytest.mark.slow
def test_a_library_that_vlmevalkit_misses_is_named(original, converted, table, tmp_path, capsys, monkeypatch):
    broken = tmp_path / "site"
    broken.mkdir()
    (broken / "cv2.py").write_text('raise ImportError("libGL.so.1: cannot open shared object file")\n')
    monkeypatch.setenv("PYTHONPATH", str(broken))
    folders = ["--original", str(original), "--converted", str(converted), "--lmu-data", str(table.parent)]
    assert main(["evaluate", *folders, "--data", "photographs", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    first, second, *_ = said.splitlines()
    assert first.startswith("VLMEvalKit runs ")
    assert second.startswith("importing VLMEvalKit, which reads photographs")
    assert "libGL.so.1: cannot open shared object file" in said and "libgl1" in said


def test_each_process_has_gpus_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-6,7")
    assert [_gpus(2, rank) for rank in range(2)] == [["4", "5"], ["GPU-6", "7"]]
