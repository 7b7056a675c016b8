"""Where runs begin: after roll-backs, with the data restarted, without start weights; and what is counted."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_vl.config import TrainConfig, parse_config
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.families.hf_folder import read_chat_template
from megatron_vl.training.state.recorded_fields import (
    field_change_notes,
    learning_rate_notes,
    recorded_fields,
)
from megatron_vl.weights import run_folder
from megatron_vl.weights.run_folder import saved_checkpoints, step_dir_path
from tests.security.payload import edit
from tests.support.ranks import call
from tests.support.tiny_run import metrics, options_of, prepare, trained, what_trainings_say
from tests.tiny import tiny_checkpoint
from toolkit.checkpoint.contents import verify_checkpoint
from toolkit.checkpoint.rollback import restart_data
from toolkit.cli import main

pytestmark = pytest.mark.ranks

QUICK = "--data.num_workers 0 --checkpoint.keep 0 --checkpoint.interval 2 --log.samples true".split()


def trainings(prepared: dict[str, Path], *starts: tuple[Path, list[str]]) -> list[str]:
    """The output of each start of the trainer, and the message that it ended with."""
    words = [options_of(prepared, run, *QUICK, *options) for run, options in starts]
    return call(what_trainings_say, starts=words)


def rows(run: Path) -> list[tuple[int, Any]]:
    return [(line["step"], line["rows"]) for line in metrics(run, "samples.jsonl")]


def test_checkpoint_that_cannot_be_deleted_is_no_reason_to_lose_the_next(prepared, tmp_path) -> None:
    """An earlier start has left something in its way. The later start trains for longer, and says so."""
    run = tmp_path / "run"
    keep = ["--checkpoint.keep", "1", "--optimizer.warmup_steps", "0"]
    run.mkdir()
    (run / "step_00000002.old.partial").write_text("not a folder")  # and so not deleted as one
    first, second = trainings(prepared, (run, [*keep, "--steps", "4"]), (run, [*keep, "--steps", "6"]))
    assert "step_00000002 is not needed any more and could not be deleted" in first
    assert saved_checkpoints(run)[-1].step == 6 and "NOTE: fields" not in first
    assert "NOTE: fields have changed since the checkpoint: steps was 4, is 6\n" in second
    assert "NOTE: the learning rate continues at 3.25e-04 (planned: 1.00e-04)\n" in second


RATE = ["--optimizer.lr", "1e-3", "--optimizer.min_lr_ratio", "0"]


def recorded(hf: Path, *options: str) -> tuple[TrainConfig, dict[str, Any]]:
    """A config, and its fields as a checkpoint's ``run.json`` holds them."""
    config = parse_config([*RATE, *options])
    return config, json.loads(json.dumps(recorded_fields(config, read_spec(hf), {"seq_len": 4096})))


def notes_text(family: str, old: str, new: str) -> str:
    hf = tiny_checkpoint(family)
    return " ".join(field_change_notes(recorded(hf, *new.split())[1], recorded(hf, *old.split())[1]))


DENSE, MOE = "qwen2_5_vl", "qwen3_vl_moe"
LORA = "--lora.rank 4 --lora.dropout 0.1"
AUX_LOSS = "--model.moe_aux_loss 0.01"
FROZEN = "--model.freeze_vision true"
CONSTANT = "--optimizer.schedule constant"


@pytest.mark.parametrize(
    ("family", "old", "new", "note"),
    [
        (DENSE, "--steps 4 --parallel.tp 2", "--steps 8 --seed 1", "steps was 4, is 8"),
        (DENSE, "", f"--model.checkpoint b {FROZEN}", "model.freeze_vision was False, is True"),
        (DENSE, "", "--optimizer.vision_lr 5e-4", "optimizer.vision_lr was 0.001, is 0.0005"),
        (DENSE, LORA, f"{LORA} --seed 1", "seed was 1234, is 1"),
        # It is what the model's config says, unless a field says something else.
        (MOE, "", "--model.moe_aux_loss 0", ""),
        (MOE, "", AUX_LOSS, "model.moe_aux_loss was 0.0, is 0.01"),
        (MOE, AUX_LOSS, "", "model.moe_aux_loss was 0.01, is 0.0"),
        # Without effect.
        (DENSE, "", "--optimizer.vision_lr 1e-3 --optimizer.merger_lr 1e-3", ""),
        (DENSE, FROZEN, f"{FROZEN} --optimizer.vision_lr 5e-4", ""),
        (DENSE, CONSTANT, f"{CONSTANT} --optimizer.min_lr_ratio 0.5", ""),
        (DENSE, "", AUX_LOSS, ""),
        (DENSE, "", "--fp8.vision true", ""),
        (DENSE, "", "--lora.dropout 0.1", ""),
        (DENSE, "--lora.rank 4 --model.checkpoint a", "--lora.rank 4 --model.checkpoint b", ""),
    ],
)
def test_resumed_run_names_changed_fields_that_matter(family: str, old: str, new: str, note: str) -> None:
    said = notes_text(family, old, new)
    assert said == (f"fields have changed since the checkpoint: {note}" if note else "")


