"""``eval.answers``: the last step of a run that is done answers samples of the split."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_vl.config import RunConfigError, parse_config, validate_config
from megatron_vl.config.checks import check_export_weights
from tests.support.ranks import run_module
from tests.support.tiny_run import prepare
from toolkit.train import command


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_run_scores_itself_when_its_ranks_have_ended(
    ranks: int, tiny_checkpoint: Any, tmp_path: Path
) -> None:
    """One rank, or two that the launcher starts: each sample once; white space does not count."""
    hf = tiny_checkpoint("qwen2_5_vl", dtype=torch.float32)
    prepared, run = prepare(tmp_path / "files", hf, samples=12, val_fraction=0.5), tmp_path / "run"
    words = ["--model.hf", str(hf), "--data.path", str(prepared["data"]), "--data.seq_len", "128"]
    words += ["--dtype", "float32", "--steps", "1", "--global_batch_size", "2", "--eval.answers", "2"]
    start = ["train", "--nproc-per-node", str(ranks), *words, "--checkpoint.dir", str(run)]
    done = run_module("toolkit", start, is_group=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    out = run / "hf" / "step_00000001_answers.jsonl"
    assert lines[-1] == f"0 of 2 answers (0.0%) equal their reference ({out})"
    assert lines.index(f"checkpoints in {run}: [1]") < len(lines) - 1, "the ranks have ended"
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(each.keys() == {"key", "prompt", "reference", "answer"} for each in answers)
    assert len({each["key"] for each in answers}) == 2
    assert (run / "hf" / "step_00000001" / "config.json").is_file()


def test_answers_are_made_of_a_finished_run_and_only_once(tmp_path: Path, monkeypatch: Any) -> None:
    class Replaced(Exception):
        """This process would be another program now."""

    def execve(program: str, words: list[str], variables: dict[str, str]) -> None:
        raise Replaced(words, variables)

    monkeypatch.setattr(os, "execve", execve)
    run, step_dir = tmp_path / "run", tmp_path / "run" / "step_00000004"
    words = ["--checkpoint.dir", str(run), "--eval.answers", "3"]
    command._answer_samples(words, {})  # nothing is saved
    step_dir.mkdir(parents=True)
    (step_dir / "run.json").write_text(json.dumps({"fields": {"steps": 9}}))
    command._answer_samples(words, {})  # a signal has stopped it after step 4 of 9
    with pytest.raises(Replaced):
        command._answer_samples([*words, "--stop_after", "4"], {})

    (step_dir / "run.json").write_text(json.dumps({"fields": {"steps": 4}}))
    command._answer_samples(words[:2], {})
    answers = run / "hf" / "step_00000004_answers.jsonl"
    answers.parent.mkdir()
    answers.with_name(f"{answers.name}.partial").write_text("{}\n{}\n")
    with pytest.raises(Replaced) as replaced:  # a kill has left two of three answers
        command._answer_samples(words, {"RANK": "0", "HOME": "/root"})
    called, variables = replaced.value.args
    assert called[-len(words) - 5 :] == ["generate", "--checkpoint", str(run), "--out", str(answers), *words]
    assert "RANK" not in variables and variables["HOME"] == "/root"
    answers.write_text("{}\n{}\n")  # the split has no more
    command._answer_samples(words, {})


def test_answers_name_what_they_need_before_a_start(tmp_path: Path) -> None:
    answers = ["--steps", "2", "--eval.answers", "3"]
    with pytest.raises(RunConfigError, match=r"eval.answers 3 needs checkpoint.dir: the last saved step"):
        validate_config(parse_config([*answers, "--data.path", "data"]), 1)
    with pytest.raises(RunConfigError, match=r"eval.answers 3 needs a data set, and data.path is synthetic"):
        validate_config(parse_config([*answers, "--data.path", "synthetic:text"]), 1)
    config = parse_config([*answers, "--model.hf", str(tmp_path)])
    with pytest.raises(RunConfigError, match=r"an export takes names .* holds none"):
        check_export_weights(config)
