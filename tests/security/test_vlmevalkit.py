"""The real VLMEvalKit, confined, with untrusted tables and folders; it is started once for the whole file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import python_path
from tests.toolkit.evaluation import (
    VIDEO_COLUMNS,
    dialogue_table,
    encoded,
    photographs,
    video_mme,
    video_row,
    write_table,
    write_video,
)
from toolkit.evaluate import cage
from toolkit.evaluate.comparison import EvaluationOptions, Result, _scores, why_open
from toolkit.evaluate.early import names, parts_of

from .payload import Mark

pytestmark = [pytest.mark.ranks, pytest.mark.eval]
MMMB = ("ar", "cn", "en", "pt", "ru", "tr")


def whole_sets(folder: Path) -> None:
    """Video-MME as in its repository; MVBench and TempCompass as VLMEvalKit has prepared them."""
    video_mme(folder / "Video-MME")

    write_video(folder / "MVBench" / "video" / "a.mp4", photographs()[0], 12)
    write_table(
        folder / "MVBench" / "MVBench_MP4.tsv",
        [[0, "Action Count", "video", "a.mp4", "How often?", "a cat", str(["a cat", "a cup"])]],
        ("index", "task_type", "prefix", "video", "question", "answer", "candidates"),
    )

    compass = (
        0,
        "a",
        "video/",
        ".mp4",
        "Which?",
        "A. a cat",
        "speed",
        "action",
        "['A. a cat']",
        "Which?",
        "a cat",
    )

    columns = (
        "index video prefix suffix question answer dim task_type candidates mc_question mc_answer".split()
    )
    for part in ("MCQ", "Captioning", "YorN"):
        write_table(folder / "TempCompass" / f"TempCompass_{part}.tsv", [list(compass)] * 2, tuple(columns))
    write_video(folder / "TempCompass" / "video" / "a.mp4", photographs()[0], 12)


def hostile_sets(folder: Path) -> None:
    """A pickle of videos, pictures to be written elsewhere, links and paths out of a folder,
    a missing video."""
    (folder / "MMBench-Video" / "video_pkl").mkdir(parents=True)
    (folder / "MMBench-Video" / "video_pkl" / "1.pkl").write_bytes(b"cos\nsystem\n(S'touch pickled'\ntR.")
    write_table(
        folder / "MMBench-Video" / "MMBench-Video.tsv",
        [[0, "a", "./video/a.mp4", "Who?", "her"]],
        ("index", "video", "video_path", "question", "answer"),
    )

    for language in MMMB:
        row = ["../../x", encoded(photographs()[0]), "Who?", "a", "b", "A"]
        write_table(
            folder / f"MMMB_{language}.tsv", [row], ("index", "image", "question", "A", "B", "answer")
        )

    write_table(folder / "lost" / "Video-MME" / "Video-MME.tsv", [video_row(0, "gone")], tuple(VIDEO_COLUMNS))

    write_video(folder / "secret.mp4", photographs()[0], 12)
    for name, second in (("away", "../../../secret"), ("linked", "link")):
        videos = folder / name / "Video-MME" / "video"
        write_video(videos / "in.mp4", photographs()[0], 12)
        (videos / "link.mp4").symlink_to(folder / "secret.mp4")
        rows = [video_row(0, "in"), video_row(1, second)]
        write_table(videos.parent / "Video-MME.tsv", rows, tuple(VIDEO_COLUMNS))


CASES: dict[str, tuple[str, str, int | None]] = {
    "videos": ("whole", "Video-MME", None),
    "first two": ("whole", "Video-MME_1fps", 2),
    "another form": ("whole", "MVBench_MP4_8frame", None),
    "three sets in one": ("whole", "TempCompass_8frame", 3),
    "too few for three": ("whole", "TempCompass_8frame", 2),
    "no folder": ("whole/MVBench", "Video-MME_8frame", None),
    "no folder of another name": ("whole", "VDC_8frame", None),
    "no video": ("hostile/lost", "Video-MME_8frame", None),
    "a pickle": ("hostile", "MMBench_Video_8frame_nopack", None),
    "a path that leads away": ("hostile/away", "Video-MME_8frame", None),
    "a link that leads away": ("hostile/linked", "Video-MME_8frame", None),
    "an index that leads away": ("hostile", "MMMB", None),
}
"""Name -> folder, data set, --limit."""


UNJUDGED = {"original-1": [["A", "B"], ["C", "D", "A"]], "converted-2": [["A", "B"], ["C", "D", "A"]]}
"""Answers to the questions of :func:`dialogue_table`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vlmevalkit")
    whole_sets(folder / "whole")
    hostile_sets(folder / "hostile")
    dialogue_table(folder / "whole")
    for name in ("unjudged", "tmp", "cells"):
        (folder / "work" / name).mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, Any]:
    """The output of :mod:`tests.security.vlmevalkit_session`."""
    work = folder / "work"
    mark = Mark(work / "executed")
    row = [mark.expression, encoded(photographs()[0]), "Who?", "a", "b", "A"]
    write_table(folder / "cells" / "table.tsv", [row], ("index", "image", "question", "A", "B", "answer"))
    common = {"settings": {"largest_picture": 10**6}, "scores": True, "judge_url": None, "work": str(work)}
    cases = [
        common | {"root": str(folder / where), "data": data, "limit": limit}
        for where, data, limit in CASES.values()
    ]
    whole = common | {
        "root": str(folder / "cells"),
        "data": "table",
        "limit": None,
        "work": str(work / "cells"),
    }

    unjudged = common | {
        "root": str(folder / "whole"),
        "data": "MMDU",
        "limit": None,
        "work": str(work / "unjudged"),
    }
    unjudged |= {"judge": "exact_matching", "answers": UNJUDGED, "checkpoints": dict.fromkeys(UNJUDGED, "")}
    asked = {"expression": mark.expression, "mark": str(mark.path), "cases": cases}
    asked |= {"worker": whole, "unjudged": unjudged}

    python = [sys.executable] if why_open(work, False) else cage.command(work, False)
    environment = os.environ | {
        "PYTHONPATH": python_path(),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "hf"),
    }
    environment |= {"LMUData": str(work), "TMPDIR": str(work / "tmp"), "VLMEVALKIT_USE_MODELSCOPE": "0"}
    command = [*python, "-m", "tests.security.vlmevalkit_session", str(work)]
    done = subprocess.run(
        command, input=json.dumps(asked), env=environment, capture_output=True, text=True, cwd=work
    )

    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    mark.check()
    return found | {"said": dict(zip(CASES, found["said"], strict=True))}


