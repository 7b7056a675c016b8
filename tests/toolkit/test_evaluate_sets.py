"""`megatron-vl evaluate` on VLMEvalKit's sets of dialogues, of several tables and of videos, in the form it keeps them in."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from converters.convert import convert, export
from tests.toolkit.test_evaluate import ROOT, answers_letters, answers_of, damage, encoded, photographs, write_table
from toolkit.cli import main
from toolkit.evaluate.early import read_names
from toolkit.evaluate.model import Checkpoint
from toolkit.hf import load_model, load_processor
from toolkit.tiny import write_tiny_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vlmeval") is None, reason="VLMEvalKit is not installed: make eval"),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(original, its round trip) of a family."""
    made: dict[str, tuple[Path, Path]] = {}

    def of(family: str) -> tuple[Path, Path]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            original = answers_letters(write_tiny_checkpoint(folder / "hf", family, max_pixels=112 * 112), 0)
            convert(original, folder / "shards", {"tp": 2, "pp": 2})
            export(folder / "shards", original, folder / "back")
            made[family] = original, folder / "back"
        return made[family]

    return of


def evaluate(pair: tuple[Path, Path], data: str, lmu: Path, out: Path, *options: str) -> tuple[int, dict]:
    folders = ["--original", str(pair[0]), "--converted", str(pair[1]), "--out", str(out), "--lmu-data", str(lmu)]
    code = main(["evaluate", *folders, "--data", data, "--dtype", "float32", "--device", "cpu", *options])
    report = out / "report.json"
    return code, json.loads(report.read_text()) if report.is_file() else {}


# ------------------------------------------------------------------------------------------------------------ dialogues

DIMENSIONS = (
    "Creativity",
    "Richness",
    "Visual Perception",
    "Logical Coherence",
    "Answer Accuracy",
    "Image Relationship Understanding",
    "Overall Score",
)
QUESTIONS = (["<ImageHere> <ImageHere> Which of the two is a cat?", "And the other?"], ["What is <ImageHere>?", "Why?", "Who?"])


@pytest.fixture
def dialogues(tmp_path) -> Path:
    """MMDU's form: lists of base64 pictures, of questions and of reference answers."""
    pictures = [encoded(picture) for picture in photographs()]
    rows = [
        [1, str(pictures[:2]), str(QUESTIONS[0]), "['The second.', 'A person.']"],
        [2, str(pictures[2:3]), str(QUESTIONS[1]), "['A cup.', 'It is red.', 'Nobody.']"],
    ]
    write_table(tmp_path / "LMUData" / "MMDU.tsv", rows, ("index", "image", "question", "answer"))
    return tmp_path / "LMUData"


@pytest.fixture
def judge():
    """A server that scores an answer by its first letter, A 1 to D 4, in the words that MMDU's judge is asked to use."""
    seen: list[str] = []

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
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


def dialogue_of(folder: Path, questions: list[str], pictures: list[Image.Image]) -> list[str]:
    """Each turn's answer by transformers, its own answers before it."""
    processor, model = load_processor(folder), load_model(folder, torch.float32)
    messages, answers, used = [], [], 0
    for question in questions:
        content = []
        for i, words in enumerate(question.split("<ImageHere>")):
            content += [{"type": "image"}] * (i > 0) + [{"type": "text", "text": words}] * (words != "")
            used += i > 0
        messages.append({"role": "user", "content": content})
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        batch = processor(text=[text], images=pictures[:used], return_tensors="pt")
        with torch.no_grad():
            answers.append(processor.decode(model(**batch).logits[0, -1].argmax()))
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answers[-1]}]})
    return answers