def test_resumed_run_names_yarn_that_an_older_checkpoint_did_not_record() -> None:
    hf = tiny_checkpoint("qwen2_5_vl")
    config, saved = recorded(hf)
    del saved["model.rope_scaling"]
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    [note] = field_change_notes(recorded_fields(config, read_spec(hf, yarn), {}), saved)
    assert f"model.rope_scaling was None, is {yarn}" in note


def test_resumed_run_names_a_jump_of_its_learning_rate() -> None:
    hf, tower = tiny_checkpoint("qwen2_5_vl"), "--model.freeze_language true --steps 4"
    wsd = "--steps 8 --optimizer.schedule wsd --optimizer.decay_steps"
    for old, new, step, expected in (
        ("--steps 4", "--steps 8", 2, ["8.54e-04 (planned: 5.00e-04)"]),
        ("--steps 4", "--steps 8", 0, []),  # the schedules begin alike
        (f"{wsd} 2", f"{wsd} 4", 5, ["7.50e-04 (planned: 1.00e-03)"]),
        (f"{wsd} 2", f"{wsd} 2", 7, []),
        # The rate is that of a part that is trained.
        (tower, f"{tower} --optimizer.vision_lr 4e-3", 2, ["2.00e-03 (planned: 5.00e-04)"]),
    ):
        config, saved = recorded(hf, *new.split())[0], recorded(hf, *old.split())[1]
        notes = learning_rate_notes(config, saved, step)
        assert [note.removeprefix("the learning rate continues at ") for note in notes] == expected, new


def test_damaged_and_other_checkpoints_are_refused(prepared, tmp_path) -> None:
    """The message names the last whole one."""
    run, starts = tmp_path / "run", []
    trainings(prepared, (run, []))
    for name in ("weights/manifest.json", "run.json", "optimizer/rank_00000.safetensors"):
        shutil.copytree(run, again := tmp_path / name.replace("/", "_"))
        (again / "step_00000006" / name).unlink()
        for path in (again / "step_00000004" / "loader").iterdir():
            path.write_text("{}")  # this one is damaged too
        starts.append((again, ["--steps", "8"]))
    for (again, _), said in zip(starts, trainings(prepared, *starts), strict=True):
        assert said.endswith(f"files are all there: `megatron-vl checkpoint rollback {again} 2`"), said

    other = tiny_checkpoint("qwen2_5_vl", dtype=torch.float32)  # not tied
    [said] = trainings({**prepared, "hf": other}, (run, ["--steps", "8"]))
    assert "holds another model than model.hf" in said and "both qwen2_5_vl, other sizes" in said


def test_data_restart_once_and_then_go_on(prepared: dict[str, Path], tmp_path: Path) -> None:
    """A stopped run reads what an undisturbed run reads, and a step before the restart knows its position."""
    first, whole, stopped = (tmp_path / name for name in ("first", "whole", "stopped"))
    trainings(prepared, (first, ["--stop_after", "2"]))
    for run in (whole, stopped):
        shutil.copytree(first / "step_00000002", run / "step_00000002")
        assert main(["checkpoint", "restart-data", str(run)]) == 0
        assert verify_checkpoint(run / "step_00000002") == []
    restart_data(stopped)  # a second time changes nothing
    said = trainings(prepared, (whole, []), (stopped, ["--stop_after", "3"]), (stopped, []))
    assert "resumed at step 2" in said[1] and "; the data set is read from its start" in said[1]
    assert "resumed at step 3" in said[2] and "from its start" not in said[2]
    start = [samples for _, samples in rows(first)]
    assert [samples for _, samples in rows(whole)][:2] == start, "the data did not restart"
    assert rows(stopped) == rows(whole)

    restart_data(whole)  # at step 6, and so not at step 4
    assert main(["checkpoint", "rollback", str(whole), "4"]) == 0
    before = metrics(whole / "abandoned" / "after_step_00000004", "samples.jsonl")
    trainings(prepared, (whole, []))
    assert metrics(whole, "samples.jsonl")[-2:] == before


