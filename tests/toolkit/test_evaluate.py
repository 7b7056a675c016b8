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

from converters.convert import convert_weights, export_weights, reshard_weights
from megatron_vl.errors import UsageError
from tests.converters.peft_models import peft_folder
from tests.tiny import tiny_checkpoint
from tests.toolkit.evaluation import answers_letters, answers_of, damage, photograph_table, write_table
from toolkit.cli import main
from toolkit.evaluate import evaluation
from toolkit.evaluate.command import find_dataset
from toolkit.evaluate.evaluation import _process_gpus
from toolkit.evaluate.options import EvaluateOptions
from toolkit.hf_loading import load_hf_model, load_hf_processor

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
    convert_weights(original, folder / "shards", {"tp": 2, "pp": 2, "layers": [10, 18]})
    export_weights(folder / "shards", original, folder / "hf")
    return folder / "hf"


def first_answers(folder: Path, lines: list[dict], table: Path) -> list[str]:
    """The first words of transformers' answer to VLMEvalKit's prompt about the table's own pictures."""
    with table.open(newline="") as file:
        pictures = {row["index"]: row["image"] for row in csv.DictReader(file, delimiter="\t")}
    processor = load_hf_processor(folder)
    model = load_hf_model(folder, torch.float32)
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


@pytest.mark.eval
@pytest.mark.ranks
def test_an_examples_script_scores_original_round_trip_and_training(original, table, tmp_path):
    """Two processes share the questions; answers and scores are those of transformers and of counting."""
    full, shards, run = tmp_path / "full", tmp_path / "shards", tmp_path / "run"
    convert_weights(original, shards, {"tp": 2, "pp": 2, "layers": [10, 18]})
    other = shutil.copytree(tiny_checkpoint("qwen2_5_vl", layers=28), tmp_path / "other")
    convert_weights(answers_letters(other, 1), full)
    reshard_weights(full, run / "step_00000003" / "weights", {"tp": 2, "pp": 1})

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
    assert [gate["name"] for gate in report["gates"]] == ["tensors", "logits", "text", "scores"]
    assert report["passed"]
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

    # What was recorded is not asked again, the rest is: the same command after an interruption.
    [folder] = (tmp_path / "out" / "report" / "work").glob("trained-*")
    lines = answers_of(tmp_path / "out" / "report", "trained")
    for file in folder.glob("answers_*.jsonl"):
        file.unlink()
    kept = json.dumps(lines[0] | {"answer": "recorded"}) + "\n" + json.dumps(lines[1])[:-5]
    (folder / "answers_0.jsonl").write_text(kept)
    again = ["--original", original, "--converted", tmp_path / "out" / "converted"]
    again += [
        "--trained",
        tmp_path / "out" / "trained",
        "--lmu-data",
        table.parent,
        "--processes",
        "2",
        "--no-scores",
    ]
    again += ["--data", table.stem, "--out", tmp_path / "out" / "report", *QUICK]
    assert main(["evaluate", *map(str, again)]) == 0
    assert answers_of(tmp_path / "out" / "report", "trained") == [
        lines[0] | {"answer": "recorded"},
        *lines[1:],
    ]


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


@pytest.mark.eval
def test_one_permuted_projection_fails_before_a_question_is_asked(original, damaged, table, tmp_path, capsys):
    code, report = run(original, damaged, table, tmp_path / "out")
    assert code == 1 and not report["passed"]
    assert [gate["passed"] for gate in report["gates"]] == [False, None, None, None]
    assert "k_proj" in report["gates"][0]["details"][0] and "k_proj" in capsys.readouterr().out
    assert not list((tmp_path / "out" / "work").glob("*/answers*"))
    assert "no question asked" in (tmp_path / "out" / "report.html").read_text()


def test_an_adapter_is_merged_and_scored_as_the_trained_checkpoint(original, tmp_path):
    adapter = peft_folder(tmp_path / "adapter", original, target_modules=["q_proj"])
    options = EvaluateOptions(
        original=original, converted=original, adapter=adapter, data="", out=tmp_path / "out"
    )
    evaluation._merge_adapter(options, print)
    export_weights(adapter, original, tmp_path / "merged", merges_adapter=True)
    scored = evaluation.folder_hash(options.checkpoints["trained"])
    assert scored == evaluation.folder_hash(tmp_path / "merged") != evaluation.folder_hash(original)


@pytest.mark.eval
@pytest.mark.ranks
def test_one_permuted_projection_changes_the_logits(original, damaged, table, tmp_path):
    options = ["--limit", "4", "--keep-going"]
    code, report = run(original, damaged, table, tmp_path / "out", *options)
    assert code == 1 and report["questions"] == 4
    assert [gate["passed"] for gate in report["gates"]][:2] == [False, False]
    assert report["gates"][1]["measured"].startswith("4 of 4 prompts differ, by at most ")


