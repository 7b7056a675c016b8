"""`megatron-vl evaluate`: scores, damage and refusals; dialogues, tables and videos; models that think."""

import base64
import io
import json
import os
import random
import shutil
import subprocess
import sys
from operator import itemgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import av
import numpy as np
import pytest
import torch
from pandas import DataFrame, read_csv
from PIL import Image

from converters.convert import convert_weights, export_weights, reshard_weights
from converters.hf_checkpoint import HfCheckpoint
from megatron_vl.data.sample.thinking import GeneratedAnswer
from megatron_vl.system.errors import UsageError
from megatron_vl.system.json_files import write_json
from megatron_vl.weights.model_digest import LoraBase, model_digest
from megatron_vl.weights.run_folder import EXPORT_FACTS_FILE
from megatron_vl.weights.tensor_files import WeightsError
from megatron_vl.weights.trained_media import ARGUMENTS_KEY, MEDIA_KEY
from tests.converters.peft_models import peft_folder
from tests.data.media import video_of, write
from tests.tiny import replace_tensor, tiny_checkpoint, with_released_template, write_tiny_checkpoint
from toolkit.cli import main
from toolkit.common.hf_loading import load_hf_model, load_hf_processor
from toolkit.evaluate import evaluation
from toolkit.evaluate.checkpoint_model import CheckpointModel
from toolkit.evaluate.command import find_dataset
from toolkit.evaluate.evaluation import folder_hash, read_answers, run_evaluation
from toolkit.evaluate.options import EvaluateOptions
from toolkit.evaluate.vlmevalkit_adapter import (
    NO_JUDGE,
    QUESTION_COUNT_FILE,
    UNUSABLE_FILE,
    VlmEvalKitModel,
    _read_dataset,
    run_vlmevalkit,
)

ROOT = Path(__file__).resolve().parents[2]
HF_CONFIGS = ROOT / "tests" / "hf_configs"
QUICK = ["--max-new-tokens", "1"]
WHO = [{"type": "text", "value": "Who?"}]


def photographs() -> list[Image.Image]:
    from skimage import data

    images = [Image.fromarray(getattr(data, name)()) for name in ("astronaut", "chelsea", "coffee", "rocket")]
    for image in images:
        image.thumbnail((160, 160))
    return images


def encoded(image: Image.Image) -> str:
    image.save(data := io.BytesIO(), "PNG")
    return base64.b64encode(data.getvalue()).decode()