def test_dialogues_are_answered_turn_by_turn_and_judged_on_this_machine(pair, dialogues, judge, tmp_path, capsys):
    url, seen = judge
    both = pair("qwen2_5_vl")
    options = ["--max-new-tokens", "1", "--judge", "mine", "--judge-base-url", url]
    code, report = evaluate(both, "MMDU", dialogues, tmp_path / "out", *options)
    assert code == 0 and report["passed"], capsys.readouterr()
    assert [gate["passed"] for gate in report["gates"]] == [True] * 4 and report["questions"] == 2
    assert report["settings"]["tables"]["MMDU.tsv"]["of VLMEvalKit"] is False
    lines, pictures = answers_of(tmp_path / "out", "original"), photographs()
    for line, questions, shown in zip(lines, QUESTIONS, (pictures[:2], pictures[2:3]), strict=True):
        assert line["answer"] == dialogue_of(both[0], questions, shown)
    said = [answer for line in lines for answer in line["answer"]]
    assert sorted(seen) == sorted(2 * said)  # of both checkpoints
    # VLMEvalKit's arithmetic: the mean of all turns, of ten, in per cent
    mean = 10 * sum("ABCD".index(letter) + 1 for letter in said) / len(said)
    assert report["checkpoints"]["converted"]["metrics"]["set=all|Overall Score"] == pytest.approx(mean)
    page = (tmp_path / "out" / "report.html").read_text()
    assert f"1. {said[0]}\n2. {said[1]}" in page and page.count("data:image/jpeg") == 3


def test_what_a_language_model_must_judge_says_so(pair, dialogues, tmp_path, capsys):
    code, report = evaluate(pair("qwen2_5_vl"), "MMDU", dialogues, tmp_path / "out", "--max-new-tokens", "1", "--json")
    assert code == 1 and json.loads(capsys.readouterr().out) == report
    assert [gate["passed"] for gate in report["gates"]] == [True, True, True, False]
    assert "--judge-base-url" in report["gates"][3]["details"][0] and not report["checkpoints"]["original"]["metrics"]


# -------------------------------------------------------------------------------------------------------------- tables


def test_several_tables_in_one_and_damage(pair, tmp_path):
    """MMMB: six tables, each scored by itself; two questions of each are asked. The checkpoint with one projection permuted is
    told from the original there too."""
    original, converted = pair("qwen2_5_vl")
    pictures, options = photographs(), ("a person", "a cat", "a cup", "a rocket")
    for language in ("ar", "cn", "en", "pt", "ru", "tr"):
        rows = [
            [i + 1, encoded(pictures[i]), f"What is this? ({language})", *options, "ABC"[i], "object", "val"] for i in range(3)
        ]
        columns = ("index", "image", "question", "A", "B", "C", "D", "answer", "category", "split")
        write_table(tmp_path / "LMUData" / f"MMMB_{language}.tsv", rows, columns)
    out = tmp_path / "MMMB"  # VLMEvalKit replaces the name of the set wherever it is in a path
    pair_ = (original, damage(converted, tmp_path / "damaged"))
    code, report = evaluate(pair_, "MMMB", tmp_path / "LMUData", out, "--limit", "12", "--max-new-tokens", "1", "--keep-going")
    assert code == 1 and report["questions"] == 12
    assert [gate["passed"] for gate in report["gates"]][:2] == [False, False]
    assert report["gates"][1]["measured"].startswith("4 of 4 prompts differ")
    lines = answers_of(out, "original")
    assert [line["question"].count("(tr)") for line in lines[-2:]] == [1, 1]
    metrics = report["checkpoints"]["original"]["metrics"]
    for i, language in enumerate(("ar", "cn", "en", "pt", "ru", "tr")):
        of_one = lines[2 * i : 2 * i + 2]
        right = sum(line["answer"] == line["expected"] for line in of_one)
        found = [value for name, value in metrics.items() if f"MMMB_{language}" in name and name.endswith("Overall")]
        assert found == [pytest.approx(right / 2)], metrics


# -------------------------------------------------------------------------------------------------------------- videos


