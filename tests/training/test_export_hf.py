"""Hugging Face folders of saved steps (``checkpoint.export_hf``): whole or not there, and made up for."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch

from converters.compare import compare_weights
from converters.convert import convert_weights, export_weights
from megatron_vl.config import RunConfigError, parse_config
from megatron_vl.config.checks import check_export_weights
from megatron_vl.training.state.export_hf import HfExporter
from megatron_vl.weights.run_folder import EXPORT_FACTS_FILE, SavedCheckpoint
from tests.support.tiny_run import metrics, trained, trainings
from tests.test_processes import has_ended, wait_until
from tests.tiny import tiny_checkpoint
from tests.training.test_missing_sizes import start


def test_folder_of_origin_without_weights_is_refused(tmp_path: Path) -> None:
    options = ["--model.hf", str(tmp_path), "--checkpoint.dir", "run", "--checkpoint.export_hf", "last"]
    with pytest.raises(RunConfigError, match=r"holds none \(\*.safetensors\); download"):
        check_export_weights(parse_config(options))
    (tmp_path / "model-00002-of-00002.safetensors").touch()
    check_export_weights(parse_config(options))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shutil.copytree(tiny_checkpoint("qwen2_5_vl", tied=True, dtype=torch.float32), tmp_path / "hf")
    return tmp_path / "run"


def save(run: Path, step: int, of: Path | None = None) -> SavedCheckpoint:
    path = run / f"step_{step:08d}"
    shutil.rmtree(path, ignore_errors=True)
    convert_weights(of or run.parent / "hf", path / "weights")
    return SavedCheckpoint(path, step)


def exporter_of(run: Path, every: int = 4, last: int = 8) -> HfExporter:
    return HfExporter(run, run.parent / "hf", every or "last", last)


def wait(exporter: HfExporter) -> None:
    exporter.wait_for_exports(lambda: False)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@pytest.mark.slow
def test_stopped_export_goes_on_at_the_next_start_as_that_of_the_command(run, tmp_path, capfd) -> None:
    """A half folder never has the name. One of other weights is set aside, a second one is not made, and
    what lost its checkpoint goes."""
    saved, exports, hf = save(run, 4), run / "hf", tmp_path / "hf"
    first = exporter_of(run)
    first.enqueue_export(saved)
    assert first.pending_checkpoints() == {saved.path}
    first.advance()
    wait_until((exports / "step_00000004.partial").exists)
    first.wait_for_exports(lambda: True)  # as after a signal
    assert "left to the next start" in capfd.readouterr().out
    assert "step_00000004" not in names(exports)

    (exports / "step_00000002.partial").mkdir()
    second = exporter_of(run)
    second.enqueue_missing_exports([saved, save(run, 5)])
    wait(second)
    assert "step 4 is exported" in capfd.readouterr().out and names(exports) == ["step_00000004"]
    made = exports / "step_00000004"
    export_weights(saved.path, hf, tmp_path / "by_hand")
    assert names(made) == sorted([*names(tmp_path / "by_hand"), EXPORT_FACTS_FILE])
    for path in (tmp_path / "by_hand").iterdir():
        assert (made / path.name).read_bytes() == path.read_bytes(), path.name
    facts = json.loads((made / EXPORT_FACTS_FILE).read_text())
    assert facts["step"] == 4 and facts["weights"]

    second.enqueue_export(saved)
    assert second.pending_checkpoints() == set()
    other = tiny_checkpoint("qwen2_5_vl", tied=True, dtype=torch.float32, seed=5)
    second.enqueue_missing_exports([save(run, 4, of=other)])
    wait(second)
    assert names(exports) == ["step_00000004", "step_00000004.earlier"]
    assert not compare_weights(made, other).differences
    assert not compare_weights(exports / "step_00000004.earlier", hf).differences
    for every, expected in ((4, [4, 8, 10]), (0, [10])):
        assert [step for step in range(1, 11) if exporter_of(run, every, 10).is_due(step)] == expected


@pytest.mark.slow
def test_export_ends_with_a_killed_rank(run: Path) -> None:
    saved = save(run, 4)

    def export() -> None:
        exporter = exporter_of(run)
        exporter.enqueue_export(saved)
        exporter.advance()
        time.sleep(300)

    rank = start(export)
    wait_until(lambda: any("export_step" in " ".join(child.cmdline()) for child in rank.children()))
    [process] = rank.children()
    rank.kill()
    wait_until(lambda: has_ended(process))
    assert "step_00000004" not in names(run / "hf")


@pytest.mark.slow
def test_export_that_leaves_no_room_for_the_next_checkpoint_is_named_and_stops_nothing(run, capfd) -> None:
    exporter, saved = exporter_of(run), save(run, 4)
    with (saved.path / "optimizer.safetensors").open("wb") as file:
        file.truncate(1 << 43)  # it takes no room itself
    exporter.enqueue_export(saved)
    wait(exporter)
    said = capfd.readouterr().out
    assert "NOTE: step 4 could not be exported to" in said and "GB are left for the next checkpoint" in said
    assert names(run / "hf") == []

    exporter.enqueue_export(save(run, 8))  # the last one needs no room for another
    wait(exporter)
    assert names(run / "hf") == ["step_00000008"]


QUICK = ["--data.num_workers", "0"]
TP2 = [*QUICK, "--parallel.tp", "2", "--checkpoint.interval", "1", "--checkpoint.keep", "1"]


@pytest.mark.ranks
def test_run_exports_chosen_steps_and_trains_the_same(prepared: dict[str, Path]) -> None:
    """Every second step and the last one, although ``keep`` allows one checkpoint; transformers loads it."""
    plain, run = prepared["folder"] / "plain", prepared["folder"] / "exports"
    trained(prepared, plain, *TP2, ranks=2, steps=3)
    trained(prepared, run, *TP2, "--checkpoint.export_hf", "2", ranks=2, steps=3)

    assert names(run / "hf") == ["step_00000002", "step_00000003"]
    assert [path.name for path in run.glob("step_*")] == ["step_00000003"]  # none stays once it is exported
    for name in ("step", "loss", "grad_norm"):
        assert [line[name] for line in metrics(run)] == [line[name] for line in metrics(plain)]

    last = run / "hf" / "step_00000003"
    assert not compare_weights(last, run).differences
    assert compare_weights(last, run / "hf" / "step_00000002").differences  # each step has its own weights
    assert compare_weights(last, prepared["hf"]).differences

    from transformers import AutoModelForImageTextToText, AutoTokenizer

    media = json.loads((last / EXPORT_FACTS_FILE).read_text())["media"]
    assert media["max_pixels"] and media["video_max_frames"] == 32
    AutoTokenizer.from_pretrained(last)
    AutoModelForImageTextToText.from_pretrained(last)


@pytest.mark.ranks
def test_finished_run_makes_up_for_its_last_export(prepared: dict[str, Path]) -> None:
    """Asked for after the end of the run, or lost by a kill: the same command again is enough."""
    run = prepared["folder"] / "afterwards"
    export = ["--checkpoint.export_hf", "last"]
    words = [*QUICK, "--steps", "3"]
    _, said = trainings(prepared, (run, words), (run, [*words, *export]))
    assert "nothing to do" in said and "step 3 is exported" in said
    assert names(run / "hf") == ["step_00000003"]
