"""`megatron-vl evaluate` on VLMEvalKit's sets of dialogues, several tables and videos, in its own format."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import av
import pytest
import torch
from huggingface_hub import constants
from pandas import DataFrame
from PIL import Image

from converters.convert import convert_weights, export_weights
from tests.toolkit.evaluation import (
    DIALOGUES,
    answers_letters,
    answers_of,
    as_published,
    dialogue_table,
    photographs,
    video_mme,
    write_video,
)
from toolkit.cli import main
from toolkit.common.hf_loading import load_hf_model, load_hf_processor
from toolkit.common.tiny_checkpoint import write_tiny_checkpoint
from toolkit.evaluate.checkpoint_model import CheckpointModel
from toolkit.evaluate.vlmevalkit_adapter import _read_dataset

pytestmark = pytest.mark.ranks


LETTER_SEEDS = {"qwen3_vl": 2005}
"""Seeds of the letters' weights with which the four clips get three different answers, by a margin of 0.5."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(original, its round trip) of a family."""
    made: dict[str, tuple[Path, Path]] = {}

    def of(family: str) -> tuple[Path, Path]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            tiny = write_tiny_checkpoint(folder / "hf", family, max_pixels=112 * 112)
            original = answers_letters(tiny, LETTER_SEEDS.get(family, 0))
            convert_weights(original, folder / "shards", {"tp": 2, "pp": 2})
            export_weights(folder / "shards", original, folder / "back")
            made[family] = original, folder / "back"
        return made[family]

    return of


def evaluate(
    pair: tuple[Path, Path], data: str, lmu: Path | None, out: Path, *options: str
) -> tuple[int, dict]:
    folders = ["--original", str(pair[0]), "--converted", str(pair[1]), "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        if lmu:
            patch.setenv("LMUData", str(lmu))
        code = main(["evaluate", *folders, "--data", data, *options])
    report = out / "report.json"
    return code, json.loads(report.read_text()) if report.is_file() else {}


# --- Dialogues ----------------------------------------------------------------------------------------------

DIMENSIONS = (
    "Creativity",
    "Richness",
    "Visual Perception",
    "Logical Coherence",
    "Answer Accuracy",
    "Image Relationship Understanding",
    "Overall Score",
)


@pytest.fixture
def judge():
    """A server that scores an answer by its first letter, A 1 to D 4, in the format that MMDU's
    judge must use."""
    seen: list[str] = []

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1][
                "content"
            ]
            asked = asked if isinstance(asked, str) else asked[0]["text"]
            answer = asked.split("[The Start of Assistant’s Answer]\n")[1]
            seen.append(answer.split("\n")[0])
            said = f"It is short. {dict.fromkeys(DIMENSIONS, 'ABCD'.index(answer[0]) + 1)}"
            body = json.dumps({"choices": [{"message": {"content": said}, "finish_reason": "stop"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", seen
    server.shutdown()
    server.server_close()


def dialogue_of(folder: Path, questions: list[str], images: list[Image.Image]) -> list[str]:
    """Each turn's answer by transformers, given its own answers before."""
    processor = load_hf_processor(folder)
    model = load_hf_model(folder, torch.float32)
    messages = []
    answers = []
    used = 0
    for question in questions:
        content = []
        for i, words in enumerate(question.split("<ImageHere>")):
            content += [{"type": "image"}] * (i > 0) + [{"type": "text", "text": words}] * (words != "")
            used += i > 0
        messages.append({"role": "user", "content": content})
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        batch = processor(text=[text], images=images[:used], return_tensors="pt")
        with torch.no_grad():
            answers.append(processor.decode(model(**batch).logits[0, -1].argmax()))
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answers[-1]}]})

    return answers