def write_video(path: Path, picture: Image.Image, frames: int) -> None:
    """A picture that moves to the left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = np.asarray(picture.convert("RGB").resize((96 + frames, 64)))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for i in range(frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(whole[:, i : i + 96]))))
        container.mux(stream.encode())


VIDEO_COLUMNS = "index video video_path duration domain candidates sub_category task_type subtitle_path question answer".split()


def video_row(i: int, name: str) -> list[object]:
    kind = ["short", "Knowledge", str(["A. a person", "B. a cat", "C. a cup", "D. a rocket"]), "Technology", "Counting Problem"]
    return [i, name, f"./video/{name}.mp4", *kind, f"./subtitle/{name}.srt", f"What is in video {i}?", "ABCD"[i]]


@pytest.fixture
def videos(tmp_path) -> Path:
    """Video-MME's form, as its repository holds it after VLMEvalKit has prepared it."""
    folder = tmp_path / "LMUData" / "Video-MME"
    for i, picture in enumerate(photographs()):
        write_video(folder / "video" / f"clip{i}.mp4", picture, 24 + i)
    write_table(folder / "Video-MME.tsv", [video_row(i, f"clip{i}") for i in range(4)], tuple(VIDEO_COLUMNS))
    return tmp_path / "LMUData"


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_the_model_is_given_what_its_own_processor_makes_of_a_video(family, tmp_path):
    """Frames, grids, times and tokens, for a number of frames and for frames a second; sizes limited frame by frame."""
    from transformers.video_utils import VideoMetadata

    hf = write_tiny_checkpoint(tmp_path / "hf", family)
    write_video(tmp_path / "a.mp4", photographs()[1], 29)
    with av.open(str(tmp_path / "a.mp4")) as container:
        frames = torch.stack([torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)])
    settings = {"dtype": "float32", "device": "cpu", "largest_picture": 10**6, "max_new_tokens": 1, "video_max_frames": 20}
    for own, theirs in (({"nframes": 8}, {"num_frames": 8, "fps": None}), ({"fps": 2.0}, {"fps": 2.0}), ({}, {"fps": 2.0})):
        limits = {"min_pixels": 64 * 64, "max_pixels": 64 * 96 if "nframes" in own else None}
        model = Checkpoint(hf, settings | limits, [tmp_path])
        found = model.inputs([{"type": "video", "value": str(tmp_path / "a.mp4")} | own, {"type": "text", "value": "Who?"}])
        processor = load_processor(hf)
        spread = len(found["video_grid_thw"]) and family == "qwen3_vl"
        times = 2 * int(found["video_grid_thw"][0, 0]) if spread else 1
        size = {"shortest_edge": 64 * 64 * times, "longest_edge": (limits["max_pixels"] or 0) * times}
        size["longest_edge"] = size["longest_edge"] or processor.video_processor.size["longest_edge"]
        content = [{"type": "video"}, {"type": "text", "text": "Who?"}]
        messages = [{"role": "user", "content": content}]
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if family == "qwen3_vl":  # the pair around the whole video, which the released model does not know
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


def test_videos_are_shown_as_frames_and_two_processes_give_what_one_gives(pair, videos, tmp_path):
    both = pair("qwen3_vl")
    reports = {}
    for processes in ("1", "2"):
        out = tmp_path / processes
        options = ["--max-new-tokens", "1", "--processes", processes]
        code, reports[processes] = evaluate(both, "Video-MME_8frame", videos, out, *options)
        assert code == 0, reports[processes]["gates"]
    one, two = (reports[key] for key in ("1", "2"))
    assert one["checkpoints"] == two["checkpoints"] and one["gates"] == two["gates"]
    assert one["settings"] | {"processes": 2} == two["settings"]
    assert answers_of(tmp_path / "1", "original") == [
        line | {"videos": [name.replace("data_1", "data_0").replace("/2/work", "/1/work") for name in line["videos"]]}
        for line in answers_of(tmp_path / "2", "original")
    ]
    lines = answers_of(tmp_path / "1", "original")
    right = sum(line["answer"] == line["expected"] for line in lines)
    assert one["checkpoints"]["original"]["metrics"]["overall|overall"] == pytest.approx(right / 4)
    assert (tmp_path / "1" / "report.html").read_text().count("data:image/jpeg") == 4
    # Nothing is written between the user's files.
    assert sorted(path.name for path in (videos / "Video-MME").rglob("*")) == sorted(
        ["video", "Video-MME.tsv", *(f"clip{i}.mp4" for i in range(4))]
    )


