"""`megatron-vl evaluate` with the real VLMEvalKit: an example's script from shards to scores,
damage, refused tables."""

import base64
import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pandas import DataFrame
from PIL import Image

from converters.convert import convert_weights, export_weights, reshard_weights
from converters.hf_checkpoint import HfCheckpoint
from megatron_vl.system.errors import UsageError
from megatron_vl.weights.model_digest import LoraBase, model_digest
from megatron_vl.weights.run_folder import EXPORT_FACTS_FILE
from megatron_vl.weights.tensor_files import WeightsError
from tests.converters.peft_models import peft_folder
from tests.tiny import tiny_checkpoint
from tests.toolkit.evaluation import answers_letters, damage, photograph_table, write_table
from toolkit.cli import main
from toolkit.common.hf_loading import load_hf_model, load_hf_processor
from toolkit.evaluate import evaluation
from toolkit.evaluate.command import find_dataset
from toolkit.evaluate.vlmevalkit_adapter import UNUSABLE_FILE, VlmEvalKitModel, _read_dataset

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["--max-new-tokens", "1"]


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    return photograph_table(tmp_path_factory.mktemp("LMUData") / "photographs.tsv")


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "hf"
    shutil.copytree(tiny_checkpoint("qwen2_5_vl", layers=28), folder)
    return answers_letters(folder, 0)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "hf"
    shutil.copytree(tiny_checkpoint("qwen2_5_vl"), folder)
    return answers_letters(folder, 0)