def test_resuming_needs_no_start_weights_and_opens_none(prepared: dict[str, Path], tmp_path: Path) -> None:
    """They are damaged, then removed. The checkpoint itself names its model; the numbers stay equal."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    weights = shutil.copytree(prepared["weights"], tmp_path / "weights")
    moved = {**prepared, "weights": weights}
    trainings(moved, (run, ["--stop_after", "2"]), (whole, []))
    for path in weights.glob("*"):
        path.write_bytes(b"damaged")
    [said] = trainings(moved, (run, ["--stop_after", "4"]))
    assert "resumed at step 2" in said
    shutil.rmtree(weights)
    [said] = trainings(moved, (run, []))
    assert "resumed at step 4" in said
    for key in ("step", "loss", "grad_norm", "samples"):
        assert [line[key] for line in metrics(run)] == [line[key] for line in metrics(whole)]

    [anew] = trainings(moved, (tmp_path / "new", []))
    assert "model.checkpoint" in anew and "does not exist" in anew


DROPPING = ["--data.seq_len", "56", "--data.max_bad_share", "1.0", "--checkpoint.interval", "1"]


def dropped(run: Path, last: int) -> dict[str, Any]:
    """Counts over all ranks up to a step, summed from the printed lines of a run that prints every step."""
    lines = [line for line in metrics(run) if line["step"] <= last]
    reasons: Counter[str] = Counter()
    for line in lines:
        reasons.update({name[8:]: n for name, n in line.items() if name.startswith("dropped/")})
    assert reasons, "nothing was dropped, so nothing is tested"
    return {"used": sum(line["samples"] for line in lines), "reasons": dict(reasons)}


def saved_counts(run: Path, step: int) -> dict[str, Any]:
    counts = json.loads((step_dir_path(run, step) / "run.json").read_text())["bad_samples"]
    return {name: counts[name] for name in ("used", "reasons")}


def test_bad_samples_are_counted_on_after_a_resume(prepared: dict[str, Path], tmp_path: Path) -> None:
    """It is saved twice between printed lines; the totals equal those of a run that prints each step."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    sparse = [*DROPPING, "--log.interval", "4"]
    stops = ["--stop_after", "2"], ["--stop_after", "5"], []
    trainings(prepared, (whole, [*DROPPING]), *((run, [*sparse, *stop]) for stop in stops))
    for step in (1, 2, 3, 5, 6):
        assert saved_counts(run, step) == saved_counts(whole, step) == dropped(whole, step), step


def test_bad_samples_of_all_ranks_are_saved_and_another_number_of_ranks_keeps_them(
    prepared: dict[str, Path], tmp_path: Path
) -> None:
    """Starts two replicas, then one alone, then another data set, whose samples are counted anew."""
    run = tmp_path / "run"
    options = [*QUICK, *DROPPING, "--optimizer.warmup_steps", "1"]
    trained(prepared, run, *options, "--log.interval", "1", ranks=2, steps=2)
    two = dropped(run, 2)
    assert saved_counts(run, 1) == dropped(run, 1) and saved_counts(run, 2) == two

    [said] = trainings(prepared, (run, [*DROPPING, "--steps", "3"]))
    assert "resumed at step 2" in said
    assert saved_counts(run, 3) == dropped(run, 3) and saved_counts(run, 3)["used"] > two["used"]

    unsaved = ["--checkpoint.dir", "", "--checkpoint.interval", "0", "--log.samples", "false"]
    [said] = trainings(prepared, (run, [*DROPPING, *unsaved, "--data.max_bad_share", "0"]))
    assert "raise data.max_bad_share; a run with checkpoint.dir lists them" in said

    shutil.copytree(prepared["hf"], other_hf := tmp_path / "hf")
    template = read_chat_template(other_hf)
    (other_hf / "chat_template.json").unlink()
    (other_hf / "chat_template.jinja").write_text(template + "{# another #}")
    edit(other_hf / "preprocessor_config.json", resample=2)
    other = prepare(tmp_path / "other", other_hf, samples=20)
    moved = {**prepared, "data": other["data"], "hf": other_hf}
    [said] = trainings(moved, (run, [*DROPPING, "--steps", "4"]))
    assert said.count(f"`megatron-vl checkpoint restart-data {run}`") == 1
    restart_data(run)
    [said] = trainings(moved, (run, [*DROPPING, "--steps", "4"]))
    assert f"NOTE: fields have changed since the checkpoint: data.path was '{prepared['data']}', is " in said
    assert "; chat template was 'CRC-32 " in said and "; processor.resample was 3, is 2" in said
    assert saved_counts(run, 4)["used"] < two["used"], "what another data set had was counted on"


def train_beside_an_older_folder(words: list[str], seen: int) -> str:
    """The output of a training whose rank 1 sees steps up to ``seen`` alone, as on shared storage."""
    if int(os.environ["RANK"]) == 1:
        everything = run_folder.saved_checkpoints
        run_folder.saved_checkpoints = lambda folder: [one for one in everything(folder) if one.step <= seen]
    return what_trainings_say([words])[0]


def test_finished_run_ends_well_where_a_rank_sees_the_folder_late(prepared, tmp_path) -> None:
    """The last checkpoint and latest.json need not be seen together on all nodes."""
    words = options_of(prepared, tmp_path / "run", *QUICK, steps=4)
    said = call(train_beside_an_older_folder, ranks=2, words=words, seen=2)
    assert f"checkpoints in {tmp_path / 'run'}: [2, 4]" in said