BUILD = """
import json, os, sys
from pathlib import Path
from toolkit.evaluate.table import TableError
from toolkit.evaluate.worker import build, guard
cases = json.loads(sys.stdin.read())
guard(Path(cases[0]["work"]))
for number, job in enumerate(cases):
    os.environ["LMUData"] = str(Path(job["work"]) / f"data_{number}")
    os.makedirs(os.environ["LMUData"])
    try:
        dataset = build(job)
        print("said:", len(dataset.data), flush=True)
    except TableError as error:
        print("said:", " ".join(str(error).split()), flush=True)
"""


def said_about(cases: list[tuple[Path, str, int | None]], work: Path) -> list[str]:
    """What a worker says when it opens data sets, one after the other."""
    settings = {"largest_picture": 10**6}
    jobs = [{"root": str(r), "data": d, "limit": n, "work": str(work), "settings": settings} for r, d, n in cases]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "hf"), "LMUData": str(work)}
    done = subprocess.run(
        [sys.executable, "-c", BUILD], input=json.dumps(jobs), env=environment, capture_output=True, text=True, cwd=work
    )
    said = [line.removeprefix("said: ") for line in done.stdout.splitlines() if line.startswith("said: ")]
    assert len(said) == len(cases), done.stderr[-3000:]
    return said