@pytest.fixture(scope="module")
def converted(small, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    convert_weights(small, folder / "shards", {"tp": 2, "pp": 2})
    export_weights(folder / "shards", small, folder / "hf")
    return folder / "hf"


def predictions(out: Path, role: str) -> dict[str, str]:
    """Index -> answer, of VLMEvalKit's own file."""
    [path] = (out / "work" / "results").glob(f"{role}-*/{role}-*_photographs.tsv")
    with path.open(newline="") as file:
        return {row["index"]: row["prediction"] for row in csv.DictReader(file, delimiter="\t")}


def first_words(folder: Path, table: Path) -> dict[str, str]:
    """Index -> first word of transformers' answer to VLMEvalKit's prompt about the table's own image."""
    processor = load_hf_processor(folder)
    model = load_hf_model(folder, torch.float32)
    answers = {}
    with table.open(newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            choices = "".join(f"{letter}. {row[letter]}\n" for letter in "ABCD")
            question = f"Question: {row['question']}\nOptions:\n{choices}"
            question += "Please select the correct answer from the options above. \n"
            content = [{"type": "image"}, {"type": "text", "text": question}]
            text = processor.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
            )
            image = Image.open(io.BytesIO(base64.b64decode(row["image"]))).convert("RGB")
            batch = processor(text=[text], images=[image], return_tensors="pt")
            with torch.no_grad():
                answers[row["index"]] = processor.decode(model(**batch).logits[0, -1].argmax())
    return answers


@pytest.mark.eval
@pytest.mark.ranks
def test_script_scores_original_round_trip_and_training(original, table, tmp_path):
    """Answers and scores are those of transformers and of counting."""
    full, shards, run = tmp_path / "full", tmp_path / "shards", tmp_path / "run"
    convert_weights(original, shards, {"tp": 2, "pp": 2, "layers": [10, 18]})
    other = shutil.copytree(tiny_checkpoint("qwen2_5_vl", layers=28), tmp_path / "other")
    convert_weights(answers_letters(other, 1), full)
    reshard_weights(full, run / "step_00000003" / "weights", {"tp": 2, "pp": 1})

    out = tmp_path / "out"
    environment = {"HF": original, "SHARDS": shards, "RUN": run, "DATA": table.stem, "OUT": out}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    script = [ROOT / "examples" / "evaluate.sh", "qwen2_5_vl_7b"]
    environment["LMUData"] = table.parent
    command = [*script, *QUICK]

    def evaluate() -> dict:
        done = subprocess.run(
            list(map(str, command)),
            env=os.environ | {k: str(v) for k, v in environment.items()},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return json.loads((out / "report.json").read_text())

    report = evaluate()
    assert report["passed"] and report["problems"] == []
    assert report["questions"] == 8
    checkpoints = report["checkpoints"]
    assert checkpoints["converted"]["tensors"] == checkpoints["converted"]["answers"] == "identical"
    with table.open(newline="") as file:
        right_answers = {row["index"]: row["answer"] for row in csv.DictReader(file, delimiter="\t")}
    for role, folder in (("original", original), ("trained", other)):
        answers = predictions(out, role)
        assert answers == first_words(folder, table)
        right = sum(answers[index] == answer for index, answer in right_answers.items())
        assert checkpoints[role]["metrics"]["split=none|Overall"] == pytest.approx(right / 8)
    assert checkpoints["original"]["metrics"] == checkpoints["converted"]["metrics"]

    # The same command again: VLMEvalKit keeps its answers, and no model is loaded.
    written = {path: path.stat().st_mtime_ns for path in (out / "work").glob("results/*-*/answers_*")}
    assert evaluate()["checkpoints"] == checkpoints
    assert {path: path.stat().st_mtime_ns for path in written} == written


@pytest.fixture(scope="module")
def damaged(converted, tmp_path_factory) -> Path:
    return damage(converted, tmp_path_factory.mktemp("damaged") / "hf")


def run(original: Path, converted: Path, table: Path, out: Path, *options: str) -> tuple[int, dict]:
    folders = ["--original", str(original), "--converted", str(converted), "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMUData", str(table.parent))
        code = main(["evaluate", *folders, "--data", table.stem, *QUICK, *options])
    report = out / "report.json"
    return code, json.loads(report.read_text()) if report.is_file() else {}


@pytest.mark.eval
def test_permuted_projection_fails_before_a_question_is_asked(small, damaged, table, tmp_path, capsys):
    code, report = run(small, damaged, table, tmp_path / "out")
    assert code == 1 and not report["passed"] and report["questions"] == 0
    assert "k_proj" in report["problems"][0] and "k_proj" in capsys.readouterr().out
    assert not (tmp_path / "out" / "work").exists()


def test_adapter_is_merged_and_scored_as_the_trained_checkpoint(small, tmp_path):
    adapter = peft_folder(tmp_path / "adapter", small, target_modules=["q_proj"])
    exported = evaluation.exported_folder(adapter, small, tmp_path / "out")
    export_weights(adapter, small, tmp_path / "merged", merges_adapter=True)
    scored = evaluation.folder_hash(exported)
    assert scored == evaluation.folder_hash(tmp_path / "merged") != evaluation.folder_hash(small)
    assert evaluation.exported_folder(small, small, tmp_path / "unused") == small


def test_adapter_of_another_base_is_refused(small, tmp_path):
    other = tiny_checkpoint("qwen2_5_vl", seed=5)
    adapter = peft_folder(tmp_path / "adapter", small, target_modules=["q_proj"])
    facts = LoraBase(model_digest(HfCheckpoint(small)), str(small)).entry()
    (adapter / EXPORT_FACTS_FILE).write_text(json.dumps(facts))
    refusal = rf"{adapter} were .* other weights \({small}\) than .* {other},"
    with pytest.raises(WeightsError, match=refusal):
        evaluation.exported_folder(adapter, other, tmp_path / "out")


def test_permuted_projection_changes_an_answer(small, damaged, table, tmp_path):
    """What VLMEvalKit's model of each folder records is compared."""
    folders = {"original": small, "same": small, "damaged": damaged}
    settings = {"dtype": "float32", "max_new_tokens": (8, 8)}
    job = {"work": str(tmp_path), "checkpoints": folders, "settings": settings, "roots": []}
    for name in folders:
        VlmEvalKitModel(job, name).generate([{"type": "text", "value": "Who?"}])
    first, same, other = (tmp_path / "results" / name for name in folders)
    assert evaluation.compare_answers(first, same) == ("1", "identical", [])
    assert evaluation.compare_answers(first, other)[1] == "1 differ"
    assert evaluation.compare_answers(first, tmp_path)[1] == "1 differ"  # not asked


def test_missing_metric_and_another_score_are_problems(tmp_path):
    """A metric that is NaN counts as missing; VLMEvalKit's reason is given."""

    def scored(converted: float = 0.5, **trained: float) -> list[str]:
        facts = {
            "original": {"a": 0.5, "b": 1.0},
            "converted": {"a": converted, "b": 1.0},
            "trained": trained,
        }
        return evaluation.compare_scores({role: {"metrics": metrics} for role, metrics in facts.items()})

    assert scored(a=0.1, b=0.2) == []
    assert scored(a=0.1) == ["trained: metric 'b' is missing; only the original has it"]
    assert scored(0.4, a=0.1, b=0.2) == ["a: 0.5 and 0.4"]

    assert evaluation.read_scores(tmp_path, "set") == ({}, "VLMEvalKit wrote no status.json")
    for status, found in (
        ({"status": "done", "metrics": {"a": 0.5, "b": float("nan")}}, ({"a": 0.5}, "")),
        ({"status": "eval"}, ({}, "VLMEvalKit stopped at 'eval'")),
        ({"error_message": "no judge", "metrics": {"a": 1}}, ({}, "no judge")),
    ):
        (tmp_path / "status.json").write_text(json.dumps({"datasets": {"set": status}}))
        assert evaluation.read_scores(tmp_path, "set") == found


def test_evaluate_refuses_what_it_cannot_use(small, converted, table, tmp_path, capsys, monkeypatch):
    """VLMEvalKit is missed last: a wrong path is named where it is not installed, too."""
    monkeypatch.setattr(evaluation, "VLMEVALKIT_VERSION", "0")  # no such version is installed

    def refused(*options: str, hf: Path = small, out: Path = tmp_path / "out") -> str:
        assert run(hf, converted, table, out, *options)[0] == 2
        return capsys.readouterr().err

    assert "gone.tsv is not a file; give the path of a table" in refused("--data", str(tmp_path / "gone.tsv"))
    assert "holds no config.json" in refused(hf=tmp_path)
    assert "--limit: 0 must be at least 1" in refused("--limit", "0")
    assert "must be on this machine" in refused("--judge", "gpt@https://example.com/v1")
    assert "give the address of its server too, NAME@URL" in refused("--judge", "gpt")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    assert "is not empty" in refused(out=tmp_path / "full")
    assert "install the eval extra: pip install" in refused()
    assert main(["evaluate", "--original", str(small)]) == 2


def test_existing_table_is_taken_as_a_path(tmp_path, monkeypatch):
    """Also a table in the working folder or with a name that VLMEvalKit knows, but never a folder
    or another file."""
    usual = tmp_path / "LMUData"
    monkeypatch.setenv("LMUData", str(usual))
    write_table(tmp_path / "mine" / "photos.tsv", [[1, "Who?"]], ("index", "question"))
    write_table(usual / "photos.tsv", [[1, "Where?"]], ("index", "question"))
    mine = ("photos", tmp_path / "mine")
    assert find_dataset(str(tmp_path / "mine" / "photos.tsv")) == mine

    monkeypatch.chdir(tmp_path / "mine")
    assert find_dataset("photos.tsv") == find_dataset("../mine/photos.tsv") == mine
    assert find_dataset("photos") == ("photos", usual)

    (tmp_path / "mine" / "MMBench").touch()
    (tmp_path / "mine" / "folder.tsv").mkdir()
    assert find_dataset("MMBench") == ("MMBench", usual)
    for wrong in ("folder.tsv", "gone.tsv", "../mine/photos", "..", ""):
        with pytest.raises(UsageError, match="is not a file; give the path of a table"):
            find_dataset(wrong)


@pytest.mark.eval
@pytest.mark.ranks
def test_evaluate_refuses_an_unknown_data_set(small, converted, tmp_path, capsys):
    assert run(small, converted, tmp_path / "photos.tsv", tmp_path / "out")[0] == 2
    assert "--data photos: VLMEvalKit knows no such data set" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1, "Who?", "a", "b"], [1, "Where?", "a", "b"]], "--data photos: index 1 occurs twice"),
        ([[1, "Who?", "a", "b"]], "--data photos: multiple choice without a column answer"),
    ],
)
def test_table_that_cannot_be_scored_is_refused(tmp_path, rows, message):
    table = SimpleNamespace(data=DataFrame(rows, columns=["index", "question", "A", "B"]))
    job = {"data": "photos", "work": str(tmp_path), "settings": {"limit": None}}
    with pytest.raises(SystemExit):
        _read_dataset(job, lambda name: table)
    assert message in (tmp_path / UNUSABLE_FILE).read_text()