def test_no_cell_is_executed(answers):
    """VLMEvalKit's `istype` and `toliststr` evaluate cells as Python; a worker refuses the table before
    loading a model."""
    assert answers["executed"], "the control failed: VLMEvalKit does not execute cells any more"
    code, last = answers["worker"]
    assert code == 3 and "table.tsv: row 1: index" in last


def test_sets_as_they_are_published_are_used(answers):
    said = answers["said"]
    assert [said[name] for name in ("videos", "first two", "another form", "three sets in one")] == [
        "4",
        "2",
        "1",
        "3",
    ]
    assert "--limit 2 is less than one question of each of the 3" in said["too few for three"]


def test_tables_of_another_md5_are_used_and_told_apart(answers):
    """Tables of MMDU, Video-MME and MVBench_MP4, which VLMEvalKit 0.0.20 keeps in three kinds of places."""
    published = set(answers["published"])
    assert {"848b635a88a078f49aebcc6e39792061", "85bdd91f9b29a99354c23b97ab7c113c"} < published
    assert "5c8c6f8b7972c2de65a629590f7c42f5" in published
    assert all(len(md5) == 32 for md5 in published) and len(published) > 200


def test_what_is_missing_is_named(answers, folder):
    said = answers["said"]
    assert f"{folder / 'whole' / 'MVBench' / 'Video-MME'} is missing" in said["no folder"]
    assert "would download lmms-lab/Video-MME" in said["no folder"]
    assert f"{folder / 'whole' / 'VLMEval-VDC'} is missing" in said["no folder of another name"]
    assert (
        f"{folder / 'hostile' / 'lost' / 'Video-MME' / 'video' / 'gone.mp4'} is missing" in said["no video"]
    )


def test_what_leads_away_is_refused(answers, folder):
    """Nothing is fetched, unpacked, unpickled, or written outside."""
    said = answers["said"]
    hostile = folder / "hostile"
    assert f"{hostile / 'MMBench-Video' / 'video' / 'a.mp4'} is missing" in said["a pickle"]
    assert not list(folder.rglob("pickled"))
    assert "secret.mp4 is missing" in said["a path that leads away"]
    assert (
        f"{hostile / 'linked' / 'Video-MME' / 'video' / 'link.mp4'} is missing"
        in said["a link that leads away"]
    )
    assert "MMMB_ar.tsv: row 1: index '../../x'" in said["an index that leads away"]
    assert not list(folder.rglob("x.jpg"))


def test_what_a_language_model_must_judge_says_so(answers, folder):
    roles = dict(zip(("original", "converted"), UNJUDGED, strict=True))
    options = EvaluationOptions({role: folder for role in roles}, "MMDU", folder, folder)
    result = Result("MMDU", 2, {}, {role: {"metrics": {}, "problem": ""} for role in roles})
    gate = _scores(options, folder / "work" / "unjudged", roles, result)
    assert gate.passed is False and "2 of 2 checkpoints have no score" in gate.measured
    assert "--judge-base-url" in gate.details[0] and not result.checkpoints["original"]["metrics"]


def test_the_list_of_data_sets_is_that_of_vlmevalkit(answers):
    """What is said before VLMEvalKit is imported equals what it would say."""
    found = answers["names"]
    assert found == names(), "python -m tests.toolkit.vlmeval_names > toolkit/evaluate/names.json"
    assert len(found["table"]) > 400 and len(found["video"]) > 200
    assert parts_of("MMMB") == ("tables", [f"MMMB_{language}" for language in MMMB])
    assert parts_of("photographs") == ("table", ["photographs"])