def test_what_is_missing_or_leads_away_is_named(videos, tmp_path):
    """Forms of several classes of VLMEvalKit; nothing is fetched, unpacked, unpickled, or written outside."""
    work, mine = tmp_path / "work", tmp_path / "other"
    work.mkdir()
    mp4 = mine / "MVBench" / "video"
    write_video(mp4 / "a.mp4", photographs()[0], 12)
    options = str(["a cat", "a cup"])
    write_table(
        mine / "MVBench" / "MVBench_MP4.tsv",
        [[0, "Action Count", "video", "a.mp4", "How often?", "a cat", options]],
        ("index", "task_type", "prefix", "video", "question", "answer", "candidates"),
    )
    (mine / "MMBench-Video" / "video_pkl").mkdir(parents=True)
    (mine / "MMBench-Video" / "video_pkl" / "1.pkl").write_bytes(b"cos\nsystem\n(S'touch pickled'\ntR.")
    write_table(
        mine / "MMBench-Video" / "MMBench-Video.tsv",
        [[0, "a", "./video/a.mp4", "Who?", "her"]],
        ("index", "video", "video_path", "question", "answer"),
    )
    write_table(
        mine / "MMMB_ar.tsv",
        [["../../x", encoded(photographs()[0]), "Who?", "a", "b", "A"]],
        ("index", "image", "question", "A", "B", "answer"),
    )
    compass = (0, "a", "video/", ".mp4", "Which?", "A. a cat", "speed", "action", "['A. a cat']", "Which?", "a cat")
    columns = "index video prefix suffix question answer dim task_type candidates mc_question mc_answer".split()
    for part in ("MCQ", "Captioning", "YorN"):
        write_table(mine / "TempCompass" / f"TempCompass_{part}.tsv", [list(compass)] * 2, tuple(columns))
    write_video(mine / "TempCompass" / "video" / "a.mp4", photographs()[0], 12)
    lost = tmp_path / "lost"
    (lost / "Video-MME").mkdir(parents=True)
    write_table(lost / "Video-MME" / "Video-MME.tsv", [video_row(0, "gone")], tuple(VIDEO_COLUMNS))
    away = tmp_path / "away"
    write_video(away / "secret.mp4", photographs()[0], 12)
    write_video(away / "LMUData" / "Video-MME" / "video" / "in.mp4", photographs()[0], 12)
    (away / "LMUData" / "Video-MME" / "video" / "link.mp4").symlink_to(away / "secret.mp4")
    outside = [video_row(0, "in"), video_row(1, "../../../secret")]
    write_table(away / "LMUData" / "Video-MME" / "Video-MME.tsv", outside, tuple(VIDEO_COLUMNS))
    linked = tmp_path / "linked" / "Video-MME"
    write_video(linked / "video" / "in.mp4", photographs()[0], 12)
    (linked / "video" / "link.mp4").symlink_to(away / "secret.mp4")
    write_table(linked / "Video-MME.tsv", [video_row(0, "in"), video_row(1, "link")], tuple(VIDEO_COLUMNS))

    cases = [
        (videos, "Video-MME", None),
        (videos, "Video-MME_1fps", 2),
        (mine, "MVBench_MP4_8frame", None),
        (tmp_path, "Video-MME_8frame", None),
        (lost, "Video-MME_8frame", None),
        (mine, "MMBench_Video_8frame_nopack", None),
        (away / "LMUData", "Video-MME_8frame", None),
        (linked.parent, "Video-MME_8frame", None),
        (mine, "MMMB", None),
        (lost, "MMMB", None),
        (videos, "nobody", None),
        (mine, "TempCompass_8frame", 3),
        (mine, "TempCompass_8frame", 2),
        (mine, "VDC_8frame", None),
    ]
    said = said_about(cases, work)
    assert said[:3] == ["4", "2", "1"]
    assert f"{tmp_path / 'Video-MME'} is missing" in said[3] and "lmms-lab/Video-MME" in said[3]
    assert f"{lost / 'Video-MME' / 'video' / 'gone.mp4'} is missing" in said[4]
    assert str(mine / "MMBench-Video" / "video" / "a.mp4") in said[5] and not list(tmp_path.rglob("pickled"))
    assert "secret.mp4 is missing" in said[6] and f"{linked / 'video' / 'link.mp4'} is missing" in said[7]
    assert "row 1: index" in said[8] and not list(tmp_path.rglob("x.jpg"))
    assert said[11] == "3" and "--limit 2 is less than one question of each of the 3" in said[12]
    assert f"{mine / 'VLMEval-VDC'} is missing" in said[13]
    assert "MMMB_ar.tsv does not exist" in said[9] and "nobody.tsv does not exist" in said[10]


NAMES = """
import json
from vlmeval.dataset import SUPPORTED_DATASETS, ConcatDataset, supported_video_datasets
from toolkit.evaluate.sources import parts_of
names = [*SUPPORTED_DATASETS, *supported_video_datasets, *ConcatDataset.DATASET_SETS]
print("said:", json.dumps({name: parts_of(name) for name in names}))
"""


def test_names_read_in_the_source_code_are_those_that_vlmevalkit_has(tmp_path):
    """What is told before VLMEvalKit is imported is what it would say: a set of videos is never refused, the tables that others
    need are known, and no published table's columns are taken for those of an own one."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LMUData": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", NAMES], env=environment, capture_output=True, text=True, cwd=tmp_path)
    kinds = json.loads(done.stdout.rpartition("said:")[2])
    names = read_names()
    assert names is not None and len(kinds) > 700
    undecided = []
    for name, (kind, parts) in kinds.items():
        found = names.tables_of(name)
        assert found in (None, parts) if kind != "video" else found is None, name
        undecided += [name] if found is None and kind != "video" else []
        assert names.may_have(name), name
    assert len(undecided) < 10, undecided
    assert not names.may_have("photographs") and names.tables_of("photographs") == ["photographs"]