@pytest.mark.eval
@pytest.mark.full
def test_dialogues_are_answered_turn_by_turn_and_judged_on_this_machine(
    pair, judge, tmp_path, capsys, monkeypatch
):
    url, seen = judge
    both = pair("qwen2_5_vl")
    options = ["--max-new-tokens", "1", "--judge", f"mine@{url}"]
    table = dialogue_table(tmp_path / "LMUData")
    path = as_published(tmp_path / "site", {table: "848b635a88a078f49aebcc6e39792061"})
    monkeypatch.setenv("PYTHONPATH", path)
    code, report = evaluate(both, str(table), None, tmp_path / "out", *options)
    assert code == 0 and report["passed"], capsys.readouterr()
    assert report["questions"] == 5

    lines = answers_of(tmp_path / "out", "original")
    images = photographs()
    said = [line["answer"] for line in lines]
    shown = (images[:2], images[2:3])
    assert said == [
        answer
        for questions, some in zip(DIALOGUES, shown, strict=True)
        for answer in dialogue_of(both[0], questions, some)
    ]

    assert sorted(seen) == sorted(2 * said)  # of both checkpoints
    # VLMEvalKit's arithmetic: the mean of all turns, of ten, in per cent
    mean = 10 * sum("ABCD".index(letter) + 1 for letter in said) / len(said)
    assert report["checkpoints"]["converted"]["metrics"]["set=all|Overall Score"] == pytest.approx(mean)

    # Without the judge there is no score.
    code, report = evaluate(both, str(table), None, tmp_path / "out", "--max-new-tokens", "1")
    assert code == 1 and len(report["problems"]) == 2 and len(seen) == 2 * len(said)
    assert "--judge NAME@http://localhost" in report["problems"][0]


# --- Tables -------------------------------------------------------------------------------------------------


def test_limit_takes_the_same_number_of_questions_from_each_table():
    """A set of several tables, such as MMMB, scores each of them by itself."""
    tables = ["ar"] * 3 + ["cn"] * 3 + ["en"] * 3
    rows = DataFrame({"index": range(9), "question": "What is this?", "SUB_DATASET": tables})
    job = {"data": "MMMB", "settings": {"limit": 5}}
    dataset = _read_dataset(job, lambda name: SimpleNamespace(data=rows))
    assert dataset.data["SUB_DATASET"].tolist() == ["ar", "ar", "cn", "cn", "en", "en"]


# --- Videos -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.full)]
)
def test_videos_are_encoded_as_by_the_checkpoints_processor(family, tmp_path):
    """Compares frames, grids, times and tokens for a number of frames and for frames per second."""
    from transformers.video_utils import VideoMetadata

    hf = write_tiny_checkpoint(tmp_path / "hf", family)
    write_video(tmp_path / "a.mp4", photographs()[1], 29)
    with av.open(str(tmp_path / "a.mp4")) as container:
        frames = torch.stack(
            [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
        )

    settings = {"dtype": "float32", "max_new_tokens": (1, 1)}
    for own, theirs in (
        ({"nframes": 8}, {"num_frames": 8, "fps": None}),
        ({"fps": 2.0}, {"fps": 2.0}),
        ({}, {"fps": 2.0}),
    ):
        timed = family in ("qwen3_vl", "qwen3_5")  # their limits are of all frames together
        model = CheckpointModel(hf, settings, [tmp_path])
        prompt = [{"type": "video", "value": str(tmp_path / "a.mp4")} | own]
        prompt.append({"type": "text", "value": "Who?"})
        found = model.answerer.model_inputs(model.encode(prompt))
        processor = load_hf_processor(hf)
        size = processor.video_processor.size
        size = {"shortest_edge": size["shortest_edge"], "longest_edge": size["longest_edge"]}
        content = [{"type": "video"}, {"type": "text", "text": "Who?"}]
        messages = [{"role": "user", "content": content}]
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if timed:  # the pair around the whole video, which the released model does not know
            text = text.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")
        wanted = processor(
            text=[text],
            videos=[frames.permute(0, 3, 1, 2)],
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


@pytest.mark.eval
@pytest.mark.full
def test_videos_are_shown_as_frames(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    videos = video_mme(tmp_path / "hub")
    (tmp_path / "LMUData").mkdir()
    options = ["--max-new-tokens", "1"]
    code, report = evaluate(
        pair("qwen3_vl"), "Video-MME_8frame", tmp_path / "LMUData", tmp_path / "out", *options
    )

    assert code == 0 and report["questions"] == 4, report["problems"]
    answers = {
        Path(line["media"][0]).stem: line["answer"] for line in answers_of(tmp_path / "out", "original")
    }
    assert len(set(answers.values())) > 1
    right = sum(answers[f"clip{i}"] == "ABCD"[i] for i in range(4))
    assert 0 < right < 4
    found = report["checkpoints"]["original"]["metrics"]["overall|overall"]
    assert found == pytest.approx(right / 4)
    # Nothing is written between the user's files.
    files = ["test-00000-of-00001.parquet", *(f"clip{i}.mp4" for i in range(4))]
    assert sorted(path.name for path in videos.rglob("*.*")) == sorted(files)