def test_what_cannot_be_used_ends_with_2(original, converted, table, tmp_path, capsys, monkeypatch):
    """VLMEvalKit is missed last: a wrong path is named where it is not installed, too."""
    monkeypatch.setattr(evaluation, "VLMEVALKIT_VERSION", "0")  # no such version is installed

    def refused(*options: str, hf: Path = original, out: Path = tmp_path / "out") -> str:
        assert run(hf, converted, table, out, *options)[0] == 2
        return capsys.readouterr().err

    assert "gone.tsv is not a file; give the path of a table" in refused("--data", str(tmp_path / "gone.tsv"))
    assert f"--data {table} is a table whose own folder is used" in refused("--data", str(table))
    assert "holds no config.json" in refused(hf=tmp_path)
    assert "--limit: '0' is not a whole number of at least 1" in refused("--limit", "0")
    both = ("--adapter", str(original), "--trained", str(original))
    assert "give --trained or --adapter, not both" in refused(*both)
    assert "must be on this machine" in refused(
        "--judge", "gpt", "--judge-base-url", "https://example.com/v1"
    )
    assert "must be given together" in refused("--judge", "gpt")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    assert "is not empty" in refused(out=tmp_path / "full")
    assert "install the eval extra: pip install" in refused()
    assert main(["evaluate", "--original", str(original)]) == 2


def test_an_existing_table_is_taken_as_a_path(tmp_path, monkeypatch):
    """Also a table in the working folder or with a name that VLMEvalKit knows, but never a folder
    or another file."""
    usual = tmp_path / "LMUData"
    monkeypatch.setenv("LMUData", str(usual))
    write_table(tmp_path / "mine" / "photos.tsv", [[1, "Who?"]], ("index", "question"))
    write_table(usual / "photos.tsv", [[1, "Where?"]], ("index", "question"))
    mine = ("photos", tmp_path / "mine")
    assert find_dataset(str(tmp_path / "mine" / "photos.tsv"), None, True) == mine

    monkeypatch.chdir(tmp_path / "mine")
    assert find_dataset("photos.tsv", None, True) == find_dataset("../mine/photos.tsv", None, True) == mine
    assert find_dataset("photos", None, True) == ("photos", usual)
    assert find_dataset("photos", tmp_path, True) == ("photos", tmp_path)

    (tmp_path / "mine" / "MMBench").touch()
    (tmp_path / "mine" / "folder.tsv").mkdir()
    assert find_dataset("MMBench", None, True) == ("MMBench", usual)
    for wrong in ("folder.tsv", "gone.tsv", "../mine/photos", "..", ""):
        with pytest.raises(UsageError, match="is not a file; give the path of a table"):
            find_dataset(wrong, None, True)

    with pytest.raises(UsageError, match="leave it out"):
        find_dataset("photos.tsv", tmp_path, True)


def test_a_table_that_lacks_a_column_is_refused(table, tmp_path):
    """VLMEvalKit would end with "KeyError: 'answer'" after the last answer."""
    path = write_table(tmp_path / "photos.tsv", [[1, "Who?", "a", "b"]], ("index", "question", "A", "B"))
    with pytest.raises(UsageError, match="no column answer; it has index, question, A, B$"):
        find_dataset(str(path), None, True)
    assert find_dataset(str(path), None, False) == ("photos", tmp_path)
    assert find_dataset(str(table), None, True) == (table.stem, table.parent)
    with pytest.raises(UsageError, match="no column index, question; it has id"):
        find_dataset(str(write_table(path, [[1]], ("id",))), None, True)


@pytest.mark.eval
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "--data photos: VLMEvalKit knows no such data set"),
        ([[1, "Who?"], [1, "Where?"]], "--data photos: index 1 occurs twice"),
    ],
)
def test_data_that_vlmevalkit_cannot_use_ends_with_2(original, converted, tmp_path, capsys, rows, message):
    if rows:
        write_table(tmp_path / "photos.tsv", rows, ("index", "question"))
    assert run(original, converted, tmp_path / "photos.tsv", tmp_path / "out")[0] == 2
    assert message in capsys.readouterr().err


@pytest.mark.eval
@pytest.mark.slow
def test_a_library_that_vlmevalkit_misses_is_named(original, converted, table, tmp_path, capsys, monkeypatch):
    broken = tmp_path / "site"
    broken.mkdir()
    (broken / "cv2.py").write_text('raise ImportError("libGL.so.1: cannot open shared object file")\n')
    monkeypatch.setenv("PYTHONPATH", str(broken))
    folders = ["--original", str(original), "--converted", str(converted), "--lmu-data", str(table.parent)]
    assert main(["evaluate", *folders, "--data", "photographs", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "\nVLMEvalKit runs " in said and "\nimporting VLMEvalKit, which reads photographs" in said
    assert "libGL.so.1: cannot open shared object file" in said and "libgl1" in said


def test_each_process_has_gpus_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-6,7")
    assert [_process_gpus(2, rank) for rank in range(2)] == [["4", "5"], ["GPU-6", "7"]]