def answers_letters(folder: Path, seed: int, **sizes: int) -> Path:
    """A tiny checkpoint whose first token is always one of A to D, depending on the image."""
    shutil.copytree(tiny_checkpoint("qwen2_5_vl", **sizes), folder)
    tokens = load_hf_processor(folder).tokenizer
    letters = [tokens.convert_tokens_to_ids(letter) for letter in "ABCD"]

    def with_letters(head: torch.Tensor) -> torch.Tensor:
        rows = torch.randn(2, head.shape[1], generator=torch.Generator().manual_seed(seed))
        values = torch.cat([rows, -rows]).to(head.dtype)
        # One of four is always above the zero of all others.
        return torch.zeros_like(head).index_copy(0, torch.tensor(letters), values)

    return replace_tensor(folder, "lm_head.weight", with_letters)


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    """Eight questions about four photographs; the right answers alternate between A, B, C and D."""
    path, images = tmp_path_factory.mktemp("LMUData") / "photographs.tsv", photographs()
    choices = dict(zip("ABCD", ("a person", "a cat", "a cup", "a rocket"), strict=True))
    rows = [
        {"index": i + 1, "image": encoded(images[i // 2]), "question": f"What is in image {i}?"}
        | choices
        | {"answer": "ABCD"[i // 2]}
        for i in range(8)
    ]
    DataFrame(rows).to_csv(path, sep="\t", index=False)
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return answers_letters(tmp_path_factory.mktemp("original") / "hf", 0, layers=28)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return answers_letters(tmp_path_factory.mktemp("small") / "hf", 0)


@pytest.fixture(scope="module")
def converted(small, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    convert_weights(small, folder / "shards", {"tp": 2, "pp": 2})
    export_weights(folder / "shards", small, folder / "hf")
    return folder / "hf"


def predictions(out: Path, role: str) -> dict[str, str]:
    """Index -> answer, of VLMEvalKit's own file."""
    [path] = (out / "work" / "results").glob(f"{role}-*/{role}-*_photographs.tsv")
    return read_csv(path, sep="\t", dtype=str).set_index("index")["prediction"].to_dict()


def first_words(folder: Path, table: Path) -> dict[str, str]:
    """Index -> first word of transformers' answer to VLMEvalKit's prompt about the table's own image."""
    processor, model, answers = load_hf_processor(folder), load_hf_model(folder, torch.float32), {}
    for row in read_csv(table, sep="\t", dtype=str).to_dict("records"):
        choices = "".join(f"{letter}. {row[letter]}\n" for letter in "ABCD")
        question = f"Question: {row['question']}\nOptions:\n{choices}"
        question += "Please select the correct answer from the options above. \n"
        turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}
        text = processor.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
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
    other = answers_letters(tmp_path / "other", 1, layers=28)
    convert_weights(other, full)
    reshard_weights(full, run / "step_00000003" / "weights", {"tp": 2, "pp": 1})

    out = tmp_path / "out"
    environment = {"HF": original, "SHARDS": shards, "RUN": run, "DATA": table.stem, "OUT": out}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "LMUData": table.parent}
    variables = os.environ | {name: str(value) for name, value in environment.items()}
    command = [str(ROOT / "examples" / "evaluate.sh"), "qwen2_5_vl_7b", *QUICK]

    def evaluate() -> dict:
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return json.loads((out / "report.json").read_text())

    report = evaluate()
    assert (report["passed"], report["problems"], report["questions"]) == (True, [], 8)
    checkpoints = report["checkpoints"]
    assert checkpoints["converted"]["tensors"] == checkpoints["converted"]["answers"] == "identical"
    right_answers = read_csv(table, sep="\t", dtype=str).set_index("index")["answer"].to_dict()
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
    """With the heads of one k_proj swapped, as after a wrong conversion of grouped queries."""
    folder = shutil.copytree(converted, tmp_path_factory.mktemp("damaged") / "hf")
    name = "model.layers.3.self_attn.k_proj.weight"
    return replace_tensor(folder, name, lambda weight: torch.cat(weight.chunk(2)[::-1]))


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
    folders = {"original": small, "same": small, "damaged": damaged}
    settings = {"dtype": "float32", "max_new_tokens": (8, 8)}
    job = {"work": str(tmp_path), "checkpoints": folders, "settings": settings, "roots": []}
    for name in folders:
        VlmEvalKitModel(job, name).generate(WHO)
    first, same, other = (tmp_path / "results" / name for name in folders)
    assert evaluation.compare_answers(first, same) == ("1", "identical", [])
    assert evaluation.compare_answers(first, other)[1] == "1 differ"
    assert evaluation.compare_answers(first, tmp_path)[1] == "1 differ"  # not asked


def test_missing_metric_and_another_score_are_problems(tmp_path):
    """A metric that is NaN counts as missing; VLMEvalKit's reason is given."""

    def scored(converted: float = 0.5, **trained: float) -> list[str]:
        original, back = {"a": 0.5, "b": 1.0}, {"a": converted, "b": 1.0}
        facts = {"original": original, "converted": back, "trained": trained}
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
    write(tmp_path / "full/mine.txt", b"")
    assert "is not empty" in refused(out=tmp_path / "full")
    assert "install the eval extra: pip install" in refused()
    assert main(["evaluate", "--original", str(small)]) == 2


def test_existing_table_is_taken_as_a_path(tmp_path, monkeypatch):
    """Also one in the working folder or with a name that VLMEvalKit knows, but never a folder."""
    usual = tmp_path / "LMUData"
    monkeypatch.setenv("LMUData", str(usual))
    for folder in (tmp_path / "mine", usual):
        write(folder / "photos.tsv", b"index\tquestion\n1\tWho?\n")
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


# --- Dialogues, several tables and videos -------------------------------------------------------------------


def test_limit_takes_the_same_number_of_questions_from_each_table():
    """A set of several tables, such as MMMB, scores each of them by itself."""
    tables = ["ar"] * 3 + ["cn"] * 3 + ["en"] * 3
    rows = DataFrame({"index": range(9), "question": "What is this?", "SUB_DATASET": tables})
    job = {"data": "MMMB", "settings": {"limit": 5}}
    dataset = _read_dataset(job, lambda name: SimpleNamespace(data=rows))
    assert dataset.data["SUB_DATASET"].tolist() == ["ar", "ar", "cn", "cn", "en", "en"]


@pytest.mark.parametrize("judge", [NO_JUDGE, "mine"])
def test_vlmevalkit_gets_models_judge_and_counted_questions(judge: str, tmp_path: Path, monkeypatch) -> None:
    """Instead of VLMEvalKit, modules with the names that the program takes from it."""
    dialogues = DataFrame({"index": [1, 2], "question": [["a", "b"], ["c", "d", "e"]]})
    dataset = SimpleNamespace(data=dialogues, TYPE="MT", build_prompt=lambda row: 2 * row["question"])
    api, config = SimpleNamespace(OpenAIWrapper=str), SimpleNamespace(supported_VLM={})
    asked: list[object] = []
    build = {"MMDU": dataset}.get
    run = SimpleNamespace(build_dataset=build, main=lambda: asked.append(run.build_dataset("x", fps=1)))
    package = ModuleType("vlmeval")
    vars(package).update(api=api, config=config, run=run)
    monkeypatch.setitem(sys.modules, "vlmeval", package)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(torch.distributed, "init_process_group", None)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    url = "" if judge == NO_JUDGE else "http://localhost:8000/v1"
    run_vlmevalkit(
        {"data": "MMDU", "work": str(tmp_path), "checkpoints": {"original-1": "hf", "converted-2": "back"},
         "settings": {"judge": judge, "limit": None}, "judge_url": url}
    )  # fmt: skip
    assert asked == [dataset] and (tmp_path / QUESTION_COUNT_FILE).read_text() == "5"
    words = "--data MMDU --model original-1 converted-2 --work-dir ../results --judge".split()
    of_judge = ["--judge-base-url", url, "--judge-key", "none"] if url else []
    assert sys.argv[1:] == [*words, judge, *of_judge] and list(config.supported_VLM) == words[3:5]
    if not url:
        with pytest.raises(RuntimeError, match="--judge NAME@http://localhost"):
            api.OpenAIWrapper("gpt")
    assert random.random() == random.Random(0).random(), "sets that draw give all checkpoints the same"


def test_videos_have_the_frames_that_their_set_names() -> None:
    model = VlmEvalKitModel.__new__(VlmEvalKitModel)
    text, video, own = {"type": "text"}, {"type": "video"}, {"type": "video", "fps": 1.0}
    for given in ({"nframes": 8}, {"fps": 2.0}, {}):
        model.nframe, model.fps = given.get("nframes"), given.get("fps")
        assert [model._with_frame_settings(part) for part in (text, video, own)] == [text, video | given, own]


@pytest.mark.parametrize(
    "family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.full)]
)
def test_videos_are_encoded_as_by_the_checkpoints_processor(family, tmp_path):
    """Compares frames, grids, times and tokens for a number of frames and for frames per second."""
    from transformers.video_utils import VideoMetadata

    hf = write_tiny_checkpoint(tmp_path / "hf", family)
    whole = np.asarray(photographs()[1].convert("RGB").resize((96 + 29, 64)))  # it moves to the left
    moving = (np.ascontiguousarray(whole[:, i : i + 96]) for i in range(29))
    write(tmp_path / "a.mp4", video_of(moving, rate=8))
    with av.open(str(tmp_path / "a.mp4")) as container:
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        frames = torch.from_numpy(np.stack(decoded)).permute(0, 3, 1, 2)

    model = CheckpointModel(hf, {"dtype": "float32", "max_new_tokens": (1, 1)}, [tmp_path])
    processor = load_hf_processor(hf)
    size = {name: processor.video_processor.size[name] for name in ("shortest_edge", "longest_edge")}
    messages = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "Who?"}]}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if family in ("qwen3_vl", "qwen3_5"):
        # The pair around the whole video, which the released model does not know.
        text = text.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")
    for own, theirs in (
        ({"nframes": 8}, {"num_frames": 8, "fps": None}),
        ({"fps": 2.0}, {"fps": 2.0}),
        ({}, {"fps": 2.0}),
    ):
        video = {"type": "video", "value": str(tmp_path / "a.mp4")} | own
        found = model.answerer.model_inputs(model.encode([video, *WHO]))
        wanted = processor(
            text=[text],
            videos=[frames],
            video_metadata=[VideoMetadata(total_num_frames=len(frames), fps=8.0)],
            do_sample_frames=True,
            cap_pixels_per_frame=False,
            size=size,
            return_tensors="pt",
            **theirs,
        )
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


# --- Models that think --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinking(tmp_path_factory) -> Path:
    """A tiny Qwen3.5 with the chat template of 9B, as released."""
    hf = write_tiny_checkpoint(tmp_path_factory.mktemp("thinking") / "hf", "qwen3_5")
    return with_released_template(hf)


GREEDY = {"dtype": "float32", "limit": None}
OPENED, CLOSED = "<think>\n", "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(("switch", "end"), [(None, OPENED), ("off", CLOSED)])
def test_evaluated_model_thinks_as_asked(thinking, switch, end):
    """As the released template and transformers do; a dozen tokens are too few to think."""
    limits = {"max_new_tokens": (12, 13)}
    model = CheckpointModel(thinking, GREEDY | limits | {"thinking": switch}, [])
    inputs = model.answerer.model_inputs(model.encode(WHO))
    prompt = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    assert model.answerer.encoder.chat_encoder.tokenizer.decode(inputs["input_ids"][0]) == prompt + end

    thinks = switch != "off"
    greedy = {"do_sample": False, "repetition_penalty": 1.0, "max_new_tokens": 12 + thinks}
    tokens = model.answerer.model.generate(**inputs, **greedy)
    text = model.answerer.decode(tokens[0, inputs["input_ids"].shape[1] :])
    assert model.answerer.answer(model.encode(WHO))[0] == (
        GeneratedAnswer("", text.strip(), is_block_closed=False) if thinks else GeneratedAnswer(text)
    )


def test_exported_model_is_asked_as_it_was_trained(thinking, tmp_path):
    """With the limits of pixels and the arguments of the template that ``megatron_vl.json`` names."""
    hf = shutil.copytree(thinking, tmp_path / "hf")
    released_hash = folder_hash(hf)
    media = {"min_pixels": 1024, "max_pixels": 4096, "video_max_pixels": 0, "video_fps": 1.0}
    media["video_max_frames"] = 6
    write_json(hf / EXPORT_FACTS_FILE, {MEDIA_KEY: media, ARGUMENTS_KEY: {"enable_thinking": False}})
    Image.new("RGB", (320, 320)).save(tmp_path / "square.png")
    prompt = [{"type": "image", "value": str(tmp_path / "square.png")}, *WHO]
    for switch, end in ((None, CLOSED), ("on", OPENED)):
        model = CheckpointModel(hf, GREEDY | {"max_new_tokens": (1, 1), "thinking": switch}, [tmp_path])
        encoded = model.encode(prompt)
        assert model.answerer.decode(encoded.token_ids).endswith(f"assistant\n{end}")
        # 64 x 64 pixels are the most: four patches of 16 a side.
        [grid] = [item.grid_thw for item in encoded.media_items]
        assert (grid.t, grid.h, grid.w) == (1, 4, 4)
    assert model.answerer.encoder.pixel_settings.video_max_frames == 6
    assert folder_hash(hf) != released_hash, "answers of another encoding would be taken for its own"


def test_thinking_is_not_part_of_the_answer(thinking, tmp_path, monkeypatch):
    """The tokens are made by hand; a later turn of a dialogue is asked without what was thought before."""
    job = {"work": str(tmp_path), "checkpoints": {"original": thinking}, "roots": []}
    adapter = VlmEvalKitModel(job | {"settings": GREEDY | {"max_new_tokens": (2, 2)}}, "original")
    answerer = adapter.model.answerer
    tokenizer = answerer.encoder.chat_encoder.tokenizer
    outputs = ["A? No.\n</think>\n\nB", "Well, A or"]
    seen = []

    def generated(input_ids, **_):
        seen.append(tokenizer.decode(input_ids[0]))
        new = tokenizer(outputs[len(seen) - 1], return_tensors="pt")["input_ids"]
        return torch.cat([input_ids, new], dim=1)

    monkeypatch.setattr(answerer.model, "generate", generated)
    turns = [{"role": "user", "content": "One?"}]
    turns.append({"role": "assistant", "content": adapter.chat(turns)})
    assert adapter.chat([*turns, {"role": "user", "content": "Two?"}]) == ""
    assert "assistant\nB<|im_end|>" in seen[1] and "A? No." not in seen[1]
    seen.clear()
    assert adapter.generate(WHO) == "B"

    told = itemgetter("question", "answer", "thinking", "unanswered")
    answers = list(map(told, read_answers(tmp_path / "results" / "original")))
    assert answers[:2] == [("One?", "B", "A? No.", 0), ("Two?", "", "Well, A or", 1)]
    assert answers[2:] == [("Who?", "B", "A? No.", 0)]


def test_evaluate_refuses_a_switch_that_the_template_lacks(tmp_path):
    hf = tiny_checkpoint("qwen2_5_vl")
    options = EvaluateOptions(original=hf, converted=hf, data="set", out=tmp_path, thinking="off")
    with pytest.raises(UsageError, match="--thinking off: the chat template of .* has no switch"):
        run_evaluation(options, "set", tmp_path)
