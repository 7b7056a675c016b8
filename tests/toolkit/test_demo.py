"""The demo passes its own checks, and they fail if something is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from toolkit.cli import main
from toolkit.demo import steps
from toolkit.demo.demo_data import ANSWER_BY_PICTURE, load_pictures, write_raw_data
from toolkit.demo.reference import MEDIA_PLACEHOLDER, read_sharegpt_sample

SHORT = 12
LEARNT = ("The loss has fallen", "One question about", "Several images, text")
"""First words of the checks that need more steps."""


def run_demo(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the demo as a user does."""
    command = [sys.executable, "-m", "toolkit", "demo", "--dir", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> steps.DemoRun:
    """A demo of two ranks that ends before the model has learnt its answers."""
    folder = tmp_path_factory.mktemp("demo") / "here"
    done = run_demo(folder, "--steps", str(SHORT), "--ranks", "2", "--tp", "1", "--pp", "2")
    assert (folder / "report.json").is_file(), done.stdout[-6000:] + done.stderr[-3000:]
    return steps.DemoRun(folder, SHORT, steps.DemoMachine(world_size=2, tp_size=1, pp_size=2))


@pytest.mark.full
@pytest.mark.ranks
def test_the_whole_demo_passes(tmp_path):
    """Four ranks and sixty steps pass every check, those of what was learnt included."""
    done = run_demo(tmp_path / "here")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "here" / "report.json").read_text())
    assert report["passed"] and len(report["checks"]) == 9


@pytest.mark.ranks
def test_checks_pass_and_the_curve_is_drawn(demo):
    report = json.loads((demo.demo_dir / "report.json").read_text())
    assert len(report["checks"]) == 9
    failed = [check["what"] for check in report["checks"] if not check["passed"]]
    assert all(what.startswith(LEARNT) for what in failed), failed
    with Image.open(demo.demo_dir / "loss.png") as picture:
        assert picture.width > 800 and len(picture.convert("RGB").getcolors(1 << 20)) > 50


@pytest.mark.ranks
def test_a_damaged_export_fails(demo, tmp_path):
    """The control: with one layer's heads swapped, as by a wrong conversion, loss and answers are wrong."""
    shutil.copytree(demo.demo_dir, tmp_path / "own")  # other tests read the report
    demo = steps.DemoRun(tmp_path / "own", demo.num_steps, demo.machine)
    damaged = tmp_path / "damaged"
    shutil.copytree(demo.exported_dir, damaged)
    name = "model.layers.3.self_attn.q_proj.weight"
    file = damaged / json.loads((damaged / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(file)
    tensors[name] = (
        tensors[name].view(2, -1, tensors[name].shape[1]).flip(0).reshape(tensors[name].shape).contiguous()
    )
    save_file(tensors, file, metadata={"format": "pt"})
    evaluated = steps.read_metrics(demo.demo_dir / "evaluation_after")[-1]
    steps.compare_losses(demo, steps._open_reference(damaged), "after", evaluated, 1e-4)
    demo.seconds_by_part["total"] = 0.0
    assert not demo.checks[-1].passed
    assert steps.write_report(demo) == 1


@pytest.mark.ranks
def test_a_second_demo_replaces_the_first_but_nothing_else(demo, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["demo", "--dir", str(tmp_path)]) == 1
    assert (tmp_path / "mine.txt").read_text() == "mine"
    again = tmp_path / "again"
    shutil.copytree(demo.demo_dir / "raw", again / "raw")
    (again / ".megatron-vl-demo").touch()
    steps._clear_folder(again)
    assert os.listdir(again) == [".megatron-vl-demo"]


def test_conversations_and_media_fit(tmp_path):
    samples = json.loads(write_raw_data(tmp_path).read_text())
    assert {sample["conversations"][1]["value"] for sample in samples[: len(ANSWER_BY_PICTURE)]} == set(
        ANSWER_BY_PICTURE.values()
    )
    counts = []
    for sample in samples:
        messages, images, videos = read_sharegpt_sample(sample, tmp_path / "media")
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        written = sum(len(MEDIA_PLACEHOLDER.findall(turn["value"])) for turn in sample["conversations"])
        assert written == len(images) + len(videos)
        counts.append((len(images), len(videos)))
    assert {(0, 0), (1, 0), (2, 0), (0, 1)} == set(counts)


def test_without_scikit_image_pictures_are_drawn_in_the_photographs_sizes(monkeypatch, tmp_path):
    photographs = {name: load().shape for name, load in load_pictures().items()}
    monkeypatch.setitem(sys.modules, "skimage", None)
    drawn = {name: load() for name, load in load_pictures().items()}
    assert {name: picture.shape for name, picture in drawn.items()} == photographs
    assert len({picture.tobytes() for picture in drawn.values()}) == len(photographs)
    assert len(json.loads(write_raw_data(tmp_path).read_text())) == 11


def test_steps_must_be_enough(capsys):
    assert main(["demo", "--steps", "3", "--dir", str(Path("unused"))]) == 2
    assert "at least 12" in capsys.readouterr().err
