"""The demo passes its own checks, and they fail if something is wrong. `make demo` runs it in the CI, too."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tiny import replace_tensor
from toolkit.cli import main
from toolkit.demo import command
from toolkit.demo.demo_data import ANSWER_BY_IMAGE, load_images, write_raw_data


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("demo") / "here and there"
    words = [sys.executable, "-m", "toolkit", "demo", "--dir", str(folder)]
    return folder, subprocess.run(words, capture_output=True, text=True, timeout=900)


@pytest.mark.full
@pytest.mark.ranks
def test_demo_passes(demo):
    folder, done = demo
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    report = json.loads((folder / "report.json").read_text())
    assert report["passed"] and len(report["checks"]) == 9
    question, answer = done.stdout.strip().splitlines()[-2:]
    assert question.endswith("--prompt 'What is in this picture?'") and answer == ANSWER_BY_IMAGE["chelsea"]


@pytest.mark.full
@pytest.mark.ranks
def test_demo_fails_on_a_damaged_export(demo, tmp_path, capsys):
    """The control: with one layer's heads swapped, as by a wrong conversion, the loss is wrong."""
    folder, own = demo[0], tmp_path / "own"
    shutil.copytree(folder, own)
    name = "model.layers.3.self_attn.q_proj.weight"
    replace_tensor(own / "hf_trained", name, lambda weight: torch.cat(weight.chunk(2)[::-1]))
    samples = json.loads((folder / "raw" / "conversations.json").read_text())
    assert command.compare_losses(folder, "after", "hf_trained", samples)[2]
    check = command.compare_losses(own, "after", "hf_trained", samples)
    assert not check[2] and command.write_report(own, [check], 0.0) == 1
    assert "FAILED" in capsys.readouterr().out


def test_demo_fails_if_a_resumed_run_does_not_repeat_its_losses():
    lines = [{"step": step, "loss": 1.0 / step, "updated": True} for step in (1, 2, 3, 4, 3, 4)]
    assert command.check_training(lines, 2)[0][2] and not command.check_training(lines, 1)[0][2]
    lines[-1] = lines[-1] | {"loss": 0.3, "dropped/too long": 1}
    repeated, fallen, dropped = command.check_training(lines, 2)
    assert not repeated[2] and not fallen[2] and not dropped[2]


@pytest.mark.ranks
def test_demo_replaces_an_earlier_demo_but_nothing_else(tmp_path):
    (tmp_path / "mine.txt").touch()
    assert main(["demo", "--dir", str(tmp_path)]) == 1 and (tmp_path / "mine.txt").exists()
    again = tmp_path / "again"
    (again / "raw").mkdir(parents=True)
    (again / ".megatron-vl-demo").touch()
    command.clear_folder(again)
    assert os.listdir(again) == [".megatron-vl-demo"]


def test_images_are_drawn_without_scikit_image(monkeypatch, tmp_path):
    photographs = load_images()
    monkeypatch.setitem(sys.modules, "skimage", None)
    drawn = load_images()
    assert drawn.keys() == photographs.keys()
    assert len({load().tobytes() for load in drawn.values()}) == len(photographs)
    assert len(json.loads(write_raw_data(tmp_path).read_text())) == 11
