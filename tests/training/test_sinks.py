"""Where a run's numbers go: JSON lines, TensorBoard, and Weights & Biases.

What concerns W&B needs its package (the extra ``wandb``) and no network: the runs are offline.
"""

import importlib.util
import json
import math
import os
import sys
from pathlib import Path

import pytest

from megatron_vl.config import RunConfigError, TrainConfig, parse_config
from megatron_vl.config.checks import check_wandb_installed
from megatron_vl.system.errors import UserError
from megatron_vl.training.report import sinks
from tests.support.tiny_run import metrics

_found = importlib.util.find_spec("wandb")
HAS_WANDB = _found is not None and _found.origin is not None
needs_wandb = pytest.mark.skipif(not HAS_WANDB, reason="the extra wandb is not installed")

NUMBERS = {"step": 7, "loss": 1.5, "updated": True, "mfu": None, "lr/vision": 1e-5, "memory_gib": 3.5}
EVALUATION = sinks.ValidationResult(loss=2.5, loss_tokens=20, elapsed_s=0.5, rows="a1")


def fill(sink: sinks.MetricsSink) -> None:
    sink.write_step(NUMBERS)
    sink.write_evaluation(7, EVALUATION)
    sink.close()


@pytest.fixture(autouse=True)
def _without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


def offline(folder: Path, *options: str) -> TrainConfig:
    return parse_config(["--checkpoint.dir", str(folder), "--wandb.project", "tests", *options])


def test_run_opens_the_sinks_that_it_asks_for(tmp_path: Path) -> None:
    assert sinks.open_metrics_sinks(TrainConfig()) == []
    options = ["--checkpoint.dir", str(tmp_path / "run"), "--log.tensorboard", str(tmp_path / "board")]
    opened = sinks.open_metrics_sinks(parse_config(options))
    assert [type(sink) for sink in opened] == [sinks.JsonLinesSink, sinks.TensorBoardSink]
    for sink in opened:
        sink.close()


def test_json_lines_hold_every_number(tmp_path: Path) -> None:
    """Also in a step without loss tokens. JSON has no NaN, and other programs than Python refuse it."""
    sink = sinks.JsonLinesSink(tmp_path)
    sink.write_step({"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": 0.5, "mfu": None})
    sink.write_evaluation(1, sinks.ValidationResult(loss=math.nan, loss_tokens=0, elapsed_s=1.0))
    fill(sink)
    empty = {"step": 1, "loss": None, "grad_norm": None, "lr": 0.5, "mfu": None}
    assert metrics(tmp_path) == [empty, NUMBERS]
    without, line = metrics(tmp_path, "eval.jsonl")
    assert line == {"step": 7, "loss": 2.5, "loss_tokens": 20, "seconds": 0.5, "rows": "a1"}
    assert without["loss"] is None


def test_tensorboard_holds_what_can_be_drawn(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fill(sinks.TensorBoardSink(str(tmp_path)))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    values = {name: events.Scalars(name)[0].value for name in events.Tags()["scalars"]}
    drawn = {"train/loss": 1.5, "train/updated": 1, "train/lr/vision": pytest.approx(1e-5)}
    assert values == drawn | {"speed/memory_gib": 3.5, "val/loss": 2.5}


def test_missing_package_names_its_extra(monkeypatch, tmp_path: Path) -> None:
    """A folder that W&B left where the run starts is not its package."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (tmp_path / "wandb").mkdir()
    importlib.invalidate_caches()
    message = r"wandb.project mine needs .*\(pip install 'megatron-vl\[wandb\]'"
    with pytest.raises(RunConfigError, match=message):
        check_wandb_installed("mine")
    check_wandb_installed("")


@pytest.mark.slow
@needs_wandb
def test_wandb_gets_what_can_be_drawn(tmp_path: Path, monkeypatch, capfd) -> None:
    sink, logged = sinks.WandbSink(offline(tmp_path)), {}
    with monkeypatch.context() as patch:
        patch.setattr(sink.wandb_run, "log", lambda numbers, **_: logged.update(numbers))
        sink.write_step(NUMBERS)
        sink.write_evaluation(7, EVALUATION)
    expected = {"step": 7, "loss": 1.5, "updated": True, "lr/vision": 1e-5, "validation_loss": 2.5}
    assert logged.items() >= expected.items() and "mfu" not in logged

    # Losing W&B costs its curves alone.
    sink.wandb_run.finish()  # it takes no more numbers then
    sink.write_step(NUMBERS)
    sink.write_step(NUMBERS)
    sink.close()
    assert capfd.readouterr().err.count("NOTE: nothing more is sent to W&B") == 1


@pytest.mark.slow
@needs_wandb
def test_later_start_goes_on_in_the_same_wandb_run(tmp_path: Path) -> None:
    """Unless it belongs to another project."""

    def run_id(*options: str) -> str:
        sink = sinks.WandbSink(offline(tmp_path, *options))
        sink.close()
        assert json.loads((tmp_path / sinks.WANDB_RUN_FILE).read_text())["id"] == sink.wandb_run.id
        return sink.wandb_run.id

    first = run_id()
    assert run_id() == first
    assert run_id("--wandb.project", "others") != first

    (tmp_path / sinks.WANDB_RUN_FILE).write_text("[")
    with pytest.raises(UserError, match="wandb.json is damaged .* delete it"):
        sinks.WandbSink(offline(tmp_path))


@needs_wandb
def test_refusal_of_wandb_is_a_message_that_says_what_to_do(tmp_path: Path, monkeypatch, request) -> None:
    """Online without a login; the package asks for a key before it looks for the network."""
    import wandb

    wandb.teardown()  # it reads its variables once for all runs of a process
    request.addfinalizer(wandb.teardown)
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "stdin", open(os.devnull))
    with pytest.raises(UserError, match="wandb.project tests: W&B says: .*wandb login.*WANDB_MODE=offline"):
        sinks.WandbSink(offline(tmp_path))
    assert not (tmp_path / sinks.WANDB_RUN_FILE).exists()
